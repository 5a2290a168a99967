//! The monitor of a VM's QEMU: on its socket, or through libvirt.

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use farside_daemon::{VmName, paths};
use farside_vm_config::Manager;
use rustix::{
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use serde_json::{Value, json};

use crate::{
    Error,
    process::Process,
    qmp::{ANSWER, Event, QmpClient, QmpError, left, returned},
    virsh,
};

/// Maximum wait for the exit of a QEMU that closes a connection at once.
const ENDING: Duration = Duration::from_secs(5);

/// A connection to the monitor of a VM's QEMU.
#[derive(Debug)]
pub struct Monitor {
    vm: VmName,
    transport: Transport,
}

#[derive(Debug)]
enum Transport {
    Socket {
        path: PathBuf,
        client: QmpClient,
        process: Process,
    },
    Virsh,
}

impl Monitor {
    /// Connects to the monitor of a VM, through its manager. QEMU must greet
    /// within `limit`; it serves one client at a time.
    ///
    /// [`Error::NotRunning`] when there is no QEMU.
    pub fn connect(vm: &VmName, manager: Manager, limit: Duration) -> Result<Self, Error> {
        match manager {
            Manager::Qemu => Self::open(vm, &paths::monitor_socket(vm), limit),
            Manager::Libvirt if virsh::is_running(vm)? => Ok(Self {
                vm: vm.to_owned(),
                transport: Transport::Virsh,
            }),
            Manager::Libvirt => Err(Error::NotRunning {
                vm: vm.to_owned(),
                hint: " (libvirt's domain of that name is not active)".to_owned(),
            }),
        }
    }

    fn open(vm: &VmName, path: &Path, limit: Duration) -> Result<Self, Error> {
        Self::open_beyond(vm, path, limit, Process::is_service_manager)
    }

    /// Connects once more if the socket was the service manager's, that of `is_manager`, before: QEMU
    /// has greeted, so it listens itself by now, and a new connection identifies its process.
    fn open_beyond(
        vm: &VmName,
        path: &Path,
        limit: Duration,
        is_manager: impl FnOnce(&Process) -> bool,
    ) -> Result<Self, Error> {
        let monitor = Self::greet(vm, path, limit)?;
        match monitor.process().is_some_and(is_manager) {
            true => {
                // QEMU serves one client at a time.
                drop(monitor);
                Self::greet(vm, path, limit)
            }
            false => Ok(monitor),
        }
    }

    fn greet(vm: &VmName, path: &Path, limit: Duration) -> Result<Self, Error> {
        let deadline = Instant::now() + limit;
        let failed = |what: &str| Error::system(format!("{}: {what}", path.display()));
        let not_running = |hint: String| Error::NotRunning {
            vm: vm.to_owned(),
            hint,
        };
        let stream = connect_by(path, deadline).map_err(|errno| match errno {
            Errno::NOENT => not_running(String::new()),
            Errno::CONNREFUSED => not_running(format!(
                " ({} is what a QEMU that ended has left)",
                path.display()
            )),
            // Its backlog is full.
            Errno::AGAIN => Error::MonitorFull {
                vm: vm.to_owned(),
                path: path.to_owned(),
            },
            errno => failed("cannot connect")(errno.into()),
        })?;
        let process = Process::of_peer(&stream).map_err(failed("whose process is it?"))?;
        let mut client = QmpClient::new(stream);
        let greeted = client.greet(deadline).map_err(|error| (limit, error));
        let ready = greeted.and_then(|()| {
            let ready = client.run("qmp_capabilities", json!({}));
            ready.map_err(|error| (ANSWER, error))
        });
        let monitor = Self {
            vm: vm.to_owned(),
            transport: Transport::Socket {
                path: path.to_owned(),
                client,
                process,
            },
        };
        let ended = || match monitor.process() {
            Some(process) => process.wait(Instant::now() + ENDING),
            None => Ok(false),
        };
        match ready {
            Ok(_) => Ok(monitor),
            // Treat a QEMU that exits while a client connects as not running.
            Err((_, QmpError::Closed(_))) if matches!(ended(), Ok(true)) => {
                Err(not_running(" (QEMU has just ended)".to_owned()))
            }
            Err((limit, error)) => Err(monitor.error(limit, error)),
        }
    }

    /// Executes a command, and returns its result.
    pub fn run(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let ran = match &mut self.transport {
            Transport::Virsh => {
                let line = json!({ "execute": command, "arguments": arguments });
                returned(command, &virsh::monitor_command(&self.vm, &line)?)
            }
            Transport::Socket { client, .. } => client.run(command, arguments),
        };
        ran.map_err(|error| match error {
            QmpError::Refused { class, reason } => Error::Refused {
                vm: self.vm.clone(),
                command: command.to_owned(),
                class,
                reason,
            },
            error => self.error(ANSWER, error),
        })
    }

    /// Waits for the next event that `wanted` accepts; earlier ones are dropped. Returns `None` at
    /// `deadline`, and at once with libvirt, which does not forward events: query the state
    /// instead.
    ///
    /// [`Error::MonitorLost`] when QEMU ends.
    pub fn wait_event(
        &mut self,
        deadline: Instant,
        wanted: impl Fn(&Event) -> bool,
    ) -> Result<Option<Event>, Error> {
        let Transport::Socket { client, .. } = &mut self.transport else {
            return Ok(None);
        };
        client
            .wait_event(deadline, wanted)
            .map_err(|error| self.error(ANSWER, error))
    }

    /// Whether [`Monitor::wait_event`] receives events.
    pub fn has_events(&self) -> bool {
        matches!(self.transport, Transport::Socket { .. })
    }

    /// QEMU's process, if directly connected.
    pub(crate) fn process(&self) -> Option<&Process> {
        match &self.transport {
            Transport::Socket { process, .. } => Some(process),
            Transport::Virsh => None,
        }
    }

    /// QEMU's process id, if known.
    pub fn pid(&self) -> Option<u32> {
        self.process().map(Process::pid)
    }

    /// The VM's name.
    pub fn vm(&self) -> &VmName {
        &self.vm
    }

    fn error(&self, limit: Duration, error: QmpError) -> Error {
        let vm = self.vm.clone();
        match (error, &self.transport) {
            (QmpError::Silent, Transport::Socket { path, process, .. })
                if process.is_service_manager() =>
            {
                Error::MonitorWaits {
                    vm,
                    path: path.clone(),
                    limit,
                }
            }
            (QmpError::Silent, Transport::Socket { path, process, .. }) => Error::MonitorSilent {
                vm,
                pid: process.pid(),
                path: path.clone(),
                limit,
            },
            (error, _) => Error::MonitorLost {
                vm,
                why: error.to_string(),
            },
        }
    }
}

/// Connects; a full backlog is waited for until `deadline`, then fails with EAGAIN.
pub fn connect_by(path: &Path, deadline: Instant) -> Result<UnixStream, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    set_socket_timeout(&socket, Timeout::Send, Some(left(deadline)))?;
    connect(&socket, &address)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests;
