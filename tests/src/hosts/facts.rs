//! Recorded facts.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::Serialize;

/// Facts about one borrowed NVMe device. Unless stated otherwise, they come from the
/// lending host's kernel.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Facts {
    /// Whether the guest read back what it had written, and the image on the outermost
    /// machine contains it.
    pub checksum_ok: bool,
    /// Mappings in the device's IOMMU domain, and of guest RAM at the borrower, before the
    /// guest first set bus-master enable.
    pub dmar_mappings_before_bme: u64,
    /// Bytes mapped in the device's domain while the guest used it.
    pub bytes_mapped_after_bme: u64,
    /// Guest RAM as reported by the guest's QEMU.
    pub guest_ram_bytes: u64,
    /// Whether the mapped IOVA ranges equal the guest's RAM ranges.
    pub ranges_equal: bool,
    /// Bytes of guest RAM mapped in the borrower's domain of the NTB endpoint
    /// (on one host: as `bytes_mapped_after_bme`).
    pub borrower_bytes_mapped: u64,
    /// Mappings, on both sides, after the guest's driver was unbound.
    pub dmar_mappings_after_unbind: u64,
    /// DMA faults in the IOMMU while the device was programmed to access addresses outside
    /// guest RAM.
    pub rogue_dma_faults: u64,
    /// The faults that `farside status` reports.
    pub rogue_faults_in_status: u64,
    /// Bytes of guest RAM changed by these accesses.
    pub rogue_bytes_written: u64,
    /// Interrupts that the device raised during the guest's I/O.
    pub msix_device: u64,
    /// Interrupts that the guest counted meanwhile.
    pub msix_guest: u64,
    /// From bus-master enable until the device can access guest RAM, as measured by the
    /// backend.
    pub bme_to_ready_us: u64,
    /// From the start of the nested QEMU until its guest agent answers, seconds.
    pub nested_boot_s: f64,
    /// Duration of writing and reading 2 MiB in the guest, seconds.
    pub nested_io_s: f64,
    /// Total duration, seconds.
    pub wall_s: f64,
}

/// Facts about an image that was lent over the network.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NetworkFacts {
    /// Whether the guest read back what it had written, and the image in the lending host contains it.
    pub checksum_ok: bool,
    /// Bytes of guest RAM pinned before the guest first set bus-master enable.
    pub bytes_pinned_before_bme: u64,
    /// Guest RAM as reported by the guest's QEMU.
    pub guest_ram_bytes: u64,
    /// Guest RAM that the device could reach while the guest used it.
    pub bytes_pinned_after_bme: u64,
    /// DMA outside of guest RAM that the borrower refused and counted.
    pub rogue_dma_refused: u64,
    /// Bytes of guest RAM changed by it.
    pub rogue_bytes_written: u64,
    /// Reads at the lender for each read of the guest.
    pub round_trips_per_read: f64,
    /// Writes at the lender for each write of the guest.
    pub round_trips_per_write: f64,
    /// From the start of the nested QEMU until its guest agent answers, seconds.
    pub nested_boot_s: f64,
    /// Duration of writing and reading 2 MiB in the guest, seconds.
    pub nested_io_s: f64,
    /// Whether a VM moved to a third host and back, which share nothing, and found its data each time.
    pub moved_there_and_back: bool,
    /// Whether its guest then moved on through all hosts without a reboot, and found its data each time.
    pub moved_live: bool,
    /// Duration of each of these moves, until the command ended, in seconds: two cold ones, then
    /// those of the running guest.
    pub moves_s: Vec<f64>,
    /// How long no host ran the VM in each cold move, between its shutdown and its boot, as farside
    /// reports it, seconds.
    pub cold_off_s: Vec<f64>,
    /// How long the guest stood still in each of its moves, as QEMU reports it, ms.
    pub live_downtime_ms: Vec<f64>,
    /// How long the guest was without its device in each of its moves, as farside reports it, seconds.
    pub live_without_devices_s: Vec<f64>,
    /// Time for the hosts to boot, seconds.
    pub hosts_boot_s: f64,
    /// Total duration, seconds.
    pub wall_s: f64,
}

/// Facts about a VM with a physical drive that moves between the disk's host and one that reaches it
/// through an NTB.
#[derive(Clone, Debug, Default)]
pub struct NtbMoves {
    /// LUT entries of the lender's endpoint that the disk uses, at first and after each move.
    pub lut_entries: Vec<u64>,
    /// Duration of each move until the command ended, in seconds: two cold ones, then that of the
    /// running guest.
    pub moves_s: Vec<f64>,
    /// Whether the disk has what the guest wrote on each host. The guest verifies it after each move.
    pub data_ok: bool,
}

