//! What a server and a client of the vfio-user protocol have in common: commands, headers, and integers.
//!
//! Source: the vfio-user specification in QEMU's `docs/interop/vfio-user.rst`, version 0.1; sections are cited by their
//! titles.

#![forbid(unsafe_code)]

mod command;
mod header;
mod integers;

pub use command::Command;
pub use header::{HEADER_SIZE, Header, MessageType, ReplyTo, begin_command, finish};
pub use integers::{Cursor, Put};
