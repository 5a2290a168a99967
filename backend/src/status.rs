//! Answers `farside status`: whoever connects to the status socket is sent the
//! state of this backend as JSON, and the connection is closed.

use std::{
    io::{ErrorKind, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use serde::Serialize;

use crate::{device::DeviceReport, server::DeviceServer};

#[derive(Serialize)]
struct BackendReport<'a> {
    vm: &'a str,
    pid: u32,
    devices: Vec<DeviceReport>,
}

/// The status socket on the event loop.
pub(crate) struct StatusServer {
    vm: String,
    listener: UnixListener,
    path: PathBuf,
    devices: Vec<Arc<Mutex<DeviceServer>>>,
}

impl StatusServer {
    /// The socket is in the VM's own folder, which the caller holds: what is
    /// at `path` is a leftover.
    pub(crate) fn bind(
        vm: &str,
        path: &Path,
        devices: Vec<Arc<Mutex<DeviceServer>>>,
    ) -> std::io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            vm: vm.to_owned(),
            listener,
            path: path.to_owned(),
            devices,
        })
    }

    fn answer(&self, mut peer: UnixStream) -> std::io::Result<()> {
        let lock = |device: &Arc<Mutex<DeviceServer>>| {
            let device = device.lock().unwrap_or_else(PoisonError::into_inner);
            device.report()
        };
        let report = BackendReport {
            vm: &self.vm,
            pid: std::process::id(),
            devices: self.devices.iter().map(lock).collect(),
        };
        // A report is far smaller than a socket's buffer: a peer that does not
        // read cannot hold us up.
        peer.set_nonblocking(true)?;
        peer.write_all(&serde_json::to_vec(&report)?)
    }
}

impl MutEventSubscriber for StatusServer {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&self.listener, EventSet::IN)) {
            log::error!("no status for VM {}: event loop: {error}", self.vm);
        }
    }

    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        loop {
            let answered = match self.listener.accept() {
                Ok((peer, _)) => self.answer(peer),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => Err(error),
            };
            if let Err(error) = answered {
                log::warn!("cannot answer a status request of VM {}: {error}", self.vm);
                return;
            }
        }
    }
}

impl Drop for StatusServer {
    fn drop(&mut self) {
        // Nothing is lost if it stays: the next backend removes it.
        let _ = std::fs::remove_file(&self.path);
    }
}
