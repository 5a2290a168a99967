//! `sd_notify(3)`.

use std::{
    os::unix::net::UnixDatagram,
    sync::atomic::{AtomicBool, Ordering},
};

/// Set when this process may not connect to the service manager any more.
static SILENT: AtomicBool = AtomicBool::new(false);

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

/// Notifies the service manager of nothing more: a confined process connects to nothing.
pub fn end_notices() {
    SILENT.store(true, Ordering::Relaxed);
}

fn notify(states: &str) {
    let path = std::env::var_os("NOTIFY_SOCKET");
    let Some(path) = path.filter(|_| !SILENT.load(Ordering::Relaxed)) else {
        return;
    };
    let send = || UnixDatagram::unbound()?.send_to(states.as_bytes(), path);
    if let Err(error) = send() {
        // Not fatal: the daemon works. A service manager that waits for readiness stops it
        // after a timeout.
        log::warn!("cannot notify the service manager ($NOTIFY_SOCKET): {error}");
    }
}
