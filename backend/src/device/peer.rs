//! Peer to peer: this device's BARs as targets of the VM's other devices, and theirs as its targets.

use std::sync::Arc;

use farside_config_space::GuestBarAddress;
use farside_guest_layout::{Gpa, GpaRange};
use farside_lender_protocol::BarOwner;
use farside_pci::BarKind;
use farside_vfio_user::SparseArea;

use super::Device;
use crate::{
    borrow::{bars::BarFile, worker::Settings},
    dma_table::Target,
    peer_bars::{PeerBar, Reaching},
};

impl Device {
    /// Lists the BARs where the guest has them, after those of `moved` have moved, or their decoding has.
    ///
    /// The BAR registers that a guest sees are its VMM's, which does not clear them with a function-level reset, and does not
    /// write them again after one. So a BAR that is decoded at 0 is where it was.
    pub(super) fn list_bars(&mut self, moved: impl IntoIterator<Item = u8>) {
        let mut any = false;
        for bar in moved {
            any = true;
            if let (Some(GuestBarAddress::Memory(at @ 1..)), Some(placed)) = (
                self.config.bar_address(bar),
                self.placed.get_mut(usize::from(bar)),
            ) {
                *placed = Some(Gpa::new(at));
            }
        }
        if any {
            self.publish_bars();
        }
    }

    /// The guest has no BARs any more.
    pub(super) fn unlist_bars(&mut self) {
        self.placed = Default::default();
        self.publish_bars();
    }

    /// Lists of the BARs that are decoded those that are prefetchable and whose memory this backend has: a function's, and a
    /// vfio-user server's, while it has the lease.
    pub(super) fn publish_bars(&self) {
        let bars = (0u8..).zip(&self.described.description.bars);
        let listed = bars
            .zip(self.placed)
            .filter_map(|((bar, description), placed)| {
                let prefetchable = matches!(
                    description.as_ref()?.kind,
                    BarKind::Memory32 { prefetchable: true }
                        | BarKind::Memory64 { prefetchable: true }
                );
                self.config.bar_address(bar)?;
                Some(self.memory_at(bar, placed.filter(|_| prefetchable)?))
            });
        let listed = listed.flatten().collect();
        self.settings.peer_bars.list(&self.settings.device, listed);
    }

    /// The memory of a BAR that the guest has at `start`: of each of its sparse mmap areas.
    fn memory_at(&self, bar: u8, start: Gpa) -> Vec<PeerBar> {
        let Some((memory, areas)) = self.bars.reachable(bar) else {
            return Vec::new();
        };
        let is_lenders = self.described.bars == BarOwner::Lender;
        let lender = is_lenders.then(|| self.settings.lender.clone());
        let of_area = |area: &SparseArea| {
            Some(PeerBar {
                range: GpaRange::new(start.checked_add(area.offset)?, area.size).ok()?,
                memory: BarFile {
                    file: Arc::clone(&memory.file),
                    offset: memory.offset + area.offset,
                    exported: match memory.exported {
                        Some(bar) => Some(bar.checked_add(area.offset)?),
                        None => None,
                    },
                },
                lender: lender.clone(),
            })
        };
        areas.iter().filter_map(of_area).collect()
    }

    /// The target of a range without a descriptor: a BAR of a device of the VM, or memory that no device can reach.
    ///
    /// Behind a vIOMMU, where the guest has no RAM at 1 MiB, an address is an IOVA, and not that of a BAR.
    pub(super) fn target_without_descriptor(&mut self, start: Gpa, len: u64) -> Target {
        let range = GpaRange::new(start, len).ok();
        let found = range.and_then(|range| {
            let Settings {
                device,
                lender,
                transport,
                ..
            } = &self.settings;
            let by = Reaching {
                device,
                lender,
                transport: *transport,
            };
            let found = self.settings.peer_bars.find(range, &by)?;
            self.memory.has_low_ram().then_some((range, found))
        });
        let Some((range, (peer, target))) = found else {
            return Target::Private;
        };
        if let Some(held_back) = self.line_limits.peer_bars.allow() {
            log::info!(
                "{}: DMA to GPA {range} reaches the BAR of device {peer}{held_back}",
                self.name()
            );
        }
        target
    }
}
