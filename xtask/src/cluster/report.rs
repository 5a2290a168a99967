//! The report on the facts: as text, and as JSON.

use console::style;
use farside_tests::hosts::{Facts, NetworkFacts, VfFacts};
use serde::Serialize;

use crate::text::{bytes, micros};

/// The facts of the scenes that ran.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) same_host: Option<Facts>,
    pub(super) two_hosts: Option<Facts>,
    pub(super) network: Option<NetworkFacts>,
    pub(super) vfs: Option<VfFacts>,
}

/// A condition that must hold.
pub(super) struct Check {
    pub(super) what: String,
    pub(super) holds: bool,
}

impl Report {
    fn scenes(&self) -> impl Iterator<Item = (&'static str, &Facts)> {
        [
            ("one host", &self.same_host),
            ("two hosts", &self.two_hosts),
        ]
        .into_iter()
        .filter_map(|(name, facts)| Some((name, facts.as_ref()?)))
    }

    /// All conditions.
    pub(super) fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        let mut check = |what: String, holds| checks.push(Check { what, holds });
        for (name, facts) in self.scenes() {
            for (what, holds) in facts.checks() {
                check(format!("{name}: {what}"), holds);
            }
        }
        if let Some(network) = &self.network {
            for (what, holds) in network.checks() {
                check(format!("network: {what}"), holds);
            }
        }
        if let Some(vfs) = &self.vfs {
            for (what, holds) in vfs.checks() {
                check(format!("virtual functions: {what}"), holds);
            }
        }
        checks
    }

    /// As text.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for (name, facts) in self.scenes() {
            text += &format!("\n{}\n", style(name).bold());
            for (what, value) in rows(facts) {
                text += &format!("  {what:<34} {value}\n");
            }
        }
        if let Some(network) = &self.network {
            text += &format!("\n{}\n", style("network").bold());
            for (what, value) in network_rows(network) {
                text += &format!("  {what:<34} {value}\n");
            }
        }
        if let Some(vfs) = &self.vfs {
            text += &format!("\n{}\n", style("virtual functions").bold());
            text += &format!("  {:<34} {}\n", "lent at the same time", vfs.vfs_lent);
            text += &format!("  {:<34} {:.1} s\n", "took", vfs.wall_s);
        }
        text += &format!("\n{}\n", style("Verdict").bold());
        for Check { what, holds } in self.checks() {
            let mark = match holds {
                true => style("ok").green(),
                false => style("NO").red().bold(),
            };
            text += &format!("  {mark} {what}\n");
        }
        text
    }

    /// What `cargo xtask cluster --json` writes.
    pub(super) fn document(&self) -> Document<'_> {
        Document {
            format: Document::FORMAT,
            same_host: self.same_host.as_ref(),
            two_hosts: self.two_hosts.as_ref(),
            network: self.network.as_ref(),
            vfs_lent: self.vfs.as_ref().map(|vfs| vfs.vfs_lent),
            vfs: self.vfs.as_ref(),
        }
    }
}

/// What `cargo xtask cluster --json` writes; docs/json.md has the keys.
#[derive(Debug, Serialize)]
pub(super) struct Document<'a> {
    /// [`Document::FORMAT`].
    format: u32,
    same_host: Option<&'a Facts>,
    two_hosts: Option<&'a Facts>,
    network: Option<&'a NetworkFacts>,
    vfs_lent: Option<u64>,
    vfs: Option<&'a VfFacts>,
}

impl Document<'_> {
    /// The format number. It is incremented when a key is removed or changes its type or
    /// meaning; new keys do not change it.
    const FORMAT: u32 = 1;
}

