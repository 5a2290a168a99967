//! What a backend may do once its sockets are open: use the descriptors that it has, memory, threads of
//! its own, and those that its [helper](crate::helper) opens for it.
//!
//! It parses the messages of QEMU, which is not trusted. It opens no connection and no socket, starts
//! no program or process, and makes no memory executable. It reads the kernel's figures on memory, and
//! removes the sockets of its VM.

use std::path::PathBuf;

use farside_daemon::confine::{
    self, Argument, COMMON, ConfineError, Filter, Right, SeccompAction, SystemCalls,
};
use farside_error_chain::Chain;

use crate::Config;

/// Gives up privileges and paths, before threads are started. With an NTB endpoint it keeps both: at
/// its end it returns the endpoint to the driver of the host.
pub(crate) fn give_up_privileges(config: &Config) -> Result<(), ConfineError> {
    if config.ntb.is_some() {
        return Ok(());
    }
    if let Err(error) = confine::give_up_privileges(confine::locking()) {
        // Such as in a unit with a capability, where systemd's filter refuses capset(2).
        log::warn!("backend of VM {}: {}", config.vm, Chain(&error));
    }
    if !confine::give_up_paths(&kept(config))? {
        log::warn!(
            "Landlock is not available: the backend of VM {} keeps its user's rights to files",
            config.vm
        );
    }
    Ok(())
}

fn kept(config: &Config) -> Vec<(PathBuf, Right)> {
    vec![
        (config.directory.clone(), Right::Remove),
        // Of how much memory is left, and locked.
        ("/proc".into(), Right::Read),
        ("/sys/fs/cgroup".into(), Right::Read),
        ("/sys/kernel/mm".into(), Right::Read),
    ]
}

/// System calls of a backend beside the common ones.
const ALLOWED: &[i64] = &[
    // Clients of its sockets. `listen` makes a socket that the helper has bound its own.
    libc::SYS_accept4,
    libc::SYS_listen,
    libc::SYS_getsockname,
    libc::SYS_recvmmsg,
    libc::SYS_sendmmsg,
    // The event loop.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    // Guest memory that is locked.
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    // Paths, as far as Landlock lets it.
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_readlinkat,
    libc::SYS_statx,
    libc::SYS_unlinkat,
    // Registers of an NTB endpoint, and the version of a device's state.
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    // Answered with ENOSYS by the other filter.
    libc::SYS_clone3,
    // What it is and may do.
    libc::SYS_capget,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getuid,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
];

/// Commands of ioctl(2): nonblocking sockets, and whether standard error is a terminal.
const IOCTL: &[u64] = &[libc::FIONBIO, libc::TCGETS];

/// The type in the commands of VFIO and iommufd (`linux/vfio.h`, `linux/iommufd.h`).
const VFIO: Argument<'static> = Argument::Masked(0xff00, &[(b';' as u64) << 8]);

/// Levels of setsockopt(2).
const OPTIONS: &[u64] = &[libc::SOL_SOCKET as u64, libc::IPPROTO_TCP as u64];

/// Set for a thread, not for a process.
const THREAD: u64 = libc::CLONE_THREAD as u64;

/// Restricts the system calls of all threads of this process.
pub(crate) fn restrict_system_calls(config: &Config) -> Result<(), ConfineError> {
    let restrict = || {
        without_clone3()?.install()?;
        filter(config.ntb.is_some(), SeccompAction::KillProcess)?.install()
    };
    match restrict() {
        Err(error) if error.is_unsupported() => {
            log::warn!(
                "system call filters are not available: the backend of VM {} keeps all system calls",
                config.vm
            );
            Ok(())
        }
        restricted => restricted,
    }
}

/// Has the C library use clone(2), whose flags a filter can read.
fn without_clone3() -> Result<Filter, ConfineError> {
    let missing = SeccompAction::Errno(libc::ENOSYS as u32);
    SystemCalls::new(&[libc::SYS_clone3], &[]).refused(missing)
}

