//! Many hosts: how many devices can each lend to how many others.
//!
//! A read by a device is answered through the NTB by its requester id, so each
//! device that is lent takes an entry of the requester table of its lender's
//! adapter, and the CPUs of a host take some for themselves. *Whose* table it is
//! decides what a cluster can do (Markussen et al., ACM TOCS 38, section 8.6):
//!
//! - two hosts back to back have an adapter each for one another: a table of 32
//!   with 2 reserved lends 30 devices, in each direction at once;
//! - hosts with one adapter each on a switch share its table among all the hosts
//!   that they lend to: 30 devices a host, not a pair;
//! - and each entry of a host takes one at the other ports of the switch.

use farside_fabric::{NtbLimits, Size};
use serde::Serialize;

use crate::{Cost, Guest, PlanError, remedy::Remedy};

/// A cluster to plan for. Hosts are alike: each lends to as many others as it
/// borrows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Hosts, at least 2.
    pub nodes: u32,
    /// Devices that one host lends to one other.
    pub devices: u32,
    /// Other hosts that each lends to at the same time.
    pub peers: u32,
    /// Bytes of a device's BARs, which its borrower reaches through a window of
    /// its own adapter.
    pub device_bars: u64,
    /// Entries that a switch port has for requesters of other ports, where
    /// known.
    pub switch_requesters: Option<u64>,
}

/// Whether a table is large enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Table {
    /// Entries that are needed.
    pub needed: u64,
    /// Entries that there are.
    pub limit: u64,
    /// Whether that is enough.
    pub fits: bool,
}

impl Table {
    fn new(needed: u64, limit: u64) -> Self {
        Self {
            needed,
            limit,
            fits: needed <= limit,
        }
    }
}

/// LUT entries of one host's adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WindowsOfHost {
    /// For the RAM of guests elsewhere, one set of windows for each VM that borrows.
    pub for_guest_ram: u64,
    /// For the BARs of devices elsewhere, one window for each device borrowed.
    pub for_device_bars: u64,
    /// Both together.
    pub lut: Table,
}

/// The resources of each host's adapter that a cluster uses.
#[derive(Clone, Debug, Serialize)]
pub struct ClusterPlan {
    /// Hosts.
    pub nodes: u32,
    /// Pairs of hosts there are.
    pub pairs: u64,
    /// Devices that one host lends to one other.
    pub devices_per_pair: u32,
    /// Other hosts that each lends to at the same time.
    pub peers: u32,
    /// Requester entries of an adapter that serves one pair.
    pub one_pair: Table,
    /// Requester entries of an adapter through which a host lends to `peers`.
    pub one_adapter: Table,
    /// Requester entries of an adapter through which a host lends to all others.
    pub all_pairs: Table,
    /// Maximum number of hosts to which one adapter can lend this number of devices.
    pub most_peers: u64,
    /// Most devices that one adapter can lend.
    pub most_devices_per_adapter: u64,
    /// Most devices that one adapter can lend to each of `peers`.
    pub most_devices_per_pair: u64,
    /// Devices that a host lends, and as many that it borrows.
    pub lent_by_host: u64,
    /// Devices that are lent in the whole cluster.
    pub lent_in_cluster: u64,
    /// Entries that a switch port needs for requesters of the other ports.
    pub switch_port: u64,
    /// Windows, when a guest was given.
    pub windows: Option<WindowsOfHost>,
    /// The required change of each adapter if windows do not fit.
    pub remedy: Option<Remedy>,
    /// Whether it fits, with one adapter a host.
    pub fits: bool,
    /// Problems, with remedies; empty if all fits.
    pub problems: Vec<String>,
}

/// Plans for a cluster whose hosts have one adapter each, like `limits`.
/// With `guest`, the devices lent to one host are used by such VMs, of as many devices each.
///
/// # Errors
/// Invalid cluster, adapter or guest.
pub fn plan_cluster(
    cluster: &Cluster,
    limits: &NtbLimits,
    guest: Option<&Guest>,
) -> Result<ClusterPlan, PlanError> {
    validate(cluster)?;
    limits.validate()?;
    guest.map_or(Ok(()), Guest::check)?;

    let reserved = u64::from(limits.reserved_requesters);
    let others = u64::from(cluster.nodes) - 1;
    let (devices, peers) = (u64::from(cluster.devices), u64::from(cluster.peers));
    // 32 bits times 32 bits.
    let lent = devices * peers;
    let table = |devices: u64| {
        let needed = devices.saturating_add(reserved);
        Table::new(needed, limits.requester_entries.into())
    };
    let most = u64::from(limits.max_devices());
    let mut plan = ClusterPlan {
        nodes: cluster.nodes,
        pairs: u64::from(cluster.nodes) * others / 2,
        devices_per_pair: cluster.devices,
        peers: cluster.peers,
        one_pair: table(devices),
        one_adapter: table(lent),
        all_pairs: table(devices * others),
        most_peers: (most / devices).min(others),
        most_devices_per_adapter: most,
        most_devices_per_pair: most / peers,
        lent_by_host: lent,
        lent_in_cluster: lent.saturating_mul(cluster.nodes.into()),
        switch_port: lent.saturating_add(reserved).saturating_mul(others),
        windows: guest.map(|guest| windows(cluster, guest, limits)),
        remedy: guest.and_then(|guest| remedy(cluster, guest, limits)),
        fits: true,
        problems: Vec::new(),
    };
    plan.problems = problems(&plan, cluster, limits, guest);
    plan.fits = plan.problems.is_empty();
    Ok(plan)
}

