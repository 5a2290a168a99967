//! Starts, stops and controls the VM's backend.

use std::{
    ffi::OsString,
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use farside_backend_api::admin::{self, Answer, Request, Status};
use farside_daemon::{DeviceId, VmName, paths};
use farside_error_chain::Chain;
use farside_vm_config::places as config_places;
use rustix::{io::Errno, process::Signal};

use crate::{
    Error,
    logs::Log,
    monitor::connect_by,
    places,
    process::Process,
    systemd,
    watch::{Waited, Watch},
};

/// Timeout for a backend's answer: longer than requests to some lenders, each of which has 4 s.
const ANSWER: Duration = Duration::from_secs(60);

/// Timeout for answers that do not depend on lenders.
const STATUS: Duration = Duration::from_secs(10);

/// Timeout for a backend to return its devices and exit.
const RETURN: Duration = Duration::from_secs(30);

/// Maximum time that QEMU's connections outlive its process: its io_uring holds them until a kernel
/// worker has released it.
const DISCONNECT: Duration = Duration::from_secs(2);

/// Polling interval for that: the backend reports no event for it.
const DISCONNECT_STEP: Duration = Duration::from_millis(10);

/// The file in the VM's directory that a backend locks (`backend/src/directory.rs`).
const LOCK: &str = "lock";

/// Maximum length of an answer, in bytes.
const MAX_ANSWER: u64 = 4 << 20;

/// A running backend.
#[derive(Debug)]
pub struct Backend {
    vm: VmName,
    path: PathBuf,
    stream: BufReader<UnixStream>,
    process: Process,
}

impl Backend {
    /// Connects to the backend of a VM. [`Error::NoBackend`] when none runs,
    /// [`Error::BackendSilent`] when it does not answer.
    pub fn connect(vm: &VmName) -> Result<Self, Error> {
        let mut backend = Self::open(vm)?;
        // Its answer confirms its process id.
        backend.status()?;
        Ok(backend)
    }

    /// Connects without waiting for an answer.
    fn open(vm: &VmName) -> Result<Self, Error> {
        let path = paths::control_socket(vm);
        let lost = |why: &dyn std::fmt::Display| Error::BackendLost {
            vm: vm.to_owned(),
            path: path.clone(),
            why: why.to_string(),
        };
        let stream = match connect_by(&path, Instant::now() + STATUS) {
            Ok(stream) => stream,
            Err(Errno::NOENT | Errno::CONNREFUSED) => {
                return Err(Error::NoBackend { vm: vm.to_owned() });
            }
            // Its backlog is full.
            Err(Errno::AGAIN) => {
                return Err(match holder(vm) {
                    Some(process) => Error::BackendSilent {
                        vm: vm.to_owned(),
                        pid: process.pid(),
                        path: path.clone(),
                        limit: STATUS,
                    },
                    None => lost(&format!(
                        "it accepts no connection within {STATUS:?}, so it hangs, or is stopped, \
                         and its process is not visible here: `fuser {}` as root finds it",
                        path.display()
                    )),
                });
            }
            Err(errno) => return Err(lost(&errno)),
        };
        let process = Process::of_peer(&stream).map_err(|error| lost(&error))?;
        Ok(Self {
            vm: vm.to_owned(),
            stream: BufReader::new(stream),
            process,
            path,
        })
    }

    /// The devices that it serves.
    pub fn status(&mut self) -> Result<Status, Error> {
        match self.call(admin::Command::Status, STATUS)? {
            Answer::Status(status) => Ok(status),
            other => Err(self.odd(&other)),
        }
    }

    /// Makes it look up and serve `device`. Returns the socket, and whether it was served before.
    pub fn attach(&mut self, device: &DeviceId) -> Result<(PathBuf, bool), Error> {
        let device = device.to_owned();
        match self.call(admin::Command::Attach { device }, ANSWER)? {
            Answer::Attached { socket, already } => Ok((socket, already)),
            other => Err(self.odd(&other)),
        }
    }

    /// Makes it stop serving `device`. Returns after the lender has it back. With `force` also if
    /// QEMU still uses it.
    pub fn detach(&mut self, device: &DeviceId, force: bool) -> Result<(), Error> {
        let device = device.to_owned();
        match self.call(admin::Command::Detach { device, force }, ANSWER)? {
            Answer::Detached => Ok(()),
            other => Err(self.odd(&other)),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn call(&mut self, command: admin::Command, limit: Duration) -> Result<Answer, Error> {
        let request = Request {
            version: admin::VERSION,
            command,
        };
        let mut line = serde_json::to_vec(&request).map_err(|error| self.lost(error))?;
        line.push(b'\n');
        let stream = self.stream.get_mut();
        let sent = stream
            .set_read_timeout(Some(limit))
            .and_then(|()| stream.set_write_timeout(Some(limit)))
            .and_then(|()| stream.write_all(&line));
        sent.map_err(|error| self.lost_within(error, limit))?;
        let mut answer = Vec::new();
        let read = (&mut self.stream)
            .take(MAX_ANSWER)
            .read_until(b'\n', &mut answer);
        match read {
            Ok(0) => return Err(self.lost("it closed the connection")),
            Ok(_) => {}
            Err(error) => return Err(self.lost_within(error, limit)),
        }
        match serde_json::from_slice(&answer).map_err(|error| self.lost(error))? {
            Answer::Refused(refusal) => Err(Error::Backend {
                vm: self.vm.clone(),
                refusal,
            }),
            answer => Ok(answer),
        }
    }

    fn odd(&self, answer: &Answer) -> Error {
        self.lost(format!("it answered {answer:?}"))
    }

    fn lost_within(&self, error: std::io::Error, limit: Duration) -> Error {
        match error.kind() {
            std::io::ErrorKind::WouldBlock => Error::BackendSilent {
                vm: self.vm.clone(),
                pid: self.pid(),
                path: self.path.clone(),
                limit,
            },
            _ => self.lost(error),
        }
    }

    fn lost(&self, why: impl ToString) -> Error {
        Error::BackendLost {
            vm: self.vm.clone(),
            path: self.path.clone(),
            why: why.to_string(),
        }
    }

    /// The backend of a VM, if one runs.
    pub(crate) fn find(vm: &VmName) -> Result<Option<Self>, Error> {
        match Self::connect(vm) {
            Ok(backend) => Ok(Some(backend)),
            Err(Error::NoBackend { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The backend of a VM; starts it if none runs.
    pub fn ensure(vm: &VmName, limit: Duration) -> Result<Self, Error> {
        match Self::find(vm)? {
            Some(backend) => Ok(backend),
            None => Self::start(vm, limit),
        }
    }

    /// Starts one in the background, through systemd if the unit is installed, and waits until it
    /// answers.
    pub(crate) fn start(vm: &VmName, limit: Duration) -> Result<Self, Error> {
        if systemd::has_unit() {
            systemd::start(vm)?;
            return Self::connect(vm);
        }
        let description = config_places::description(vm);
        Self::spawn(vm, &["--config".into(), description.into()], limit)
    }

    /// Starts one in the background, with these arguments for `farside serve`, and
    /// waits until it answers.
    pub(crate) fn spawn(vm: &VmName, args: &[OsString], limit: Duration) -> Result<Self, Error> {
        let deadline = Instant::now() + limit;
        let directory = paths::vm_dir(vm);
        paths::create_directory(&directory)
            .map_err(Error::system(format!("cannot use {}", directory.display())))?;
        let log = Log::open(vm, "backend.log")?;
        let mut watch = Watch::new(&directory)?;
        let process = log.spawn(
            Command::new(places::farside())
                .args(["serve", "--keeper", "--vm", vm.as_str()])
                .args(args),
        )?;
        let failed = |why| Error::Failed {
            what: "the backend",
            vm: vm.to_owned(),
            why,
        };
        // Its keeper.
        let ours = process.pid();
        let waited = watch.wait(&process, deadline, || {
            let backend = Self::connect(vm).ok()?;
            let parent = backend.process.parent().ok()?;
            (parent == ours).then_some(backend)
        })?;
        match waited {
            Waited::Answered(backend) => Ok(backend),
            Waited::Ended => {
                // Removes an unused directory; fails if it is not empty or already removed.
                let _ = fs::remove_dir(&directory);
                Err(failed(log.last_words()))
            }
            Waited::Late => {
                // Our child, which no other client uses yet. The second ends it in any case.
                for _ in 0..2 {
                    let _ = process.signal(Signal::TERM);
                }
                if !process.wait(Instant::now() + RETURN).unwrap_or(false) {
                    let _ = process.signal(Signal::KILL);
                    let _ = farside_keeper::end(&paths::keeper_socket(vm));
                }
                Err(failed(format!(
                    "it did not answer within {limit:?}: {}",
                    log.last_words()
                )))
            }
        }
    }

    /// Stops the backend of a VM, if one runs. On return its devices are back at their lenders.
    /// With `force` also if it does not answer, or a VMM is still connected.
    pub(crate) fn end(vm: &VmName, force: bool) -> Result<(), Error> {
        let mut backend = match Self::open(vm) {
            Err(Error::NoBackend { .. }) => return Ok(()),
            // Its backlog is full.
            Err(Error::BackendSilent { .. }) if force => {
                return match holder(vm) {
                    Some(process) => kill(vm, &process, None),
                    // It has exited meanwhile.
                    None => Ok(()),
                };
            }
            backend => backend?,
        };
        let status = match force {
            true => backend.status(),
            false => backend.status_when_disconnected(),
        };
        match status {
            Ok(status) => backend.stop(&status, force),
            Err(Error::BackendSilent { .. }) if force => backend.kill(),
            Err(error) => Err(error),
        }
    }

    /// Its status once no VMM uses its devices, or after [`DISCONNECT`].
    fn status_when_disconnected(&mut self) -> Result<Status, Error> {
        let deadline = Instant::now() + DISCONNECT;
        loop {
            let status = self.status()?;
            let in_use = status.devices.iter().any(|served| served.in_use);
            if !in_use || Instant::now() >= deadline {
                return Ok(status);
            }
            std::thread::sleep(DISCONNECT_STEP);
        }
    }

    fn stop(mut self, status: &Status, force: bool) -> Result<(), Error> {
        let in_use = status.devices.iter().filter(|served| served.in_use);
        let in_use: Vec<_> = in_use.map(|served| served.device.clone()).collect();
        if !in_use.is_empty() && !force {
            return Err(Error::InUse {
                vm: self.vm,
                devices: in_use.join(", "),
            });
        }
        for device in in_use {
            if let Err(error) = self.detach(&device, true) {
                log::warn!("{error}", error = Chain(&error));
            }
        }
        if is_unit(&self.vm)? {
            return systemd::stop(&self.vm);
        }
        let not_ended = || not_ended(&self.vm);
        self.process.signal(Signal::TERM).map_err(not_ended())?;
        let ended = self.process.wait(Instant::now() + RETURN);
        match ended.map_err(not_ended())? {
            true => self.wait_keeper(),
            false if force => self.kill(),
            false => Err(late(
                &self.vm,
                &self.process,
                "it may wait for a lender to take a device back: see its log, and `farside \
                 status`; --force kills it",
            )),
        }
    }

    /// Waits for the end of the keeper, which has the backend's descriptors, too.
    fn wait_keeper(&self) -> Result<(), Error> {
        let (deadline, socket) = (Instant::now() + RETURN, paths::keeper_socket(&self.vm));
        while farside_keeper::is_there(&socket) {
            if Instant::now() >= deadline {
                let advice = "end it by SIGKILL";
                return Err(late(&self.vm, &self.process, advice));
            }
            std::thread::sleep(DISCONNECT_STEP);
        }
        Ok(())
    }

    fn kill(self) -> Result<(), Error> {
        kill(&self.vm, &self.process, Some(self.stream.get_ref()))
    }
}

/// The process of a VM's backend, identified by the lock that it holds.
fn holder(vm: &VmName) -> Option<Process> {
    Process::of_lock(&paths::vm_dir(vm).join(LOCK)).ok()?
}

/// Kills a backend: its lenders revoke the devices when its connections close. With a connection,
/// only if that is still open.
fn kill(vm: &VmName, process: &Process, connection: Option<&UnixStream>) -> Result<(), Error> {
    // systemd would restart a killed unit, unless it is stopped.
    let unit = is_unit(vm)?;
    log::warn!(
        "killing the backend of VM {vm} (process {}), which does not answer or end",
        process.pid()
    );
    // Its keeper would start it again.
    match farside_keeper::end(&paths::keeper_socket(vm)) {
        Ok(_) => {}
        Err(error) => log::warn!("VM {vm}: {}", Chain(&error)),
    }
    let killed = match connection {
        Some(stream) => process.kill_listener(stream),
        None => process.signal(Signal::KILL),
    };
    killed.map_err(not_ended(vm))?;
    let ended = process.wait(Instant::now() + RETURN);
    if !ended.map_err(not_ended(vm))? {
        let advice = "the kernel keeps it: see its log, and `dmesg`";
        return Err(late(vm, process, advice));
    }
    match unit {
        true => systemd::stop(vm),
        false => Ok(()),
    }
}

fn is_unit(vm: &VmName) -> Result<bool, Error> {
    Ok(systemd::has_unit() && systemd::is_active(vm)?)
}

fn not_ended(vm: &VmName) -> impl FnOnce(std::io::Error) -> Error + use<> {
    Error::system(format!("cannot end the backend of VM {vm}"))
}

fn late(vm: &VmName, process: &Process, advice: &str) -> Error {
    Error::Late {
        what: format!(
            "the backend of VM {vm} (process {}) has not ended",
            process.pid()
        ),
        limit: RETURN,
        advice: advice.to_owned(),
    }
}
