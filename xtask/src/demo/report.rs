//! The report on the facts: as text, and as JSON.

use console::style;
use serde::Serialize;

use super::{
    facts::{Facts, Seen},
    guest::Direction,
    kill::{Kills, Victim},
};
use crate::{
    status,
    text::{bytes, micros},
};

/// The report at the end of the demo.
pub(super) fn text(facts: &Facts) -> String {
    let none = Seen::default();
    let running = facts.running.as_ref().unwrap_or(&none);
    let after = facts.after.as_ref().unwrap_or(&none);
    let borrow = &running.borrow;
    let mut text = String::new();
    let heading = |text: &mut String, name: &str| {
        *text += &format!("\n{}\n", style(name).bold());
    };
    let line = |text: &mut String, name: &str, value: String| {
        *text += &format!("  {name:<22} {value}\n");
    };

    heading(&mut text, "What the guest saw (lspci -v)");
    for row in facts.guest.lspci.trim_end().lines() {
        text += &format!("  {row}\n");
    }

    heading(&mut text, "The borrow");
    let entry = &running.lent.entry;
    line(
        &mut text,
        "borrowed",
        format!("{}: {}", entry.id, entry.summary),
    );
    if let Some(by) = &entry.borrowed_by {
        line(
            &mut text,
            "by",
            format!("VM {} (generation {})", by.vm, by.generation),
        );
    }
    line(&mut text, "started with", facts.typed.clone());
    line(
        &mut text,
        "on",
        format!(
            "{}, {}, Linux {}",
            facts.qemu, facts.accel, facts.guest.kernel
        ),
    );
    line(
        &mut text,
        "guest RAM found",
        format!(
            "{} of {}, by {} probes",
            bytes(borrow.guest_ram_bytes),
            bytes(facts.memory),
            borrow.layout_probes
        ),
    );
    line(
        &mut text,
        "pinned",
        format!(
            "{} before bus-master enable, {} after, {} after shutdown",
            bytes(facts.pinned_before_bme()),
            bytes(borrow.bytes_pinned),
            bytes(after.borrow.bytes_pinned)
        ),
    );
    line(
        &mut text,
        "locked of that",
        match borrow.bytes_locked == borrow.bytes_pinned {
            true => "all".to_owned(),
            false => format!("{} (memlock limit)", bytes(borrow.bytes_locked)),
        },
    );
    line(
        &mut text,
        "NTB",
        format!(
            "{}, {}",
            counted(borrow.dma_windows.into(), "DMA window", "DMA windows"),
            counted(borrow.lut_entries.into(), "LUT entry", "LUT entries")
        ),
    );
    line(
        &mut text,
        "BME to DMA-ready",
        micros(borrow.bme_to_ready_us as f64),
    );
    let fired: Vec<String> = running.lent.interrupts.iter().map(status::fired).collect();
    let since = match &facts.kills {
        Some(_) => " (of the last worker)",
        None => "",
    };
    line(&mut text, "interrupts", fired.join(", ") + since);
    line(&mut text, "DMA faults", facts.dma_faults().to_string());

    heading(&mut text, "I/O in the guest");
    line(
        &mut text,
        "256 MiB, SHA-256",
        facts.guest.sha256_written.clone(),
    );
    for (name, direction) in [
        ("fio random reads", &facts.guest.fio.read),
        ("fio random writes", &facts.guest.fio.write),
    ] {
        line(&mut text, name, figures(direction));
    }

    if let Some(kills) = &facts.kills {
        heading(&mut text, "Killed meanwhile");
        for (victim, count) in kills {
            let name = match victim {
                Victim::Worker => "the disk's worker",
                Victim::Lender => "the lender",
                Victim::Backend => "the VM's backend",
            };
            line(&mut text, name, counted(*count, "time", "times"));
        }
        let longest = facts.longest_io().as_secs_f64() * 1e6;
        line(&mut text, "longest I/O of fio", micros(longest));
    }

    heading(&mut text, "Verdict");
    for check in facts.checks() {
        match check.holds {
            true => text += &format!("  {} {}\n", style("ok").green(), check.what),
            false => {
                text += &format!(
                    "  {} {}\n       but: {}\n",
                    style("NO").red().bold(),
                    check.what,
                    check.why
                );
            }
        }
    }
    text += &format!("\nThe demo took {:.1} s.\n", facts.wall.as_secs_f64());
    text
}

fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn figures(direction: &Direction) -> String {
    format!(
        "{:.0} IOPS of 4 KiB, {:.1} MiB/s, mean latency {} (queue depth 16, on the file system)",
        direction.iops,
        direction.bw_bytes / f64::from(1 << 20),
        micros(direction.clat_ns.mean / 1000.0),
    )
}

