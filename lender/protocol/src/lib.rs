//! The versioned protocol between a backend and a lender.
//!
//! One UNIX `SOCK_SEQPACKET` connection carries requests and their replies
//! ([`Request`], [`Reply`]) with their descriptors (guest RAM, eventfds). The
//! socket preserves message boundaries; messages are encoded by `serde` and `postcard`.
//! Between hosts the same messages go over TLS, length-prefixed and without
//! descriptors; over TCP without TLS where the operator accepts that. The [`Address`] selects the transport. A borrow adds a second
//! connection, the *register channel* ([`registers`]), which carries BAR accesses in
//! one direction and relayed interrupts in the other, so that neither waits behind slow
//! requests.
//!
//! ```text
//!   backend                                   lender
//!     | Hello{version, vm}  ------------------> |
//!     | <------------------------ Welcome       |
//!     | Describe{device} ---------------------> |   nothing is borrowed
//!     | <---------------------- Description     |
//!     | Borrow{device} + BAR memory ----------> |
//!     | <- Lease{generation} + register channel |   + BAR files, from hardware
//!     | MapPeer + fd, OpenWindow, SetIrqs + fds,|
//!     | EnableBusMaster, ... (generation) ----> |
//!     | Return (generation), or close --------> |
//! ```
//!
//! A migration to another host requests a [`Handover`](Request::Handover) of each of the
//! VM's devices; see [`Fence`].
//!
//! Over TCP the lease has a [`RegisterToken`] instead of the register channel:
//!
//! ```text
//!     | <------------ Lease{generation, token}      |
//!     | second connection, Registers{token} --> |
//!     | <--------- Done: this connection is now the register channel
//! ```

#![forbid(unsafe_code)]

pub mod registers;

mod address;
mod availability;
mod channel;
mod client;
mod dial;
mod fence;
mod find;
mod identity;
mod instance;
mod irqs;
mod kept;
mod limits;
mod listener;
mod message;
mod secret;
mod state;
mod status;

pub use address::{Address, AddressError};
pub use availability::Availability;
pub use channel::{Channel, ChannelError, MAX_FDS, MAX_MESSAGE, TlsError};
pub use client::{CallError, Client, Lease, MAX_DEVICES};
pub use dial::{Dial, Dialer, Greeted, Target, dial};
pub use fence::{Fence, Fences, HeldFence, MAX_FENCES};
pub use find::{FindError, MAX_ASKED, find_device};
pub use identity::{Identity, UntrustedListener};
pub use instance::Instance;
pub use irqs::{IrqUpdate, IrqVectors, irq_counts};
pub use kept::KeptFor;
pub use limits::{LimitUse, Resource};
pub use listener::Listener;
pub use message::{
    BarMemory, BarOwner, BorrowedBy, Described, DeviceEntry, Envelope, ErrorKind, Generation,
    MAX_RESIZED, MAX_REVOKE_LIMIT, MediumLease, ROM_PART, RamRange, RegisterToken, Registers,
    RemoteError, Reply, Request, ResizedDevice, Revocation, TOKEN_LIFE, Transport, VERSION,
};
pub use secret::Secret;
pub use state::{Keeping, STATE_PAGE, served};
pub use status::{Counter, DeviceStatus};