/// Facts about a physical device that is attached to a running guest, and detached.
#[derive(Clone, Debug, Default)]
pub struct PlugFacts {
    /// Whether the guest read back from the device what it wrote to it, and the image has it.
    pub data_ok: bool,
    /// Whether the device has no lease, and no memory is mapped for it, once it is detached.
    pub is_returned: bool,
    /// Whether attaching it again is refused while that VM runs, with its name.
    pub is_refused_by_name: bool,
    /// Whether a guest that is started afterwards has it attached and reads the data.
    pub works_again: bool,
}

/// Facts about an NVMe device of another host that is attached twice to a running VM, beside one that it has had from its
/// start. LUT entries are those of the lender's endpoint.
#[derive(Clone, Debug, Default)]
pub struct NtbPlugFacts {
    /// LUT entries in use before that.
    pub entries_before: u64,
    /// And afterwards.
    pub entries_after: u64,
    /// Of the attached one, each time.
    pub entries_of_disk: Vec<u64>,
    /// Whether the guest read back what it wrote, and the image has it, each time.
    pub data_ok: Vec<bool>,
    /// The same of the first device afterwards.
    pub other_goes_on: bool,
}

/// Facts about two NVMe functions of one IOMMU group, lent to one VM.
#[derive(Clone, Debug, Default)]
pub struct GroupFacts {
    /// Whether the guest has them as functions of one device.
    pub is_one_device: bool,
    /// Checksums of what the guest wrote to each function, and read back.
    pub read_back: BTreeSet<String>,
    /// Checksums of what the images have.
    pub on_images: BTreeSet<String>,
    /// Guest RAM, as reported by its QEMU.
    pub guest_ram_bytes: u64,
    /// Bytes mapped while the guest used both, one, and none.
    pub bytes_of_both: u64,
    /// With the driver of one unbound.
    pub bytes_of_one: u64,
    /// With both unbound.
    pub bytes_of_none: u64,
    /// Checksum of what it read from one function when it had released the other.
    pub read_after: String,
    /// What another VM was answered meanwhile.
    pub refusal: String,
    /// Checksum of what another VM read from that function afterwards.
    pub read_by_next: String,
}

/// Facts about devices of one VM that reach the memory of each other's BARs. A transfer is that of a disk, with the buffer of
/// another one. What is mapped, the host's kernel reports.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PeerFacts {
    /// Transfers without an error.
    pub transfers: BTreeSet<(&'static str, &'static str)>,
    /// After backend and workers were killed.
    pub transfers_after_kills: BTreeSet<(&'static str, &'static str)>,
    /// To and from the function's buffer, after the guest reset that.
    pub transfers_after_reset: BTreeSet<(&'static str, &'static str)>,
    /// The same after it moved that while the other function transferred data to it, and moved it back.
    pub transfers_after_move: BTreeSet<(&'static str, &'static str)>,
    /// After the guest rebooted.
    pub transfers_after_reboot: BTreeSet<(&'static str, &'static str)>,
    /// DMA that the devices were refused, before the move.
    pub faults: u64,
    /// DMA that the other function was refused at the buffer's former address.
    pub faults_at_home: u64,
    /// Bytes of the function's buffer.
    pub buffer_bytes: u64,
    /// Of them mapped where the guest moved it.
    pub buffer_bytes_elsewhere: u64,
    /// Of them mapped there and anywhere else.
    pub buffer_bytes_with_elsewhere: u64,
    /// Of them mapped for the other function.
    pub buffer_bytes_mapped: u64,
    /// The same after the kills.
    pub buffer_bytes_after_kills: u64,
    /// Guest RAM, as reported by its QEMU.
    pub guest_ram_bytes: u64,
    /// Bytes mapped for each disk, as reported by the lender.
    pub bytes_mapped: BTreeMap<&'static str, u64>,
    /// The same after the kills.
    pub bytes_after_kills: BTreeMap<&'static str, u64>,
    /// The same after the reboot.
    pub bytes_after_reboot: BTreeMap<&'static str, u64>,
    /// The same with all drivers unbound.
    pub bytes_of_none: BTreeMap<&'static str, u64>,
    /// Bytes of the function's buffer mapped then.
    pub buffer_bytes_of_none: u64,
}

/// Facts about two functions and a model of two lenders at another host, of which each reaches the memory of another one.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NtbPeerFacts {
    /// Transfers without an error.
    pub transfers: BTreeSet<(&'static str, &'static str)>,
    /// To and from the function's buffer, after the guest reset that.
    pub transfers_after_reset: BTreeSet<(&'static str, &'static str)>,
    /// DMA that the devices were refused.
    pub faults: u64,
    /// Bytes of the function's buffer.
    pub buffer_bytes: u64,
    /// Bytes of it mapped for the other function, at the guest's address of it, by the lending host's kernel.
    pub buffer_bytes_mapped: u64,
    /// The same when the guest has released the other function.
    pub buffer_bytes_of_none: u64,
}

