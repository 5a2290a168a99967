//! The lender's end of a borrow: NTB windows behind the device's IOMMU domain.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farside_error_chain::Chain;
use farside_fabric::{
    AddressRange, BusAddress, FabricError, Iova, LenderPath, Owner, PageCounts, PeerAddress,
    RangeTable, Usage, WindowUse,
};
use farside_vfio::Function;

use crate::adapter::{LutRun, RequesterEntry};
use crate::driver::Flush;
use crate::export::{Export, ExportedBars};
use crate::platform::{DomainOps, FunctionOps};
use crate::{Adapter, NtbError};

/// The path of one borrowed device to the borrower's host, created by [`Adapter::attach`]. Dropping
/// it stops the device's DMA, and closes and releases everything.
///
/// A window is a run of LUT entries of the endpoint, which the devices of an owner share, and the same
/// part of the endpoint's window BAR mapped into the device's domain. The device's domain should be exclusive, without other
/// mappings.
pub struct LenderNtb<F: FunctionOps = Function> {
    device: Arc<F>,
    owner: Owner,
    windows: RangeTable<Iova, Window<F>>,
    export: Option<Export<F>>,
    flusher: Flusher,
    // Dropped last: releases the requester entry after all windows are closed.
    requester: RequesterEntry<F>,
}

/// The target of a window.
enum Window<F: FunctionOps> {
    /// Memory of the peer host.
    Peer(LutRun<F>),
    /// The BAR of another device of the owner, on this host.
    Bar,
}

impl<F: FunctionOps> Adapter<F> {
    /// Creates a path for `device` of `owner`, called `name` in messages. Allocates only a requester
    /// entry.
    ///
    /// # Errors
    /// [`NtbError::LinkDown`], [`NtbError::WindowSizesDiffer`];
    /// [`farside_fabric::LimitError::Requesters`] when no entry is free; hardware errors.
    pub fn attach(
        &self,
        name: &str,
        owner: &Owner,
        device: Arc<F>,
    ) -> Result<LenderNtb<F>, NtbError> {
        self.check_link()?;
        Ok(LenderNtb {
            requester: self.add_requester(name, owner, device.bdf().requester_id())?,
            device,
            owner: owner.clone(),
            windows: RangeTable::default(),
            export: None,
            flusher: Flusher {
                flush: Arc::clone(self.flush()),
                at: Arc::new(AtomicU64::new(Flusher::NOWHERE)),
            },
        })
    }
}

impl<F: FunctionOps> LenderNtb<F> {
    /// The adapter that it goes through.
    pub fn adapter(&self) -> &Adapter<F> {
        self.requester.adapter()
    }

    /// Lets the borrower's CPUs access the device's BARs: maps their mappable parts into the
    /// endpoint's domain. Idempotent. They are unmapped with the path.
    ///
    /// # Errors
    /// [`NtbError::PeerSpace`]; system errors. Nothing is mapped then.
    pub fn export_bars(&mut self) -> Result<&ExportedBars, NtbError> {
        let export = match self.export.take() {
            Some(export) => export,
            None => Export::new(self.adapter(), &self.owner, &self.device)?,
        };
        Ok(self.export.insert(export).bars())
    }

    /// Unmaps the device's BARs from the endpoint's domain.
    ///
    /// # Errors
    /// System errors; they are still mapped then.
    pub fn unexport_bars(&mut self) -> Result<(), NtbError> {
        match self.export.take() {
            None => Ok(()),
            Some(export) => export.end().map_err(|(export, error)| {
                self.export = Some(*export);
                error
            }),
        }
    }

    /// Lets the device reach, at `iova`, `len` bytes of the BAR of another device of the owner that the borrower reaches at
    /// `exported` ([`LenderNtb::export_bars`]). Takes no LUT entry: the NTB is not on the way.
    /// [`LenderPath::close_window`] undoes it.
    ///
    /// # Errors
    /// [`NtbError::NotExported`]; [`FabricError::Overlap`]; what the IOMMU refuses. Nothing is mapped then.
    pub fn reach_bar(
        &mut self,
        iova: Iova,
        exported: PeerAddress,
        len: u64,
    ) -> Result<(), NtbError> {
        let range = AddressRange::new(iova, len)?;
        AddressRange::new(exported, len)?;
        self.windows.check(range)?;
        let exports = self.adapter().exports();
        let found = exports.find(&self.owner, &self.device, exported, len);
        let (bar, offset) = found.ok_or_else(|| NtbError::NotExported {
            bdf: self.device.bdf(),
            vm: self.owner.to_string(),
            exported,
            len,
        })?;
        self.device.domain().map_bar(iova, &bar, offset, len)?;
        Ok(self.windows.map(range, Window::Bar)?)
    }

