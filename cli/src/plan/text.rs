//! The answers of `farside plan` for people.

use std::fmt::Write;

use farside_bench::text_table;
use farside_fabric::{NtbLimits, PageCounts, Size};
use farside_planner::{
    Answer, ClusterPlan, NtbGuest, NtbPlan, PRESETS, Preset, Span, Table, VfioGuest, VfioPlan,
};

/// How wide names are.
const NAME: usize = 20;

/// A page of lines.
#[derive(Default)]
struct Page(String);

impl Page {
    fn title(&mut self, text: &str) {
        if !self.0.is_empty() {
            self.0.push('\n');
        }
        self.0 += text;
        self.0.push('\n');
    }

    /// `  name   value`.
    fn line(&mut self, name: &str, value: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "  {name:NAME$}{value}");
    }

    fn rows(&mut self, header: &[&str], rows: &[Vec<String>]) {
        for line in text_table(header, rows).lines() {
            let _ = writeln!(self.0, "  {line}");
        }
    }
}

/// The adapters that have names.
pub(super) fn adapters() -> String {
    let mut page = Page::default();
    for preset in &PRESETS {
        page.title(&format!("{}: {}", preset.name, preset.what));
        adapter_lines(&mut page, &preset.limits);
        for (n, line) in wrapped(preset.source).iter().enumerate() {
            page.line(if n == 0 { "source" } else { "" }, line);
        }
    }
    page.0
}

pub(super) fn answer(answer: &Answer) -> String {
    let mut page = Page::default();
    if let Some(plan) = &answer.ntb {
        adapter(&mut page, answer, &plan.limits);
        for guest in &plan.guests {
            ntb_guest(&mut page, guest);
        }
    }
    if let Some(plan) = &answer.cluster {
        cluster(
            &mut page,
            plan,
            answer.adapter.as_deref().unwrap_or_default(),
        );
    }
    if let Some(plan) = &answer.vfio {
        vfio(&mut page, plan);
    }
    page.title(if answer.fits {
        "Fits."
    } else {
        "Does not fit."
    });
    if let Some(plan) = &answer.ntb {
        taken(&mut page, plan);
    }
    page.0
}

fn adapter(page: &mut Page, answer: &Answer, limits: &NtbLimits) {
    let name = answer.adapter.as_deref().unwrap_or_default();
    let what = Preset::find(name).map_or(String::new(), |preset| format!(" ({})", preset.what));
    page.title(&format!("NTB adapter {name}{what}"));
    adapter_lines(page, limits);
}

fn adapter_lines(page: &mut Page, limits: &NtbLimits) {
    let segment = Size(limits.segment());
    let mut lut = format!(
        "{}, {} LUT entries of {segment}",
        Size(limits.bar_size),
        limits.lut_entries
    );
    if let Some(most) = limits.entries_per_window {
        let _ = write!(lut, ", at most {most} for one window");
    }
    if let Some(most) = limits.per_vm.lut_entries {
        let _ = write!(lut, ", at most {most} for one VM");
    }
    page.line("BAR", &lut);
    let alignment = Size(limits.alignment());
    page.line("peer addresses", &format!("multiples of {alignment}"));
    let mut requesters = format!(
        "{}, {} of them the CPUs': {}",
        limits.requester_entries,
        limits.reserved_requesters,
        count(limits.max_devices().into(), "device")
    );
    if let Some(most) = limits.per_vm.requester_entries {
        let _ = write!(requesters, ", at most {most} for one VM");
    }
    page.line("requester entries", &requesters);
}

fn ntb_guest(page: &mut Page, guest: &NtbGuest) {
    page.title(&guest_title(
        guest.vms,
        guest.ram,
        guest.machine,
        guest.devices,
    ));
    page.line("RAM", &ranges(&guest.ram_ranges));
    let mut rows: Vec<Vec<String>> = guest
        .windows
        .iter()
        .map(|window| {
            vec![
                window.range.to_string(),
                Size(window.range.end - window.range.start).to_string(),
                window.lut_entries.to_string(),
                Size(window.bar_bytes).to_string(),
                String::new(),
            ]
        })
        .collect();
    let all = guest.per_vm;
    rows.push(vec![
        format!("one VM: {}", count(all.windows, "window")),
        Size(all.span_bytes).to_string(),
        all.lut_entries.to_string(),
        Size(all.bar_bytes).to_string(),
        all.requester_entries.to_string(),
    ]);
    page.rows(
        &["DMA WINDOW", "SPAN", "LUT ENTRIES", "BAR", "REQUESTERS"],
        &rows,
    );
    page.line(
        "room at one lender",
        &format!(
            "{}; one more exceeds {}",
            count(guest.room, "such VM"),
            guest.limited_by.name()
        ),
    );
    let mut largest = format!("{} alone", size_or_none(guest.largest_alone));
    if guest.vms > 1 {
        let all = size_or_none(guest.largest_for_all);
        let _ = write!(largest, ", {all} when there are {}", guest.vms);
    }
    page.line("largest guest", &largest);
}

