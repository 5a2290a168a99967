//! The fabric between two hosts: NTB endpoints programmed from userspace,
//! through VFIO.
//!
//! Each host has one port of an NTB, an endpoint bound to vfio-pci and alone in its
//! IOMMU domain. An access to segment `i` of a port's window BAR comes out at the
//! other host, as DMA of the endpoint there, at the *peer address* in LUT entry
//! `i`.
//!
//! ```text
//!  lender                                       borrower
//!  device ──► device's domain ──► window BAR ══► endpoint's domain ──► guest RAM
//!       IOVA = GPA     LenderNtb      LUT    peer address    BorrowerNtb
//!
//!  device's BAR ◄── endpoint's domain ◄══ window BAR ◄── guest's CPU
//!               ExportedBars  peer address   LUT     BarWindow
//! ```
//!
//! - [`Adapter`]: this host's endpoint in use: link, LUT, requester table, peer
//!   addresses. One process has it; lender and borrower alike.
//! - [`HostEndpoint`]: the endpoint, taken from its driver for as long as it is
//!   in use.
//! - [`LenderNtb`]: a borrowed device's path, [`farside_fabric::LenderPath`].
//! - [`BorrowerNtb`]: what a borrow maps for the device,
//!   [`farside_fabric::BorrowerDomain`]; [`BarWindow`]: what its CPUs reach.
//! - [`NtbDriver`]: what a driver for a kind of NTB gives; [`FarsideNtb`] is
//!   that of our own endpoint. docs/ntb-adapters.md has what others need.
//! - [`platform`]: what all of it needs of VFIO.
//!
//! # What is trusted
//!
//! The two hosts trust each other, as hosts with an NTB between them must: a host
//! reaches whatever the other has mapped in its endpoint's domain, at any peer
//! address, by programming its own LUT. That is the RAM of VMs that borrow, and
//! BARs of devices that are lent; nothing else is ever mapped there. A *device*
//! reaches only what is mapped in its own domain.
#![forbid(unsafe_code)]

pub mod driver;
pub mod platform;
pub mod regs;

mod adapter;
mod borrower;
mod endpoint;
mod error;
mod export;
mod far_space;
mod farside;
mod host;
mod lender;
mod registers;
mod watch;

pub use adapter::{Adapter, Parts};
pub use borrower::{BarWindow, BorrowerNtb};
pub use driver::{Capabilities, Events, LinkState, NtbDriver, PeerCapabilities, Refused};
pub use endpoint::EndpointOptions;
pub use error::NtbError;
pub use export::{ExportedBar, ExportedBars};
pub use far_space::{FarRange, FarSpace};
pub use farside::FarsideNtb;
pub use host::HostEndpoint;
pub use lender::{Flusher, LenderNtb};
pub use registers::Registers;
