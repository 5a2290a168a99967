//! The planner against the product's allocator: VMs that are planned to fit are lent their
//! devices, the next is refused, by the predicted limit.

mod common;

use common::{Lender, MIB, guest, limits, shared};
use farside_fabric::NtbLimits;
use farside_planner::{
    AddressRules, Cluster, Guest, Limit, NtbGuest, NtbPlan, plan_cluster, plan_ntb,
};
use proptest::prelude::*;

/// All x86 addresses usable, so that only the adapter limits.
fn all_addresses() -> AddressRules {
    AddressRules {
        bits: 52,
        reserved: Vec::new(),
    }
}

fn plan(guests: &[Guest], limits: &NtbLimits) -> NtbPlan {
    plan_ntb(guests, limits, &all_addresses()).expect("sane input")
}

fn only(plan: &NtbPlan) -> &NtbGuest {
    &plan.guests[0]
}

/// How many VMs can borrow before one is refused, and the limit that refuses it.
fn lend(guests: &[Guest], limits: &NtbLimits) -> (Lender, u64, Option<Limit>) {
    let mut lender = Lender::new(limits);
    let mut vms = 0;
    for guest in guests {
        for _ in 0..guest.vms {
            if let Err(limit) = lender.borrow(guest) {
                return (lender, vms, Some(limit));
            }
            vms += 1;
        }
    }
    (lender, vms, None)
}

/// Windows of less than that many bytes in total fit on some adapter, whose LUT can grow to many entries.
const LARGEST_ADAPTER: u64 = 1 << 48;

