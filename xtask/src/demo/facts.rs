//! The measured facts, and the conditions on them.

use std::{path::PathBuf, time::Duration};

use farside_backend_api::{BorrowState, DeviceReport};
use farside_daemon::DeviceId;
use farside_fabric::{FaultSummary, Usage};
use farside_lender_protocol::{DeviceEntry, DeviceStatus};

use super::{
    guest::{FILE_SIZE, GuestFacts},
    kernel_view::KernelView,
    kill::{Kills, Victim},
    outside::OutsideFacts,
};
use crate::text::bytes;

/// Maximum difference between QEMU's RAM and the layout: a PC lacks RAM between 640 KiB and
/// 1 MiB. How much depends on the video card (none here) and on the ROM shadows that the
/// firmware has locked so far.
const LEGACY_HOLE: u64 = 384 << 10;

/// Maximum shared memory that a backend has mapped without guest RAM: registers and rings
/// shared with the lender.
const OWN_SHARED: u64 = 4 << 20;

/// All facts.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// The command that started QEMU.
    pub(super) typed: String,
    pub(super) qemu: String,
    pub(super) accel: String,
    /// Guest RAM in QEMU's command line.
    pub(super) memory: u64,
    /// Before the guest's first instruction.
    pub(super) paused: Option<Seen>,
    /// While the guest uses the disk.
    pub(super) running: Option<Seen>,
    /// After QEMU's end.
    pub(super) after: Option<Seen>,
    pub(super) guest: GuestFacts,
    /// Processes that were killed meanwhile, with `--kill`.
    pub(super) kills: Option<Kills>,
    /// QEMU ran until the guest powered off.
    pub(super) qemu_survived: bool,
    pub(super) outside: OutsideFacts,
    /// Sockets left behind by backend and lender.
    pub(super) sockets_left: Vec<PathBuf>,
    pub(super) wall: Duration,
}

/// The device's state at one moment.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) borrow: DeviceReport,
    pub(super) lent: DeviceStatus,
    pub(super) kernel: KernelView,
}

/// A condition that must hold.
#[derive(Debug)]
pub(super) struct Check {
    pub(super) what: &'static str,
    pub(super) holds: bool,
    /// The figures, printed if it does not hold.
    pub(super) why: String,
}

impl Facts {
    /// Bytes pinned before bus-master enable: the maximum observed.
    pub(super) fn pinned_before_bme(&self) -> u64 {
        let paused = self
            .paused
            .as_ref()
            .map_or(0, |seen| seen.borrow.bytes_pinned);
        let running = self.running.as_ref();
        paused.max(running.map_or(0, |seen| seen.borrow.bytes_pinned_before_bme))
    }

    /// DMA faults: the maximum observed.
    pub(super) fn dma_faults(&self) -> u64 {
        let seen = [&self.paused, &self.running, &self.after];
        let totals = seen
            .into_iter()
            .flatten()
            .map(|seen| seen.lent.faults.total);
        totals.max().unwrap_or(0)
    }

    /// Whether the bytes that the guest wrote equal those it read back, and those in the
    /// image.
    pub(super) fn checksum_ok(&self) -> bool {
        self.guest_ok() && self.outside_ok()
    }

    /// The longest I/O of fio.
    pub(super) fn longest_io(&self) -> Duration {
        let fio = &self.guest.fio;
        let longest = fio.read.clat_ns.max.max(fio.write.clat_ns.max);
        Duration::from_nanos(longest as u64)
    }

    fn guest_ok(&self) -> bool {
        let guest = &self.guest;
        !guest.sha256_written.is_empty()
            && guest.sha256_written == guest.sha256_read
            && guest.bytes_read_back >= FILE_SIZE
    }

    fn outside_ok(&self) -> bool {
        !self.outside.sha256.is_empty()
            && self.guest.sha256_written == self.outside.sha256
            && self.outside.file_size == FILE_SIZE
    }

    /// All conditions, in the order of the events.
    pub(super) fn checks(&self) -> Vec<Check> {
        let mut checks = self.checks_of_any();
        if let Some(kills) = &self.kills {
            let killed = Victim::ALL
                .iter()
                .all(|victim| kills.get(victim).is_some_and(|count| *count > 0));
            checks.push(Check {
                what: "worker, lender and backend were killed while the guest used the disk, QEMU went on, and no I/O failed",
                holds: killed && self.qemu_survived && self.guest.io_errors == 0,
                why: format!("{kills:?}, {} lines of the guest's kernel about failed I/O", self.guest.io_errors),
            });
        }
        checks
    }

