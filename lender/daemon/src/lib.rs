//! The common parts of the daemons: paths, sockets, readiness, rate-limited logging.
//!
//! - [`paths`]: default paths of sockets, state and configurations.
//! - [`VmName`], [`DeviceId`], [`LenderName`], [`GroupName`]: names, checked when parsed.
//! - [`is_private`]: networks that need no encryption.
//! - [`cgroup`]: a control group for each child process.
//! - [`confine`]: giving up privileges, paths and system calls.
//! - [`files`]: small files that survive a crash.
//! - [`FileLock`]: a lock between processes.
//! - [`Activated`]: listening sockets that the service manager (systemd) created, so
//!   that peers can connect before the daemon runs and while it restarts
//!   (`sd_listen_fds(3)`).
//! - [`OwnedListener`]: a listening UNIX socket and its path.
//! - [`SocketGroup`]: a group whose members may connect to a socket.
//! - [`user_id`], [`user_name`], [`group_name`]: the users of this host.
//!   [`peer_credentials`]: the user and process at the other end of a UNIX socket.
//! - [`ready`], [`status`], [`stopping`]: readiness and a status line
//!   (`sd_notify(3)`). No-ops without a service manager, and after [`end_notices`].
//! - [`RateLimit`], [`StateLog`]: limits for log lines that peers can cause at will.
//! - [`Wakeup`]: wakes a thread that polls.
//! - [`output_within`], [`ends_by`]: run or await a child process with a deadline.
//! - [`raise_open_files`], [`limit_open_files`]: the limit of open files. [`close_inherited`]: closes inherited ones.
//!
//! Protocols are in other crates: this one depends on no other crate of the workspace.

#![forbid(unsafe_code)]

pub mod cgroup;
pub mod confine;
pub mod files;
pub mod paths;

mod activation;
mod command;
mod directory;
mod group;
mod listener;
mod lock;
mod names;
mod network;
mod open_files;
mod peer;
mod rate_limit;
mod readiness;
mod user;
mod wakeup;

pub use activation::{Activated, ActivationError, Endpoint, SocketKind};
pub use command::{OutputError, ends_by, output_within};
pub use group::{GroupError, SocketGroup};
pub use listener::{ListenError, OwnedListener};
pub use lock::{FileLock, Holder, LockError};
pub use names::{DeviceId, GroupName, LenderName, NameError, VmName};
pub use network::is_private;
pub use open_files::{close_inherited, limit_open_files, raise_open_files};
pub use peer::{PeerCredentials, peer_credentials};
pub use rate_limit::{HeldBack, RateLimit, StateLog};
pub use readiness::{end_notices, ready, status, stopping};
pub use user::{UserError, group_name, user_id, user_name};
pub use wakeup::Wakeup;
