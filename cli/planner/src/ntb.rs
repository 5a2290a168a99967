//! Guests behind an NTB adapter: their resources, and how many fit.

use farside_fabric::{NtbLimits, Size};
use farside_guest_layout::Plan;
use serde::Serialize;

use crate::{
    AddressRules, Cost, Guest, Limit, PlanError, Span, cost::room, largest::largest, remedy::Remedy,
};

/// The resources of one lender's adapter that guests use.
#[derive(Clone, Debug, Serialize)]
pub struct NtbPlan {
    /// The adapter.
    pub limits: NtbLimits,
    /// Bytes that a LUT entry translates.
    pub segment: u64,
    /// Each kind of guest, in the order in which they borrow.
    pub guests: Vec<NtbGuest>,
    /// Number of requested VMs.
    pub vms: u64,
    /// How many of them fit, when they borrow one after the other.
    pub vms_that_fit: u64,
    /// Their resources.
    pub taken: Cost,
    /// Whether all fit.
    pub fits: bool,
    /// The required change if not all fit.
    pub remedy: Option<Remedy>,
    /// Problems, with remedies; empty if all fits.
    pub problems: Vec<String>,
}

/// One kind of guest.
#[derive(Clone, Debug, Serialize)]
pub struct NtbGuest {
    /// How many VMs.
    pub vms: u32,
    /// RAM of each, bytes.
    pub ram: u64,
    /// QEMU's name of the machine type.
    pub machine: &'static str,
    /// Devices of each.
    pub devices: u16,
    /// Where RAM is.
    pub ram_ranges: Vec<Span>,
    /// The windows of one VM, which its devices share.
    pub windows: Vec<NtbWindow>,
    /// The resources of one VM.
    pub per_vm: Cost,
    /// How many such VMs an otherwise unused lender has room for.
    pub room: u64,
    /// The limit that excludes another VM.
    pub limited_by: Limit,
    /// RAM of the largest guest of this machine type with as many devices that
    /// fits alone, bytes; `None` when not even the smallest does.
    pub largest_alone: Option<u64>,
    /// The same, when there are as many VMs.
    pub largest_for_all: Option<u64>,
}

/// A DMA window of a VM's devices.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct NtbWindow {
    /// The range that it spans.
    pub range: Span,
    /// RAM in it, bytes.
    pub ram_bytes: u64,
    /// LUT entries that it takes.
    pub lut_entries: u64,
    /// Bytes of the BAR: the entries' segments.
    pub bar_bytes: u64,
}

/// Plans for `guests`, which borrow from one lender in this order.
///
/// # Errors
/// Invalid guest, adapter or address rules.
pub fn plan_ntb(
    guests: &[Guest],
    limits: &NtbLimits,
    rules: &AddressRules,
) -> Result<NtbPlan, PlanError> {
    if guests.is_empty() {
        return Err(PlanError::NoGuests);
    }
    limits.validate()?;
    rules.validate()?;
    for guest in guests {
        guest.check()?;
    }
    let mut plan = NtbPlan {
        limits: limits.clone(),
        segment: limits.segment(),
        guests: guests
            .iter()
            .map(|guest| kind(guest, limits, rules))
            .collect(),
        vms: guests.iter().map(|guest| u64::from(guest.vms)).sum(),
        vms_that_fit: 0,
        taken: Cost::default(),
        fits: true,
        remedy: None,
        problems: Vec::new(),
    };
    place(&mut plan, guests);
    for guest in guests {
        let spans = guest.windows().windows.into_iter().map(|w| w.range);
        if let Err(error) = rules.check(spans) {
            plan.problems.push(format!("{guest}: {error}"));
        }
    }
    plan.fits = plan.problems.is_empty();
    Ok(plan)
}

fn kind(guest: &Guest, limits: &NtbLimits, rules: &AddressRules) -> NtbGuest {
    let windows = guest.windows();
    let spans = windows.spans();
    let devices = u64::from(guest.devices);
    let (room, limited_by) = room(&spans, devices, Cost::default(), limits);
    let largest_of = |vms: u64| {
        let granule = guest.huge_pages.granule();
        largest(guest.machine, granule, |plan| {
            good(plan, devices, vms, limits, rules)
        })
    };
    NtbGuest {
        vms: guest.vms,
        ram: guest.ram,
        machine: guest.machine.name(),
        devices: guest.devices,
        ram_ranges: guest.layout().ranges().map(Span::from).collect(),
        windows: windows
            .windows
            .iter()
            .map(|window| {
                let lut_entries = limits.entries_for(window.range.len());
                NtbWindow {
                    range: window.range.into(),
                    ram_bytes: window.ram_bytes(),
                    lut_entries,
                    bar_bytes: lut_entries.saturating_mul(limits.segment()),
                }
            })
            .collect(),
        per_vm: Cost::of_vm(&spans, devices, limits),
        room,
        limited_by,
        largest_alone: largest_of(1),
        largest_for_all: largest_of(guest.vms.into()),
    }
}

