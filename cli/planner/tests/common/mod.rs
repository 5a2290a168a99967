//! Random adapters and guests, and a lender with the real allocator.
// Each test binary uses a part of it.
#![allow(dead_code)]

use std::sync::{Arc, Mutex};

use farside_fabric::{
    AdapterUsage, FabricError, Iova, LenderPath, LimitError, NtbLimits, NtbTables, Owner,
    PeerAddress, VmShare,
    soft::{Adapter, Path},
};
use farside_guest_layout::{PlanRules, ProbeLimits, RangeSet, plan, probe};
use farside_planner::{Guest, Limit};
use farside_qemu_configs::{HugePages, Machine};
use proptest::{prelude::*, sample::select};

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// Alignment of a backend's windows at the borrower: a multiple of this, or of the
/// adapter's requirement.
const PEER_STEP: u64 = 64 * GIB;

/// Any adapter, small enough to be filled.
pub fn limits() -> impl Strategy<Value = NtbLimits> {
    let bits = (20u32..44, 0u32..9);
    let alignment = prop::option::of((12u32..40).prop_map(|bits| 1 << bits));
    let together = prop::option::of(1u32..40);
    (bits, alignment, together, 0u32..4, 1u32..50).prop_map(
        |((bar, lut), alignment, entries_per_window, reserved, devices)| NtbLimits {
            bar_size: 1 << bar,
            lut_entries: 1 << lut,
            alignment,
            entries_per_window,
            requester_entries: reserved + devices,
            reserved_requesters: reserved,
            per_vm: VmShare::ALL,
        },
    )
}

/// Any adapter, of which a VM may have a share.
pub fn shared() -> impl Strategy<Value = NtbLimits> {
    let lut_entries = prop::option::of(1u32..300);
    let requester_entries = prop::option::of(1u32..4);
    (limits(), lut_entries, requester_entries).prop_map(
        |(limits, lut_entries, requester_entries)| NtbLimits {
            per_vm: VmShare {
                lut_entries,
                requester_entries,
            },
            ..limits
        },
    )
}

pub fn machine() -> impl Strategy<Value = Machine> {
    select(vec![Machine::Q35, Machine::I440fx])
}

/// Any guest: from a MiB to tens of TiB, often around the split of low and high RAM.
pub fn guest() -> impl Strategy<Value = Guest> {
    let ram = prop_oneof![
        1u64..64,
        (0u32..26).prop_flat_map(|bits| (1u64 << bits)..(2u64 << bits)),
        2800u64..2830,
        3570u64..3600,
    ];
    let pages = select(vec![HugePages::None, HugePages::Of2MiB, HugePages::Of1GiB]);
    (1u32..40, ram, machine(), 1u16..4, pages).prop_map(|(vms, mib, machine, devices, pages)| {
        let granule = pages.granule();
        Guest {
            vms,
            ram: (mib * MIB).next_multiple_of(granule),
            machine,
            devices,
            huge_pages: pages,
        }
    })
}

/// A lender with the adapter model of the soft fabric.
pub struct Lender {
    adapter: Adapter,
    tables: Arc<Mutex<NtbTables>>,
    /// Paths of lent devices; they hold their resources.
    paths: Vec<Path>,
    /// The number of VMs so far: each has a name of its own.
    vms: u32,
}

impl Lender {
    pub fn new(limits: &NtbLimits) -> Self {
        let tables = NtbTables::new(limits.clone()).expect("sane limits");
        let tables = Arc::new(Mutex::new(tables));
        Self {
            adapter: Adapter::with_tables(limits.clone(), tables.clone()),
            tables,
            paths: Vec::new(),
            vms: 0,
        }
    }

    pub fn usage(&self) -> AdapterUsage {
        self.tables.lock().unwrap().usage()
    }

    /// Lends a VM its devices, as a backend does: probes for RAM, and opens windows for
    /// each device. Nothing is kept on failure.
    pub fn borrow(&mut self, guest: &Guest) -> Result<(), Limit> {
        let mut ram: RangeSet = guest.layout().ranges().collect();
        let layout = probe(&mut ram, &ProbeLimits::default()).expect("sane layout");
        let spans = plan(&layout, &PlanRules::default()).spans();
        let before = self.paths.len();
        self.vms += 1;
        for _ in 0..guest.devices {
            if let Err(refused) = self.open(&spans) {
                self.paths.truncate(before);
                return Err(refused);
            }
        }
        Ok(())
    }

    /// Lends the last VM a device with windows of these sizes.
    pub fn open(&mut self, spans: &[u64]) -> Result<(), Limit> {
        let owner = Owner::new(&self.vms.to_string(), "user 1");
        let mut path = self.adapter.attach("device", &owner).map_err(limit)?;
        let step = PEER_STEP.max(self.adapter.limits().alignment());
        let (mut iova, mut peer_address) = (0, step);
        for &span in spans {
            path.open_window(Iova::new(iova), PeerAddress::new(peer_address), span)
                .map_err(limit)?;
            iova += span;
            peer_address = (peer_address + span).next_multiple_of(step);
        }
        self.paths.push(path);
        Ok(())
    }

    /// Opens a window to the BARs of a borrowed device, which nothing shares.
    pub fn open_bars(&mut self, bytes: u64) -> Result<(), Limit> {
        self.vms += 1;
        self.open(&[bytes])
    }

    /// Whether that many devices can have a requester entry at once.
    pub fn attach(&mut self, devices: u32) -> bool {
        (0..devices).all(|_| {
            let path = self.adapter.attach("device", &Owner::new("vm", "user 1"));
            path.map(|path| self.paths.push(path)).is_ok()
        })
    }
}

fn limit(error: FabricError) -> Limit {
    match error {
        FabricError::Limit(LimitError::Requesters { .. }) => Limit::RequesterEntries,
        FabricError::Limit(LimitError::LutEntries { .. }) => Limit::LutEntries,
        FabricError::Limit(LimitError::VmLutEntries { .. }) => Limit::LutEntriesPerVm,
        FabricError::Limit(LimitError::VmRequesters { .. }) => Limit::RequesterEntriesPerVm,
        FabricError::Limit(LimitError::WindowTooLarge { .. }) => Limit::EntriesPerWindow,
        other => panic!("refused by no limit: {other}"),
    }
}
