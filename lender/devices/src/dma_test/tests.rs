use std::sync::Arc;

use farside_fabric::{Access, Fault, FaultReason, Iova, memory::HostSlice, memory::SharedMemory};
use proptest::prelude::*;

use super::{config_space::at, *};
use crate::{Dma, Interrupts};

/// IOVA of the memory that the fake fabric maps.
const BASE: u64 = 0x1_0000_0000;
const SIZE: usize = 1 << 20;
/// The last page is read-only.
const READ_ONLY: u64 = BASE + SIZE as u64 - 4096;

/// One mapping, contiguous for at most a page, as with a real IOMMU.
struct FakeDma(Arc<SharedMemory>);

impl Dma for FakeDma {
    fn is_bus_master(&self) -> bool {
        true
    }

    fn reaches(&mut self, iova: Iova, len: usize, access: Access) -> bool {
        self.gather(iova, len, access, &mut Vec::new()).is_ok()
    }

    fn translate(&mut self, iova: Iova, len: usize, access: Access) -> Result<HostSlice, Fault> {
        let refuse = |reason| {
            Err(Fault {
                iova,
                len: len as u64,
                access,
                reason,
            })
        };
        let iova = iova.get();
        if !(BASE..BASE + SIZE as u64).contains(&iova) {
            return refuse(FaultReason::LenderDomain);
        }
        if access == Access::Write && iova >= READ_ONLY {
            return refuse(FaultReason::Permission);
        }
        let run = len.min(4096 - (iova % 4096) as usize);
        Ok(self.0.slice((iova - BASE) as usize, run).unwrap())
    }
}

#[derive(Default)]
struct FakeIrq {
    raised: Vec<u16>,
    intx: bool,
}

impl Interrupts for FakeIrq {
    fn raise(&mut self, vector: u16) {
        self.raised.push(vector);
    }
    fn set_intx(&mut self, asserted: bool) {
        self.intx = asserted;
    }
    fn is_pending(&self, vector: u16) -> bool {
        matches!(vector, 0 | 9 | 2047)
    }
}

/// Test fixture: device and bus.
struct Bench {
    device: DmaTest,
    dma: FakeDma,
    irq: FakeIrq,
}

impl Bench {
    fn new() -> Self {
        Self {
            device: DmaTest::new(),
            dma: FakeDma(SharedMemory::anonymous(SIZE).unwrap()),
            irq: FakeIrq::default(),
        }
    }

    fn with_bus<R>(&mut self, call: impl FnOnce(&mut DmaTest, &mut Bus<'_>) -> R) -> R {
        let mut bus = Bus {
            dma: &mut self.dma,
            irq: &mut self.irq,
        };
        call(&mut self.device, &mut bus)
    }

    fn read(&mut self, bar: u8, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.with_bus(|device, bus| device.bar_read(bar, offset, &mut data, bus));
        data
    }

    fn get(&mut self, reg: u64) -> u32 {
        u32::from_le_bytes(self.read(0, reg, 4).try_into().unwrap())
    }

    fn get64(&mut self, reg: u64) -> u64 {
        u64::from_le_bytes(self.read(0, reg, 8).try_into().unwrap())
    }

    fn write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        self.with_bus(|device, bus| device.bar_write(bar, offset, data, bus));
    }

    fn set(&mut self, reg: u64, value: u32) {
        self.write(0, reg, &value.to_le_bytes());
    }

    fn set64(&mut self, reg: u64, value: u64) {
        self.write(0, reg, &value.to_le_bytes());
    }

    fn poll(&mut self) -> bool {
        self.with_bus(|device, bus| device.poll(bus))
    }

    /// Executes a command and waits for its end.
    fn run(&mut self, command: Command, src: u64, dst: u64, len: u32) -> u32 {
        self.set64(reg::SRC, src);
        self.set64(reg::DST, dst);
        self.set(reg::LENGTH, len);
        self.set(reg::STATUS, u32::MAX);
        self.set(reg::COMMAND, command as u32);
        while self.poll() {}
        self.get(reg::STATUS)
    }

