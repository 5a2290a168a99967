//! RAM layouts: the planner against probing of a machine's DMA table, and against reserved
//! IOVA ranges.

mod common;

use common::{GIB, MIB, guest};
use farside_fabric::{NtbLimits, VmShare, fits};
use farside_guest_layout::{Gpa, GpaRange, PlanRules, ProbeLimits, RangeSet, plan, probe};
use farside_planner::{
    AddressError, AddressRules, Guest, MAX_RAM, Reserved, Span, plan_ntb, plan_vfio,
};
use farside_qemu_configs::{HugePages, Machine};
use proptest::prelude::*;

fn range(start: u64, end: u64) -> GpaRange {
    GpaRange::between(Gpa::new(start), Gpa::new(end)).expect("the test's ranges are not empty")
}

fn guest_of(ram: u64, machine: Machine) -> Guest {
    Guest {
        machine,
        ..Guest::new(ram)
    }
}

fn rules(bits: u32, reserved: &[(u64, u64)]) -> AddressRules {
    AddressRules {
        bits,
        reserved: reserved
            .iter()
            .map(|&(start, end)| Reserved {
                range: range(start, end),
                what: "the test".into(),
            })
            .collect(),
    }
}

proptest! {
    /// Firmware maps some of the 16 KiB segments below 1 MiB as RAM (PAM), others as ROM.
    /// Probing such a DMA table finds the planned windows.
    #[test]
    fn a_guest_has_the_windows_that_probing_finds(guest in guest(), pam in any::<u16>()) {
        let shadow = (0..16).filter(|n| pam & (1 << n) != 0).map(|n| {
            let start = 0xc_0000 + n * 0x4000;
            range(start, start + 0x4000)
        });
        // A guest of 1 MiB has next to no RAM above its firmware.
        let shadow = shadow.filter(|_| guest.ram > MIB);
        let mut table: RangeSet = guest.layout().ranges().chain(shadow).collect();
        let found = probe(&mut table, &ProbeLimits::default()).expect("sane layout");
        let found = plan(&found, &PlanRules::default());
        prop_assert_eq!(found.spans(), guest.windows().spans());

        let limits = NtbLimits::default();
        let planned = plan_ntb(std::slice::from_ref(&guest), &limits, &AddressRules::default());
        let kind = &planned.expect("sane input").guests[0];
        let windows: Vec<Span> = kind.windows.iter().map(|window| window.range).collect();
        let probed: Vec<Span> = found.windows.iter().map(|window| window.range.into()).collect();
        prop_assert_eq!(windows, probed);
        // The soft fabric's view of one device of such a VM.
        let alone = Guest { vms: 1, devices: 1, ..guest };
        let planned = plan_ntb(&[alone], &limits, &rules(52, &[])).expect("sane input");
        prop_assert_eq!(planned.fits, fits(&found.spans(), &limits).is_ok());
    }

    /// A guest collides exactly if a byte of its RAM is reserved, or beyond the last
    /// address.
    #[test]
    fn collisions_are_those_of_a_naive_search(
        guest in guest(),
        bits in 32u32..56,
        start in 0u64..(8 * GIB),
        len in 1u64..(2 * GIB),
    ) {
        let rules = rules(bits, &[(start, start + len)]);
        let plan = plan_vfio(std::slice::from_ref(&guest), &rules).expect("sane input");
        let bad = guest.layout().ranges().any(|ram| {
            let (ram, reserved) = (Span::from(ram), start..start + len);
            (ram.start < reserved.end && reserved.start < ram.end) || ram.end > 1 << bits
        });
        prop_assert_eq!(plan.fits, !bad, "{:?}", plan.problems);
        // The largest guest fits; one granule more does not.
        let granule = guest.huge_pages.granule();
        let largest = plan.guests[0].largest;
        let fits = |ram| {
            let guest = Guest { ram, ..guest.clone() };
            plan_vfio(&[guest], &rules).is_ok_and(|plan| plan.fits)
        };
        if let Some(ram) = largest {
            prop_assert!(fits(ram));
        }
        prop_assert!(!fits(largest.unwrap_or(0) + granule));
    }

    /// Page counts cover RAM, whatever page sizes it consists of.
    #[test]
    fn pages_add_up_to_ram(guest in guest()) {
        let plan = plan_vfio(std::slice::from_ref(&guest), &rules(52, &[])).expect("sane input");
        for pages in &plan.guests[0].pages {
            prop_assert_eq!(pages.counts.bytes(), guest.layout().ram_bytes());
        }
    }

    /// Any input returns an answer or an error.
    #[test]
    fn nothing_typed_is_a_panic(
        ram in prop_oneof![any::<u64>(), Just(0), Just(MAX_RAM), Just(MAX_RAM + MIB), Just(u64::MAX)],
        vms in any::<u32>(),
        devices in prop_oneof![40 => 0u16..50, 1 => any::<u16>()],
        bits in any::<u32>(),
        limits in (any::<u64>(), any::<u32>(), any::<Option<u64>>(), any::<Option<u32>>(), any::<u32>(), any::<u32>()),
        sane_limits in any::<bool>(),
        round in any::<bool>(),
    ) {
        let ram = if round { ram / MIB * MIB } else { ram };
        let guest = Guest { vms, ram, machine: Machine::Q35, devices, huge_pages: HugePages::None };
        let limits = NtbLimits {
            bar_size: limits.0,
            lut_entries: limits.1,
            alignment: limits.2,
            entries_per_window: limits.3,
            requester_entries: limits.4,
            reserved_requesters: limits.5,
            per_vm: VmShare { lut_entries: limits.3, requester_entries: limits.3 },
        };
        let limits = if sane_limits { NtbLimits::default() } else { limits };
        let bits = if sane_limits { 48 } else { bits };
        let rules = AddressRules { bits, ..AddressRules::default() };
        let guests = [guest];
        match plan_ntb(&guests, &limits, &rules) {
            Ok(plan) => prop_assert_eq!(plan.fits, plan.problems.is_empty()),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
        match plan_vfio(&guests, &rules) {
            Ok(plan) => prop_assert_eq!(plan.fits, plan.problems.is_empty()),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn no_pc_has_ram_where_interrupt_messages_go() {
    let edges = [2815, 2816, 3583, 3584, 4096, 1 << 20];
    for machine in [Machine::Q35, Machine::I440fx] {
        for mib in edges {
            let guest = guest_of(mib * MIB, machine);
            let plan = plan_vfio(&[guest], &AddressRules::default()).unwrap();
            assert!(plan.fits, "{:?}", plan.problems);
        }
    }
}

#[test]
fn ram_in_a_reserved_range_is_named_with_the_range() {
    // An artificial layout: RAM across the interrupt address range.
    let ram = range(0xc000_0000, 0x1_0000_0000);
    let error = AddressRules::default().check([ram]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "guest RAM at 0xc0000000-0xffffffff meets the reserved range 0xfee00000-0xfeefffff \
         (interrupt messages (MSI)): no device can reach RAM there; give the VM another machine \
         type or less RAM"
    );
    // A range configured by the user, which a large guest overlaps (AMD hosts reserve the
    // last 12 GiB below 1 TiB).
    let amd = rules(48, &[(0xfd_0000_0000, 0x100_0000_0000)]);
    let small = plan_ntb(
        &[guest_of(512 * GIB, Machine::Q35)],
        &NtbLimits {
            bar_size: 1 << 40,
            ..NtbLimits::default()
        },
        &amd,
    );
    assert!(small.unwrap().fits);
    let large = plan_vfio(&[guest_of(1 << 40, Machine::Q35)], &amd).unwrap();
    assert!(!large.fits);
    assert!(
        large.problems[0].contains("0xfd00000000-0xffffffffff"),
        "{:?}",
        large.problems
    );
    // 1012 GiB from 0 to the start of the range, less 2 GiB of MMIO.
    assert_eq!(large.guests[0].largest, Some(1010 * GIB));
}

#[test]
fn an_iommu_of_39_bits_has_no_address_for_a_tib() {
    let plan = plan_vfio(&[guest_of(1 << 40, Machine::Q35)], &rules(39, &[])).unwrap();
    assert!(!plan.fits);
    let said = &plan.problems[0];
    assert!(said.contains("39 bits"), "{said}");
    assert!(said.contains("0x7fffffffff"), "{said}");
    assert_eq!(plan.guests[0].largest, Some(510 * GIB));
    let error = plan_vfio(&[Guest::new(GIB)], &rules(12, &[])).unwrap_err();
    assert!(error.to_string().contains("iova-bits = 12"), "{error}");
    assert!(matches!(
        rules(39, &[]).check([range(1 << 39, (1 << 39) + 4096)]),
        Err(AddressError::TooHigh { bits: 39, .. })
    ));
}

#[test]
fn what_memory_has_to_be_locked() {
    let guest = Guest {
        vms: 3,
        devices: 2,
        ..Guest::new(4 * GIB)
    };
    let plan = plan_vfio(&[guest, Guest::new(GIB)], &AddressRules::default()).unwrap();
    assert_eq!(plan.guests[0].backend_memlock, 4 * GIB);
    assert_eq!(plan.guests[0].lender_memlock, 8 * GIB);
    assert_eq!(plan.lender_memlock, 25 * GIB);
    // 384 KiB below 1 MiB are not RAM.
    let pages = plan.guests[0].pages[0];
    assert_eq!(pages.counts.pages_4k, (4 * GIB - 384 * 1024) / 4096);
    let huge = plan.guests[0].pages[2].counts;
    assert_eq!((huge.pages_1g, huge.pages_2m, huge.pages_4k), (3, 511, 416));
}

#[test]
fn guests_that_cannot_be_are_refused_with_their_numbers() {
    let refused = |guest: Guest| {
        plan_vfio(&[guest], &AddressRules::default())
            .expect_err("cannot be")
            .to_string()
    };
    let base = || Guest::new(GIB);
    assert!(refused(Guest { ram: 0, ..base() }).contains("0 bytes"));
    assert!(refused(Guest { vms: 0, ..base() }).contains("0 VMs of 1 GiB"));
    assert!(
        refused(Guest {
            devices: 0,
            ..base()
        })
        .contains("0 devices")
    );
    assert!(
        refused(Guest {
            ram: GIB + 1,
            ..base()
        })
        .contains("1073741825")
    );
    assert!(
        refused(Guest {
            devices: 999,
            ..base()
        })
        .contains("999 devices")
    );
    let ram = MAX_RAM + MIB;
    assert!(refused(Guest { ram, ..base() }).contains("x86 can address"));
    assert!(
        refused(Guest {
            huge_pages: HugePages::Of1GiB,
            ram: GIB + MIB,
            ..base()
        })
        .contains("multiple of 1073741824")
    );
}
