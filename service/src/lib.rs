//! What a daemon gets from the service manager that started it (systemd), and
//! what it tells it.
//!
//! - [`Activated`]: listening sockets that the service manager has made, so that
//!   peers can connect before the daemon runs and while it is restarted
//!   (`sd_listen_fds(3)`).
//! - [`ready`], [`stopping`]: readiness and a line of status (`sd_notify(3)`).
//! - [`SocketGroup`]: a group whose members may connect to a socket.
//!
//! Started by hand, a daemon gets nothing and tells nobody; all of this then does
//! nothing.

#![forbid(unsafe_code)]

mod activation;
mod group;
mod readiness;

pub use activation::{Activated, ActivationError, Endpoint, Kind};
pub use group::{GroupError, SocketGroup};
pub use readiness::{ready, stopping};
