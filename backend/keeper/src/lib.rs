//! What a backend leaves to the next one when it is killed: its descriptors, and a record of what it was doing.
//!
//! ```text
//!   keeper ──clone(CLONE_FILES)──▶ backend        one table of descriptors for all, and the spare keeper
//!      │                              │
//!      │                              ├─ journal: what came from the client, what was answered
//!      │ SIGCHLD                      ├─ snapshots: the state of each device
//!      ▼                              └─ log of register writes, lease
//!   the next backend takes both over        (memfds, in the same table)
//! ```
//!
//! - *Descriptors.* The [keeper](keep) is the process that was started. It clones the backend from itself so that both
//!   have one table of descriptors: what the backend receives or opens stays open when it is killed, under the same
//!   number. No descriptor is sent to a keeper, so none is lost on the way.
//! - *Records* are in one [file](DeviceFile) for each device, of which the next backend reads what is needed. It
//!   [claims](Inherited) the descriptors that the records name, and closes all others.
//! - *Requests.* A [`Journal`] has the kernel itself store how many bytes it has received or sent, in the same system
//!   call: a process that is killed at any instruction leaves no doubt whether a byte was taken. A request stays in
//!   the journal until its answer and the state that it leads to replace it, with one store.
//!
//! The keeper parses nothing, and does nothing but wait. Nor does the spare, which is the keeper after it
//! ([`keep`]). A process that has not been cloned from it, such as that of another version, [takes](Former::take) all
//! descriptors over.

#![deny(unsafe_code)]

mod file;
mod handover;
mod inherited;
mod journal;
mod keep;
mod kept;
mod root;
mod snapshots;
mod system;
mod words;

pub use file::{DeviceFile, LEASE_WORDS, LOG_WORDS, RECORDS};
pub use handover::{Former, HandoverError, end, is_there};
pub use inherited::Inherited;
pub use journal::{Journal, JournalError, MAX_FDS, Received};
pub use keep::{Options, keep};
pub use kept::Kept;
pub use snapshots::Snapshots;
pub use words::Words;