    fn checks_of_any(&self) -> Vec<Check> {
        let none = Seen::default();
        let paused = self.paused.as_ref().unwrap_or(&none);
        let running = self.running.as_ref().unwrap_or(&none);
        let after = self.after.as_ref().unwrap_or(&none);
        let ram = running.borrow.guest_ram_bytes;
        let check = |what, holds, why| Check { what, holds, why };
        vec![
            check(
                "before bus-master enable nothing is pinned and no window is open",
                self.paused.is_some()
                    && paused.is_shut()
                    && !paused.lent.bus_master
                    && self.pinned_before_bme() == 0,
                format!(
                    "{paused:?}, {} pinned when it came",
                    bytes(running.borrow.bytes_pinned_before_bme)
                ),
            ),
            check(
                "the layout found is QEMU's RAM but for the hole below 1 MiB",
                self.memory
                    .checked_sub(ram)
                    .is_some_and(|hole| ram > 0 && hole <= LEGACY_HOLE),
                format!("QEMU has {}, {ram} bytes were found", self.memory),
            ),
            check(
                "after it exactly the guest's RAM is pinned, and windows are open",
                ram > 0
                    && running.borrow.bytes_pinned == ram
                    && running.borrow.state == BorrowState::Ready
                    && running.borrow.dma_windows > 0
                    && running.borrow.lut_entries > 0,
                format!("{:?}", running.borrow),
            ),
            check(
                "lender and kernel agree with what the backend says of that",
                ram > 0
                    && running.lent.usage.bytes_mapped == ram
                    && running.lent.usage.windows == running.borrow.dma_windows
                    && running.lent.usage.lut_entries == running.borrow.lut_entries
                    && running.kernel.locked == running.borrow.bytes_locked
                    && running.kernel.shared >= ram,
                format!("{:?}, {:?}", running.lent.usage, running.kernel),
            ),
            check(
                "the guest read back from the disk what it had written",
                self.guest_ok(),
                format!(
                    "written {}, read {}, {} of it from the disk",
                    self.guest.sha256_written,
                    self.guest.sha256_read,
                    bytes(self.guest.bytes_read_back)
                ),
            ),
            check(
                "the same bytes are in the lender's image",
                self.outside_ok(),
                format!(
                    "{} with SHA-256 {}",
                    bytes(self.outside.file_size),
                    self.outside.sha256
                ),
            ),
            check(
                "the file system in the image is clean",
                self.outside.fsck.is_empty() && self.outside.file_size > 0,
                self.outside.fsck.clone(),
            ),
            check(
                "interrupts fired and none was lost",
                !running.lent.interrupts.is_empty()
                    && running.borrow.interrupts.dropped == 0
                    && running.borrow.interrupts.failed == 0,
                format!(
                    "{:?}, {:?}",
                    running.lent.interrupts, running.borrow.interrupts
                ),
            ),
            check(
                "no DMA was refused and no error is recorded",
                self.running.is_some()
                    && self.dma_faults() == 0
                    && running.borrow.last_error.is_none(),
                format!(
                    "{} faults, {:?}",
                    self.dma_faults(),
                    running.borrow.last_error
                ),
            ),
            check(
                "afterwards the device is available, and no memory is pinned and no window open",
                after.is_shut() && after.lent.is_free() && self.after.is_some(),
                format!("{after:?}"),
            ),
            check(
                "backend and lender left no socket",
                self.sockets_left.is_empty(),
                format!("{:?}", self.sockets_left),
            ),
        ]
    }
}

impl Default for Seen {
    /// A device that was not examined: nothing is mapped or pinned.
    fn default() -> Self {
        let id: DeviceId = "none".parse().expect("a valid id");
        Self {
            borrow: DeviceReport::new(&id, "", PathBuf::new().into()),
            lent: DeviceStatus {
                entry: DeviceEntry {
                    id,
                    source: String::new(),
                    summary: String::new(),
                    borrowed_by: None,
                    fences: Vec::new(),
                    problem: None,
                    availability: Default::default(),
                    kept: None,
                },
                bus_master: false,
                usage: Usage::default(),
                interrupts: Vec::new(),
                faults: FaultSummary::default(),
                counters: Vec::new(),
                limits: Vec::new(),
            },
            kernel: KernelView::default(),
        }
    }
}

impl Seen {
    /// Whether backend, lender and kernel all report that nothing is mapped.
    fn is_shut(&self) -> bool {
        self.borrow.bytes_pinned == 0
            && self.borrow.bytes_locked == 0
            && self.borrow.dma_windows == 0
            && self.borrow.lut_entries == 0
            && self.lent.usage.windows == 0
            && self.lent.usage.lut_entries == 0
            && self.lent.usage.bytes_mapped == 0
            && self.kernel.locked == 0
            && self.kernel.shared <= OWN_SHARED
    }
}

#[cfg(test)]
pub(super) mod tests {
    use farside_irq_relay::{IrqIndex, VectorCount};

    use super::*;