    fn memory(&self, at: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.slice(at, len).read(&mut data);
        data
    }

    fn fill_memory(&self, at: u64, data: &[u8]) {
        self.slice(at, data.len()).write(data);
    }

    fn slice(&self, at: u64, len: usize) -> HostSlice {
        self.dma.0.slice((at - BASE) as usize, len).unwrap()
    }
}

fn noise(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 31 + n / 256) as u8).collect()
}

#[test]
fn identifies_itself() {
    let mut bench = Bench::new();
    assert_eq!(bench.read(0, reg::ID, 4), b"FSDT");
    assert_eq!(bench.get(reg::VERSION), 1);
    assert_eq!(bench.get(reg::STATUS), 0);
}

#[test]
fn copies_between_pages_at_odd_addresses() {
    let mut bench = Bench::new();
    let data = noise(10_000);
    bench.fill_memory(BASE + 123, &data);
    let status = bench.run(Command::Copy, BASE + 123, BASE + 0x80_001, 10_000);
    assert_eq!(status, status::DONE);
    assert_eq!(bench.memory(BASE + 0x80_001, 10_000), data);
    assert_eq!(bench.get(reg::MOVED), 10_000);
    assert_eq!(bench.get64(reg::BYTES_READ), 10_000);
    assert_eq!(bench.get64(reg::BYTES_WRITTEN), 10_000);
    assert_eq!(bench.get64(reg::COMMANDS), 1);
}

#[test]
fn a_long_command_goes_on_in_poll_and_halts_while_quiesced() {
    let mut bench = Bench::new();
    let len = 4 * CHUNK as u32 + 1;
    bench.fill_memory(BASE, &noise(len as usize));
    bench.set64(reg::SRC, BASE);
    bench.set64(reg::DST, BASE + 0x80_000);
    bench.set(reg::LENGTH, len);
    bench.set(reg::COMMAND, Command::Copy as u32);
    assert_eq!(bench.get(reg::STATUS), status::BUSY);
    assert_eq!(bench.get(reg::MOVED), CHUNK as u32);
    assert!(!bench.with_bus(|device, bus| device.enable_notifications(bus)));

    assert!(bench.with_bus(|device, bus| device.quiesce(bus)));
    assert!(!bench.poll());
    assert!(bench.with_bus(|device, bus| device.enable_notifications(bus)));
    assert_eq!(bench.get(reg::MOVED), CHUNK as u32);

    bench.with_bus(|device, bus| device.resume(bus));
    assert!(bench.poll());
    assert_eq!(bench.get(reg::MOVED), 2 * CHUNK as u32);
    // Another command meanwhile is rejected without side effects.
    bench.set(reg::COMMAND, Command::Raise as u32);
    assert_eq!(bench.get(reg::STATUS), status::BUSY | status::REJECTED);
    while bench.poll() {}
    assert_eq!(bench.get(reg::STATUS), status::DONE | status::REJECTED);
    assert_eq!(
        bench.memory(BASE + 0x80_000, len as usize),
        noise(len as usize)
    );
    assert!(bench.with_bus(|device, bus| device.enable_notifications(bus)));
}

#[test]
fn fills_with_the_pattern_low_byte_first() {
    let mut bench = Bench::new();
    bench.set(reg::PATTERN, 0x0403_0201);
    assert_eq!(bench.run(Command::Fill, 0, BASE + 1, 7), status::DONE);
    assert_eq!(bench.memory(BASE, 9), [0, 1, 2, 3, 4, 1, 2, 3, 0]);
}

#[test]
fn the_checksum_is_crc32c() {
    let mut bench = Bench::new();
    bench.fill_memory(BASE, b"123456789");
    assert_eq!(bench.run(Command::Checksum, BASE, 0, 9), status::DONE);
    // The standard check value of CRC-32C.
    assert_eq!(bench.get(reg::RESULT), 0xe306_9283);
    // The same checksum in pieces.
    let data = noise(3 * CHUNK - 5);
    bench.fill_memory(BASE, &data);
    bench.run(Command::Checksum, BASE, 0, data.len() as u32);
    assert_eq!(bench.get(reg::RESULT), crc32c::crc32c(&data));
}

