//! How long the guest's bus-master enable is held until the device can do DMA, compared
//! with one `mlock` of the same memory.
//!
//! Both get new memory of the same kind: a memfd, like QEMU's. *Untouched*: none of its
//! pages is allocated; *touched*: all are, and the process in the guest's role has them
//! mapped. The backend finds the RAM, populates, locks and maps it, and opens windows; the
//! `mlock`, on one thread, only populates and locks.

use std::{fs, num::NonZeroUsize, path::Path, time::Instant};

use anyhow::{Context, Result, ensure};
use farside_bench::{Section, Series};
use farside_fabric::host_memory::meminfo_bytes;
use farside_scripted_vmm::{
    pci,
    ram::{Layout, PAGE, Ram},
};

use super::{
    figures::{against, at_most, series},
    lock::time_to_lock,
    round_trip::micros,
    stage::{Stage, boot},
};
use farside_testbed::Progress;

use crate::interrupt;

const GIB: u64 = 1 << 30;
const LARGE: u64 = 4 * GIB;
/// Guests, bytes of RAM.
pub(super) const SIZES: [u64; 4] = [GIB / 4, GIB, 4 * GIB, 16 * GIB];
/// Memory kept available for other processes.
const SPARE: u64 = 3 * GIB;
/// Target ratio of bus-master enable to locking.
const TARGET: f64 = 1.15;

/// Turns of a guest with that much RAM: first the unmeasured ones, which warm up for all
/// sizes, then the others. Small guests take little time and vary more; large ones take
/// half a minute per turn.
fn turns_of(size: u64, turns: u32) -> (u32, u32) {
    match size {
        ..GIB => (1, 3 * turns),
        GIB..LARGE => (1, turns),
        LARGE => (0, turns.min(3)),
        _ => (0, turns.min(2)),
    }
}

/// Measures in turns.
pub(super) fn measure(
    program: &Path,
    turns: u32,
    largest_gib: u64,
    progress: &Progress,
) -> Result<Section> {
    let mut all = Vec::new();
    let mut skipped = Vec::new();
    for size in SIZES.into_iter().filter(|size| *size <= largest_gib * GIB) {
        let mib = size >> 20;
        // The RAM of one guest at a time is allocated.
        let (needed, available) = (size + SPARE, available()?);
        if available < needed {
            skipped.push(format!(
                " {mib} MiB: skipped: needs {} MiB of available memory, and there are {} MiB.",
                needed >> 20,
                available >> 20
            ));
            continue;
        }
        let task = progress.spinner(format!("Locking {mib} MiB"));
        all.extend(measure_size(program, size, turns)?);
        task.done();
    }
    for line in &skipped {
        progress.note(line.trim());
    }
    Ok(Section {
        name: "bus-master-enable".into(),
        title: "From bus-master enable to DMA".into(),
        about: format!(
            "How long the guest's write to the command register is held until the device can DMA, \
             beside one mlock, by one thread, of equal memory, before or after it: a fresh memfd, of which no page \
             exists yet (untouched) or every page does and is mapped by whoever plays the guest \
             (touched).{}",
            skipped.concat()
        ),
        series: all,
    })
}

/// Measures guests with that much RAM.
fn measure_size(program: &Path, size: u64, turns: u32) -> Result<Vec<Series>> {
    let mut stage = Stage::start(program)?;
    let memory = format!("{}M", size >> 20);
    // Longer than a VMM's timeout: the duration itself is measured.
    let arguments = ["--memory", &memory, "--open-timeout", "600"];
    let socket = stage.serve("a", &arguments)?;
    let mut all = Vec::new();
    for (touched, state) in [(false, "untouched"), (true, "touched")] {
        let mut pairs = Vec::new();
        let (warm_up, turns) = turns_of(size, turns);
        for turn in 0..warm_up + turns {
            interrupt::check()?;
            let pair = pair(&socket, size, touched, turn % 2 == 0);
            let pair = pair.with_context(|| stage.last_words())?;
            if turn >= warm_up {
                pairs.push(pair);
            }
        }
        let name = format!("{} MiB {state}", size >> 20);
        let bare = series(
            format!("{name}, one mlock"),
            pairs.iter().map(|pair| pair.1),
        );
        let enabled = series(name, pairs.iter().map(|pair| pair.0));
        all.push(at_most(against(enabled, &bare.name), TARGET));
        all.push(bare);
    }
    Ok(all)
}

/// Bus-master enable and one mlock, one after the other, each with separate memory.
/// Microseconds.
fn pair(socket: &Path, size: u64, touched: bool, enable_first: bool) -> Result<(f64, f64)> {
    let lock = || -> Result<f64> {
        let memory = ram(size, touched)?;
        let len = NonZeroUsize::new(size as usize).context("no guest without RAM")?;
        Ok(micros(time_to_lock(memory.file(), len)?))
    };
    let enable = || enable(socket, &ram(size, touched)?);
    if enable_first {
        let enabled = enable()?;
        Ok((enabled, lock()?))
    } else {
        let locked = lock()?;
        Ok((enable()?, locked))
    }
}

fn ram(size: u64, touched: bool) -> Result<Ram> {
    let ram = Ram::new(Layout::new(size, None, false)?)?;
    if touched {
        for block in ram.layout().blocks() {
            for gpa in block.gpas().step_by(PAGE as usize) {
                ram.write(gpa, &[1])?;
            }
        }
    }
    Ok(ram)
}

/// Boots a guest with this RAM up to where its driver sets bus-master enable. Returns how
/// long that is held, microseconds.
fn enable(socket: &Path, ram: &Ram) -> Result<f64> {
    let mut device = boot(socket)?;
    for block in ram.layout().blocks() {
        device.map(ram, block)?;
    }
    pci::place_bars(&mut device)?;
    pci::set_command(&mut device, pci::MEMORY)?;
    let start = Instant::now();
    pci::set_command(&mut device, pci::MEMORY | pci::BUS_MASTER)?;
    let took = start.elapsed();
    ensure!(
        pci::command(&mut device)? & pci::BUS_MASTER != 0,
        "bus-master enable was refused"
    );
    // Unpins, so that the memory is free before the next allocation.
    pci::set_command(&mut device, pci::MEMORY)?;
    device.close();
    Ok(micros(took))
}

/// Bytes of memory available without swapping.
fn available() -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    meminfo_bytes(&info, "MemAvailable").context("no MemAvailable in /proc/meminfo")
}
