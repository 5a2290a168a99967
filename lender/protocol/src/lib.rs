//! The versioned protocol between a backend and a lender.
//!
//! One UNIX `SOCK_SEQPACKET` connection carries requests and their replies
//! ([`Request`], [`Reply`]); descriptors (guest RAM, eventfds) ride along. The
//! socket keeps message boundaries, `serde` and `postcard` encode. Between hosts
//! the same messages go over TCP, each with its length before it, and without
//! descriptors ([`Address`] says which it is). A borrow adds a second
//! connection, the *register channel* ([`registers`]), on which BAR accesses
//! travel one way and relayed interrupts the other, without waiting behind slow
//! requests.
//!
//! ```text
//!   backend                                   lender
//!     | Hello{version, vm}  ------------------> |
//!     | <------------------------ Welcome       |
//!     | Describe{device} ---------------------> |   nothing is borrowed
//!     | <---------------------- Description     |
//!     | Borrow{device} + BAR memory ----------> |
//!     | <------ Lease{epoch} + register channel |   + BAR files, from hardware
//!     | FarMap + fd, OpenWindow, SetIrqs + fds, |
//!     | EnableBusMaster, Reset, ... (epoch) --> |
//!     | Return (epoch), or just close --------> |
//! ```
//!
//! A tool that moves a VM to another host requests a [`Handover`](Request::Handover)
//! of each of its devices; see [`Fence`].
//!
//! Over TCP the lease comes with a [`Ticket`] instead of the register channel:
//!
//! ```text
//!     | <------------ Lease{epoch, ticket}      |
//!     | connects again, Registers{ticket} ----> |
//!     | <--------- Done: now it is the register channel
//! ```

#![forbid(unsafe_code)]

pub mod registers;

mod address;
mod channel;
mod client;
mod fence;
mod irqs;
mod listener;
mod message;

pub use address::{Address, AddressError};
pub use channel::{Channel, ChannelError, MAX_FDS, MAX_MESSAGE};
pub use client::{CallError, Client, Lease};
pub use fence::{Fence, Fences, MAX_FENCES};
pub use irqs::{IrqUpdate, IrqVectors, irq_counts};
pub use listener::Listener;
pub use message::{
    BarMemory, BarOwner, BorrowedBy, Described, DeviceEntry, DeviceStatus, Envelope, Epoch,
    ErrorKind, RamRange, Registers, RemoteError, Reply, Request, Route, TICKET_LIFE, Ticket,
    VERSION,
};
