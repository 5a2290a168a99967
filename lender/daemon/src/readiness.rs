//! `sd_notify(3)`.

use sd_notify::NotifyState;

/// Notifies the service manager that all sockets listen (`READY=1`), with a line for
/// `systemctl status`.
pub fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// Sets the line for `systemctl status`.
pub fn status(status: &str) {
    notify(&[NotifyState::Status(status)]);
}

/// Notifies the service manager that the daemon is shutting down (`STOPPING=1`).
pub fn stopping(status: &str) {
    notify(&[NotifyState::Stopping, NotifyState::Status(status)]);
}

fn notify(states: &[NotifyState]) {
    // Not fatal: the daemon works. A service manager that waits for readiness stops it
    // after a timeout.
    if let Err(error) = sd_notify::notify(states) {
        log::warn!("cannot notify the service manager ($NOTIFY_SOCKET): {error}");
    }
}