/// What `cargo xtask demo --json` writes; docs/json.md has the keys.
#[derive(Debug, Serialize)]
pub(super) struct Document {
    /// [`Document::FORMAT`].
    format: u32,
    guest_ram_bytes: u64,
    bytes_pinned_before_bme: u64,
    bytes_pinned_after_bme: u64,
    bytes_pinned_after_shutdown: u64,
    dma_windows: u32,
    lut_entries: u32,
    layout_probes: u32,
    bme_to_ready_us: u64,
    dma_faults: u64,
    checksum_ok: bool,
    wall_s: f64,
    bytes_locked_after_bme: u64,
    qemu_ram_bytes: u64,
    accel: String,
    sha256: String,
    interrupts: Vec<InterruptCount>,
    guest_io_errors: u64,
    qemu_survived: bool,
    kills: Option<Kills>,
    longest_pause_ms: Option<f64>,
    checks: Vec<CheckResult>,
}

#[derive(Debug, Serialize)]
struct InterruptCount {
    index: u8,
    vector: u16,
    count: u64,
}

#[derive(Debug, Serialize)]
struct CheckResult {
    what: &'static str,
    ok: bool,
}

impl Document {
    /// The format number. It is incremented when a key is removed or changes its type or
    /// meaning; new keys do not change it.
    const FORMAT: u32 = 1;
}

impl From<&Facts> for Document {
    fn from(facts: &Facts) -> Self {
        let none = Seen::default();
        let running = facts.running.as_ref().unwrap_or(&none);
        let after = facts.after.as_ref().unwrap_or(&none);
        let interrupts = running.lent.interrupts.iter();
        let checks = facts.checks().into_iter();
        Self {
            format: Self::FORMAT,
            guest_ram_bytes: running.borrow.guest_ram_bytes,
            bytes_pinned_before_bme: facts.pinned_before_bme(),
            bytes_pinned_after_bme: running.borrow.bytes_pinned,
            bytes_pinned_after_shutdown: after.borrow.bytes_pinned,
            dma_windows: running.borrow.dma_windows,
            lut_entries: running.borrow.lut_entries,
            layout_probes: running.borrow.layout_probes,
            bme_to_ready_us: running.borrow.bme_to_ready_us,
            dma_faults: facts.dma_faults(),
            checksum_ok: facts.checksum_ok(),
            wall_s: facts.wall.as_secs_f64(),
            bytes_locked_after_bme: running.borrow.bytes_locked,
            qemu_ram_bytes: facts.memory,
            accel: facts.accel.to_lowercase(),
            sha256: facts.guest.sha256_written.clone(),
            interrupts: interrupts
                .map(|count| InterruptCount {
                    index: count.index as u8,
                    vector: count.vector,
                    count: count.fired,
                })
                .collect(),
            guest_io_errors: facts.guest.io_errors,
            qemu_survived: facts.qemu_survived,
            kills: facts.kills.clone(),
            longest_pause_ms: facts
                .kills
                .as_ref()
                .map(|_| facts.longest_io().as_secs_f64() * 1e3),
            checks: checks
                .map(|check| CheckResult {
                    what: check.what,
                    ok: check.holds,
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{demo::facts::tests::good, json::is_documented};

    /// The names that users of the file rely on.
    const FIXED: &[&str] = &[
        "guest_ram_bytes",
        "bytes_pinned_before_bme",
        "bytes_pinned_after_bme",
        "bytes_pinned_after_shutdown",
        "dma_windows",
        "lut_entries",
        "layout_probes",
        "bme_to_ready_us",
        "dma_faults",
        "checksum_ok",
        "wall_s",
        "guest_io_errors",
        "longest_pause_ms",
        "qemu_survived",
    ];

    #[test]
    fn the_json_has_its_fixed_names() {
        let json = serde_json::to_value(Document::from(&good())).unwrap();
        let without_kills = Facts {
            kills: None,
            ..good()
        };
        let other = serde_json::to_value(Document::from(&without_kills)).unwrap();
        assert!(other["longest_pause_ms"].is_null());
        is_documented("cargo xtask demo --json", &[&json, &other]);
        for name in FIXED {
            match *name {
                "checksum_ok" | "qemu_survived" => assert_eq!(json[name], true),
                name => assert!(json[name].is_number(), "{name}: {json}"),
            }
        }
        assert_eq!(json["bytes_pinned_after_bme"], json["guest_ram_bytes"]);
        assert_eq!(
            json["kills"],
            serde_json::json!({"worker": 2, "lender": 1, "backend": 1})
        );
    }

    #[test]
    fn the_report_says_what_is_wrong() {
        let mut facts = good();
        let text_of = |facts: &Facts| console::strip_ansi_codes(&text(facts)).into_owned();
        let report = text_of(&facts);
        assert!(!report.contains("NO "), "{report}");
        assert!(report.contains("MSI-X 0: 14, MSI-X 1: 1000"), "{report}");
        assert!(
            report.contains("BME to DMA-ready       250.0 ms"),
            "{report}"
        );
        facts.outside.fsck = "bad inode".to_owned();
        let report = text_of(&facts);
        assert!(
            report.contains("NO the file system in the image is clean"),
            "{report}"
        );
        assert!(report.contains("but: bad inode"), "{report}");
    }
}
