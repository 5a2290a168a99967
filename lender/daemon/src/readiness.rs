//! `sd_notify(3)`.

use std::{io, os::unix::net::UnixDatagram, sync::OnceLock};

/// The service manager's socket, while the process runs: a confined one connects to nothing.
static SOCKET: OnceLock<Option<UnixDatagram>> = OnceLock::new();

/// Notifies the service manager that all sockets listen (`READY=1`), with a line for
/// `systemctl status`.
pub fn ready(status: &str) {
    notify(&format!("READY=1\nSTATUS={status}\n"));
}

/// Sets the line for `systemctl status`.
pub fn status(status: &str) {
    notify(&format!("STATUS={status}\n"));
}

/// Notifies the service manager that the daemon is shutting down (`STOPPING=1`).
pub fn stopping(status: &str) {
    notify(&format!("STOPPING=1\nSTATUS={status}\n"));
}

/// Connects to the service manager, before a process confines itself.
pub fn connect_to_service_manager() {
    socket();
}

fn notify(states: &str) {
    if let Some(socket) = socket()
        && let Err(error) = socket.send(states.as_bytes())
    {
        failed(&error);
    }
}

fn socket() -> Option<&'static UnixDatagram> {
    let connect = || {
        let path = std::env::var_os("NOTIFY_SOCKET")?;
        let connected = UnixDatagram::unbound().and_then(|socket| {
            socket.connect(path)?;
            Ok(socket)
        });
        connected.inspect_err(failed).ok()
    };
    SOCKET.get_or_init(connect).as_ref()
}

fn failed(error: &io::Error) {
    // Not fatal: the daemon works. A service manager that waits for readiness stops it
    // after a timeout.
    log::warn!("cannot notify the service manager ($NOTIFY_SOCKET): {error}");
}