/// The total resources of all VMs that fit.
fn taken(page: &mut Page, plan: &NtbPlan) {
    let (taken, limits) = (plan.taken, &plan.limits);
    page.rows(
        &["", "TAKEN", "OF"],
        &[
            row("VMs", plan.vms_that_fit, plan.vms),
            row("LUT entries", taken.lut_entries, limits.lut_entries),
            row("BAR", Size(taken.bar_bytes), Size(limits.bar_size)),
            row(
                "requester entries",
                taken.requester_entries,
                limits.max_devices(),
            ),
        ],
    );
}

fn cluster(page: &mut Page, plan: &ClusterPlan, adapter: &str) {
    page.title(&format!(
        "Cluster of {} hosts, {} pairs, one adapter {adapter} each",
        plan.nodes, plan.pairs
    ));
    let devices = count(plan.devices_per_pair.into(), "device");
    let row = |what: String, table: Table| {
        let fits = if table.fits { "fits" } else { "does not fit" };
        vec![
            what,
            table.needed.to_string(),
            table.limit.to_string(),
            fits.into(),
        ]
    };
    let mut rows = vec![
        row(
            format!("requester entries: one pair, {devices}"),
            plan.one_pair,
        ),
        row(
            format!("requester entries: a host lends to {}", plan.peers),
            plan.one_adapter,
        ),
    ];
    if plan.peers + 1 < plan.nodes {
        rows.push(row(
            format!("requester entries: a host lends to all {}", plan.nodes - 1),
            plan.all_pairs,
        ));
    }
    if let Some(windows) = plan.windows {
        rows.push(row(
            format!(
                "LUT entries of a host: {} for guest RAM, {} for BARs",
                windows.for_guest_ram, windows.for_device_bars
            ),
            windows.lut,
        ));
    }
    page.rows(&["", "NEEDED", "LIMIT", ""], &rows);
    page.line(
        "lent",
        &format!(
            "{} by each host, {} in the cluster",
            plan.lent_by_host, plan.lent_in_cluster
        ),
    );
    page.line(
        "one adapter lends",
        &format!(
            "{} in all: at most {} to each of {}",
            count(plan.most_devices_per_adapter, "device"),
            plan.most_devices_per_pair,
            count(plan.peers.into(), "host")
        ),
    );
    page.line(
        "a switch port",
        &format!("{} entries for requesters of other ports", plan.switch_port),
    );
    let why = "whose the requester table is. Every lent device takes an entry of it, CPUs take \
               some: hosts back to back have a table for each pair, hosts on a switch have one for \
               all that they lend to.";
    for (n, line) in wrapped(why).iter().enumerate() {
        page.line(if n == 0 { "what decides" } else { "" }, line);
    }
    if plan.windows.is_none() {
        page.line("windows", "not counted; give --guest to count them");
    }
}

fn vfio(page: &mut Page, plan: &VfioPlan) {
    page.title("Linux VFIO: lender and VMs on one machine, no windows");
    page.line("IOVA", &format!("{} bits", plan.iova_bits));
    for (range, what) in &plan.reserved {
        page.line("reserved", &format!("{range}  {what}"));
    }
    for guest in &plan.guests {
        vfio_guest(page, guest);
    }
    page.title("Memory to lock (RLIMIT_MEMLOCK; none with CAP_IPC_LOCK)");
    page.line(
        "lender",
        &format!(
            "{}: VFIO counts a VM's RAM once for each of its devices",
            Size(plan.lender_memlock)
        ),
    );
    page.line("each backend", "the RAM of its VM");
}

fn vfio_guest(page: &mut Page, guest: &VfioGuest) {
    page.title(&guest_title(
        guest.vms,
        guest.ram,
        guest.machine,
        guest.devices,
    ));
    page.line("IOVA = GPA", &ranges(&guest.ram_ranges));
    let rows: Vec<Vec<String>> = guest
        .pages
        .iter()
        .map(|pages| {
            let PageCounts {
                pages_4k,
                pages_2m,
                pages_1g,
            } = pages.counts;
            let mut row = vec![Size(pages.backing).to_string()];
            row.extend([pages_4k, pages_2m, pages_1g].map(|pages| pages.to_string()));
            row
        })
        .collect();
    page.rows(
        &["RAM IN PAGES OF", "IOMMU: 4 KiB", "2 MiB", "1 GiB"],
        &rows,
    );
    page.line("largest guest", &size_or_none(guest.largest));
}

fn guest_title(vms: u32, ram: u64, machine: &str, devices: u16) -> String {
    format!(
        "{} of {} ({machine}), {}{}",
        count(vms.into(), "VM"),
        Size(ram),
        count(devices.into(), "device"),
        if vms == 1 { "" } else { " each" }
    )
}

/// Lines next to a name.
fn wrapped(text: &str) -> Vec<String> {
    const WIDTH: usize = 76;
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.len() + 1 + word.len() <= WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn ranges(ranges: &[Span]) -> String {
    let ranges: Vec<String> = ranges.iter().map(Span::to_string).collect();
    ranges.join(", ")
}

fn row(what: &str, taken: impl ToString, of: impl ToString) -> Vec<String> {
    vec![what.to_owned(), taken.to_string(), of.to_string()]
}

fn size_or_none(size: Option<u64>) -> String {
    size.map_or("none".into(), |size| Size(size).to_string())
}

fn count(n: u64, what: &str) -> String {
    match n {
        1 => format!("1 {what}"),
        n => format!("{n} {what}s"),
    }
}
