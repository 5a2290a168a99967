//! A VM that plays a host, running the product; checks that refusals leave no trace.

use std::{
    cell::RefCell,
    ops::Deref,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use farside_testbed::{HostVm, Pending, VmBuilder};
use farside_tests::{BOOT, SHORT, Status, hosts::Programs};

/// Longer than any test.
pub const LIFE: Duration = Duration::from_secs(24 * 3600);

/// Timeout of a refusal, on a loaded emulated host; link-down is detected after 10 s.
const REFUSED_WITHIN: Duration = Duration::from_secs(40);

/// A runtime directory, which separates one logical host from another.
#[derive(Clone, Copy)]
pub struct Place(pub &'static str);

/// The host itself, and both sides of an NTB.
pub const HERE: Place = Place("/run/farside");
pub const LENDER: Place = Place("/run/lender");
pub const BORROWER: Place = Place("/run/borrower");

/// A VM that plays a host.
pub struct Host {
    vm: HostVm,
    wrong: RefCell<Vec<String>>,
}

/// A daemon in it.
pub struct Service<'a> {
    host: &'a Host,
    name: String,
    running: Pending<'a>,
}

impl Host {
    pub fn launch(builder: VmBuilder) -> Result<Self> {
        let vm = Programs::build()?.add_to(builder).launch_host(BOOT)?;
        Ok(Self {
            vm,
            wrong: RefCell::default(),
        })
    }

    fn shell(&self, command: &str) -> Result<(Option<i32>, String)> {
        let output = self.exec(command, REFUSED_WITHIN)?;
        ensure!(
            !output.timed_out,
            "`{command}` did not end within {REFUSED_WITHIN:?}: {output}"
        );
        Ok((output.code, output.stderr))
    }

    /// Runs `farside`, which must refuse with all these words, and leave everything
    /// unchanged. Failures are collected for [`Host::verdict`], so that the remaining cases
    /// still run.
    pub fn refuses(&self, what: &str, place: Place, args: &str, words: &[&str]) -> Result<()> {
        let command = format!(
            "export FARSIDE_RUNTIME_DIR={}; exec farside {args}",
            place.0
        );
        self.refuses_shell(what, &command, words)
    }

    /// As [`Host::refuses`], with a command that ends with `exec farside …`.
    pub fn refuses_shell(&self, what: &str, command: &str, words: &[&str]) -> Result<()> {
        let before = self.look()?;
        let started = Instant::now();
        let (code, printed) = self.shell(command)?;
        let took = started.elapsed();
        let after = self.look()?;
        let message = printed.split("error: ").last().unwrap_or_default().trim();
        log::info!("{what} ({took:.1?}): {message}");
        let mut wrong = Vec::new();
        // A usage error is 2; a panic is 101.
        if !matches!(code, Some(1 | 2)) || !printed.contains("error: ") {
            wrong.push(format!("it ended with code {code:?}"));
        }
        let missing = words.iter().filter(|word| !message.contains(**word));
        wrong.extend(missing.map(|word| format!("it does not say {word:?}")));
        if before != after {
            wrong.push(format!(
                "it left things changed\n-- before:\n{before}\n-- after:\n{after}"
            ));
        }
        if !wrong.is_empty() {
            self.wrong.borrow_mut().push(format!(
                "{what}: `{command}`: {}\n-- it printed:\n{printed}",
                wrong.join("; ")
            ));
        }
        Ok(())
    }

    /// Fails if any case failed since the last verdict.
    pub fn verdict(&self) -> Result<()> {
        let wrong = self.wrong.take();
        ensure!(wrong.is_empty(), "{}", wrong.join("\n\n"));
        Ok(())
    }

    /// The state that must not change: driver bindings, virtual functions, sockets.
    pub fn look(&self) -> Result<String> {
        let script = "cd /sys/bus/pci/devices
            for bdf in *; do
                echo $bdf driver=$(basename \"$(readlink $bdf/driver)\") \
                    override=$(cat $bdf/driver_override) vfs=$(cat $bdf/sriov_numvfs 2>/dev/null)
            done
            find /run/farside /run/lender /run/borrower -type s 2>/dev/null | sort
            grep ^/dev /proc/mounts; cat /sys/class/net/*/flags
            pidof farside";
        // The last command exits with 1 if it finds none.
        Ok(self.exec(script, SHORT)?.stdout)
    }

    /// The driver of a function.
    pub fn driver(&self, bdf: &str) -> Result<String> {
        let script = format!("basename \"$(readlink /sys/bus/pci/devices/{bdf}/driver)\"");
        Ok(self.exec_ok(&script, SHORT)?.trim().to_owned())
    }

    pub fn lend(&self, place: Place, args: &str) -> Result<Service<'_>> {
        let socket = format!("{}/lender.sock", place.0);
        self.start(
            place,
            &format!("lender-{}", place.0.rsplit('/').next().unwrap_or_default()),
            &format!("lend --name rack1 {args}"),
            &socket,
        )
    }

    pub fn serve(&self, place: Place, vm: &str, device: &str, args: &str) -> Result<Service<'_>> {
        let args = format!("serve --vm {vm} --device {device} --open-timeout 100 {args}");
        let socket = socket(place, vm, device);
        self.start(place, &format!("backend-{vm}"), &args, &socket)
    }

    fn start(&self, place: Place, name: &str, args: &str, ready: &str) -> Result<Service<'_>> {
        let command = format!(
            // Renamed into place, so that it is complete when it appears.
            "echo $$ >/run/{name}.new; mv /run/{name}.new /run/{name}.pid
            export FARSIDE_RUNTIME_DIR={}
            exec farside {args} >/tmp/{name}.log 2>&1",
            place.0
        );
        // A killed process leaves them.
        self.exec_ok(&format!("rm -f {ready} /run/{name}.pid"), SHORT)?;
        let service = Service {
            host: self,
            name: name.to_owned(),
            running: self.exec_start(&command, LIFE)?,
        };
        let wait = format!(
            "until [ -S {ready} ]; do
                [ ! -e /run/{name}.pid ] || kill -0 $(cat /run/{name}.pid) || break; sleep 0.05
            done; [ -S {ready} ]"
        );
        if self.exec(&wait, SHORT)?.success() {
            return Ok(service);
        }
        bail!("farside {args} does not come up:\n{}", service.log()?)
    }

    pub fn status(&self, place: Place) -> Result<Status> {
        let command = format!("FARSIDE_RUNTIME_DIR={} farside status --json", place.0);
        let text = self.exec_ok(&command, SHORT)?;
        Status::from_json(&text)
    }

    /// Polls until a shell condition holds that has no event.
    pub fn wait_for(&self, condition: &str) -> Result<()> {
        let script = format!("until {condition}; do sleep 0.05; done");
        let output = self.exec(&script, SHORT)?;
        ensure!(
            output.success(),
            "not within {SHORT:?}: {condition}: {output}"
        );
        Ok(())
    }

    /// Waits until this host's lender has its device back.
    pub fn wait_free(&self) -> Result<()> {
        self.wait_for("FARSIDE_RUNTIME_DIR=/run/farside farside devices | grep -q ' - *$'")
    }

    /// Ends the processes that a failed test has left.
    pub fn clean_up(&self) -> Result<()> {
        let script = "kill -KILL $(pidof scripted-vmm) $(pidof farside) 2>/dev/null
            while pidof farside scripted-vmm >/dev/null; do sleep 0.05; done; rm -f /tmp/*.log";
        self.exec_ok(script, SHORT).map(drop)
    }

    /// The daemons' logs, and the end of the kernel log.
    pub fn story(&self) -> String {
        let script = "for log in /tmp/*.log; do echo \"-- $log:\"; tail -n 40 $log; done
            echo '-- dmesg:'; dmesg | tail -n 20";
        match self.exec(script, SHORT) {
            Ok(output) => output.stdout,
            Err(error) => format!("{error:#}"),
        }
    }

    pub fn shutdown(self) -> Result<()> {
        self.vm.shutdown(SHORT)
    }
}

impl Deref for Host {
    type Target = HostVm;

    fn deref(&self) -> &HostVm {
        &self.vm
    }
}

/// The socket at which a backend serves a device.
pub fn socket(place: Place, vm: &str, device: &str) -> String {
    format!("{}/vm/{vm}/{device}.sock", place.0)
}

impl Service<'_> {
    pub fn log(&self) -> Result<String> {
        self.host
            .exec_ok(&format!("cat /tmp/{}.log", self.name), SHORT)
    }

    /// Waits for a log line.
    pub fn wait_log(&self, text: &str) -> Result<()> {
        let waited = self
            .host
            .wait_for(&format!("grep -q '{text}' /tmp/{}.log", self.name));
        if let Err(error) = waited {
            bail!("{error:#}\n-- {}:\n{}", self.name, self.log()?);
        }
        Ok(())
    }

    /// Stops it by SIGTERM; it must exit successfully.
    pub fn stop(self) -> Result<()> {
        self.signal("TERM")?;
        let log = self.log()?;
        let ended = self.running.wait_for(SHORT)?;
        ensure!(ended.success(), "{}: {ended}\n{log}", self.name);
        Ok(())
    }

    /// Waits until it has ended successfully, after a signal.
    pub fn ended(self) -> Result<()> {
        let ended = self.running.wait_for(SHORT)?;
        ensure!(ended.success(), "{}: {ended}", self.name);
        Ok(())
    }

    /// Kills it; its sockets stay.
    pub fn kill(self) -> Result<()> {
        self.signal("KILL")?;
        let ended = self.running.wait_for(SHORT)?;
        ensure!(ended.signal == Some(9), "{}: {ended}", self.name);
        Ok(())
    }

    pub fn signal(&self, signal: &str) -> Result<()> {
        let kill = format!("kill -{signal} $(cat /run/{}.pid)", self.name);
        self.host.exec_ok(&kill, SHORT).map(drop)
    }
}
