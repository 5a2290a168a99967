//! Checks this crate against real kernels: one end of a borrow between two VMs
//! that an NTB joins. Prints a line for each step and ends with
//! `probe: all is well`.
//!
//! `ntb-probe borrower NTB` in one, `ntb-probe lender NTB DRIVE` in the other:
//! addresses of functions that are bound to vfio-pci, DRIVE an NVMe device that is
//! unused. `tests/guest.rs` runs both.
//!
//! They communicate through the NTB: scratchpads contain messages, and a doorbell announces them.

use std::error::Error;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use farside_fabric::memory::{SharedMemory, create_sealed};
use farside_fabric::{BorrowerDomain, Iova, LenderPath, MemoryRange, Owner, PeerAddress};
use farside_irq_relay::IrqEventFd;
use farside_ntb::platform::FunctionOps;
use farside_ntb::regs::{REGISTERS_BAR, REGISTERS_SIZE};
use farside_ntb::{Adapter, BorrowerNtb, EndpointOptions};
use farside_pci::Bdf;
use farside_vfio::{Api, Domain, Function, RegionMemory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

#[path = "../tests/fabric/messages.rs"]
mod messages;
use messages::Messages;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const RAM: u64 = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(60);
/// Registers of an NVMe controller, in BAR 0.
mod nvme {
    pub const VS: u64 = 0x08;
    pub const CC: u64 = 0x14;
    pub const CSTS: u64 = 0x1c;
    pub const AQA: u64 = 0x24;
    pub const ASQ: u64 = 0x28;
    pub const ACQ: u64 = 0x30;
    pub const DOORBELL: u64 = 0x1000;
}
/// The IOVA of the device's queues, above guest RAM.
const QUEUES: u64 = 1 << 32;
/// The value that the borrower stores to AQA through its window.
const MARK: u32 = 0x0042_0042;

fn main() -> Outcome {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["borrower", ntb] => borrower(ntb.parse()?)?,
        ["lender", ntb, drive] => lender(ntb.parse()?, drive.parse()?)?,
        _ => return Err("usage: ntb-probe borrower NTB | lender NTB DRIVE".into()),
    }
    println!("probe: all is well");
    Ok(())
}

/// An endpoint, and the eventfd of its doorbell 0.
struct End {
    adapter: Adapter,
    messages: Messages,
    bell: IrqEventFd,
}

impl End {
    fn open(ntb: Bdf) -> Outcome<Self> {
        let adapter = EndpointOptions::new(ntb, Api::detect()?).open()?;
        println!("endpoint: {:?}", adapter.capabilities());
        let bell = IrqEventFd::new()?;
        let function = &**adapter.function();
        FunctionOps::signal(function, 0, bell.clone())?;
        let registers = FunctionOps::map_region(function, REGISTERS_BAR, 0, REGISTERS_SIZE)?;
        let messages = Messages(registers);
        messages.unmask_doorbells(1);
        let started = Instant::now();
        adapter.wait_link(PATIENCE)?;
        println!("link: up after {:?}", started.elapsed());
        // The peer's link may have come up while the kernel enabled the doorbell's vector, which
        // loses interrupts of the others: the event's bit is set, and no later event raises it.
        println!("events: {:?}", adapter.take_events());
        Ok(Self {
            adapter,
            messages,
            bell,
        })
    }

    /// Sends two numbers to the peer.
    fn say(&self, words: [u64; 2]) {
        for (index, word) in (0..).step_by(2).zip(words) {
            self.messages.set_scratchpad(index, word as u32);
            self.messages.set_scratchpad(index + 1, (word >> 32) as u32);
        }
        self.messages.ring_doorbell(0);
    }

    /// Waits for a message of the peer.
    fn hear(&self) -> Outcome<[u64; 2]> {
        let timeout = Timespec::try_from(PATIENCE)?;
        let fd = self.bell.as_fd();
        if poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout))? == 0 {
            return Err("the other end said nothing".into());
        }
        self.bell.take()?;
        assert_eq!(self.messages.take_doorbells(), 1);
        Ok([0, 2].map(|index| {
            let halves = [index, index + 1].map(|index| self.messages.peer_scratchpad(index));
            u64::from(halves[0]) | u64::from(halves[1]) << 32
        }))
    }
}

