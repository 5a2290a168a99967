//! The parts that every daemon needs: paths, sockets, readiness, and a log that no
//! peer can flood.
//!
//! - [`paths`]: where sockets are, unless configured.
//! - [`check_name`]: names that become file names and parts of log lines.
//! - [`is_private`]: networks in which nothing need be encrypted.
//! - [`files`]: small files that survive a crash.
//! - [`FileLock`]: a lock between processes.
//! - [`Activated`]: listening sockets that the service manager (systemd) created, so
//!   that peers can connect before the daemon runs and while it restarts
//!   (`sd_listen_fds(3)`).
//! - [`OwnedListener`]: a UNIX socket that this process listens at, and its path.
//! - [`SocketGroup`]: a group whose members may connect to a socket.
//! - [`ready`], [`status`], [`stopping`]: readiness and a status line
//!   (`sd_notify(3)`). Without a service manager they do nothing.
//! - [`RateLimit`], [`StateLog`]: log lines that peers cause at a rate they choose.
//! - [`Wakeup`]: wakes a thread that polls.
//! - [`output_within`], [`ends_by`]: run a program, or wait for one, with a deadline.
//! - [`raise_open_files`]: the limit of open files.
//!
//! Protocols are in other crates: this one depends on none of ours.

#![forbid(unsafe_code)]

pub mod files;
pub mod paths;

mod activation;
mod command;
mod group;
mod listener;
mod lock;
mod names;
mod network;
mod open_files;
mod rate_limit;
mod readiness;
mod wakeup;

pub use activation::{Activated, ActivationError, Endpoint, Kind};
pub use command::{OutputError, ends_by, output_within};
pub use group::{GroupError, SocketGroup};
pub use listener::{ListenError, OwnedListener};
pub use lock::{FileLock, LockError};
pub use names::{MAX_NAME, NAME_RULE, NameError, check_name, check_name_of};
pub use network::is_private;
pub use open_files::raise_open_files;
pub use rate_limit::{HeldBack, RateLimit, StateLog};
pub use readiness::{ready, status, stopping};
pub use wakeup::Wakeup;
