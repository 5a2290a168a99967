//! A lender, a backend and a VM, each started as a user would: with the `farside` binary,
//! as processes, with sockets in a separate directory.

use std::{
    ffi::OsString,
    fs,
    os::unix::{ffi::OsStrExt, fs::FileTypeExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use farside_backend_api::{DeviceReport, Status};
use farside_lender_protocol::DeviceStatus;
use farside_testbed::{Accel, TCG_CPU, Testbed, Vm};
use rustix::process::Pid;
use tempfile::TempDir;

use crate::{
    child::Child,
    interrupt::{self, Registration},
    status,
};

/// Name of the borrowed device.
pub(crate) const DEVICE: &str = "disk0";
/// That of a second device.
const SECOND: &str = "disk1";

/// Timeout of operations that are immediate on an idle machine.
pub(crate) const SHORT: Duration = Duration::from_secs(60);

/// Timeout of a guest's boot.
pub(crate) const BOOT: Duration = Duration::from_secs(180);

/// Polling interval for conditions without an event.
const LOOK_AGAIN: Duration = Duration::from_millis(25);

/// Maximum length of a UNIX socket's path.
const SOCKET_PATH_MAX: usize = 107;

/// A lender of one NVMe device, and the backend of one VM that borrows it. On drop, both
/// are killed and their directory is removed.
pub(crate) struct Scene {
    program: PathBuf,
    vm: &'static str,
    image: PathBuf,
    /// Of a second NVMe device. The first has a controller memory buffer then.
    beside: Option<PathBuf>,
    /// Before the backend, which may be the first of several.
    _keeper: KeptUntilDropped,
    model: Model,
    backend: Child,
    lender: Child,
    directory: TempDir,
}

/// What the borrowed device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    Nvme,
    VirtioBlk,
    /// On a tap interface, whose name is in place of the image's path.
    VirtioNet,
}

/// A VM's size.
pub(crate) struct Size {
    /// Guest RAM, MiB.
    pub(crate) memory_mib: u64,
    /// CPUs.
    pub(crate) cpus: u32,
}

/// A VM in the scene. Killed on drop.
pub(crate) struct Guest {
    pub(crate) vm: Vm,
    /// The command that started it, without the arguments of the test bed.
    pub(crate) typed: String,
    _registration: Registration,
}

impl Guest {
    /// Powers the guest off; QEMU must exit successfully.
    pub(crate) fn shutdown(self) -> Result<()> {
        let Self {
            vm, _registration, ..
        } = self;
        vm.shutdown(SHORT)
    }
}

/// A directory for sockets and other files, with a sufficiently short path.
pub(crate) fn directory(vm: &str) -> Result<TempDir> {
    let directory = tempfile::Builder::new()
        .prefix("farside-")
        .tempdir()
        .context("creating a directory for sockets")?;
    let longest = socket(directory.path(), vm).as_os_str().as_bytes().len();
    ensure!(
        longest <= SOCKET_PATH_MAX,
        "sockets in {} would have paths of {longest} bytes, and {SOCKET_PATH_MAX} is the most: \
         set TMPDIR to a shorter path",
        directory.path().display()
    );
    Ok(directory)
}

pub(crate) fn socket(directory: &Path, vm: &str) -> PathBuf {
    directory.join("vm").join(vm).join(format!("{DEVICE}.sock"))
}

/// Ends the keeper at this socket when it is dropped: its processes go on when one of them is killed.
struct KeptUntilDropped(PathBuf);

impl Drop for KeptUntilDropped {
    fn drop(&mut self) {
        // Fails without a keeper.
        let _ = farside_keeper::end(&self.0);
    }
}

impl Scene {
    /// Starts a lender of `image` as an NVMe device and a backend for `vm`, with `more` arguments.
    /// `directory` is from [`directory`].
    pub(crate) fn start(
        program: PathBuf,
        directory: TempDir,
        image: &Path,
        vm: &'static str,
        more: &[&str],
    ) -> Result<Self> {
        Self::start_as(Model::Nvme, program, directory, image, vm, more)
    }

    /// As [`Scene::start`], with another device.
    pub(crate) fn start_as(
        model: Model,
        program: PathBuf,
        directory: TempDir,
        image: &Path,
        vm: &'static str,
        more: &[&str],
    ) -> Result<Self> {
        Self::start_with(model, program, directory, (image, None), vm, more)
    }

    /// As [`Scene::start`], with two devices, of which the first has a controller memory buffer.
    pub(crate) fn start_pair(
        program: PathBuf,
        directory: TempDir,
        [first, second]: [&Path; 2],
        vm: &'static str,
    ) -> Result<Self> {
        let images = (first, Some(second));
        let more = ["--device", SECOND];
        Self::start_with(Model::Nvme, program, directory, images, vm, &more)
    }

    fn start_with(
        model: Model,
        program: PathBuf,
        directory: TempDir,
        (image, beside): (&Path, Option<&Path>),
        vm: &'static str,
        more: &[&str],
    ) -> Result<Self> {
        let path = directory.path();
        let lender = lend(&program, path, (image, beside), model)?;
        let serve = ["serve", "--vm", vm, "--device", DEVICE];
        let serve = farside(&program, path, &[&serve, more].concat());
        let mut backend = Child::spawn("the backend", serve, &path.join("backend.log"))?;
        await_socket(&socket(path, vm), &mut backend)?;
        let scene = Self {
            program,
            vm,
            image: image.to_owned(),
            beside: beside.map(Path::to_owned),
            _keeper: KeptUntilDropped(path.join("keepers").join(vm)),
            model,
            backend,
            lender,
            directory,
        };
        scene.wait_for("the backend's status", |scene| {
            Ok(status::device(&scene.status()?, DEVICE).0.is_some())
        })?;
        Ok(scene)
    }

    /// The backend's process id.
    pub(crate) fn backend_pid(&self) -> u32 {
        self.backend.pid()
    }

    /// The backend, if its keeper was started.
    pub(crate) fn kept_backend(&self) -> Vec<Pid> {
        let mut children = interrupt::children_of(&self.backend.pid().to_string());
        children.retain(|pid| {
            let name = format!("/proc/{}/comm", pid.as_raw_nonzero());
            !std::fs::read_to_string(name).is_ok_and(|name| name.starts_with("farside-spare"))
        });
        children
    }

    /// The process that serves the device: the backend, or that of its keeper.
    pub(crate) fn serving_pid(&self) -> Result<u32> {
        let status = self.status()?;
        let backend = status.backend(self.vm);
        Ok(backend.context("there is no status of the backend")?.pid)
    }

    /// How often the keeper has started the backend again.
    pub(crate) fn restarts(&self) -> Result<u64> {
        let status = self.status()?;
        let backend = status.backend(self.vm);
        Ok(backend.and_then(|it| it.restarts).unwrap_or_default())
    }

    /// The device's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        socket(self.directory.path(), self.vm)
    }

    /// The lender's process id.
    pub(crate) fn lender_pid(&self) -> u32 {
        self.lender.pid()
    }

    /// The processes of the lender's leases.
    pub(crate) fn workers(&self) -> Vec<Pid> {
        let mut children = interrupt::children_of(&self.lender.pid().to_string());
        children.retain(|pid| {
            let path = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
            let arguments = std::fs::read_to_string(path);
            arguments.is_ok_and(|arguments| arguments.contains("lease-worker"))
        });
        children
    }

    /// Kills the lender, and starts another.
    pub(crate) fn replace_lender(&mut self) -> Result<()> {
        self.lender.kill()?;
        let path = self.directory.path();
        let images = (&*self.image, self.beside.as_deref());
        self.lender = lend(&self.program, path, images, self.model)?;
        Ok(())
    }

    /// The ends of the logs, for an error.
    pub(crate) fn last_words(&self) -> String {
        format!(
            "\nbackend{}\nlender{}",
            self.backend.last_words(),
            self.lender.last_words()
        )
    }

    /// Starts the VM by `farside qemu --run`, with stopped CPUs. `kernel` is for the
    /// guest's kernel command line, `more` for QEMU's.
    pub(crate) fn launch(
        &self,
        testbed: &Testbed,
        size: &Size,
        kernel: &[&str],
        more: &[OsString],
    ) -> Result<Guest> {
        interrupt::check()?;
        // As in users' guests: the test bed disables mitigations when it emulates.
        let vm = testbed.vm(self.vm).append("mitigations=auto");
        let builder = kernel.iter().fold(vm, |vm, word| vm.append(*word));
        let staged = builder.stage()?;
        let tcg = testbed.accel() == Accel::Tcg;
        let memory = format!("{}M", size.memory_mib);
        let cpus = size.cpus.to_string();
        let accel = if tcg { "tcg" } else { "kvm" };
        let args = [
            "qemu", "--vm", self.vm, "--memory", &memory, "--cpus", &cpus, "--accel", accel,
            "--run",
        ];
        let mut command = farside(&self.program, self.directory.path(), &args);
        command.arg("--qemu").arg(testbed.qemu());
        command.arg("--").args(staged.guest_args()).args(more);
        if tcg && !more.iter().any(|argument| argument == "-cpu") {
            command.args(["-cpu", TCG_CPU]);
        }
        command.arg("-S");
        // As for the other processes: a terminal's Ctrl-C does not reach it.
        command.process_group(0);
        let vm = staged
            .launch_with(command)
            .with_context(|| self.last_words())?;
        Ok(Guest {
            _registration: Registration::new(vm.pid())?,
            vm,
            typed: format!("farside {}", args.join(" ")),
        })
    }

    /// `farside status --json`.
    pub(crate) fn status(&self) -> Result<Status> {
        interrupt::check()?;
        let output = farside(&self.program, self.directory.path(), &["status", "--json"])
            .output()
            .context("running farside status")?;
        ensure!(
            output.status.success(),
            "farside status failed:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Status::from_json(&output.stdout).context("reading what farside status printed")
    }

    /// The device's state at the borrower's side.
    pub(crate) fn borrow(&self) -> Result<DeviceReport> {
        let status = self.status()?;
        let borrow = status::device(&status, DEVICE).0.cloned();
        borrow.with_context(|| format!("the backend's status does not name {DEVICE}"))
    }

    /// The device's state at both sides.
    pub(crate) fn device(&self) -> Result<(DeviceReport, DeviceStatus)> {
        let status = self.status()?;
        match status::device(&status, DEVICE) {
            (Some(borrow), Some(lent)) => Ok((borrow.clone(), lent.clone())),
            (None, _) => bail!("the backend's status does not name {DEVICE}"),
            (_, None) => bail!("the lender's status does not name {DEVICE}"),
        }
    }

    /// Waits until `done` returns true.
    pub(crate) fn wait_for(
        &self,
        what: &str,
        mut done: impl FnMut(&Self) -> Result<bool>,
    ) -> Result<()> {
        let deadline = Instant::now() + SHORT;
        while !done(self)? {
            ensure!(
                Instant::now() < deadline,
                "{what}: not within {SHORT:?}{}",
                self.last_words()
            );
            thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Stops backend and lender by SIGTERM; both must exit successfully. Returns the
    /// sockets that are left.
    pub(crate) fn stop(self) -> Result<Vec<PathBuf>> {
        self.backend.stop(SHORT)?;
        self.lender.stop(SHORT)?;
        sockets(self.directory.path())
    }
}

/// Starts a lender of `image`, and of one beside it, with its socket in that directory.
fn lend(
    program: &Path,
    directory: &Path,
    (image, beside): (&Path, Option<&Path>),
    model: Model,
) -> Result<Child> {
    let mut drive = OsString::from(format!("{DEVICE}="));
    drive.push(image);
    let option = match model {
        Model::Nvme => "--nvme",
        Model::VirtioBlk => "--virtio-blk",
        Model::VirtioNet => "--virtio-net",
    };
    let mut lend = farside(program, directory, &["lend", "--name", "here", option]);
    if let Some(beside) = beside {
        drive.push(",cmb=64M");
        let mut second = OsString::from(format!("{SECOND}="));
        second.push(beside);
        lend.arg(&drive).arg("--nvme").arg(second);
    } else {
        lend.arg(drive);
    }
    let mut lender = Child::spawn("the lender", lend, &directory.join("lender.log"))?;
    await_socket(&directory.join("lender.sock"), &mut lender)?;
    Ok(lender)
}

/// `farside` with its sockets in that directory.
pub(crate) fn farside(program: &Path, directory: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).env("FARSIDE_RUNTIME_DIR", directory);
    command
}

pub(crate) fn await_socket(path: &Path, server: &mut Child) -> Result<()> {
    let deadline = Instant::now() + SHORT;
    while !path.exists() {
        interrupt::check()?;
        server.check_running()?;
        ensure!(
            Instant::now() < deadline,
            "{} is not there after {SHORT:?}{}",
            path.display(),
            server.last_words()
        );
        thread::sleep(LOOK_AGAIN);
    }
    Ok(())
}

/// All sockets in a directory and its subdirectories.
fn sockets(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        let context = || format!("listing {}", directory.display());
        for entry in fs::read_dir(&directory).with_context(context)? {
            let entry = entry.with_context(context)?;
            let kind = entry.file_type().with_context(context)?;
            if kind.is_dir() {
                directories.push(entry.path());
            } else if kind.is_socket() {
                found.push(entry.path());
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_found_in_every_directory() {
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("vm/demo");
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("file"), "").unwrap();
        assert!(sockets(directory.path()).unwrap().is_empty());
        let path = deep.join("s");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(sockets(directory.path()).unwrap(), [path]);
    }

    #[test]
    fn a_directory_for_sockets_is_short_enough() {
        let directory = directory("demo").unwrap();
        std::os::unix::net::UnixListener::bind(directory.path().join("s")).unwrap();
        assert!(socket(directory.path(), "demo").as_os_str().len() <= SOCKET_PATH_MAX);
    }
}