/// The filter: any other system call has `otherwise` as its result.
fn filter(has_ntb: bool, otherwise: SeccompAction) -> Result<Filter, ConfineError> {
    let pid = [std::process::id().into()];
    let conditional = [
        (libc::SYS_clone, 0, Argument::has(&THREAD)),
        (libc::SYS_ioctl, 1, Argument::Is(IOCTL)),
        // Reading limits, not setting them.
        (libc::SYS_prlimit64, 2, Argument::Null),
        (libc::SYS_setsockopt, 1, Argument::Is(OPTIONS)),
    ];
    let mut conditional = [&conditional[..], &confine::common(&pid)].concat();
    if has_ntb {
        conditional.push((libc::SYS_ioctl, 1, VFIO));
    }
    SystemCalls::new(&[COMMON, ALLOWED].concat(), &conditional).allowed(otherwise)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io,
        net::{TcpListener, TcpStream, UdpSocket},
        os::unix::net::{UnixListener, UnixStream},
        path::Path,
        process::Command,
    };

    use rustix::net::{AddressFamily, SocketType, socket};
    use vm_memory::mmap::{MmapRegion, MmapRegionError};

    use super::*;

    fn config(directory: &Path) -> Config {
        Config {
            vm: "web1".parse().unwrap(),
            directory: directory.join("vm/web1"),
            devices: Vec::new(),
            lenders: vec!["tls:host:7410".parse().unwrap()],
            discovery: None,
            pki: directory.join("pki"),
            ntb: None,
            fences: None,
            interrupts: crate::Interrupts::Direct,
            pin_policy: farside_fabric::pin::PinPolicy::Prefer,
            memory: None,
            ram: Vec::new(),
            open_timeout: std::time::Duration::from_secs(4),
            message_timeout: std::time::Duration::from_secs(5),
            lost_after: std::time::Duration::from_secs(300),
            socket_group: None,
            layout: Default::default(),
            release: None,
            past: Default::default(),
            helper: None,
        }
    }

    /// What a QEMU that has taken the backend over would try. On a thread: Landlock and a filter bind
    /// the thread that installs them, and the threads that it starts.
    #[test]
    fn a_confined_thread_opens_starts_and_connects_nothing_of_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for made in ["vm/web1", "vm/web2", "vm/web3", "pki"] {
            std::fs::create_dir_all(path(made)).unwrap();
        }
        let key = "pki/client-key.pem";
        for made in ["vm/web1/lock", "vm/web2/lock", key, "image"] {
            std::fs::write(path(made), "x").unwrap();
        }
        let _listener = UnixListener::bind(path("vm/web2/qmp")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let config = config(directory.path());
        let confined = || {
            assert!(confine::give_up_paths(&kept(&config)).unwrap());
            without_clone3().unwrap().install_for_thread().unwrap();
            let eperm = SeccompAction::Errno(libc::EPERM as u32);
            filter(false, eperm).unwrap().install_for_thread().unwrap();

            let denied = |error: io::Error| error.raw_os_error() == Some(libc::EACCES);
            for other in ["vm/web2/lock", "image", key] {
                assert!(denied(File::open(path(other)).unwrap_err()), "{other}");
                assert!(
                    denied(std::fs::remove_file(path(other)).unwrap_err()),
                    "{other}"
                );
            }
            assert!(denied(File::create(path("vm/web1/new")).unwrap_err()));
            std::fs::remove_dir(path("vm/web3")).unwrap_err();
            let refused = |error: io::Error| error.raw_os_error() == Some(libc::EPERM);
            let target = port.local_addr().unwrap();
            assert!(refused(TcpStream::connect(target).unwrap_err()));
            assert!(refused(UdpSocket::bind("127.0.0.1:0").unwrap_err()));
            assert!(refused(
                UnixStream::connect(path("vm/web2/qmp")).unwrap_err()
            ));
            for (family, kind) in [
                (AddressFamily::NETLINK, SocketType::RAW),
                (AddressFamily::PACKET, SocketType::RAW),
                (AddressFamily::INET, SocketType::RAW),
            ] {
                assert!(refused(socket(family, kind, None).unwrap_err().into()));
            }
            assert!(refused(Command::new("/bin/true").spawn().unwrap_err()));
            let executable = libc::PROT_READ | libc::PROT_EXEC;
            let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            match MmapRegion::<()>::build(None, 4096, executable, private) {
                Err(MmapRegionError::Mmap(error)) => assert!(refused(error)),
                other => panic!("{other:?}"),
            }

            // What it needs.
            std::thread::spawn(|| ()).join().unwrap();
            std::fs::read_to_string("/proc/self/status").unwrap();
            std::fs::remove_file(path("vm/web1/lock")).unwrap();
        };
        std::thread::scope(|scope| scope.spawn(confined).join().unwrap());
    }
}
