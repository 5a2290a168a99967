//! Leases in processes of their own.
//!
//! A software model parses what its guest writes. So each lease of one is served by a worker: a
//! process that has this guest's memory, the descriptor of this medium and the borrower's
//! connection, and nothing else. The lender's process, the broker, has the registry, the fences and
//! the adapter, and never maps a guest's memory for a model.
//!
//! ```text
//!   backend ──── connection, register channel, eventfds, memory ────▶ worker
//!      │                                                            ▲       │
//!      └── Hello, Borrow ──▶ broker ── Start, orders ───────────────┘       │
//!                              ▲                                            │
//!                              └───────────── calls: windows, log lines ────┘
//! ```
//!
//! The broker is on no data path: it hands over the connection with the lease. A worker that ends
//! in any way costs its own lease; the broker keeps a descriptor of the connection until the
//! process is gone, so that the borrower is not told that its memory is out of use before it is.

mod borrower;
mod calls;
mod child;
mod confine;
mod create;
mod device;
mod handle;
mod kept;
mod kept_running;
mod medium;
mod messages;
mod process;
mod start_error;
mod text;

pub(crate) use borrower::Borrower;
pub use child::Program;
pub(crate) use child::{Worker, Workers};
pub(crate) use device::WorkerDevice;
pub(crate) use handle::{Handle, KeptHandle};
pub(crate) use kept::{ANOTHER_KIND, Adopted, OpenWindow, Record, needs_broker};
pub(crate) use kept_running::Running;
pub(crate) use messages::{Answer, Call, CallReply, Numbered, Order};
pub use process::{WorkerError, run};
pub(crate) use text::{LogReader, printable, printable_error};