/// Whether `vms` VMs with these windows fit in an adapter with nothing else.
fn good(plan: &Plan, devices: u64, vms: u64, limits: &NtbLimits, rules: &AddressRules) -> bool {
    room(&plan.spans(), devices, Cost::default(), limits).0 >= vms
        && rules.check(plan.windows.iter().map(|w| w.range)).is_ok()
}

/// Lets the guests borrow, one after the other, until one is refused.
fn place(plan: &mut NtbPlan, guests: &[Guest]) {
    let limits = plan.limits.clone();
    for guest in guests {
        let spans = guest.windows().spans();
        let (devices, vms) = (u64::from(guest.devices), u64::from(guest.vms));
        let (room, limit) = room(&spans, devices, plan.taken, &limits);
        let placed = room.min(vms);
        let per_vm = Cost::of_vm(&spans, devices, &limits);
        plan.taken = plan.taken.and(per_vm.times(placed));
        plan.vms_that_fit += placed;
        if placed == vms {
            continue;
        }
        let raise = |share: u64| Remedy {
            per_vm: Some(share),
            ..Remedy::default()
        };
        let remedy = match limit {
            Limit::LutEntriesPerVm => raise(per_vm.lut_entries),
            Limit::RequesterEntriesPerVm => raise(devices),
            _ => remedy(guests, &plan.guests, &limits),
        };
        let alone = Guest {
            vms: 1,
            ..guest.clone()
        };
        let all = match plan.vms {
            1 => "1 VM fits".to_owned(),
            vms => format!("{vms} VMs fit"),
        };
        plan.problems.push(format!(
            "{} of {all}: {}; {remedy}",
            plan.vms_that_fit,
            refusal(&alone, limit, plan.taken, &limits)
        ));
        plan.remedy = Some(remedy);
        return;
    }
}

/// The resources that the next VM needs, and those left.
fn refusal(guest: &Guest, limit: Limit, taken: Cost, limits: &NtbLimits) -> String {
    let spans = guest.windows().spans();
    let needs = Cost::of_vm(&spans, guest.devices.into(), limits);
    let segment = Size(limits.segment());
    match limit {
        Limit::RequesterEntries => {
            let most = u64::from(limits.max_devices());
            format!(
                "{guest} needs {} more requester entries, of {most} for devices (requester-entries \
                 = {}, {} the CPUs') {} are free",
                needs.requester_entries,
                limits.requester_entries,
                limits.reserved_requesters,
                most.saturating_sub(taken.requester_entries)
            )
        }
        Limit::EntriesPerWindow => {
            let largest = spans.iter().copied().max().unwrap_or(0);
            format!(
                "{guest} needs a window of {}, which is {} LUT entries of {segment}; the limit for \
                 one window is {} (entries-per-window)",
                Size(largest),
                limits.entries_for(largest),
                limits.max_entries()
            )
        }
        Limit::LutEntriesPerVm => format!(
            "{guest} needs {} LUT entries of {segment}; the share of a VM is {} (per-vm.lut-entries)",
            needs.lut_entries,
            limits.lut_entries_per_vm()
        ),
        Limit::RequesterEntriesPerVm => format!(
            "{guest} needs {} requester entries; the share of a VM is {} (per-vm.requester-entries)",
            needs.requester_entries,
            limits.devices_per_vm()
        ),
        Limit::BarSize | Limit::LutEntries => format!(
            "{guest} needs {} more LUT entries of {segment}, of {} (bar-size = {}) {} are free",
            needs.lut_entries,
            limits.lut_entries,
            Size(limits.bar_size),
            u64::from(limits.lut_entries).saturating_sub(taken.lut_entries)
        ),
    }
}

/// The remedy that makes room for all.
fn remedy(guests: &[Guest], kinds: &[NtbGuest], limits: &NtbLimits) -> Remedy {
    let devices = |guest: &Guest| u64::from(guest.vms).saturating_mul(guest.devices.into());
    let spans: Vec<(Vec<u64>, u64)> = guests
        .iter()
        .map(|guest| (guest.windows().spans(), guest.vms.into()))
        .collect();
    let entries = |limits: &NtbLimits| {
        spans.iter().try_fold(0u64, |sum, (spans, vms)| {
            let most = u64::from(limits.max_entries());
            let joined = spans.iter().all(|&span| limits.entries_for(span) <= most);
            let vm = Cost::of_vm(spans, 1, limits).lut_entries;
            joined.then_some(sum.saturating_add(vm.saturating_mul(*vms)))
        })
    };
    let all = guests.iter().map(devices).fold(0, u64::saturating_add);
    let mut remedy = Remedy::raise(limits, all, entries);
    if let [kind] = kinds
        && kind.room > 0
    {
        remedy.lenders = Some(u64::from(kind.vms).div_ceil(kind.room));
    }
    remedy
}
