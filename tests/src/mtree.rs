//! Guest RAM as reported by QEMU: the reference for the memory to pin.

use anyhow::{Context, Result};
use farside_testbed::Qmp;
use serde_json::json;

/// Ranges (first address, bytes) of the VM's address space that the shared memory backend
/// `mem` is mapped at, in order: RAM, and RAM that the firmware has write-protected.
pub fn shared_ram(qmp: &Qmp) -> Result<Vec<(u64, u64)>> {
    let arguments = json!({ "command-line": "info mtree -f" });
    let answer = qmp.execute("human-monitor-command", arguments)?;
    let text = answer.as_str().context("info mtree answered no text")?;
    parse(text).with_context(|| format!("in QEMU's memory tree:\n{text}"))
}

fn parse(text: &str) -> Result<Vec<(u64, u64)>> {
    let system = text
        .split("FlatView #")
        .find(|view| view.contains("AS \"memory\""))
        .context("no address space \"memory\"")?;
    let mut ranges = Vec::new();
    for line in system.lines() {
        // "  0000000000000000-000000000009ffff (prio 0, ram): mem"
        let Some((range, what)) = line.trim().split_once(" (prio ") else {
            continue;
        };
        let Some((kind, name)) = what.split_once("): ") else {
            continue;
        };
        let is_mem = name.split(' ').next() == Some("mem");
        if !(kind.ends_with(" ram") || kind.ends_with(" rom")) || !is_mem {
            continue;
        }
        let (first, last) = range.split_once('-').context("a range has two ends")?;
        let first = u64::from_str_radix(first, 16)?;
        let last = u64::from_str_radix(last, 16)?;
        ranges.push((first, last - first + 1));
    }
    anyhow::ensure!(!ranges.is_empty(), "no RAM of the backend \"mem\"");
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_of_the_backend_is_found_and_nothing_else() {
        let text = "FlatView #0\n AS \"I/O\", root: io\n  0000000000000000-0000000000000007 (prio 0, ram): mem\n\n\
            FlatView #1\n AS \"memory\", root: system\n AS \"cpu-memory-0\", root: system\n Root memory region: system\n\
            \x20 0000000000000000-000000000009ffff (prio 0, ram): mem\n\
            \x20 00000000000a0000-00000000000bffff (prio 1, i/o): vga\n\
            \x20 00000000000c0000-00000000000c3fff (prio 0, rom): mem @00000000000c0000\n\
            \x20 00000000000e0000-00000000000fffff (prio 1, ram): pc.rom\n\
            \x20 0000000000100000-000000001fffffff (prio 0, ram): mem @0000000000100000\n";
        assert_eq!(
            parse(text).unwrap(),
            [(0, 0xa_0000), (0xc_0000, 0x4000), (0x10_0000, 0x1ff0_0000)]
        );
    }
}
