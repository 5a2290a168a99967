//! Errors, in a form that is sent between hosts.

use farside_error_chain::Chain;
use serde::{Deserialize, Serialize};

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error. Its message names what failed, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// The class of the error.
    pub kind: ErrorKind,
    /// The text for the user.
    pub message: String,
}

/// Classes of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// The VM cannot be moved as things are.
    Refused,
    /// The VM has arrived at the other host: it cannot be taken back any more.
    Arrived,
    /// The other host cannot be reached, or the connection broke.
    Lost,
    /// Another version at the other end, or of a file.
    Version,
    /// A journal that cannot be read, or does not match.
    Journal,
    /// A lender.
    Lender,
    /// The VM itself: it does not start or stop.
    Vm,
    /// The host's files.
    Host,
}

impl Error {
    /// An error of a kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }

    /// The VM cannot be moved as things are.
    pub fn refused(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Refused, message)
    }

    /// The other host is gone.
    pub fn lost(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Lost, message)
    }

    /// A journal.
    pub fn journal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Journal, message)
    }

    /// Prefixes the message with a host's name.
    #[must_use]
    pub fn at(self, host: &str) -> Self {
        let message = format!("{host}: {}", self.message);
        Self { message, ..self }
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::new(ErrorKind::Host, Chain(&error).to_string())
    }
}

impl From<farside_lender_protocol::CallError> for Error {
    fn from(error: farside_lender_protocol::CallError) -> Self {
        Self::new(ErrorKind::Lender, Chain(&error).to_string())
    }
}

impl From<farside_vm_control::Error> for Error {
    fn from(error: farside_vm_control::Error) -> Self {
        Self::new(ErrorKind::Vm, Chain(&error).to_string())
    }
}