fn network_rows(facts: &NetworkFacts) -> Vec<(&'static str, String)> {
    vec![
        ("guest RAM", bytes(facts.guest_ram_bytes)),
        ("pinned before BME", bytes(facts.bytes_pinned_before_bme)),
        ("pinned after BME", bytes(facts.bytes_pinned_after_bme)),
        (
            "DMA outside of RAM",
            format!(
                "{} refused by the borrower, {} changed",
                facts.rogue_dma_refused,
                bytes(facts.rogue_bytes_written)
            ),
        ),
        (
            "round trips",
            format!(
                "{} per read, {} per write",
                facts.round_trips_per_read, facts.round_trips_per_write
            ),
        ),
        ("moves of a VM", format!("{} s", list(&facts.moves_s))),
        (
            "off in cold moves",
            format!("{} s", list(&facts.cold_off_s)),
        ),
        (
            "of it live",
            format!(
                "{} ms of standstill, {} s without the device",
                list(&facts.live_downtime_ms),
                list(&facts.live_without_devices_s)
            ),
        ),
        (
            "took",
            format!(
                "{:.1} s, of it {:.1} s for the hosts' boot, {:.1} s for the guest's, {:.1} s for its I/O",
                facts.wall_s, facts.hosts_boot_s, facts.nested_boot_s, facts.nested_io_s
            ),
        ),
    ]
}

fn list(figures: &[f64]) -> String {
    let figures: Vec<_> = figures
        .iter()
        .map(|figure| format!("{figure:.1}"))
        .collect();
    figures.join(", ")
}

fn rows(facts: &Facts) -> Vec<(&'static str, String)> {
    vec![
        ("guest RAM", bytes(facts.guest_ram_bytes)),
        (
            "IOMMU mappings before BME",
            facts.dmar_mappings_before_bme.to_string(),
        ),
        ("mapped after BME", bytes(facts.bytes_mapped_after_bme)),
        ("of it by the borrower", bytes(facts.borrower_bytes_mapped)),
        (
            "IOMMU mappings after unbind",
            facts.dmar_mappings_after_unbind.to_string(),
        ),
        ("BME to DMA-ready", micros(facts.bme_to_ready_us as f64)),
        (
            "DMA outside of RAM",
            format!(
                "{} refused by the IOMMU, {} shown by farside status, {} changed",
                facts.rogue_dma_faults,
                facts.rogue_faults_in_status,
                bytes(facts.rogue_bytes_written)
            ),
        ),
        (
            "MSI-X interrupts",
            format!(
                "{} by the device, {} in the guest",
                facts.msix_device, facts.msix_guest
            ),
        ),
        (
            "took",
            format!(
                "{:.1} s, of it {:.1} s for the guest's boot, {:.1} s for its I/O",
                facts.wall_s, facts.nested_boot_s, facts.nested_io_s
            ),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::is_documented;

    /// The names that users of the file rely on.
    const FIXED: &[&str] = &[
        "checksum_ok",
        "dmar_mappings_before_bme",
        "bytes_mapped_after_bme",
        "guest_ram_bytes",
        "dmar_mappings_after_unbind",
        "rogue_dma_faults",
        "rogue_bytes_written",
        "msix_device",
        "msix_guest",
        "wall_s",
    ];

    #[test]
    fn the_json_has_its_fixed_names() {
        let report = Report {
            same_host: Some(Facts::default()),
            two_hosts: Some(Facts::default()),
            network: Some(NetworkFacts {
                moves_s: vec![1.0],
                cold_off_s: vec![1.0],
                live_downtime_ms: vec![1.0],
                live_without_devices_s: vec![1.0],
                ..NetworkFacts::default()
            }),
            vfs: Some(VfFacts {
                vfs_lent: 2,
                bytes_mapped: vec![1, 1],
                guest_ram_bytes: vec![1, 1],
                ..VfFacts::default()
            }),
        };
        let json = serde_json::to_value(report.document()).unwrap();
        let none = serde_json::to_value(Report::default().document()).unwrap();
        is_documented("cargo xtask cluster --json", &[&json, &none]);
        for scene in ["same_host", "two_hosts"] {
            for name in FIXED {
                assert!(!json[scene][name].is_null(), "{scene}.{name}: {json}");
            }
        }
        assert_eq!(json["vfs_lent"], 2);
    }

    #[test]
    fn the_report_says_what_is_wrong() {
        let report = Report {
            same_host: Some(Facts::default()),
            ..Report::default()
        };
        let text = console::strip_ansi_codes(&report.text()).into_owned();
        assert!(text.contains("NO one host: the guest read what"), "{text}");
        assert!(!text.contains("two hosts"), "{text}");
    }
}