fn borrower(ntb: Bdf) -> Outcome {
    let end = End::open(ntb)?;
    let adapter = &end.adapter;
    adapter.check_ram(&[RAM])?;
    let memory = MemoryRange::whole(create_sealed("guest", RAM)?, RAM);
    let ram = SharedMemory::map_range(&memory)?;
    let range = adapter.peer_space().take(RAM)?;
    let mut domain = BorrowerNtb::new(adapter);
    domain.map(range.start(), memory)?;
    println!("guest RAM at {}: {:?}", range.start(), domain.usage());
    end.say([range.start().get(), RAM]);

    // The device has written its Identify data to guest RAM.
    let [peer_address, len] = end.hear()?;
    let mut serial = [0; 20];
    ram.slice(4, 20).ok_or("inside")?.read(&mut serial);
    println!("serial number: {:?}", String::from_utf8_lossy(&serial));
    assert!(serial.starts_with(b"farside-probe"), "{serial:?}");

    // The device's registers, through a window.
    let window = adapter.open_bar_window(PeerAddress::new(peer_address), len)?;
    println!("window: {window:?}, {} LUT entries", window.lut_entries());
    let registers = adapter.function().map_region(2, window.offset(), 4096)?;
    let version = registers.load_u32(nvme::VS).ok_or("inside")?;
    println!("NVMe version: {version:#x}");
    let (_descriptor, offset) = adapter.bar_file()?;
    println!("window BAR at {offset:#x} of the descriptor");
    registers.store_u32(nvme::AQA, MARK).ok_or("inside")?;
    assert_eq!(registers.load_u32(nvme::AQA), Some(MARK));
    end.say([version.into(), 0]);

    // The lender disconnects, which raises an event.
    let [_, _] = end.hear()?;
    while adapter.link().up {
        let fd = adapter.event_fd();
        let timeout = Timespec::try_from(PATIENCE)?;
        if poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout))? == 0 {
            return Err("the lender's end is not noticed".into());
        }
        println!("events: {:?}", adapter.take_events());
    }
    let error = adapter.check_link().expect_err("the lender has gone");
    println!(
        "refused: {error}",
        error = farside_error_chain::Chain(&error)
    );
    Ok(())
}

fn lender(ntb: Bdf, drive: Bdf) -> Outcome {
    let end = End::open(ntb)?;
    let adapter = &end.adapter;
    let drive = Arc::new(Domain::new(Api::detect()?)?.open(drive)?);
    let [peer_address, len] = end.hear()?;
    println!("guest RAM: {len:#x} bytes at {peer_address:#x}");

    let mut path = adapter.attach("drive", &Owner::new("vm", "user 1"), Arc::clone(&drive))?;
    adapter.check_windows(None, &[len])?;
    let refused = adapter.check_windows(None, &[4 << 30]);
    println!("refused: {}", refused.expect_err("it cannot fit"));
    assert_eq!(drive.domain().usage().mappings, 0);
    let started = Instant::now();
    let window = path.open_window(Iova::new(0), PeerAddress::new(peer_address), len)?;
    println!("window: {window:?}, open after {:?}", started.elapsed());
    println!("usage: {:?}, {:?}", path.usage(), adapter.usage());

    let queues = SharedMemory::anonymous(8192)?;
    let slice = queues.slice(0, 8192).ok_or("inside")?;
    drive.domain().map(Iova::new(QUEUES), &slice, true)?;
    path.set_bus_master(true)?;
    let registers = drive.map_region(0, 0, 4096)?;
    identify(&drive, &registers, &queues)?;
    let started = Instant::now();
    path.flush();
    println!("flush: {:?}", started.elapsed());
    let bars = path.export_bars()?.clone();
    println!("BARs: {bars:x?}");
    end.say([bars.peer_address.get(), bars.len]);

    let [version, _] = end.hear()?;
    assert_eq!(registers.load_u32(nvme::VS).map(u64::from), Some(version));
    assert_eq!(registers.load_u32(nvme::AQA), Some(MARK));
    assert_eq!(adapter.take_events().refused, None);
    path.unexport_bars()?;
    path.set_bus_master(false)?;
    path.close_all()?;
    drop(path);
    drive.domain().unmap(Iova::new(QUEUES), 8192)?;
    assert_eq!(drive.domain().usage().mappings, 0);
    end.say([0, 0]);
    Ok(())
}

/// Makes the device write its Identify data to IOVA 0, which is guest RAM.
fn identify(drive: &Function, registers: &RegionMemory, queues: &Arc<SharedMemory>) -> Outcome {
    let deadline = Instant::now() + PATIENCE;
    let wait = |what: &str, done: &dyn Fn() -> bool| -> Outcome {
        while !done() {
            if Instant::now() > deadline {
                return Err(format!("timed out waiting for {what}").into());
            }
            thread::yield_now();
        }
        Ok(())
    };
    let status = |bits| move || registers.load_u32(nvme::CSTS).unwrap_or(0) & 3 == bits;
    let store = |at, value| registers.store_u32(at, value).ok_or("inside");
    store(nvme::CC, 0)?;
    wait("the device to stop", &status(0))?;
    store(nvme::AQA, 0x0001_0001)?;
    for (at, address) in [(nvme::ASQ, QUEUES), (nvme::ACQ, QUEUES + 4096)] {
        store(at, address as u32)?;
        store(at + 4, (address >> 32) as u32)?;
    }
    store(nvme::CC, 0x0046_0001)?;
    wait("the device to start", &status(1))?;
    // Identify (opcode 6), command 1, controller (CNS 1), data at 0.
    let command = queues.slice(0, 64).ok_or("inside")?;
    command.store_u32(0, 1 << 16 | 6, Ordering::SeqCst);
    command.store_u32(40, 1, Ordering::SeqCst);
    drive.bar_write(0, nvme::DOORBELL, &1u32.to_le_bytes())?;
    let completion = queues.slice(4096, 16).ok_or("inside")?;
    let last = || completion.load_u32(12, Ordering::SeqCst).unwrap_or(0);
    wait("the command", &|| last() & 1 << 16 != 0)?;
    println!("identify: status {:#x}", last() >> 17);
    assert_eq!(last() >> 17, 0);
    Ok(())
}
