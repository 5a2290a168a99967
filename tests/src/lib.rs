//! What the end-to-end tests share: real `farside` processes in a folder of
//! their own, real QEMU, real guests.
//!
//! - [`Cluster`]: the runtime folder, images, and what is started in it;
//! - [`Daemon`]: one process, with its log as it comes;
//! - [`Status`]: `farside status --json`;
//! - [`GuestBuilder`], [`Guest`]: a VM started by `farside qemu --run`;
//! - [`DmaTester`]: drives the DMA test device from inside a guest.
//! - [`told`]: a test that fails shows what was said meanwhile;
//! - [`trial`]: a test that says how long it took, and has a limit;
//! - [`two_hosts`]: two hosts between which a VM can move.
//! - [`hosts`]: the product in VMs that play hosts, with real VFIO and IOMMUs.
//!
//! The program under test is `$FARSIDE_BIN`, else what `cargo build -p farside`
//! makes.

#![forbid(unsafe_code)]

mod binary;
mod cluster;
mod daemon;
mod dma_tester;
mod guest;
pub mod hosts;
mod image;
mod mtree;
mod status;
mod told;
pub mod two_hosts;

pub use binary::farside as farside_program;
pub use cluster::{Cluster, Ended, Serve};
pub use daemon::Daemon;
pub use dma_tester::{Answer, DmaTester};
pub use farside_backend_api::BorrowState;
pub use farside_testbed::{BarAddress, Machine, Vm, Width};
pub use guest::{FunctionId, Guest, GuestBuilder, NVME, testbed};
pub use image::{noise, sha256, sha256_of};
pub use mtree::shared_ram;
pub use status::{Borrow, Lent, Status};
pub use told::{Weight, told, trial};

use std::time::Duration;

/// For what takes no time unless the machine is very busy: emulated guests
/// share its processors with whatever else runs.
pub const SHORT: Duration = Duration::from_secs(120);

/// For a guest to boot.
pub const BOOT: Duration = Duration::from_secs(600);

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;
