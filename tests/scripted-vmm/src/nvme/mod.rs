//! A minimal driver for NVMe controllers (NVM Express 1.4): one command at a time, each
//! completion awaited by its interrupt. So the controller raises one interrupt per
//! completed command, and tests can count them. For measurements there is a polled queue
//! pair instead ([`Polled`]).

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
pub use polled::{Doorbells, Load, Polled};
pub use queue::Queue;