fn validate(cluster: &Cluster) -> Result<(), PlanError> {
    let invalid = |name, value, rule: &str| {
        Err(PlanError::Cluster {
            name,
            value,
            rule: rule.to_owned(),
        })
    };
    if cluster.nodes < 2 {
        return invalid("nodes", cluster.nodes.into(), "at least 2");
    }
    if cluster.devices == 0 {
        return invalid("devices-per-pair", 0, "at least 1");
    }
    if cluster.peers == 0 || cluster.peers >= cluster.nodes {
        let rule = format!("from 1 to {}, the other hosts", cluster.nodes - 1);
        return invalid("peers", cluster.peers.into(), &rule);
    }
    if cluster.device_bars == 0 {
        return invalid("device-bars", 0, "at least 1 byte");
    }
    Ok(())
}

/// LUT entries of a host for the devices that it lends, and as many that it borrows.
fn windows(cluster: &Cluster, guest: &Guest, limits: &NtbLimits) -> WindowsOfHost {
    let (devices, peers) = (u64::from(cluster.devices), u64::from(cluster.peers));
    let lent = devices * peers;
    let vms = devices.div_ceil(guest.devices.into()) * peers;
    let vm = Cost::of_vm(&guest.windows().spans(), 1, limits);
    let for_guest_ram = vm.lut_entries.saturating_mul(vms);
    let for_device_bars = limits.entries_for(cluster.device_bars).saturating_mul(lent);
    WindowsOfHost {
        for_guest_ram,
        for_device_bars,
        lut: Table::new(
            for_guest_ram.saturating_add(for_device_bars),
            limits.lut_entries.into(),
        ),
    }
}

fn problems(
    plan: &ClusterPlan,
    cluster: &Cluster,
    limits: &NtbLimits,
    guest: Option<&Guest>,
) -> Vec<String> {
    let mut problems = Vec::new();
    let needed = plan.one_adapter;
    if !needed.fits {
        let mut remedies = Vec::new();
        if plan.peers > 1 && plan.one_pair.fits {
            remedies.push(match plan.most_peers {
                1 => "lend to 1 host at a time".to_owned(),
                hosts => format!("lend to at most {hosts} hosts at a time"),
            });
            remedies.push("give each host an adapter for every host that it lends to".into());
        }
        if plan.most_devices_per_pair > 0 {
            remedies.push(format!(
                "lend at most {} devices to each",
                plan.most_devices_per_pair
            ));
        }
        if remedies.is_empty() {
            remedies.push("use an adapter with a larger requester table".into());
        }
        problems.push(format!(
            "{} devices for each of {} hosts and {} entries for CPUs need {} requester entries of \
             one adapter, the limit is {}; {}",
            plan.devices_per_pair,
            plan.peers,
            limits.reserved_requesters,
            needed.needed,
            needed.limit,
            remedies.join(", or "),
        ));
    }
    if let (Some(windows), Some(guest)) = (plan.windows, guest) {
        problems.extend(window_problem(plan, &windows, limits, guest));
    }
    if let Some(limit) = cluster.switch_requesters.filter(|&n| plan.switch_port > n) {
        problems.push(format!(
            "a switch port needs {} entries for requesters of the other {} ports, the limit is \
             {limit}; lend fewer devices, or connect fewer hosts",
            plan.switch_port,
            plan.nodes - 1,
        ));
    }
    problems
}

/// The remedy for insufficient room for the windows of a host.
fn remedy(cluster: &Cluster, guest: &Guest, limits: &NtbLimits) -> Option<Remedy> {
    let spans = guest.windows().spans();
    let entries = |limits: &NtbLimits| {
        let mut all = spans.iter().chain([&cluster.device_bars]);
        let most = u64::from(limits.max_entries());
        all.all(|&span| limits.entries_for(span) <= most)
            .then(|| windows(cluster, guest, limits).lut.needed)
    };
    let fits = entries(limits).is_some_and(|needed| needed <= limits.lut_entries.into());
    // For one device: exhaustion of the requester table by several is a separate problem, with its
    // own remedies.
    (!fits).then(|| Remedy::raise(limits, 1, entries))
}

/// Why the windows of a host do not fit its adapter, if so.
fn window_problem(
    plan: &ClusterPlan,
    windows: &WindowsOfHost,
    limits: &NtbLimits,
    guest: &Guest,
) -> Option<String> {
    let lent = plan.lent_by_host;
    let remedy = plan.remedy?;
    let window = match limits.entries_per_window {
        Some(most) => format!(" (at most {most} for one window)"),
        None => String::new(),
    };
    Some(format!(
        "{lent} devices lent to VMs of {} and {lent} borrowed need {} LUT entries of {}{window} in \
         each host's adapter, the limit is {}; {remedy}",
        Size(guest.ram),
        windows.lut.needed,
        Size(limits.segment()),
        windows.lut.limit,
    ))
}