/// Facts about two virtual functions, each lent to a guest.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VfFacts {
    /// How many functions were lent simultaneously.
    pub vfs_lent: u64,
    /// Bytes mapped for each, while both were in use.
    pub bytes_mapped: Vec<u64>,
    /// Guest RAM of each, as reported by its QEMU.
    pub guest_ram_bytes: Vec<u64>,
    /// Whether one guest's frames arrived at the other.
    pub frames_arrived: bool,
    /// Total duration, seconds.
    pub wall_s: f64,
}

/// Facts about two NVMe devices of one VM across an NTB. LUT entries are those of the lender's
/// endpoint.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SharingFacts {
    /// LUT entries that each device uses, while the guest uses both.
    pub of_devices: Vec<u64>,
    /// LUT entries in use then.
    pub of_both: u64,
    /// LUT entries in use when the guest's driver has released one device.
    pub of_one: u64,
    /// LUT entries in use when it has released both.
    pub of_none: u64,
    /// Checksums of what the guest wrote to each device, and read back.
    pub read_back: BTreeSet<String>,
    /// Checksum of what it read from one device when it had released the other.
    pub read_after: String,
    /// Checksums of the images.
    pub on_images: BTreeSet<String>,
}

impl Facts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let ram = self.guest_ram_bytes;
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check(
                "the guest read what it wrote, and the image has it",
                self.checksum_ok,
            ),
            check(
                "nothing was mapped before bus-master enable",
                self.dmar_mappings_before_bme == 0,
            ),
            check(
                "then exactly guest RAM was mapped for the device",
                ram > 0 && self.bytes_mapped_after_bme == ram && self.ranges_equal,
            ),
            check(
                "and exactly guest RAM at the borrower",
                ram > 0 && self.borrower_bytes_mapped == ram,
            ),
            check(
                "nothing was mapped after the driver let go",
                self.dmar_mappings_after_unbind == 0,
            ),
            check(
                "DMA outside of RAM met the IOMMU, each time",
                self.rogue_dma_faults >= super::ROGUES,
            ),
            check(
                "farside status shows it",
                self.rogue_faults_in_status >= super::ROGUES,
            ),
            check("it changed nothing", self.rogue_bytes_written == 0),
            check(
                "the guest got each of the device's interrupts",
                self.msix_device > 0 && self.msix_device == self.msix_guest,
            ),
        ]
    }
}

impl NetworkFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        let ram = self.guest_ram_bytes;
        vec![
            check(
                "the guest read what it wrote, and the lender's image has it",
                self.checksum_ok,
            ),
            check(
                "nothing was pinned before bus-master enable",
                self.bytes_pinned_before_bme == 0,
            ),
            check(
                "then exactly guest RAM could be reached",
                ram > 0 && self.bytes_pinned_after_bme == ram,
            ),
            check(
                "DMA outside of RAM was refused at the borrower, each time",
                self.rogue_dma_refused >= super::ROGUES,
            ),
            check("it changed nothing", self.rogue_bytes_written == 0),
            check(
                "each command was one round trip",
                self.round_trips_per_read == 1.0 && self.round_trips_per_write == 1.0,
            ),
            check(
                "the VM moved to a third host and back, with its data",
                self.moved_there_and_back,
            ),
            check(
                "its guest moved through all hosts without a reboot, with its data",
                self.moved_live,
            ),
        ]
    }
}

impl NtbMoves {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let through: Vec<bool> = self.lut_entries.iter().map(|used| *used > 0).collect();
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check(
                "the VM reached its drive through the NTB from the other host, and directly from the disk's own",
                through == [true, false, true, false],
            ),
            check("the disk has what it wrote on both", self.data_ok),
        ]
    }
}

impl PlugFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check(
                "the guest read what it wrote to the attached device, and the image has it",
                self.data_ok,
            ),
            check(
                "the detached device is returned, with no memory mapped for it",
                self.is_returned,
            ),
            check(
                "attaching it again to the QEMU that still has it open is refused, with its name",
                self.is_refused_by_name,
            ),
            check("the next guest read the data", self.works_again),
        ]
    }
}

impl NtbPlugFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check(
                "the guest read what it wrote to the attached device, and the image has it, twice",
                self.data_ok == [true, true],
            ),
            check(
                "it had windows each time",
                self.entries_of_disk.len() == 2
                    && self.entries_of_disk.iter().all(|&used| used > 0),
            ),
            check(
                "the VM's other device goes on, with no windows but its own",
                self.other_goes_on && self.entries_after == self.entries_before,
            ),
        ]
    }
}

