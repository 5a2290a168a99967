//! Log lines on the clients of one device.

use std::fmt;

use farside_daemon::RateLimit;
use farside_error_chain::Chain;

use crate::{AcceptError, ConnectionError, Refusal};

/// Logs events of a device's clients. Each kind of line has a rate limit of its own.
///
/// It belongs to the device rather than to a connection, so that reconnecting does
/// not reset the limits.
#[derive(Debug, Default)]
pub struct ClientLog {
    connected: RateLimit,
    not_accepted: RateLimit,
    refused: RateLimit,
    closed: RateLimit,
    dropped: RateLimit,
}

impl ClientLog {
    /// A client of `device` was accepted.
    pub fn connected(&self, device: &str) {
        if let Some(held_back) = self.connected.allow() {
            log::info!("{device}: a client connected{held_back}");
        }
    }

    /// A client of `device` could not be accepted.
    pub fn not_accepted(&self, device: &str, error: &AcceptError) {
        if let Some(held_back) = self.not_accepted.allow() {
            log::error!("{device}: {}{held_back}", Chain(error));
        }
    }

    /// A request of the client was refused.
    pub fn refused(&self, device: &str, refusal: &Refusal) {
        if let Some(held_back) = self.refused.allow() {
            log::warn!("{device}: refused a request: {refusal}{held_back}");
        }
    }

    /// The client closed the connection, or is disconnected because of `error`. If the
    /// client closed it, the log line ends with `state`.
    pub fn ended(&self, device: &str, error: &ConnectionError, state: impl fmt::Display) {
        if let ConnectionError::Closed = error {
            if let Some(held_back) = self.closed.allow() {
                log::info!("{device}: the client closed the connection{state}{held_back}");
            }
        } else if let Some(held_back) = self.dropped.allow() {
            log::warn!(
                "{device}: disconnecting the client: {}{held_back}",
                Chain(error)
            );
        }
    }
}
