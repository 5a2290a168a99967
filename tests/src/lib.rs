//! Support of the end-to-end tests: real `farside` processes in a separate directory, real
//! QEMU, real guests.
//!
//! - [`Cluster`]: the runtime directory, images, and the processes in it;
//! - [`Daemon`]: one process, with its log;
//! - [`Status`]: `farside status --json`;
//! - [`GuestBuilder`], [`Guest`]: a VM started by `farside qemu --run`;
//! - [`DmaTester`]: driver for the DMA test device in a guest;
//! - [`told`]: shows the logs of a test that fails;
//! - [`trial`]: prints the duration of a test, and limits it;
//! - [`Keepers`]: the processes that keep a backend;
//! - [`load`]: a scripted VM that does I/O while the processes of its disk are killed;
//! - [`two_hosts`]: two hosts between which a VM can move;
//! - [`check`]: the output of test suites of Linux's storage;
//! - [`hosts`]: the product in VMs that play hosts, with real VFIO and IOMMUs.
//!
//! The binary under test is `$FARSIDE_BIN`, else the build of `cargo build -p farside`.

#![forbid(unsafe_code)]

mod binary;
pub mod check;
mod cluster;
mod daemon;
mod dma_tester;
mod guest;
pub mod hosts;
mod image;
mod keepers;
pub mod load;
mod mtree;
pub mod reserving;
mod status;
mod told;
mod traffic;
pub mod two_hosts;

pub use binary::{farside as farside_program, scripted_vmm as scripted_vmm_program};
pub use cluster::{Cluster, Ended, Serve};
pub use daemon::Daemon;
pub use dma_tester::{Answer, DmaTester};
pub use farside_backend_api::BorrowState;
pub use farside_testbed::{BarAddress, Machine, Vm, Width};
pub use guest::{FunctionId, Guest, GuestBuilder, NVME, testbed};
pub use image::{noise, sha256, sha256_of};
pub use keepers::Keepers;
pub use mtree::shared_ram;
pub use status::{Borrow, Lent, Status};
pub use told::{Weight, from_env, told, trial};
pub use traffic::{Tap, Transfer};

use std::time::Duration;

/// Timeout of operations that are immediate on an idle machine: emulated guests share its
/// CPUs with other load.
pub const SHORT: Duration = Duration::from_secs(120);

/// Timeout of a guest's boot.
pub const BOOT: Duration = Duration::from_secs(600);

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;
