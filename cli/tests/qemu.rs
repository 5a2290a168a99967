//! `farside qemu --run` with a fake QEMU: the monitor's socket may come from the service manager.

use std::{
    fs::{self, Permissions},
    os::{
        fd::OwnedFd,
        unix::{fs::PermissionsExt, net::UnixListener},
    },
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{Mutex, MutexGuard, PoisonError},
};

use tempfile::TempDir;

/// A QEMU that prints its arguments and what it has inherited.
const QEMU: &str = "#!/bin/sh
case \"$*\" in
--version) echo 'QEMU emulator version 11.1.0' ;;
*'-device help') echo 'name \"vfio-user-pci\", bus PCI' ;;
*)
    printf '%s\\n' \"$@\"
    [ -S /proc/self/fd/3 ] && echo inherited
    env | grep -e ^LISTEN_FDS= -e ^LISTEN_PID=
    exit 0 ;;
esac
";

/// Becomes farside, as the service manager starts it: standard input is descriptor 3.
const ACTIVATE: &str =
    "exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=monitor exec \"$0\" \"$@\"";

/// Serialises the tests: while another thread forks, an executable that is being written
/// fails with ETXTBSY.
static ALONE: Mutex<()> = Mutex::new(());

struct Host {
    directory: TempDir,
    _device: UnixListener,
    _alone: MutexGuard<'static, ()>,
}

impl Host {
    fn new() -> Self {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let vm = directory.path().join("vm/web1");
        fs::create_dir_all(&vm).unwrap();
        let qemu = directory.path().join("qemu");
        fs::write(&qemu, QEMU).unwrap();
        fs::set_permissions(&qemu, Permissions::from_mode(0o755)).unwrap();
        let _device = UnixListener::bind(vm.join("disk0.sock")).unwrap();
        Self {
            directory,
            _device,
            _alone,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("FARSIDE_RUNTIME_DIR", self.directory.path())
            .env("FARSIDE_CONFIG_DIR", self.path("etc"))
            .env("FARSIDE_STATE_DIR", self.path("state"));
        command
    }

    fn args(&self) -> Vec<String> {
        let qemu = self.path("qemu").display().to_string();
        let args = [
            "qemu", "--vm", "web1", "--device", "disk0", "--run", "--qemu", &qemu,
        ];
        args.map(str::to_owned).to_vec()
    }

    /// With a socket that listens at `path`.
    fn activated(&self, path: &Path) -> Output {
        let socket = UnixListener::bind(path).unwrap();
        self.command("sh")
            .args(["-c", ACTIVATE, env!("CARGO_BIN_EXE_farside")])
            .args(self.args())
            .stdin(OwnedFd::from(socket))
            .output()
            .unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn qemu_inherits_the_monitor_of_the_service_manager() {
    let host = Host::new();
    let output = host.activated(&host.path("vm/web1/qmp"));
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let expected = "-chardev\nsocket,id=qmp,fd=3,server=on,wait=off\n-qmp\nchardev:qmp\n";
    assert!(said.contains(expected), "{said}");
    assert!(said.contains("\ninherited\n"), "{said}");
    assert!(!said.contains("LISTEN_"), "{said}");
}

#[test]
fn without_it_qemu_creates_its_monitor() {
    let host = Host::new();
    let output = host
        .command(env!("CARGO_BIN_EXE_farside"))
        .args(host.args())
        .output()
        .unwrap();
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let expected = format!("-qmp\nunix:{},", host.path("vm/web1/qmp").display());
    assert!(
        said.contains(&expected) && !said.contains("-chardev"),
        "{said}"
    );
}

#[test]
fn another_socket_is_refused_by_name() {
    let host = Host::new();
    let other = host.path("vm/other");
    let output = host.activated(&other);
    let said = text(&output.stderr);
    assert!(!output.status.success());
    assert!(
        said.contains(other.to_str().unwrap()) && said.contains("the monitor of VM web1"),
        "{said}"
    );
}

#[test]
fn a_device_that_nobody_serves_is_named() {
    let host = Host::new();
    fs::remove_file(host.path("vm/web1/disk0.sock")).unwrap();
    let output = host.activated(&host.path("vm/web1/qmp"));
    let said = text(&output.stderr);
    assert!(
        !output.status.success() && said.contains("nobody serves device disk0 to VM web1"),
        "{said}"
    );
}
