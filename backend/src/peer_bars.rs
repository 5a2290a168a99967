//! The BARs of a VM's devices that other devices of the VM can reach (peer to peer): where the guest has them, and the
//! memory behind them.
//!
//! A VMM maps the BARs of its devices for DMA as it maps guest RAM, whenever the guest places, moves, enables or disables
//! one, but sends no descriptor with them: it has them from this backend. A range without a descriptor is therefore looked
//! up here. Only prefetchable BARs are listed, which are memory: registers are not, for each of which a window would be
//! spent. A device's own BAR is not looked up for it: DMA of a PCIe function does not reach that function.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use farside_daemon::DeviceId;
use farside_guest_layout::GpaRange;
use farside_lender_protocol::{Address, Transport};

use crate::{
    borrow::bars::BarFile,
    dma_table::{Backing, Target},
};

/// The memory of one BAR, at the address that the guest has given it.
#[derive(Clone, Debug)]
pub(crate) struct PeerBar {
    pub(crate) range: GpaRange,
    pub(crate) memory: BarFile,
    /// The lender that has the memory; none if this backend allocated it.
    pub(crate) lender: Option<Address>,
}

/// The device that would reach a BAR.
pub(crate) struct Reaching<'a> {
    pub(crate) device: &'a DeviceId,
    pub(crate) lender: &'a Address,
    pub(crate) transport: Transport,
}

impl PeerBar {
    /// The target of `by` at `skip` bytes from the BAR's beginning, if anything.
    ///
    /// The descriptor of a function gives more than the BAR: only the function's own lender gets it. A function beyond an NTB
    /// is reached by the devices beyond it, at their lender: a controller here would wait for a round trip for each word that
    /// it reads.
    fn target(&self, skip: u64, by: &Reaching<'_>) -> Option<Target> {
        if self
            .lender
            .as_ref()
            .is_some_and(|lender| lender != by.lender)
        {
            return None;
        }
        match (self.memory.exported, by.transport) {
            (None, _) => Some(Target::Bar(Backing {
                file: Arc::new(self.memory.file.try_clone().ok()?.into()),
                offset: self.memory.offset + skip,
            })),
            (Some(exported), Transport::Ntb) => {
                Some(Target::LendersBar(exported.checked_add(skip)?))
            }
            (Some(_), _) => None,
        }
    }
}

/// The BARs of one VM. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerBars(Arc<Mutex<BTreeMap<DeviceId, Vec<PeerBar>>>>);

impl PeerBars {
    /// Replaces what is listed of `device`.
    pub(crate) fn list(&self, device: &DeviceId, bars: Vec<PeerBar>) {
        match bars.is_empty() {
            true => self.lock().remove(device),
            false => self.lock().insert(device.clone(), bars),
        };
    }

    /// The device other than `by` whose BAR `range` is, or is a part of, and the target of `by` there: memory by a descriptor of
    /// its own, as the next backend claims one for each device. `None` if there is no descriptor left, too.
    pub(crate) fn find(&self, range: GpaRange, by: &Reaching<'_>) -> Option<(DeviceId, Target)> {
        let listed = self.lock();
        let others = listed.iter().filter(|(device, _)| *device != by.device);
        let mut all = others.flat_map(|(device, bars)| bars.iter().map(move |bar| (device, bar)));
        let (device, bar) = all.find(|(_, bar)| bar.range.covers(range))?;
        let skip = range.start().offset_from(bar.range.start())?;
        Some((device.clone(), bar.target(skip, by)?))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<DeviceId, Vec<PeerBar>>> {
        // Changed by one insertion or removal.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use farside_fabric::{PeerAddress, memory::create_sealed};
    use farside_guest_layout::Gpa;

    use super::*;

    fn range(start: u64, len: u64) -> GpaRange {
        GpaRange::new(Gpa::new(start), len).unwrap()
    }

    fn device(id: &str) -> DeviceId {
        id.parse().unwrap()
    }

    #[test]
    fn a_range_is_found_while_it_is_inside_a_listed_bar() {
        let file = Arc::new(create_sealed("bar", 0x8000).unwrap());
        let inode = rustix::fs::fstat(&file).unwrap().st_ino;
        let bar = |start| PeerBar {
            range: range(start, 0x4000),
            memory: BarFile {
                file: Arc::clone(&file),
                offset: 0x1000,
                exported: None,
            },
            lender: None,
        };
        let lender: Address = "/run/lender.sock".parse().unwrap();
        let bars = PeerBars::default();
        let reaches = |id: &str, start, len, transport| {
            let by = Reaching {
                device: &device(id),
                lender: &lender,
                transport,
            };
            bars.find(range(start, len), &by)
        };
        let found = |start, len| {
            let (device, target) = reaches("c", start, len, Transport::SharedMemory)?;
            let Target::Bar(memory) = target else {
                panic!("{target:?}");
            };
            assert_eq!(memory.file.metadata().unwrap().ino(), inode);
            Some((device.to_string(), memory.offset))
        };
        bars.list(&device("a"), vec![bar(0x10_0000)]);
        bars.list(&device("b"), vec![bar(0x20_0000), bar(0x30_0000)]);
        assert_eq!(found(0x10_0000, 0x4000), Some(("a".to_owned(), 0x1000)));
        assert_eq!(found(0x30_2000, 0x1000), Some(("b".to_owned(), 0x3000)));
        for (start, len) in [
            (0xf_f000, 0x2000),
            (0x10_3000, 0x2000),
            (0x10_4000, 0x1000),
            (0, 0x1000),
        ] {
            assert_eq!(found(start, len), None, "{start:#x}+{len:#x}");
        }
        let own = reaches("a", 0x10_0000, 0x4000, Transport::SharedMemory);
        assert!(own.is_none(), "{own:?}");
        // Moved, then off.
        bars.list(&device("a"), vec![bar(0x40_0000)]);
        assert_eq!(found(0x10_0000, 0x4000), None);
        assert_eq!(found(0x40_0000, 0x4000), Some(("a".to_owned(), 0x1000)));
        bars.list(&device("a"), Vec::new());
        assert_eq!(found(0x40_0000, 0x4000), None);
        assert_eq!(found(0x20_0000, 0x4000), Some(("b".to_owned(), 0x1000)));
        // A lender's, for its own devices only.
        let owned = |lender: &str| PeerBar {
            lender: Some(lender.parse().unwrap()),
            ..bar(0x50_0000)
        };
        bars.list(&device("a"), vec![owned("/run/other.sock")]);
        assert_eq!(found(0x50_0000, 0x4000), None);
        bars.list(&device("a"), vec![owned("/run/lender.sock")]);
        assert_eq!(found(0x50_0000, 0x4000), Some(("a".to_owned(), 0x1000)));
        // Beyond an NTB: for devices of the same lender that are there, too.
        let exported = |lender: &str| {
            let mut bar = owned(lender);
            bar.memory.exported = Some(PeerAddress::new(0x700_0000));
            bar
        };
        let reached = |transport| Some(reaches("c", 0x50_1000, 0x1000, transport)?.1);
        for (of, is_its_own) in [("/run/lender.sock", true), ("/run/other.sock", false)] {
            bars.list(&device("a"), vec![exported(of)]);
            let at_lender = match reached(Transport::Ntb) {
                Some(Target::LendersBar(at)) => Some(at.get()),
                None => None,
                other => panic!("{other:?}"),
            };
            assert_eq!(at_lender, is_its_own.then_some(0x700_1000));
            for transport in [Transport::Network, Transport::SharedMemory] {
                let others = reached(transport);
                assert!(others.is_none(), "{others:?}");
            }
        }
    }
}
