//! The fabric between two hosts: NTB endpoints programmed from userspace,
//! through VFIO.
//!
//! Each host has one port of an NTB, an endpoint bound to vfio-pci and alone in its IOMMU domain.
//! An access to segment `i` of a port's window BAR becomes DMA of the endpoint at the peer host, at
//! the *peer address* in LUT entry `i`.
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
//! - [`Adapter`]: this host's endpoint in use: link, LUT, requester table, peer addresses. Only one
//!   process can use it, at the lender and at the borrower.
//! - [`HostEndpoint`]: the endpoint, unbound from its driver while it is in use.
//! - [`LenderNtb`]: a borrowed device's path, [`farside_fabric::LenderPath`].
//! - [`BorrowerNtb`]: the memory that a borrow maps for the device,
//!   [`farside_fabric::BorrowerDomain`]; [`BarWindow`]: the BARs that its CPUs access.
//! - [`NtbDriver`]: the interface of a driver for a kind of NTB; [`FarsideNtb`] is that of
//!   farside's own endpoint. docs/ntb-adapters.md lists the requirements of others.
//! - [`platform`]: the operations that it needs from VFIO.
//!
//! # Trust
//!
//! The two hosts trust each other, as hosts with an NTB between them must: a host can reach
//! everything that the peer has mapped in its endpoint's domain, at any peer address, by
//! programming its own LUT. Only the RAM of VMs that borrow and the BARs of lent devices are ever
//! mapped there. A *device* reaches only what is mapped in its own domain.
#![forbid(unsafe_code)]

pub mod driver;
pub mod platform;
pub mod regs;

mod adapter;
mod borrower;
mod endpoint;
mod error;
mod export;
mod farside;
mod host;
mod lender;
mod peer_space;
mod registers;
mod watch;

pub use adapter::{Adapter, Parts};
pub use borrower::{BarWindow, BorrowerNtb};
pub use driver::{Capabilities, Events, LinkState, NtbDriver, PeerCapabilities, Refused};
pub use endpoint::EndpointOptions;
pub use error::NtbError;
pub use export::{ExportedBar, ExportedBars};
pub use farside::FarsideNtb;
pub use host::HostEndpoint;
pub use lender::{Flusher, LenderNtb};
pub use peer_space::{PeerRange, PeerSpace, endpoint_iova};
pub use registers::Registers;