#[test]
fn reads_and_writes_words_at_an_address_the_guest_names() {
    let mut bench = Bench::new();
    bench.set64(reg::DATA, 0x8877_6655_4433_2211);
    assert_eq!(bench.run(Command::Write, 0, BASE + 3, 4), status::DONE);
    assert_eq!(bench.memory(BASE + 3, 5), [0x11, 0x22, 0x33, 0x44, 0]);
    assert_eq!(bench.run(Command::Read, BASE + 4, 0, 2), status::DONE);
    assert_eq!(bench.get64(reg::DATA), 0x3322);
}

#[test]
fn a_refused_write_says_where_and_why_and_writes_nothing_there() {
    let mut bench = Bench::new();
    let status = bench.run(Command::Write, 0, 0xdead_0000, 8);
    assert_eq!(status, status::DONE | status::FAULT);
    assert_eq!(bench.get64(reg::FAULT_IOVA), 0xdead_0000);
    let lender_domain = fault_code(FaultReason::LenderDomain);
    assert_eq!(bench.get(reg::FAULT_INFO), lender_domain | 1 << 8);
    assert_eq!(bench.get(reg::MOVED), 0);

    // Half of the range in a read-only page.
    bench.set(reg::PATTERN, u32::MAX);
    let status = bench.run(Command::Fill, 0, READ_ONLY - 100, 200);
    assert_eq!(status, status::DONE | status::FAULT);
    assert_eq!(bench.get64(reg::FAULT_IOVA), READ_ONLY);
    assert_eq!(bench.get(reg::MOVED), 100);
    assert_eq!(bench.get64(reg::BYTES_WRITTEN), 100);
    assert_eq!(bench.get(reg::FAULTS), 2);
    assert_eq!(bench.memory(READ_ONLY - 1, 2), [0xff, 0]);
}

#[test]
fn a_refused_read_gives_all_ones() {
    let mut bench = Bench::new();
    let status = bench.run(Command::Read, u64::MAX - 7, 0, 8);
    assert_eq!(status, status::DONE | status::FAULT);
    assert_eq!(bench.get64(reg::DATA), u64::MAX);
    assert_eq!(
        bench.get(reg::FAULT_INFO),
        fault_code(FaultReason::LenderDomain)
    );
}

#[test]
fn what_makes_no_sense_is_rejected() {
    let mut bench = Bench::new();
    let no_word = |bench: &mut Bench| bench.run(Command::Read, BASE, 0, 3);
    assert_eq!(no_word(&mut bench), status::REJECTED);
    assert_eq!(bench.run(Command::Copy, BASE, BASE, 0), status::REJECTED);
    let too_long = MAX_LENGTH + 1;
    assert_eq!(
        bench.run(Command::Fill, 0, BASE, too_long),
        status::REJECTED
    );
    let wraps = bench.run(Command::Checksum, u64::MAX - 2, 0, 4);
    assert_eq!(wraps, status::REJECTED);
    bench.set(reg::VECTOR, VECTORS.into());
    assert_eq!(bench.run(Command::Raise, 0, 0, 0), status::REJECTED);
    bench.set(reg::COMMAND, 99);
    assert_eq!(bench.get64(reg::COMMANDS), 0);
    assert!(bench.irq.raised.is_empty());
}

#[test]
fn raises_a_vector_and_holds_intx_until_it_is_acknowledged() {
    let mut bench = Bench::new();
    // VECTOR and COMMAND in one write.
    bench.set64(reg::VECTOR, 2047 | (Command::Raise as u64) << 32);
    assert_eq!(bench.irq.raised, [2047]);
    assert!(bench.irq.intx);
    assert_eq!(bench.get(reg::STATUS), status::DONE | status::INTERRUPT);
    bench.set(reg::STATUS, status::DONE);
    assert!(bench.irq.intx);
    bench.set(reg::STATUS, status::INTERRUPT);
    assert!(!bench.irq.intx);
    assert_eq!(bench.get64(reg::INTERRUPTS), 1);
}

