//! `sd_notify(3)`.

use std::{os::unix::net::UnixDatagram, sync::OnceLock};

use serde::{Deserialize, Serialize};

/// The variable with the path of the service manager's socket.
const SOCKET: &str = "NOTIFY_SOCKET";

/// Maximum length of a status line, in characters.
const MAX_STATUS: usize = 256;

/// A message for the service manager, with a line for `systemctl status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notice {
    /// All sockets listen (`READY=1`).
    Ready(String),
    /// No change but the line.
    Status(String),
    /// The daemon is shutting down (`STOPPING=1`).
    Stopping(String),
}

impl Notice {
    /// Sends it to the service manager, if there is one.
    pub fn send(&self) {
        let Some(path) = std::env::var_os(SOCKET) else {
            return;
        };
        let send = || UnixDatagram::unbound()?.send_to(self.text().as_bytes(), path);
        if let Err(error) = send() {
            // Not fatal: the daemon works. A service manager that waits for readiness stops it
            // after a timeout.
            log::warn!("cannot notify the service manager (${SOCKET}): {error}");
        }
    }

    /// The message. The line may come from a process that is not trusted with others.
    fn text(&self) -> String {
        let (state, status) = match self {
            Self::Ready(status) => ("READY=1\n", status),
            Self::Status(status) => ("", status),
            Self::Stopping(status) => ("STOPPING=1\n", status),
        };
        let line = status.chars().take(MAX_STATUS);
        let line = line.map(|c| if c.is_control() { ' ' } else { c });
        format!("{state}STATUS={}\n", line.collect::<String>())
    }
}

type Sender = Box<dyn Fn(Notice) + Send + Sync>;

/// Sends notices for this process, if it may not do so itself.
static SENDER: OnceLock<Sender> = OnceLock::new();

/// Has `send` send all further notices of this process, which may not connect to the service manager.
pub fn notify_through(send: impl Fn(Notice) + Send + Sync + 'static) {
    // Only the first one counts.
    let _ = SENDER.set(Box::new(send));
}

/// Notifies the service manager that all sockets listen (`READY=1`), with a line for
/// `systemctl status`.
pub fn ready(status: &str) {
    notify(Notice::Ready(status.into()));
}

/// Sets the line for `systemctl status`.
pub fn status(status: &str) {
    notify(Notice::Status(status.into()));
}

/// Notifies the service manager that the daemon is shutting down (`STOPPING=1`).
pub fn stopping(status: &str) {
    notify(Notice::Stopping(status.into()));
}

fn notify(notice: Notice) {
    match SENDER.get() {
        Some(send) if std::env::var_os(SOCKET).is_some() => send(notice),
        Some(_) => {}
        None => notice.send(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_line_is_one_line() {
        let forged = "served\nMAINPID=1\nFDSTORE=1".to_owned();
        assert_eq!(
            Notice::Stopping(forged).text(),
            "STOPPING=1\nSTATUS=served MAINPID=1 FDSTORE=1\n"
        );
        let long = Notice::Status("x".repeat(10_000)).text();
        assert_eq!(long.len(), "STATUS=\n".len() + MAX_STATUS);
    }
}