    /// Flushes device writes to the borrower's memory, ahead of messages sent from now on: call it
    /// before relaying an interrupt. No effect while no window is open.
    pub fn flush(&self) {
        self.flusher.flush();
    }

    /// For calling [`LenderNtb::flush`] from another thread.
    pub fn flusher(&self) -> Flusher {
        self.flusher.clone()
    }

    /// Closes the window at the front of `range`.
    fn close(&mut self, range: AddressRange<Iova>) -> Result<(), FabricError> {
        // Unmap the BAR first, then clear the LUT entries.
        self.device.domain().unmap(range.start(), range.len())?;
        let closed = self.windows.unmap(range)?;
        self.aim_flusher();
        drop(closed);
        Ok(())
    }

    /// Lets the flusher read the first address of a window, which is guest RAM.
    fn aim_flusher(&self) {
        let mut runs = self.windows.rows().iter().filter_map(|(_, it)| match it {
            Window::Peer(run) => Some(run),
            Window::Bar => None,
        });
        let at = runs.next().map_or(Flusher::NOWHERE, LutRun::offset);
        self.flusher.at.store(at, Ordering::Relaxed);
    }

    fn bus(&self, run: &LutRun<F>) -> BusAddress {
        self.adapter().window_address().wrapping_add(run.offset())
    }
}

impl<F: FunctionOps> LenderPath for LenderNtb<F> {
    fn open_window(
        &mut self,
        iova: Iova,
        peer_address: PeerAddress,
        len: u64,
    ) -> Result<WindowUse, FabricError> {
        let range = AddressRange::new(iova, len)?;
        AddressRange::new(peer_address, len)?;
        self.windows.check(range)?;
        // Program the entries first, then map the window BAR. Dropping `run` clears them if that
        // fails.
        let run = self.requester.open_run(peer_address, len)?;
        let bus = self.bus(&run);
        let (lut, offset) = (run.range(), run.offset());
        let window = self.adapter().window();
        self.device.domain().map_bar(iova, window, offset, len)?;
        self.windows.map(range, Window::Peer(run))?;
        self.aim_flusher();
        Ok(WindowUse {
            bus,
            bytes: len,
            first_lut_entry: lut.first,
            lut_entries: lut.entries,
        })
    }

    fn close_window(&mut self, iova: Iova) -> Result<(), FabricError> {
        let found = self.windows.find(iova).map(|(range, _)| *range);
        match found.filter(|range| range.start() == iova) {
            Some(range) => self.close(range),
            None => Err(FabricError::NoWindow { iova }),
        }
    }

    fn close_all(&mut self) -> Result<(), FabricError> {
        let all: Vec<_> = self
            .windows
            .rows()
            .iter()
            .map(|(range, _)| *range)
            .collect();
        let mut result = Ok(());
        for range in all {
            let closed = self.close(range);
            result = result.and(closed);
        }
        result
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for (range, window) in self.windows.rows() {
            usage.windows += 1;
            usage.window_bytes += range.len();
            if let Window::Peer(run) = window {
                let (from, to) = (range.start().get(), self.bus(run).get());
                usage.lut_entries += run.range().entries;
                usage.lender_pages += PageCounts::of(from, to, range.len(), 1 << 30);
            }
        }
        usage
    }

    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
        self.device.set_bus_master(enabled)
    }
}

impl<F: FunctionOps> Drop for LenderNtb<F> {
    fn drop(&mut self) {
        let stopped = self.set_bus_master(false);
        for result in [stopped, self.close_all()] {
            if let Err(error) = result {
                log::error!("{error}", error = Chain(&error));
            }
        }
        // Clear the entries that no other device uses, so that a window that could not be unmapped is not
        // translated.
        for (_, window) in self.windows.clear() {
            if let Window::Peer(run) = window {
                run.retire();
            }
        }
    }
}

impl<F: FunctionOps> std::fmt::Debug for LenderNtb<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LenderNtb")
            .field("device", &self.device.bdf())
            .field("usage", &self.usage())
            .finish()
    }
}

/// Flushes a path; see [`LenderNtb::flush`]. Clones share the path.
///
/// A flush while the path's last window is being closed may be refused by the
/// NTB, which then counts it.
#[derive(Clone)]
pub struct Flusher {
    flush: Arc<dyn Flush>,
    /// The offset in the window BAR to read.
    at: Arc<AtomicU64>,
}

impl Flusher {
    const NOWHERE: u64 = u64::MAX;

    /// Flushes device writes through the path's windows.
    pub fn flush(&self) {
        let at = self.at.load(Ordering::Relaxed);
        if at != Self::NOWHERE {
            self.flush.flush(at);
        }
    }
}
