//! The VM's backend: the control socket of one that runs, starting one, ending
//! it.

use std::{
    ffi::OsString,
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use farside_control::{
    admin::{self, Answer, Request, Status},
    paths,
};
use farside_vm_config::places as config_places;
use rustix::{io::Errno, process::Signal};

use crate::{
    Error,
    logs::Log,
    monitor::socket::connect_by,
    places,
    process::Process,
    systemd,
    watch::{Waited, Watch},
};

/// How long a backend may take to answer: longer than it takes to ask some
/// lenders, each of which has 4 s.
const ANSWER: Duration = Duration::from_secs(60);

/// Longest answer, bytes.
const MAX_ANSWER: u64 = 4 << 20;

/// A running backend.
#[derive(Debug)]
pub struct Backend {
    vm: String,
    path: PathBuf,
    stream: BufReader<UnixStream>,
    process: Process,
}

impl Backend {
    /// Connects to the backend of a VM. [`Error::NoBackend`] when none runs.
    pub fn connect(vm: &str) -> Result<Self, Error> {
        let path = paths::control_socket(vm);
        let lost = |why: &dyn std::fmt::Display| Error::BackendLost {
            vm: vm.to_owned(),
            path: path.clone(),
            why: why.to_string(),
        };
        let stream = match connect_by(&path, Instant::now() + ANSWER) {
            Ok(stream) => stream,
            Err(Errno::NOENT | Errno::CONNREFUSED) => {
                return Err(Error::NoBackend { vm: vm.to_owned() });
            }
            Err(errno) => return Err(lost(&errno)),
        };
        let process = Process::of_peer(&stream).map_err(|error| lost(&error))?;
        stream
            .set_read_timeout(Some(ANSWER))
            .and_then(|()| stream.set_write_timeout(Some(ANSWER)))
            .map_err(|error| lost(&error))?;
        let mut backend = Self {
            vm: vm.to_owned(),
            stream: BufReader::new(stream),
            process,
            path,
        };
        // Its answer makes sure of its process.
        backend.status()?;
        Ok(backend)
    }

    /// What it serves.
    pub fn status(&mut self) -> Result<Status, Error> {
        match self.call(admin::Command::Status)? {
            Answer::Status(status) => Ok(status),
            other => Err(self.odd(&other)),
        }
    }

    /// Has it look `device` up and serve it. Returns the socket, and whether it
    /// was served before.
    pub fn attach(&mut self, device: &str) -> Result<(PathBuf, bool), Error> {
        let device = device.to_owned();
        match self.call(admin::Command::Attach { device })? {
            Answer::Attached { socket, already } => Ok((socket, already)),
            other => Err(self.odd(&other)),
        }
    }

    /// Has it serve `device` no longer. Returns when the lender has it back.
    /// With `force` also when QEMU still has it.
    pub fn detach(&mut self, device: &str, force: bool) -> Result<(), Error> {
        let device = device.to_owned();
        match self.call(admin::Command::Detach { device, force })? {
            Answer::Detached => Ok(()),
            other => Err(self.odd(&other)),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn call(&mut self, command: admin::Command) -> Result<Answer, Error> {
        let request = Request {
            version: admin::VERSION,
            command,
        };
        let mut line = serde_json::to_vec(&request).map_err(|error| self.lost(error))?;
        line.push(b'\n');
        let sent = self.stream.get_mut().write_all(&line);
        sent.map_err(|error| self.lost(error))?;
        let mut answer = Vec::new();
        let read = (&mut self.stream)
            .take(MAX_ANSWER)
            .read_until(b'\n', &mut answer);
        match read {
            Ok(0) => return Err(self.lost("it closed the connection")),
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                return Err(self.lost(format!("no answer within {ANSWER:?}")));
            }
            Err(error) => return Err(self.lost(error)),
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

    fn lost(&self, why: impl ToString) -> Error {
        Error::BackendLost {
            vm: self.vm.clone(),
            path: self.path.clone(),
            why: why.to_string(),
        }
    }

    /// The backend of a VM, if one runs.
    pub(crate) fn find(vm: &str) -> Result<Option<Self>, Error> {
        match Self::connect(vm) {
            Ok(backend) => Ok(Some(backend)),
            Err(Error::NoBackend { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The backend of a VM, which is started if none runs.
    pub fn ensure(vm: &str, limit: Duration) -> Result<Self, Error> {
        match Self::find(vm)? {
            Some(backend) => Ok(backend),
            None => Self::start(vm, limit),
        }
    }

    /// Starts one in the background, by systemd where that has the unit, and
    /// waits until it answers.
    pub(crate) fn start(vm: &str, limit: Duration) -> Result<Self, Error> {
        if systemd::has_unit() {
            systemd::start(vm)?;
            return Self::connect(vm);
        }
        let description = config_places::description(vm);
        Self::spawn(vm, &["--config".into(), description.into()], limit)
    }

    /// Starts one in the background, with these arguments for `farside serve`, and
    /// waits until it answers.
    pub(crate) fn spawn(vm: &str, args: &[OsString], limit: Duration) -> Result<Self, Error> {
        let deadline = Instant::now() + limit;
        let folder = paths::vm_dir(vm);
        paths::create_folder(&folder)
            .map_err(Error::system(format!("cannot use {}", folder.display())))?;
        let log = Log::open(vm, "backend.log")?;
        let mut watch = Watch::new(&folder)?;
        let process = log.spawn(
            Command::new(places::farside())
                .args(["serve", "--vm", vm])
                .args(args),
        )?;
        let failed = |why| Error::Failed {
            what: "the backend",
            vm: vm.to_owned(),
            why,
        };
        let ours = process.pid();
        let waited = watch.wait(&process, deadline, || {
            Self::connect(vm)
                .ok()
                .filter(|backend| backend.pid() == ours)
        })?;
        match waited {
            Waited::Answered(backend) => Ok(backend),
            Waited::Ended => {
                // One that was refused has not used it; else it is not empty, or gone.
                let _ = fs::remove_dir(&folder);
                Err(failed(log.last_words()))
            }
            Waited::Late => {
                // Ours and nobody's yet.
                let _ = process.signal(Signal::KILL);
                Err(failed(format!(
                    "it did not answer within {limit:?}: {}",
                    log.last_words()
                )))
            }
        }
    }

    /// Ends it. When this returns, its devices are back at their lenders.
    pub(crate) fn stop(self, limit: Duration) -> Result<(), Error> {
        if systemd::has_unit() && systemd::is_active(&self.vm)? {
            return systemd::stop(&self.vm);
        }
        let failed = || Error::system(format!("cannot end the backend of VM {}", self.vm));
        self.process.signal(Signal::TERM).map_err(failed())?;
        let ended = self
            .process
            .wait(Instant::now() + limit)
            .map_err(failed())?;
        if ended {
            return Ok(());
        }
        Err(Error::Late {
            what: format!("the backend (process {}) has not ended", self.pid()),
            vm: self.vm.clone(),
            limit,
            advice: "it may wait for a lender to take a device back: see its log, and \
                     `farside status`"
                .to_owned(),
        })
    }
}
