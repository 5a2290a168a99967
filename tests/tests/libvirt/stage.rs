//! A host with libvirt: Debian's libvirtd and QEMU in a Debian root, with farside and its
//! hook installed as by the package. The lender is outside.

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    time::Instant,
};

use anyhow::{Context, Result, anyhow, ensure};
use farside_testbed::{DebianRoot, Inside, Progress};
use farside_tests::{Cluster, Daemon, Ended, SHORT, Status, testbed};
use tempfile::TempDir;

/// Packages installed on the host.
const PACKAGES: &[&str] = &[
    "libvirt-clients",
    "libvirt-daemon-driver-qemu",
    "libvirt-daemon-system",
    "openssh-server",
    "qemu-system-x86",
];

/// Timeout of a command, seconds.
const COMMAND_LIMIT: &str = "300";

/// Path of the guest's kernel and initramfs on the host.
const KERNEL: &str = "/srv/kernel";
const INITRAMFS: &str = "/srv/initramfs";

/// libvirt's settings for a host that is a container, which cannot confine QEMU. QEMU runs
/// as root.
pub const AS_ROOT: &str = "security_driver = \"none\"\nnamespaces = []\n\
                           cgroup_controllers = []\nuser = \"root\"\ngroup = \"root\"\n";

/// As [`AS_ROOT`], but QEMU runs as the user that Debian's libvirt configures. libvirt must
/// not change the owner of the kernel, which is in the cache.
pub const AS_DEFAULT_USER: &str = "security_driver = \"none\"\nnamespaces = []\n\
                                   cgroup_controllers = []\ndynamic_ownership = 0\n";

/// The host.
pub struct Stage<'a> {
    pub cluster: &'a Cluster,
    inside: Inside,
}

impl<'a> Stage<'a> {
    /// Installs and starts everything, with that text for `qemu.conf`.
    pub fn new(cluster: &'a Cluster, qemu_conf: &str) -> Result<Self> {
        Self::enter(cluster, qemu_conf, None)
    }

    /// As [`Stage::new`], with that host name and a separate, empty network namespace.
    pub fn named(cluster: &'a Cluster, qemu_conf: &str, name: &str) -> Result<Self> {
        Self::enter(cluster, qemu_conf, Some(name))
    }