impl GroupFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        let words = ["second", "IOMMU group", "first", "VM g"];
        vec![
            check("the guest has them as one device", self.is_one_device),
            check(
                "each function has what the guest wrote to it",
                self.read_back.len() == 2 && self.read_back == self.on_images,
            ),
            check(
                "guest RAM is mapped once, until both are released",
                self.guest_ram_bytes != 0
                    && self.bytes_of_both == self.guest_ram_bytes
                    && self.bytes_of_one == self.guest_ram_bytes
                    && self.bytes_of_none == 0,
            ),
            check(
                "a function works on without the other",
                self.read_back.contains(&self.read_after),
            ),
            check(
                "another VM gets none of them meanwhile, and is told why",
                words.iter().all(|word| self.refusal.contains(word)),
            ),
            check(
                "another VM has a function once both are returned",
                self.read_back.contains(&self.read_by_next),
            ),
        ]
    }
}

impl SharingFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        let of_all = self.of_devices.iter().all(|used| *used == self.of_both);
        vec![
            check(
                "both devices use the LUT entries of one",
                self.of_both > 0 && self.of_devices.len() == 2 && of_all,
            ),
            check(
                "which are in use until the second is released",
                self.of_one == self.of_both && self.of_none == 0,
            ),
            check(
                "each device has what the guest wrote to it",
                self.read_back.len() == 2 && self.read_back == self.on_images,
            ),
            check(
                "a device works on without the other",
                self.read_back.contains(&self.read_after),
            ),
        ]
    }
}

impl PeerFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        let all = 4;
        // RAM, and buffers of the same size: of the function or the model, but not the own one.
        let expected = [("first", 1), ("model", 1), ("second", 2)];
        let expected = expected.map(|(disk, buffers)| {
            let bytes = self.guest_ram_bytes + buffers * self.buffer_bytes;
            (disk, bytes)
        });
        let expected = BTreeMap::from(expected);
        vec![
            check(
                "each disk transferred data to and from another one's buffer",
                self.transfers.len() == all,
            ),
            check(
                "and did when backend and workers had been killed",
                self.transfers_after_kills.len() == all,
            ),
            check(
                "and when the function with the buffer had been reset",
                self.transfers_after_reset.len() == 2,
            ),
            check(
                "and when its buffer had been moved and moved back",
                self.transfers_after_move.len() == 2,
            ),
            check(
                "and when the guest had rebooted",
                self.transfers_after_reboot.len() == all,
            ),
            check("no DMA was refused", self.faults == 0),
            check(
                "a buffer that was moved was mapped there, and no longer where it had been",
                self.buffer_bytes_elsewhere == self.buffer_bytes
                    && self.buffer_bytes_with_elsewhere == self.buffer_bytes
                    && self.faults_at_home > 0,
            ),
            check(
                "the buffer of a function was mapped in the IOMMU",
                self.buffer_bytes > 0
                    && self.buffer_bytes_mapped == self.buffer_bytes
                    && self.buffer_bytes_after_kills == self.buffer_bytes,
            ),
            check(
                "each disk reached guest RAM and the buffers of others, and not its own",
                [
                    &self.bytes_mapped,
                    &self.bytes_after_kills,
                    &self.bytes_after_reboot,
                ]
                .iter()
                .all(|it| **it == expected),
            ),
            check(
                "nothing was mapped after the drivers let go",
                self.buffer_bytes_of_none == 0
                    && self.bytes_of_none.len() == 3
                    && self.bytes_of_none.values().all(|&bytes| bytes == 0),
            ),
        ]
    }
}

impl NtbPeerFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check(
                "each disk transferred data to and from another one's buffer",
                self.transfers.len() == 3,
            ),
            check(
                "and when the function with the buffer had been reset",
                self.transfers_after_reset.len() == 1,
            ),
            check("no DMA was refused", self.faults == 0),
            check(
                "the buffer was mapped for the other function",
                self.buffer_bytes > 0 && self.buffer_bytes_mapped == self.buffer_bytes,
            ),
            check(
                "and no more when the guest had released that",
                self.buffer_bytes_of_none == 0,
            ),
        ]
    }
}

impl VfFacts {
    /// The conditions to hold, and whether they do.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let check = |what: &str, holds| (what.to_owned(), holds);
        vec![
            check("two were lent at the same time", self.vfs_lent == 2),
            check(
                "each reached exactly its guest's RAM",
                !self.bytes_mapped.is_empty() && self.bytes_mapped == self.guest_ram_bytes,
            ),
            check("each guest's frames came to the other", self.frames_arrived),
        ]
    }
}

/// A duration in seconds, rounded to milliseconds.
pub(super) fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}
