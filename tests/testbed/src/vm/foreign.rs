//! VMs started by others, such as libvirt: the test bed provides the agent's port only.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use farside_guest_agent::PORT_NAME;
use rustix::event::{PollFd, PollFlags};

use super::{Board, Guest, read_lossy, tail};
use crate::process::poll_until;

/// The socket to which QEMU must connect the virtio-serial port [`AgentPort::NAME`]. The
/// guest must boot [`crate::Testbed::kernel`] and [`crate::Testbed::initramfs`].
#[derive(Debug)]
pub struct AgentPort {
    vm: String,
    listener: UnixListener,
    socket: PathBuf,
    console: PathBuf,
}

impl AgentPort {
    /// The port's name in the guest.
    pub const NAME: &'static str = PORT_NAME;

    /// Listens in a directory that QEMU can access. `vm` is used in messages.
    pub fn listen(vm: &str, directory: &Path) -> Result<Self> {
        let socket = directory.join(format!("{vm}.agent"));
        let listener = UnixListener::bind(&socket)
            .with_context(|| format!("listening on {}", socket.display()))?;
        Ok(Self {
            vm: vm.to_owned(),
            listener,
            socket,
            console: directory.join(format!("{vm}.console")),
        })
    }

    /// The socket to connect to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The file for the guest's serial console: errors quote its end.
    pub fn console(&self) -> &Path {
        &self.console
    }

    /// Waits until a VM connects, which it does at each start. See [`Guest::wait_agent`]
    /// for the next step.
    pub fn accept(&self, timeout: Duration) -> Result<Guest> {
        let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
        ensure!(
            poll_until(&mut fds, Instant::now() + timeout)?,
            "VM {}: QEMU did not connect to {} within {timeout:?}",
            self.vm,
            self.socket.display()
        );
        let (stream, _) = self.listener.accept().context("accepting a connection")?;
        let console = self.console.clone();
        let words = move || match read_lossy(&console).trim() {
            "" => String::new(),
            log => format!("\n-- its serial console ends with:\n{}", tail(log)),
        };
        Guest::start(self.vm.clone(), stream, Board::default(), Box::new(words))
    }
}