#[test]
fn interrupts_when_done_if_told_so() {
    let mut bench = Bench::new();
    bench.set(reg::CONTROL, !0x300);
    bench.set(reg::VECTOR, 5);
    assert_eq!(
        bench.run(Command::Fill, 0, BASE, 3 * CHUNK as u32),
        status::DONE | status::INTERRUPT
    );
    bench.run(Command::Read, 0, 0, 4);
    assert_eq!(bench.irq.raised, [5, 5], "a fault is an end too");
    assert_eq!(bench.get(reg::CONTROL), control::INTERRUPT_WHEN_DONE);
}

#[test]
fn the_memory_of_bar_2_is_a_source_and_a_destination() {
    let mut bench = Bench::new();
    bench.write(2, 0xfff8, b"farside!");
    bench.set(reg::CONTROL, control::SRC_IN_SRAM);
    assert_eq!(bench.run(Command::Copy, 0xfff8, BASE, 8), status::DONE);
    assert_eq!(bench.memory(BASE, 8), b"farside!");
    bench.set(reg::CONTROL, control::DST_IN_SRAM);
    assert_eq!(bench.run(Command::Copy, BASE, 4, 8), status::DONE);
    assert_eq!(bench.read(2, 4, 4), b"fars");
    assert_eq!(bench.run(Command::Copy, BASE, 0xfff9, 8), status::REJECTED);
    assert_eq!(bench.get64(reg::BYTES_WRITTEN), 8, "DMA only");
}

#[test]
fn bar_2_keeps_its_contents_when_it_becomes_shared_and_back() {
    let mut bench = Bench::new();
    bench.write(2, 8, b"before");
    let shared = SharedMemory::anonymous(SRAM_SIZE as usize).unwrap();
    let slice = shared.slice(0, SRAM_SIZE as usize).unwrap();
    bench.device.set_bar_memory(2, 0, Some(slice.clone()));
    let mut seen = [0; 6];
    slice.slice(8, 6).unwrap().read(&mut seen);
    assert_eq!(&seen, b"before");
    slice.write(b"by cpu");
    assert_eq!(bench.read(2, 0, 4), b"by c");
    bench.device.set_bar_memory(2, 0, None);
    assert_eq!(bench.read(2, 0, 8), b"by cpu\0\0");
    assert_eq!(bench.read(2, 8, 4), b"befo");
    // Too short: not used.
    bench.device.set_bar_memory(2, 0, shared.slice(0, 4096));
    assert_eq!(bench.read(2, 8, 4), b"befo");
}

#[test]
fn registers_take_every_width() {
    let mut bench = Bench::new();
    bench.set64(reg::SRC, 0x8877_6655_4433_2211);
    bench.write(0, reg::SRC + 5, &[0xaa]);
    bench.write(0, reg::SRC + 2, &[0xbb, 0xcc]);
    assert_eq!(bench.get64(reg::SRC), 0x8877_aa55_ccbb_2211);
    assert_eq!(bench.read(0, reg::SRC + 6, 2), [0x77, 0x88]);
    bench.set64(reg::SCRATCH_END - 8, 7);
    assert_eq!(bench.get64(reg::SCRATCH_END - 8), 7);
    bench.set64(reg::SCRATCH_END, 7);
    bench.set64(reg::FAULT_IOVA, 7);
    assert_eq!(bench.get64(reg::SCRATCH_END), 0);
    assert_eq!(bench.get64(reg::FAULT_IOVA), 0);
}