/// The allocator has one error for two reasons of a lack of entries.
fn same(named: Limit, refused: Limit) -> bool {
    named == refused || (named == Limit::BarSize && refused == Limit::LutEntries)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// As many borrowers as the planner reports are served, and no more.
    #[test]
    fn room_is_what_the_allocator_has(limits in shared(), guest in guest()) {
        let plan = plan(std::slice::from_ref(&guest), &limits);
        let many = Guest { vms: 10_000, ..guest };
        let (_, served, refused) = lend(&[many], &limits);
        prop_assert_eq!(only(&plan).room, served);
        let refused = refused.expect("no adapter has room for so many");
        let named = only(&plan).limited_by;
        let share = [Limit::LutEntriesPerVm, Limit::RequesterEntriesPerVm].contains(&refused);
        // Of a VM that exceeds both the allocator looks at its share first, and the planner at the
        // adapter: without a larger one, a larger share is of no use.
        let both = share && served == 0;
        prop_assert!(same(named, refused) || both, "named {:?}, refused by {:?}", named, refused);
    }

    /// Whether a mixed set of guests fits, how much of it does, and its resources.
    #[test]
    fn a_mixed_lot_fits_exactly_when_it_is_served(
        limits in shared(),
        guests in prop::collection::vec(guest(), 1..5),
    ) {
        let plan = plan(&guests, &limits);
        let (lender, served, refused) = lend(&guests, &limits);
        prop_assert_eq!(plan.vms_that_fit, served);
        prop_assert_eq!(plan.fits, refused.is_none(), "{:?}", plan.problems);
        prop_assert_eq!(plan.problems.is_empty(), plan.fits);
        let taken = lender.usage();
        prop_assert_eq!(plan.taken.lut_entries, u64::from(taken.lut_entries));
        prop_assert_eq!(plan.taken.windows, u64::from(taken.windows));
        prop_assert_eq!(plan.taken.requester_entries, taken.devices.len() as u64);
    }

    /// The suggested change suffices, and half of it does not.
    #[test]
    fn the_remedy_is_good(
        limits in limits(),
        guests in prop::collection::vec(guest(), 1..4),
    ) {
        let plan = plan(&guests, &limits);
        let Some(remedy) = plan.remedy else { return Ok(()) };
        let raised = remedy.apply(&limits);
        let ram: u64 = guests
            .iter()
            .map(|guest| guest.ram * u64::from(guest.vms) * u64::from(guest.devices))
            .sum();
        if ram < LARGEST_ADAPTER && limits.entries_per_window.is_none() {
            prop_assert!(raised != limits, "there is an adapter large enough for {ram:#x} bytes");
        }
        if raised != limits {
            prop_assert_eq!(lend(&guests, &raised).2, None, "{}", remedy);
            if remedy.bar_size.is_some() {
                let smaller = NtbLimits { bar_size: raised.bar_size / 2, ..raised.clone() };
                prop_assert!(lend(&guests, &smaller).2.is_some());
            }
            if let Some(entries) = remedy.requester_entries {
                let fewer = NtbLimits { requester_entries: entries - 1, ..raised };
                prop_assert!(lend(&guests, &fewer).2.is_some());
            }
        }
        if let Some(lenders) = remedy.lenders {
            let share = guests[0].vms.div_ceil(lenders as u32);
            let shared = Guest { vms: share, ..guests[0].clone() };
            prop_assert_eq!(lend(&[shared], &limits).2, None);
            if lenders > 1 {
                let share = guests[0].vms.div_ceil(lenders as u32 - 1);
                let shared = Guest { vms: share, ..guests[0].clone() };
                prop_assert!(lend(&[shared], &limits).2.is_some());
            }
        }
    }

    /// The largest guest is served, and one granule more is refused.
    #[test]
    fn the_largest_guest_is_the_largest(limits in shared(), guest in guest()) {
        let plan = plan(std::slice::from_ref(&guest), &limits);
        let granule = guest.huge_pages.granule();
        for (vms, largest) in [
            (1, only(&plan).largest_alone),
            (guest.vms, only(&plan).largest_for_all),
        ] {
            let of = |ram| Guest { vms, ram, ..guest.clone() };
            if let Some(ram) = largest {
                prop_assert_eq!(lend(&[of(ram)], &limits).2, None, "{}", of(ram));
            }
            let more = of(largest.unwrap_or(0) + granule);
            prop_assert!(lend(std::slice::from_ref(&more), &limits).2.is_some(), "{}", more);
        }
    }

    /// A host of a cluster has the requester entries and windows that its devices require.
    #[test]
    fn a_host_of_a_cluster_is_an_allocator(
        limits in limits(),
        guest in guest(),
        (nodes, peers) in (2u32..6).prop_flat_map(|nodes| (Just(nodes), 1..nodes)),
        devices in 1u32..6,
        bars in prop::sample::select(vec![4096, 16 << 10, MIB, 300 * MIB]),
    ) {
        let cluster = Cluster { nodes, devices, peers, device_bars: bars, switch_requesters: None };
        let plan = plan_cluster(&cluster, &limits, Some(&guest)).expect("sane input");
        // Requesters alone.
        let attached = Lender::new(&limits).attach(peers * devices);
        prop_assert_eq!(plan.one_adapter.fits, attached);
        prop_assert_eq!(plan.one_pair.fits, Lender::new(&limits).attach(devices));
        prop_assert_eq!(plan.all_pairs.fits, Lender::new(&limits).attach((nodes - 1) * devices));
        let most = plan.most_devices_per_pair as u32;
        prop_assert!(Lender::new(&limits).attach(peers * most));
        prop_assert!(!Lender::new(&limits).attach(peers * (most + 1)));
        // And windows: for each VM that borrows, those of a guest; for each device borrowed,
        // one per BAR. Borrowed devices take no requester entry here, so the test enlarges
        // the table for them.
        let served = |limits: &NtbLimits| {
            let mut lender = Lender::new(&NtbLimits {
                requester_entries: 1 << 10,
                ..limits.clone()
            });
            let vms_of_peer = |_| (0..devices).step_by(guest.devices.into());
            (0..peers).flat_map(vms_of_peer).all(|first| {
                let of_vm = guest.devices.min((devices - first) as u16);
                let vm = Guest { devices: of_vm, ..guest.clone() };
                lender.borrow(&vm).is_ok() && (0..of_vm).all(|_| lender.open_bars(bars).is_ok())
            })
        };
        prop_assert_eq!(plan.fits, served(&limits) && attached, "{:?}", plan.problems);
        prop_assert_eq!(plan.remedy.is_none(), served(&limits));
        if let Some(remedy) = plan.remedy {
            let raised = remedy.apply(&limits);
            let ram = guest.ram * u64::from(devices * peers);
            if ram < LARGEST_ADAPTER && limits.entries_per_window.is_none() {
                prop_assert!(raised != limits, "there is an adapter large enough for {ram:#x} bytes");
            }
            if raised != limits {
                prop_assert!(served(&raised), "{}", remedy);
            }
        }
    }
}

#[test]
fn two_hosts_back_to_back_lend_thirty_devices_each_way() {
    // The figures of the paper's section 8.6.
    let limits = NtbLimits::default();
    let mut cluster = Cluster {
        nodes: 60,
        devices: 30,
        peers: 1,
        device_bars: 16 << 10,
        switch_requesters: None,
    };
    let plan = plan_cluster(&cluster, &limits, None).unwrap();
    assert!(plan.fits, "{:?}", plan.problems);
    assert_eq!((plan.one_pair.needed, plan.one_pair.limit), (32, 32));
    assert_eq!((plan.pairs, plan.lent_in_cluster), (1770, 1800));
    assert_eq!(plan.all_pairs.needed, 59 * 30 + 2);
    assert!(!plan.all_pairs.fits);

    cluster.devices = 31;
    let plan = plan_cluster(&cluster, &limits, None).unwrap();
    assert!(!plan.fits && !plan.one_pair.fits);

    cluster.devices = 30;
    cluster.peers = 59;
    let plan = plan_cluster(&cluster, &limits, None).unwrap();
    assert!(!plan.fits && plan.one_pair.fits);
    let said = &plan.problems[0];
    for part in [
        "1772 requester entries",
        "limit is 32",
        "lend to 1 host at a time",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
}
