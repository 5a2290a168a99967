//! `sd_notify(3)`.

use sd_notify::NotifyState;

/// Tells the service manager that everything listens now, with a line for
/// `systemctl status`.
pub fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// A line for `systemctl status`.
pub fn status(status: &str) {
    notify(&[NotifyState::Status(status)]);
}

/// Tells the service manager that the daemon has begun to end.
pub fn stopping(status: &str) {
    notify(&[NotifyState::Stopping, NotifyState::Status(status)]);
}

fn notify(states: &[NotifyState]) {
    // The daemon is as good as before; the service manager gives up on it when
    // it waits for readiness.
    if let Err(error) = sd_notify::notify(states) {
        log::warn!("cannot tell the service manager ($NOTIFY_SOCKET): {error}");
    }
}
