//! What every daemon needs: what it gets from the service manager that started it
//! (systemd) and tells it, and a log that nobody can flood.
//!
//! - [`Activated`]: listening sockets that the service manager has made, so that
//!   peers can connect before the daemon runs and while it is restarted
//!   (`sd_listen_fds(3)`).
//! - [`ready`], [`status`], [`stopping`]: readiness and a line of status (`sd_notify(3)`).
//! - [`SocketGroup`]: a group whose members may connect to a socket.
//! - [`RateLimit`], [`StateLog`]: log lines that others cause at a rate they
//!   choose.
//! - [`output_within`]: another program's output, with a deadline.
//!
//! Started by hand, a daemon gets nothing and tells nobody; all of this then does
//! nothing.

#![forbid(unsafe_code)]

mod activation;
mod command;
mod group;
mod rate_limit;
mod readiness;

pub use activation::{Activated, ActivationError, Endpoint, Kind};
pub use command::{OutputError, output_within};
pub use group::{GroupError, SocketGroup};
pub use rate_limit::{HeldBack, RateLimit, StateLog};
pub use readiness::{ready, status, stopping};
