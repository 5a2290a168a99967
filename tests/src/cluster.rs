//! One or more lenders and backends in a separate runtime directory.

use std::{
    fs::{self, File},
    os::unix::{fs::FileTypeExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::{
    BorrowState, SHORT, Status, binary,
    daemon::{Daemon, Log},
    guest::GuestBuilder,
};

/// Interval at which a status is polled while waiting for a condition: there is no event
/// for it.
const LOOK_AGAIN: Duration = Duration::from_millis(25);

/// A runtime directory and the processes started in it.
pub struct Cluster {
    directory: TempDir,
    /// The `farside` that is run; `None`: the binary under test.
    program: Option<PathBuf>,
    logs: Mutex<Vec<(String, Log)>>,
    notes: Mutex<Vec<String>>,
}

/// The result of a process that ran to its end.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// A backend to start.
pub struct Serve<'a> {
    cluster: &'a Cluster,
    vm: String,
    args: Vec<String>,
    wrapper: Vec<String>,
}

impl Cluster {
    /// An empty cluster.
    pub fn new() -> Result<Self> {
        Self::new_in("/tmp")
    }

    /// An empty cluster with its images in memory: a flush does not wait for the machine's disk, which stops for seconds
    /// while other processes write to it.
    pub fn in_memory() -> Result<Self> {
        Self::new_in("/dev/shm")
    }

    /// Runs this `farside`, and not the binary under test.
    pub fn with_program(mut self, program: &Path) -> Self {
        self.program = Some(program.to_owned());
        self
    }

    /// An empty cluster in memory, with the same program.
    pub fn another(&self) -> Result<Self> {
        let mut another = Self::in_memory()?;
        another.program.clone_from(&self.program);
        Ok(another)
    }

    fn new_in(parent: &str) -> Result<Self> {
        // The path of a UNIX socket is limited to 107 bytes.
        let directory = tempfile::Builder::new()
            .prefix("fs-")
            .tempdir_in(parent)
            .context("creating a runtime directory")?;
        Ok(Self {
            directory,
            program: None,
            logs: Mutex::default(),
            notes: Mutex::default(),
        })
    }

    /// The directory of sockets and images.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// `farside` with this cluster's environment.
    pub fn farside(&self, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(self.program()?);
        command.args(args);
        self.environment(&mut command);
        Ok(command)
    }

    fn program(&self) -> Result<&Path> {
        match &self.program {
            Some(program) => Ok(program),
            None => binary::farside(),
        }
    }

    fn environment(&self, command: &mut Command) {
        command
            .env("FARSIDE_RUNTIME_DIR", self.directory())
            .env("FARSIDE_CONFIG_DIR", self.directory().join("etc"))
            .env("FARSIDE_STATE_DIR", self.directory().join("state"))
            .env("FARSIDE_LOG", "info");
    }

    /// Runs `farside` to its end.
    pub fn run(&self, args: &[&str]) -> Result<Ended> {
        let output = self
            .farside(args)?
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("running farside {args:?}"))?;
        Ok(Ended {
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Creates an empty image of `len` bytes.
    pub fn image(&self, name: &str, len: u64) -> Result<PathBuf> {
        let path = self.directory().join(format!("{name}.img"));
        File::create(&path)
            .and_then(|file| file.set_len(len))
            .with_context(|| format!("making {}", path.display()))?;
        Ok(path)
    }

    /// Writes a file, such as a configuration.
    pub fn file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.directory().join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// Writes a VM configuration to the path where `farside` reads it.
    pub fn describe(&self, vm: &str, text: &str) -> Result<PathBuf> {
        let directory = self.directory().join("etc/vm");
        fs::create_dir_all(&directory).context("making a configuration directory")?;
        self.file(&format!("etc/vm/{vm}.toml"), text)
    }

    /// A log that `farside` writes for a VM: `backend` or `qemu`.
    pub fn vm_log(&self, vm: &str, what: &str) -> String {
        let path = self.directory().join(format!("state/vm/{vm}/{what}.log"));
        fs::read_to_string(path).unwrap_or_default()
    }

    /// Starts `farside` in the background.
    pub fn start(&self, name: &str, args: &[&str]) -> Result<Daemon> {
        self.start_command(name, self.farside(args)?)
    }

    fn start_command(&self, name: &str, command: Command) -> Result<Daemon> {
        let daemon = Daemon::start(name, command)?;
        self.logs
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((name.to_owned(), daemon.log_handle()));
        Ok(daemon)
    }

    /// Starts a lender, and waits until it listens.
    pub fn lend(&self, args: &[&str]) -> Result<Daemon> {
        let daemon = self.start("the lender", &[&["lend", "--name", "rack1"], args].concat())?;
        daemon.wait_log("listens at", SHORT)?;
        Ok(daemon)
    }

    /// Starts a lender of the DMA test device `dma0` and the NVMe device `disk0`, on a new
    /// image of `len` bytes.
    pub fn lend_disk(&self, len: u64) -> Result<(Daemon, PathBuf)> {
        let image = self.image("disk0", len)?;
        let drive = format!("disk0={}", image.display());
        let lender = self.lend(&["--nvme", &drive, "--dma-test", "dma0"])?;
        Ok((lender, image))
    }

    /// A backend for `vm`.
    pub fn serve(&self, vm: &str, devices: &[&str]) -> Serve<'_> {
        let mut serve = Serve {
            cluster: self,
            vm: vm.to_owned(),
            args: Vec::new(),
            wrapper: Vec::new(),
        };
        for device in devices {
            serve = serve.args(&["--device", device]);
        }
        serve
    }

    /// A VM that borrows the devices served by its backend.
    pub fn guest(&self, vm: &str) -> GuestBuilder<'_> {
        GuestBuilder::new(self, vm)
    }

    /// `farside status --json`.
    pub fn status(&self) -> Result<Status> {
        let ended = self.run(&["status", "--json"])?;
        ensure!(
            ended.status.success(),
            "farside status: {}: {}",
            ended.status,
            ended.stderr
        );
        Status::from_json(&ended.stdout)
    }

    /// Waits until `look` returns a value. Its errors are retried: the status may not have
    /// the entry yet.
    pub fn wait_status<T>(
        &self,
        what: &str,
        timeout: Duration,
        look: impl Fn(&Status) -> Result<Option<T>>,
    ) -> Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            let status = self.status()?;
            let found = look(&status);
            if let Ok(Some(found)) = found {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                let why = found
                    .err()
                    .map_or(String::new(), |error| format!("{error:#}\n"));
                anyhow::bail!("no {what} within {timeout:?}; {why}status: {:#?}", status.0);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Waits until the borrow of `device` is in `state`, and returns it.
    pub fn wait_state(&self, vm: &str, device: &str, state: BorrowState) -> Result<crate::Borrow> {
        let what = format!("{device} of VM {vm} in state {state}");
        self.wait_status(&what, SHORT, |status| {
            let borrow = status.borrow(vm, device)?;
            Ok((borrow.state == state).then_some(borrow))
        })
    }

    /// Waits until the lender reports `device` as returned.
    pub fn wait_free(&self, device: &str) -> Result<crate::Lent> {
        self.wait_status(&format!("return of {device}"), SHORT, |status| {
            let lent = status.lent(device)?;
            Ok((lent.borrowed_by.is_none() && lent.is_closed()).then_some(lent))
        })
    }

    /// All sockets in the runtime directory.
    pub fn sockets(&self) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        let mut directories = vec![self.directory().to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory)? {
                let entry = entry?;
                let kind = entry.file_type()?;
                if kind.is_dir() {
                    directories.push(entry.path());
                } else if kind.is_socket() {
                    found.push(entry.path());
                }
            }
        }
        found.sort();
        Ok(found)
    }

    /// Keeps a text that is shown if the test fails.
    pub(crate) fn note(&self, text: String) {
        self.notes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(text);
    }

    /// Logs and notes for the analysis of a failure.
    pub fn story(&self) -> String {
        let mut story = String::new();
        for (name, log) in &*self.logs.lock().unwrap_or_else(PoisonError::into_inner) {
            story.push_str(&format!("-- log of {name}:\n{}\n", log.text()));
        }
        for note in &*self.notes.lock().unwrap_or_else(PoisonError::into_inner) {
            story.push_str(note);
            story.push('\n');
        }
        story
    }
}

