//! Two hosts, and the wire between them.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use farside_testbed::die_with_us;
use farside_tests::{Daemon, SHORT, Status, farside_program, scripted_vmm_program, testbed};
use rustix::process::Pid;
use serde_json::Value;

/// Where each host has its files: the same name, and different file systems.
pub const ROOT: &str = "/mnt";

/// Bytes of the image.
pub const IMAGE: u64 = 64 << 20;

/// The lender's port.
const PORT: u16 = 7410;

/// A host: the namespaces of a process that sleeps.
pub struct Host {
    name: &'static str,
    holder: Child,
    /// Names another system than the one that runs: the host has restarted.
    pub boot: Option<&'static str>,
}

impl Host {
    pub fn new(name: &'static str) -> Result<Self> {
        let mut unshare = Command::new("unshare");
        let script = format!(
            "mount -t tmpfs none {ROOT} && mkdir {ROOT}/run {ROOT}/etc {ROOT}/state && echo ready && exec sleep infinity"
        );
        unshare
            .args(["--net", "--mount", "--ipc", "--propagation", "private"])
            .args(["sh", "-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        die_with_us(&mut unshare);
        let mut holder = unshare.spawn().context("making namespaces")?;
        let stdout = holder.stdout.take().context("its output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line == "ready\n", "host {name} has not started");
        Ok(Self {
            name,
            holder,
            boot: None,
        })
    }

    /// Its process, for `ip`.
    pub fn pid(&self) -> String {
        self.holder.id().to_string()
    }

    /// Issues certificates of the CA in `ca` to this host, at `address`.
    pub fn certify(&self, ca: &Path, address: &str) -> Result<()> {
        let ca = ca.display().to_string();
        let (name, out) = (self.name, format!("{ca}/{}", self.name));
        let args = [
            "pki",
            "issue",
            name,
            "--directory",
            &ca,
            "--output",
            &out,
            "--address",
            address,
        ];
        self.farside(&args)?;
        let to = self.path("etc/pki");
        fs::create_dir_all(&to)?;
        for file in fs::read_dir(&out)? {
            let file = file?;
            fs::copy(file.path(), to.join(file.file_name()))?;
        }
        Ok(())
    }

    /// A command on this host.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.holder.id().to_string()])
            .args(["--net", "--mount", "--ipc", "--"])
            .arg(program)
            .env("FARSIDE_RUNTIME_DIR", format!("{ROOT}/run"))
            .env("FARSIDE_CONFIG_DIR", format!("{ROOT}/etc"))
            .env("FARSIDE_STATE_DIR", format!("{ROOT}/state"))
            .env("FARSIDE_LOG", "info");
        if let Some(boot) = self.boot {
            command.env("FARSIDE_BOOT_ID", boot);
        }
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> Result<String> {
        let output = self
            .command(program)
            .args(args)
            .stdin(Stdio::null())
            .output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(
            output.status.success(),
            "{}: {}: {}",
            self.name,
            args.join(" "),
            text(&output.stderr)
        );
        Ok(text(&output.stdout))
    }

    pub fn farside(&self, args: &[&str]) -> Result<String> {
        self.run(farside_program()?, args)
    }

    /// What a command of farside says, on both streams, and whether it succeeds.
    pub fn output(&self, verb: &str) -> Result<(String, bool)> {
        let output = self.command(farside_program()?).arg(verb).output()?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        Ok((said, output.status.success()))
    }

    pub fn ip(&self, args: &[&str]) -> Result<String> {
        let ip = testbed()?.tool("ip");
        self.run(ip.get_program(), args)
    }

    /// The path of one of its files, for this process.
    pub fn path(&self, name: &str) -> PathBuf {
        let root = format!("/proc/{}/root{ROOT}", self.holder.id());
        PathBuf::from(root).join(name)
    }

    pub fn start(&self, name: &str, args: &[&str]) -> Result<Daemon> {
        let mut command = self.command(farside_program()?);
        command.args(args);
        Daemon::start(name, command)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// The borrower's and the lender's host.
pub struct Stage {
    // Dropped in this order.
    vmm: Option<Vmm>,
    daemons: Vec<Daemon>,
    pub near: Host,
    pub far: Host,
    tls: bool,
}

impl Stage {
    pub fn new() -> Result<Self> {
        let (near, far) = (Host::new("near")?, Host::new("far")?);
        let far_pid = far.holder.id().to_string();
        near.ip(&[
            "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", &far_pid,
        ])?;
        for (host, address) in [(&near, "10.99.0.1/24"), (&far, "10.99.0.2/24")] {
            host.ip(&["address", "add", address, "dev", "wire"])?;
            host.ip(&["link", "set", "wire", "up"])?;
            host.ip(&["link", "set", "lo", "up"])?;
        }
        fs::File::create(far.path("disk0.img"))?.set_len(IMAGE)?;
        Ok(Self {
            vmm: None,
            daemons: Vec::new(),
            near,
            far,
            tls: false,
        })
    }

    /// Issues certificates to both hosts, which use TLS from now on.
    pub fn use_tls(&mut self) -> Result<()> {
        let site = tempfile::tempdir()?;
        let ca = site.path().display().to_string();
        self.near.farside(&["pki", "init", "--directory", &ca])?;
        for host in [&self.near, &self.far] {
            host.certify(site.path(), "10.99.0.2")?;
        }
        self.tls = true;
        Ok(())
    }

    pub fn address(&self) -> String {
        let scheme = if self.tls { "tls" } else { "tcp" };
        format!("{scheme}:10.99.0.2:{PORT}")
    }

    /// Starts the lender, or starts it again.
    pub fn lend(&mut self, image: &str) -> Result<usize> {
        self.lend_also(image, &[])
    }

    /// As [`Stage::lend`], with more arguments.
    pub fn lend_also(&mut self, image: &str, more: &[&str]) -> Result<usize> {
        let image = format!("disk0={ROOT}/{image}");
        let address = self.address();
        let rule = if self.tls { "host=near" } else { "network" };
        let mut args = vec![
            "lend",
            "--nvme",
            &image,
            "--listen",
            &address,
            "--borrower",
            rule,
        ];
        if !self.tls {
            args.push("--listen-plain");
        }
        args.extend(more);
        let lender = self.far.start("the lender", &args)?;
        lender.wait_log(&address, SHORT)?;
        self.daemons.push(lender);
        Ok(self.daemons.len() - 1)
    }

    /// Starts another lender at `address`, of `device`, with a socket of its own.
    pub fn lend_at(&mut self, address: &str, device: &str) -> Result<()> {
        let (id, image) = device.split_once('=').context("ID=IMAGE")?;
        let name = image.rsplit('/').next().unwrap_or_default();
        fs::File::create(self.far.path(name))?.set_len(IMAGE)?;
        let port = address.rsplit(':').next().unwrap_or_default();
        let socket = format!("{ROOT}/run/{port}/{id}.sock");
        let args = [
            "lend",
            "--nvme",
            device,
            "--listen",
            address,
            "--borrower",
            "network",
            "--listen-plain",
            "--socket",
            &socket,
            "--name",
            port,
        ];
        let lender = self.far.start("another lender", &args)?;
        lender.wait_log(address, SHORT)?;
        self.daemons.push(lender);
        Ok(())
    }

    /// Starts a backend of a VM that waits so many seconds.
    pub fn serve(&mut self, vm: &str, lost_after: u64) -> Result<usize> {
        self.serve_device(vm, "disk0", lost_after)
    }

    /// As [`Stage::serve`], with another device.
    pub fn serve_device(&mut self, vm: &str, device: &str, lost_after: u64) -> Result<usize> {
        self.serve_with(vm, device, lost_after, &[])
    }

    /// As [`Stage::serve`], with a keeper.
    pub fn serve_kept(&mut self, vm: &str, lost_after: u64) -> Result<usize> {
        self.serve_with(vm, "disk0", lost_after, &["--keeper"])
    }

    fn serve_with(
        &mut self,
        vm: &str,
        device: &str,
        lost_after: u64,
        more: &[&str],
    ) -> Result<usize> {
        let (address, lost_after) = (self.address(), lost_after.to_string());
        let args = [
            "serve",
            "--vm",
            vm,
            "--lender",
            &address,
            "--device",
            device,
            "--lost-after",
            &lost_after,
        ];
        let args = [&args, more].concat();
        let backend = self.near.start("the backend", &args)?;
        backend.wait_log("served at", SHORT)?;
        self.daemons.push(backend);
        Ok(self.daemons.len() - 1)
    }

    pub fn daemon(&mut self, at: usize) -> &mut Daemon {
        &mut self.daemons[at]
    }

    /// The child processes of a daemon.
    pub fn children(&self, at: usize) -> Vec<Pid> {
        self.daemons[at].children()
    }

    /// Starts a backend and the scripted VMM of a VM with another device.
    pub fn other_vm(&mut self, vm: &str, device: &str) -> Result<Vmm> {
        let address = self.address();
        let args = [
            "serve", "--vm", vm, "--lender", &address, "--device", device,
        ];
        let backend = self.near.start("another backend", &args)?;
        backend.wait_log("served at", SHORT)?;
        self.daemons.push(backend);
        let socket = format!("{ROOT}/run/vm/{vm}/{device}.sock");
        let mut command = self.near.command(scripted_vmm_program()?);
        command.args(["--socket", &socket, "--ram", "64M", "--step"]);
        Vmm::start(command)
    }

    /// Starts the scripted VMM of a VM.
    pub fn boot(&mut self, vm: &str) -> Result<&mut Vmm> {
        self.boot_device(vm, "disk0")
    }

    /// As [`Stage::boot`], with another device.
    pub fn boot_device(&mut self, vm: &str, device: &str) -> Result<&mut Vmm> {
        self.vmm = None;
        let socket = format!("{ROOT}/run/vm/{vm}/{device}.sock");
        let mut command = self.near.command(scripted_vmm_program()?);
        command.args([
            "--socket",
            &socket,
            "--ram",
            "64M",
            "--timeout",
            "100",
            "--step",
        ]);
        Ok(self.vmm.insert(Vmm::start(command)?))
    }

    pub fn end_vmm(&mut self) {
        self.vmm = None;
    }

    /// Has a VM on the lender's host do a step, and ends it.
    pub fn write_at_far(&mut self, vm: &str, step: &str) -> Result<Value> {
        let args = ["serve", "--vm", vm, "--device", "disk0"];
        let backend = self.far.start("a backend on the lender's host", &args)?;
        backend.wait_log("served at", SHORT)?;
        self.daemons.push(backend);
        let socket = format!("{ROOT}/run/vm/{vm}/disk0.sock");
        let mut command = self.far.command(scripted_vmm_program()?);
        command.args(["--socket", &socket, "--ram", "64M", "--step"]);
        Vmm::start(command)?.step(step)
    }

    pub fn vmm(&mut self) -> Result<&mut Vmm> {
        self.vmm.as_mut().context("no VMM runs")
    }

    /// Cuts the wire, without a word to either host.
    pub fn cut(&self) -> Result<()> {
        self.far.ip(&["link", "set", "wire", "down"]).map(drop)
    }

    pub fn join(&self) -> Result<()> {
        self.far.ip(&["link", "set", "wire", "up"]).map(drop)
    }

    /// The status as the borrower's host has it, without the lender.
    pub fn near_status(&self) -> Result<Status> {
        Status::from_json(&self.near.farside(&["status", "--json"])?)
    }

    /// The status as the lender's host has it.
    pub fn far_status(&self) -> Result<Status> {
        Status::from_json(&self.far.farside(&["status", "--json"])?)
    }

    /// Waits until `look` returns a value.
    pub fn wait<T>(
        &self,
        what: &str,
        mut look: impl FnMut(&Self) -> Result<Option<T>>,
    ) -> Result<T> {
        let deadline = Instant::now() + SHORT;
        loop {
            if let Some(found) = look(self)? {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                bail!("not within {SHORT:?}: {what}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The logs, for a test that fails.
    pub fn story(&self) -> String {
        let logs = self
            .daemons
            .iter()
            .map(|daemon| format!("---\n{}\n", daemon.log()));
        logs.collect()
    }
}

/// The scripted VMM, step by step.
pub struct Vmm {
    child: Child,
    input: ChildStdin,
    answers: mpsc::Receiver<Value>,
}

impl Vmm {
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        die_with_us(&mut command);
        let mut child = command.spawn().context("starting the scripted VMM")?;
        let input = child.stdin.take().context("its input")?;
        let output = child.stdout.take().context("its output")?;
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Ok(answer) = serde_json::from_str(&line) {
                    let _ = sender.send(answer);
                }
            }
        });
        Ok(Self {
            child,
            input,
            answers,
        })
    }

    /// Begins a step.
    pub fn begin(&mut self, step: &str) -> Result<()> {
        writeln!(self.input, "{step}").context("asking the scripted VMM")
    }

    /// The answer to a step, if it comes within `timeout`.
    pub fn answer(&mut self, timeout: Duration) -> Result<Option<Value>> {
        match self.answers.recv_timeout(timeout) {
            Ok(answer) => Ok(Some(answer)),
            Err(mpsc::RecvTimeoutError::Timeout) => Ok(None),
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the scripted VMM has ended"),
        }
    }

    /// The answer to a step that succeeds.
    pub fn succeeded(&mut self) -> Result<Value> {
        let answer = self.answer(SHORT)?.context("the step has not ended")?;
        ensure!(answer["ok"] == true, "{answer}");
        Ok(answer)
    }

    /// Performs a step, which succeeds.
    pub fn step(&mut self, step: &str) -> Result<Value> {
        self.begin(step)?;
        self.succeeded()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
