//! The server side of the vfio-user protocol, version 0.1.
//!
//! ```text
//!   socket ⇄ Connection ──Message──▶ Session ──Request──▶ handler
//!              ▲                                             │
//!              └───────────── send(ReplyTo, Reply) ──────────┘
//! ```
//!
//! Three layers, none of which depends on the next:
//!
//! * [`Connection`] turns a byte stream into framed messages with their file
//!   descriptors and back. It never blocks and does not interpret commands.
//! * [`Session`] turns a message into a typed, checked [`Request`], or into a
//!   [`Refusal`]. It does no I/O; its only state is whether the version has
//!   been negotiated.
//! * The backend answers with a [`Reply`] or an errno. [`serve::pump`] connects
//!   the three for a backend that implements [`serve::Handler`].
//!
//! # Protocol violations
//!
//! The client is a VMM that an untrusted guest may have compromised. No input
//! makes this crate panic, block, or allocate more than
//! [`MAX_MESSAGE_SIZE`] for input and [`MAX_QUEUED_BYTES`] for output.
//!
//! | the client sends | the server's response |
//! | --- | --- |
//! | a size below 16 | `EINVAL`, then the connection is closed: the start of the next message is unknown |
//! | a size above [`MAX_MESSAGE_SIZE`] | `E2BIG`; the body is read and discarded |
//! | a type that is neither command nor reply | `EINVAL` |
//! | a reply that matches no outstanding command | none: replies are not replied to |
//! | an undefined command number | `EINVAL` |
//! | a defined command that is not supported | `ENOTSUP` |
//! | any command before `VERSION`, or `VERSION` twice | `EINVAL` |
//! | malformed version data | `EINVAL`; the client may retry |
//! | another major version | `EINVAL`, then the connection is closed, as the specification requires |
//! | a payload of the wrong length, an invalid flag, index or range | `EINVAL` |
//! | a transfer above [`MAX_DATA_XFER_SIZE`] | `E2BIG` |
//! | descriptors that the command does not take, or a second one with `DMA_MAP` | the descriptors are closed, the command is served |
//! | above [`MAX_MSG_FDS`] descriptors with `DMA_MAP` or `DEVICE_SET_IRQS` | `EINVAL`; all of them are closed |
//! | `DEVICE_SET_IRQS` whose descriptors are neither none nor one for each vector | the handler's errno ([`SetIrqs::decode`](farside_irq_relay::SetIrqs::decode): `EINVAL`); they are closed |
//! | commands without reading the replies | the connection is closed once [`MAX_QUEUED_BYTES`] are queued |
//! | part of a message, then no more | none: the socket does not become readable |
//!
//! Unless the table states otherwise, the connection stays open. A command with the
//! no-reply flag gets no error reply either.
//!
//! Source: the vfio-user specification in QEMU's
//! `docs/interop/vfio-user.rst`; sections are cited by their titles.

#![forbid(unsafe_code)]

mod client_log;
pub mod connection;
pub mod dma;
pub mod listener;
pub mod refusal;
pub mod region;
pub mod reply;
pub mod request;
pub mod serve;
pub mod session;
mod stream;
pub mod version;

pub use client_log::ClientLog;
pub use connection::{Connection, ConnectionError, Message};
pub use dma::{DmaCommands, Matched, TooMany};
pub use listener::{AcceptError, Listener, Slot};
pub use refusal::{Fate, Refusal};
pub use region::{Mappable, Region, RegionInfo, SparseArea};
pub use reply::{DeviceInfo, Reply};
pub use request::{DmaMap, DmaUnmap, RegionWrite, Request, WriteMulti};
pub use session::Session;
pub use version::Negotiated;

pub use farside_vfio_user_wire::{Command, HEADER_SIZE, Header, MessageType, ReplyTo};

/// Most data bytes of one region read or write, offered as
/// `max_data_xfer_size`: the specification's default.
pub const MAX_DATA_XFER_SIZE: u32 = 1 << 20;

/// Most descriptors that may come with one message, offered as `max_msg_fds`.
/// QEMU refuses a server that offers more than 16.
pub const MAX_MSG_FDS: usize = 16;

/// Most DMA ranges that may be mapped at once, offered as `max_dma_maps`: the
/// specification's default. QEMU accepts no higher value.
pub const MAX_DMA_MAPS: u32 = 65_535;

/// Page size of DMA ranges, bytes, offered as `pgsizes`. Addresses, sizes and
/// offsets of DMA ranges are multiples of it.
pub const DMA_PAGE_SIZE: u64 = 4096;

/// Longest message that is accepted, in bytes including the header: a region write
/// of [`MAX_DATA_XFER_SIZE`].
pub const MAX_MESSAGE_SIZE: u32 = HEADER_SIZE as u32 + 16 + MAX_DATA_XFER_SIZE;

/// Most bytes of queued replies. Bounds the memory that a client takes up which sends
/// requests and never reads; room for a few replies of maximum length.
pub const MAX_QUEUED_BYTES: usize = 4 * MAX_MESSAGE_SIZE as usize;

/// Highest supported protocol version: major.
pub const VERSION_MAJOR: u16 = 0;

/// Highest supported protocol version: minor.
pub const VERSION_MINOR: u16 = 1;

/// An error number for a reply.
pub use rustix::io::Errno;