impl Serve<'_> {
    /// More arguments of `farside serve`.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// A command with arguments that runs the backend, such as a wrapper.
    #[must_use]
    pub fn under(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Starts it, and waits until it serves all devices.
    pub fn start(self) -> Result<Daemon> {
        let mut words = self.wrapper;
        words.push(self.cluster.program()?.display().to_string());
        words.extend(["serve".into(), "--vm".into(), self.vm.clone()]);
        let is_kept = self.args.iter().any(|word| word == "--keeper");
        words.extend(self.args);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        self.cluster.environment(&mut command);
        let name = format!("the backend of VM {}", self.vm);
        let vm = self.cluster.directory().join("vm").join(&self.vm);
        // It listens there last. A killed backend leaves its sockets, which refuse connections.
        let control = vm.join("control");
        let mut daemon = self.cluster.start_command(&name, command)?;
        if is_kept {
            let keeper = self.cluster.directory().join("keepers").join(&self.vm);
            daemon = daemon.with_keeper(keeper);
        }
        let deadline = Instant::now() + SHORT;
        while UnixStream::connect(&control).is_err() {
            ensure!(
                daemon.is_running()? && Instant::now() < deadline,
                "{name} does not serve; its log:\n{}",
                daemon.log()
            );
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(daemon)
    }
}
