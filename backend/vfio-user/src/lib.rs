//! The server side of the vfio-user protocol, version 0.1.
//!
//! ```text
//!   socket ⇄ Connection ──Message──▶ Session ──Request──▶ handler
//!              ▲                                             │
//!              └───────────── send(ReplyTo, Reply) ──────────┘
//! ```
//!
//! Three layers, each ignorant of the next:
//!
//! * [`Connection`] turns a byte stream into framed messages with their file
//!   descriptors and back. It never blocks and knows no command.
//! * [`Session`] turns a message into a typed, checked [`Request`], or into a
//!   [`Refusal`]. It does no I/O; its only state is whether the version has
//!   been negotiated.
//! * The backend answers with a [`Reply`] or an errno. [`serve::pump`] ties the
//!   three together for a backend that is a [`serve::Handler`].
//!
//! # What happens to a client that breaks the rules
//!
//! The client is a VMM that an untrusted guest may have taken over. Nothing it
//! sends makes this module panic, block, or allocate more than
//! [`MAX_MESSAGE_SIZE`] for input and [`MAX_QUEUED_BYTES`] for output.
//!
//! | the client sends | it gets |
//! | --- | --- |
//! | a size below 16 | `EINVAL`, then the connection is closed: nobody can tell where the next message starts |
//! | a size above [`MAX_MESSAGE_SIZE`] | `E2BIG`; the body is read and thrown away, the stream goes on |
//! | a type that is neither command nor reply | `EINVAL`, goes on |
//! | a reply to no command of ours | nothing: a reply is not replied to |
//! | a command number that does not exist | `EINVAL`, goes on |
//! | a command that exists and is not served | `ENOTSUP`, goes on |
//! | any command before `VERSION`, or `VERSION` twice | `EINVAL`, goes on |
//! | malformed version data | `EINVAL`, goes on: it may try again |
//! | another major version | `EINVAL`, then closed, as the specification asks |
//! | a payload of the wrong length, a bad flag, index or range | `EINVAL`, goes on |
//! | a transfer above [`MAX_DATA_XFER_SIZE`] | `E2BIG`, goes on |
//! | descriptors that the command does not take, or a second one with `DMA_MAP` | they are closed, the command is served |
//! | above [`MAX_MSG_FDS`] descriptors with `DMA_MAP` or `DEVICE_SET_IRQS` | `EINVAL`, goes on; all of them are closed |
//! | `DEVICE_SET_IRQS` with neither no descriptor nor one for each vector | the handler's errno ([`SetIrqs::decode`](farside_irq_relay::SetIrqs::decode): `EINVAL`), goes on; they are closed |
//! | commands without reading the replies | closed once [`MAX_QUEUED_BYTES`] wait |
//! | half a message, then silence | nothing: the event loop simply does not hear of it |
//!
//! Whatever is refused is answered only if the command did not carry the
//! no-reply flag.
//!
//! Source: the vfio-user specification in QEMU's
//! `docs/interop/vfio-user.rst`; sections are cited by their titles.

#![forbid(unsafe_code)]

mod client_log;
mod command;
pub mod connection;
pub mod dma;
mod header;
pub mod listener;
mod outbox;
pub mod refusal;
pub mod region;
pub mod reply;
pub mod request;
pub mod serve;
pub mod session;
mod stream;
pub mod version;
mod wire;

pub use client_log::ClientLog;
pub use command::Command;
pub use connection::{Connection, ConnectionError, Message};
pub use dma::{DmaCommands, Matched, TooMany};
pub use header::{HEADER_SIZE, Header, MessageType, ReplyTo};
pub use listener::{AcceptError, Listener, Slot};
pub use refusal::{Fate, Refusal};
pub use region::{Mappable, Region, RegionInfo, SparseArea};
pub use reply::{DeviceInfo, Reply};
pub use request::{DmaMap, DmaUnmap, RegionWrite, Request, WriteMulti};
pub use session::Session;
pub use version::Negotiated;

/// Most data bytes of one region read or write, offered as
/// `max_data_xfer_size`: the specification's default.
pub const MAX_DATA_XFER_SIZE: u32 = 1 << 20;

/// Most descriptors that may come with one message, offered as `max_msg_fds`.
/// QEMU refuses a server that offers more than 16.
pub const MAX_MSG_FDS: usize = 16;

/// Most DMA ranges that may be mapped at once, offered as `max_dma_maps`: the
/// specification's default, which QEMU lets a server lower only.
pub const MAX_DMA_MAPS: u32 = 65_535;

/// Page size of DMA ranges, bytes, offered as `pgsizes`. Addresses, sizes and
/// offsets of DMA ranges are multiples of it.
pub const DMA_PAGE_SIZE: u64 = 4096;

/// Longest message that is read, bytes including the header: a region write of
/// [`MAX_DATA_XFER_SIZE`].
pub const MAX_MESSAGE_SIZE: u32 = HEADER_SIZE as u32 + 16 + MAX_DATA_XFER_SIZE;

/// Most bytes of replies that wait for a client that does not read. Bounds the
/// memory of a client that sends requests and never reads; holds a few replies
/// of the longest kind.
pub const MAX_QUEUED_BYTES: usize = 4 * MAX_MESSAGE_SIZE as usize;

/// Highest protocol version that is spoken: major.
pub const VERSION_MAJOR: u16 = 0;

/// Highest protocol version that is spoken: minor.
pub const VERSION_MINOR: u16 = 1;

/// An error number for a reply.
pub use rustix::io::Errno;
