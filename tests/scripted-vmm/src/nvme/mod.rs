//! A driver for NVMe drives (NVM Express 1.4), as small as one can be: one
//! command at a time, each waited for by its interrupt. So a drive raises as
//! many interrupts as it completes commands, and they can be counted. For measuring
//! there is a queue pair that is polled instead ([`Polled`]).

mod command;
mod controller;
mod identify;
mod memory;
mod polled;
mod queue;
mod registers;

pub use command::{Command, Completion, Opcode};
pub use controller::{Controller, Transfer, is_ready, start, status, stop};
pub use identify::Identity;
pub use memory::{DRIVER_RAM, MAX_QUEUES};
pub use polled::{Doorbells, Polled};
pub use queue::Queue;