#[test]
fn msix_table_is_storage_and_pending_bits_are_the_interrupts_own() {
    let mut bench = Bench::new();
    assert_eq!(
        bench.read(4, 2047 * 16 + 12, 4),
        [1, 0, 0, 0],
        "masked at first"
    );
    bench.write(4, 2047 * 16, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(bench.read(4, 2047 * 16 + 4, 4), [5, 6, 7, 8]);
    assert_eq!(bench.read(4, PBA, 4), [1, 2, 0, 0]);
    assert_eq!(bench.read(4, PBA + 248, 8)[7], 0x80);
    assert_eq!(bench.read(4, PBA + 256, 8), [0; 8]);
    bench.write(4, PBA, &[0xff; 8]);
    assert_eq!(bench.read(4, PBA, 4), [1, 2, 0, 0]);
}

#[test]
fn a_reset_is_as_power_on() {
    let mut bench = Bench::new();
    bench.set64(reg::SCRATCH, 1);
    bench.write(2, 0, b"secret!!");
    bench.set(reg::LENGTH, MAX_LENGTH);
    bench.set64(reg::DST, BASE);
    bench.set(reg::COMMAND, Command::Fill as u32);
    assert_eq!(bench.get(reg::STATUS), status::BUSY);
    bench.with_bus(|device, bus| device.quiesce(bus));
    bench.device.reset();
    assert!(!bench.poll());
    assert_eq!(bench.get(reg::STATUS), 0);
    assert_eq!(bench.get64(reg::SCRATCH), 0);
    assert_eq!(bench.read(2, 0, 8), [0; 8]);
    assert_eq!(bench.run(Command::Fill, 0, BASE, 4), status::DONE);
}

#[test]
fn counters_for_people_outlive_a_reset() {
    let mut bench = Bench::new();
    bench.run(Command::Fill, 0, BASE, 16);
    bench.device.reset();
    assert_eq!(bench.get64(reg::BYTES_WRITTEN), 0);
    bench.run(Command::Fill, 0, BASE, 4);
    bench.run(Command::Read, 0, 0, 4);
    assert_eq!(
        bench.device.stats(),
        [
            ("commands", 3),
            ("bytes_read", 0),
            ("bytes_written", 20),
            ("interrupts", 0),
            ("faults", 1)
        ]
    );
}

#[test]
fn configuration_space_lists_its_capabilities() {
    let device = DmaTest::new();
    let config = &device.description().config;
    assert_eq!(config.len(), 4096);
    assert_eq!(config[..4], [0x5d, 0xfa, 0xa7, 0xd3]);
    let mut found = Vec::new();
    let mut next = config[0x34];
    while next != 0 {
        found.push((usize::from(next), config[usize::from(next)]));
        next = config[usize::from(next) + 1];
    }
    assert_eq!(
        found,
        [
            (at::PM, 0x01),
            (at::MSI, 0x05),
            (at::MSIX, 0x11),
            (at::PCIE, 0x10),
            (at::VENDOR, 0x09)
        ]
    );
    let mut found = Vec::new();
    let mut next = 0x100;
    while next != 0 {
        let header = u32::from_le_bytes(config[next..next + 4].try_into().unwrap());
        found.push((next, header as u16));
        next = (header >> 20) as usize;
    }
    assert_eq!(
        found,
        [(at::SERIAL, 0x03), (at::ATS, 0x0f), (at::VSEC, 0x0b)]
    );
    // Vector counts agree with the description.
    assert_eq!(
        u16::from_le_bytes([config[at::MSIX + 2], config[at::MSIX + 3]]),
        2047
    );
    assert_eq!(1 << (config[at::MSI + 2] >> 1 & 7), 32);
}

proptest! {
    /// No sequence of guest writes panics, and the device becomes idle.
    #[test]
    fn no_register_write_breaks_the_device(
        writes in prop::collection::vec(
            (prop_oneof![0x08u64..0x38, 0u64..0x1000], any::<u64>(), 0u32..4), 0..200)
    ) {
        let mut bench = Bench::new();
        for (offset, value, width) in writes {
            let len = 1u64 << width;
            let offset = offset & !(len - 1);
            bench.write(0, offset, &value.to_le_bytes()[..len as usize]);
            if (offset..offset + len).contains(&reg::COMMAND) {
                // Mostly valid commands.
                bench.set(reg::COMMAND, value as u32 % 8);
            }
            bench.read(0, offset, len as usize);
            bench.poll();
        }
        let mut polls = 0;
        while bench.poll() {
            polls += 1;
            prop_assert!(polls <= MAX_LENGTH as usize / CHUNK);
        }
        prop_assert_eq!(bench.get(reg::STATUS) & status::BUSY, 0);
    }
}