    fn enter(cluster: &'a Cluster, qemu_conf: &str, host: Option<&str>) -> Result<Self> {
        let testbed = testbed()?;
        let program = PathBuf::from(cluster.farside(&[])?.get_program());
        let directory_of = |path: &Path| -> Result<PathBuf> {
            let directory = path.canonicalize().ok();
            let directory = directory.as_deref().and_then(Path::parent);
            Ok(directory
                .with_context(|| path.display().to_string())?
                .into())
        };
        let programs = directory_of(&program)?;
        let kernel = directory_of(testbed.elf_kernel())?;
        let initramfs = directory_of(testbed.lean_initramfs())?;
        let binds = [
            (cluster.directory(), cluster.directory()),
            (&programs, Path::new("/opt/farside")),
            (&kernel, Path::new(KERNEL)),
            (&initramfs, Path::new(INITRAMFS)),
            (probed()?, Path::new("/var/cache/libvirt/qemu")),
        ];
        let inside = match host {
            None => root()?.enter_with(&binds)?,
            Some(host) => root()?.enter_as(host, &binds)?,
        };
        let name = program.file_name().context("the program has a name")?;
        symlink(
            Path::new("/opt/farside").join(name),
            inside.path("/usr/bin/farside"),
        )
        .context("installing farside")?;
        let hook = inside.path("/etc/libvirt/hooks/qemu");
        fs::write(&hook, include_str!("../../../cli/packaging/libvirt/qemu"))
            .and_then(|()| fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)))
            .context("installing the hook")?;
        // Root of a user namespace may not set the attributes (trusted.*) in which libvirt
        // stores former owners of files.
        let qemu_conf = format!("{qemu_conf}remember_owner = 0\n");
        fs::write(inside.path("/etc/libvirt/qemu.conf"), qemu_conf).context("qemu.conf")?;
        let log = "log_level = 3\nlog_outputs = \"3:file:/var/log/libvirt/libvirtd.log\"\n";
        fs::write(inside.path("/etc/libvirt/libvirtd.conf"), log).context("libvirtd.conf")?;
        fs::create_dir_all(inside.path("/etc/farside/vm")).context("/etc/farside/vm")?;
        let stage = Self { cluster, inside };
        // The network may be the machine's: create no bridge there.
        stage.sh("rm -f /etc/libvirt/qemu/networks/autostart/*")?;
        stage.sh("virtlogd -d && libvirtd -d")?;
        Ok(stage)
    }

    /// A command of the machine, in the host's network namespace.
    pub fn in_network(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--net", "--target", &self.pid().to_string(), "--"])
            .arg(program);
        command
    }

    /// The process id of the host's first process, in this process's PID namespace.
    pub fn pid(&self) -> u32 {
        self.inside.pid()
    }

    /// A path of the host, as this process sees it.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.inside.path(path)
    }

    /// The address of the lender, which is outside.
    pub fn lender(&self) -> PathBuf {
        self.cluster.directory().join("lender.sock")
    }

    /// Lends the NVMe devices `disk0` and `disk1`, of `len` bytes each.
    pub fn lend_two(&self, len: u64) -> Result<Daemon> {
        let (one, two) = (
            self.cluster.image("disk0", len)?,
            self.cluster.image("disk1", len)?,
        );
        let drives = [
            format!("disk0={}", one.display()),
            format!("disk1={}", two.display()),
        ];
        self.cluster
            .lend(&["--nvme", &drives[0], "--nvme", &drives[1]])
    }

    /// Runs a command on the host to its end, with that standard input.
    pub fn run_with(&self, words: &[&str], input: &[u8]) -> Result<Ended> {
        let mut command: Command = self.inside.command("timeout");
        command.args(["--kill-after=5", COMMAND_LIMIT]).args(words);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("running {words:?}"))?;
        let mut stdin = child.stdin.take().context("no standard input")?;
        // A command may exit without reading all of it.
        let _ = stdin.write_all(input);
        drop(stdin);
        let output = child.wait_with_output()?;
        Ok(Ended {
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs a command on the host to its end.
    pub fn run(&self, words: &[&str]) -> Result<Ended> {
        self.run_with(words, b"")
    }

    /// As [`Stage::run`]; the command must succeed. Returns its output.
    pub fn ok(&self, words: &[&str]) -> Result<String> {
        let ended = self.run(words)?;
        ensure!(ended.status.success(), "{words:?}: {ended:?}");
        Ok(ended.stdout.trim().to_owned())
    }

    /// As [`Stage::run`]; the command must fail. Returns its error output.
    pub fn fails(&self, words: &[&str]) -> Result<String> {
        let ended = self.run(words)?;
        ensure!(!ended.status.success(), "{words:?} succeeded: {ended:?}");
        Ok(ended.stderr)
    }

    /// A shell command on the host that must succeed.
    pub fn sh(&self, script: &str) -> Result<String> {
        self.ok(&["sh", "-c", script])
    }

    /// A `virsh` command that must succeed.
    pub fn virsh(&self, args: &[&str]) -> Result<String> {
        self.ok(&[&["virsh", "--quiet"], args].concat())
    }

    /// Whether a backend of that VM runs on the host, according to `farside status`.
    pub fn backend_runs(&self, vm: &str) -> Result<bool> {
        let status = self.run(&["farside", "status", "--json"])?;
        Ok(Status::from_json(&status.stdout)?.0.backend(vm).is_some())
    }

    /// Nothing is left of that VM: no domain runs, no QEMU, no backend, no socket.
    pub fn nothing_left_of(&self, vm: &str) -> Result<()> {
        let state = self.virsh(&["domstate", vm])?;
        ensure!(state == "shut off", "domain {vm} is {state}");
        ensure!(!self.backend_runs(vm)?, "a backend of VM {vm} runs");
        let directory = self.path("/run/farside/vm").join(vm);
        ensure!(!directory.exists(), "{} is left", directory.display());
        let processes = self.processes()?;
        let left = processes.iter().find(|(_, command)| {
            let words: Vec<_> = command.split('\0').collect();
            words
                .iter()
                .any(|word| word.contains(&format!("guest={vm},")))
                || words.windows(2).any(|pair| pair == ["--vm", vm])
        });
        ensure!(left.is_none(), "left running: {left:?}");
        Ok(())
    }

    /// Waits until a domain is shut off: libvirt sends events only to connected clients.
    pub fn wait_off(&self, vm: &str) -> Result<()> {
        let deadline = Instant::now() + SHORT;
        loop {
            let state = self.virsh(&["domstate", vm])?;
            if state == "shut off" {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "domain {vm} is still {state}");
        }
    }

    /// The process id, in the host's PID namespace, of the only process with all those
    /// words among its arguments.
    pub fn pid_of(&self, words: &[&str]) -> Result<u32> {
        let mut found = self.processes()?;
        found.retain(|(_, command)| {
            let have: Vec<_> = command.split('\0').collect();
            words.iter().all(|word| have.contains(word))
        });
        match found.as_slice() {
            [(pid, _)] => Ok(*pid),
            other => Err(anyhow!("not one process {words:?} but {other:?}")),
        }
    }

    /// Kills a VM's backend, its keeper and the spare. Stopped first: one that lives would start the others again.
    pub fn kill_backend(&self, vm: &str) -> Result<()> {
        let mut found = self.processes()?;
        found.retain(|(_, command)| {
            let have: Vec<_> = command.split('\0').collect();
            have.contains(&"--keeper") && have.windows(2).any(|two| two == ["--vm", vm])
        });
        let pids: Vec<_> = found.iter().map(|(pid, _)| pid.to_string()).collect();
        ensure!(
            pids.len() == 3,
            "a backend, its keeper and the spare: {found:?}"
        );
        let pids = pids.join(" ");
        self.sh(&format!("kill -STOP {pids} && kill -KILL {pids}"))
            .map(drop)
    }

    /// The process id, in the host's PID namespace, of the only process with exactly those
    /// arguments.
    pub fn pid_of_command(&self, words: &[&str]) -> Result<u32> {
        let mut found = self.processes()?;
        found.retain(|(_, command)| {
            command
                .trim_end_matches('\0')
                .split('\0')
                .eq(words.iter().copied())
        });
        match found.as_slice() {
            [(pid, _)] => Ok(*pid),
            other => Err(anyhow!("not one process {words:?} but {other:?}")),
        }
    }

    /// Kills libvirtd, and waits for its end.
    pub fn kill_libvirtd(&self) -> Result<()> {
        let libvirtd = self.pid_of(&["libvirtd"])?;
        self.sh(&format!("kill -9 {libvirtd}"))?;
        self.sh(&format!("while kill -0 {libvirtd} 2>/dev/null; do :; done"))
            .map(drop)
    }

    /// Starts libvirtd, and waits until it listens.
    pub fn start_libvirtd(&self) -> Result<()> {
        self.sh("libvirtd -d").map(drop)
    }

    /// Each process of the host, with its arguments.
    fn processes(&self) -> Result<Vec<(u32, String)>> {
        let entries = fs::read_dir(self.path("/proc")).context("listing processes")?;
        let pids = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        Ok(pids
            .filter_map(|pid| {
                let path = self.path(format!("/proc/{pid}/cmdline"));
                Some((pid, fs::read_to_string(path).ok()?))
            })
            .collect())
    }

    /// Logs for the analysis of a failure.
    pub fn story(&self) -> String {
        let logs = "tail -n 40 /var/log/libvirt/libvirtd.log /var/log/libvirt/qemu/*.log \
                    /var/lib/farside/vm/*/*.log 2>/dev/null || true";
        let said = self.sh(logs).unwrap_or_else(|error| format!("{error:#}"));
        format!("-- logs of the host with libvirt:\n{said}")
    }
}

/// The Debian root, prepared once per process.
fn root() -> Result<&'static DebianRoot> {
    static ROOT: OnceLock<Result<DebianRoot, String>> = OnceLock::new();
    ROOT.get_or_init(|| {
        testbed()
            .and_then(|testbed| {
                DebianRoot::prepare(testbed, "libvirt", PACKAGES, &Progress::auto())
            })
            .map_err(|error| format!("{error:#}"))
    })
    .as_ref()
    .map_err(|error| anyhow!("{error}"))
}

/// libvirt's QEMU capabilities, whose probing takes seconds: shared by the hosts.
fn probed() -> Result<&'static Path> {
    static DIRECTORY: OnceLock<Result<TempDir, String>> = OnceLock::new();
    DIRECTORY
        .get_or_init(|| {
            let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
            // Readable by QEMU's user, too.
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755))
                .map_err(|error| error.to_string())?;
            Ok(directory)
        })
        .as_ref()
        .map(TempDir::path)
        .map_err(|error| anyhow!("{error}"))
}

/// The XML that boots the test bed's guest.
pub fn boot_xml() -> Result<String> {
    let testbed = testbed()?;
    let name = |path: &Path| -> Result<String> {
        let name = path.file_name().and_then(|name| name.to_str());
        Ok(name.context("a file has a name")?.to_owned())
    };
    Ok(format!(
        "<kernel>{KERNEL}/{}</kernel><initrd>{INITRAMFS}/{}</initrd><cmdline>{}</cmdline>",
        name(testbed.elf_kernel())?,
        name(testbed.lean_initramfs())?,
        testbed.kernel_args(),
    ))
}