    /// The facts of a successful demo.
    pub(in crate::demo) fn good() -> Facts {
        let memory = 1 << 30;
        let ram = memory - (256 << 10);
        let sha256 = "ab".repeat(32);
        let running = Seen {
            borrow: DeviceReport {
                state: BorrowState::Ready,
                bytes_pinned: ram,
                bytes_locked: ram,
                dma_windows: 1,
                lut_entries: 8,
                guest_ram_bytes: ram,
                layout_probes: 40,
                bme_to_ready_us: 250_000,
                ..Seen::default().borrow
            },
            lent: DeviceStatus {
                bus_master: true,
                usage: Usage {
                    windows: 1,
                    lut_entries: 8,
                    bytes_mapped: ram,
                    ..Usage::default()
                },
                interrupts: [(0, 14), (1, 1000)]
                    .map(|(vector, fired)| VectorCount {
                        index: IrqIndex::Msix,
                        vector,
                        fired,
                    })
                    .to_vec(),
                ..Seen::default().lent
            },
            kernel: KernelView {
                locked: ram,
                shared: ram,
            },
        };
        Facts {
            memory,
            paused: Some(Seen::default()),
            running: Some(running),
            after: Some(Seen::default()),
            guest: GuestFacts {
                sha256_written: sha256.clone(),
                sha256_read: sha256.clone(),
                bytes_read_back: FILE_SIZE,
                ..GuestFacts::default()
            },
            outside: OutsideFacts {
                file_size: FILE_SIZE,
                sha256,
                fsck: String::new(),
            },
            kills: Some(
                [
                    (Victim::Worker, 2),
                    (Victim::Lender, 1),
                    (Victim::Backend, 1),
                ]
                .into(),
            ),
            qemu_survived: true,
            ..Facts::default()
        }
    }

    /// The checks that fail after a change.
    fn broken(change: impl FnOnce(&mut Facts)) -> Vec<&'static str> {
        let mut facts = good();
        change(&mut facts);
        let failed = facts.checks().into_iter().filter(|check| !check.holds);
        failed.map(|check| check.what).collect()
    }

    fn running(facts: &mut Facts) -> &mut Seen {
        facts.running.as_mut().unwrap()
    }

    #[test]
    fn a_good_demo_passes() {
        assert_eq!(broken(|_| {}), Vec::<&str>::new());
    }

    #[test]
    fn a_demo_that_measured_nothing_passes_nothing() {
        let failed = broken(|facts| *facts = Facts::default());
        // All but the check for left sockets, and those of what was not asked for.
        assert_eq!(failed.len(), good().checks_of_any().len() - 1, "{failed:?}");
    }

    #[test]
    fn each_thing_that_may_go_wrong_is_seen() {
        type Change = fn(&mut Facts);
        let changes: &[(&str, Change)] = &[
            ("before", |f| {
                f.paused.as_mut().unwrap().borrow.bytes_pinned = 4096
            }),
            ("before", |f| {
                f.paused.as_mut().unwrap().kernel.locked = 4096
            }),
            ("before", |f| {
                f.paused.as_mut().unwrap().lent.usage.windows = 1
            }),
            ("before", |f| {
                running(f).borrow.bytes_pinned_before_bme = 4096
            }),
            ("layout", |f| f.memory += 1 << 20),
            ("layout", |f| f.memory -= 1 << 20),
            ("after it", |f| running(f).borrow.bytes_pinned += 4096),
            ("after it", |f| {
                running(f).borrow.state = BorrowState::Leased
            }),
            ("lender and kernel", |f| running(f).kernel.locked = 0),
            ("lender and kernel", |f| running(f).kernel.shared -= 4096),
            ("lender and kernel", |f| {
                running(f).lent.usage.bytes_mapped -= 4096
            }),
            ("read back", |f| f.guest.sha256_read.clear()),
            ("read back", |f| f.guest.bytes_read_back = 0),
            ("same bytes", |f| f.outside.sha256.clear()),
            ("same bytes", |f| f.outside.file_size -= 1),
            ("clean", |f| f.outside.fsck = "bad inode".to_owned()),
            ("interrupts", |f| running(f).lent.interrupts.clear()),
            ("interrupts", |f| running(f).borrow.interrupts.failed = 1),
            ("refused", |f| running(f).lent.faults.total = 1),
            ("refused", |f| {
                f.after.as_mut().unwrap().lent.faults.total = 1
            }),
            ("afterwards", |f| {
                f.after.as_mut().unwrap().borrow.dma_windows = 1
            }),
            ("afterwards", |f| {
                f.after.as_mut().unwrap().lent.bus_master = true
            }),
            ("afterwards", |f| f.after = None),
            ("socket", |f| f.sockets_left.push("/s".into())),
            ("were killed", |f| f.guest.io_errors = 1),
            ("were killed", |f| f.qemu_survived = false),
            ("were killed", |f| {
                f.kills.as_mut().unwrap().remove(&Victim::Worker);
            }),
        ];
        for (position, (what, change)) in changes.iter().enumerate() {
            let failed = broken(change);
            assert_eq!(failed.len(), 1, "change {position} ({what}): {failed:?}");
            assert!(failed[0].contains(what), "change {position}: {failed:?}");
        }
    }
}
