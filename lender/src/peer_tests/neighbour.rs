//! The throughput of a device thread while another thread competes for its CPU.

use std::{
    io::{Write, stdout},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use farside_daemon::Wakeup;
use farside_devices::{Device as _, dma_test::DmaTest};
use farside_fabric::{
    LenderPath, MemoryRange, NtbLimits, Owner, PeerAddress,
    memory::SharedMemory,
    soft::{Adapter, Path},
};
use farside_irq_relay::Relay;
use farside_lender_protocol::{
    BarMemory, BarOwner, Described, IrqUpdate, RamRange, RemoteError, Transport,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::{
    device::BAR,
    host::{DEADLINE, Host},
};
use crate::lease_owner::LeaseOwner;
use crate::source::{
    Available, BorrowerMemory, DeviceSource, Irqs, Leased, LeasedDevice, NotLeased, Report,
};

/// Minimum, relative to a thread that polls and never yields, and so has its fair share of
/// the CPU. A device that yields to the neighbour has a hundredth.
const LEAST: f64 = 0.1;
/// Some dozen scheduler time slices.
const TURN: Duration = Duration::from_millis(150);
/// Pairs of turns: other load of the machine affects both of a pair.
const PAIRS: u32 = 8;

/// The memory shared by device and driver.
struct Doorbell {
    asked: AtomicU64,
    answered: AtomicU64,
    /// The device is blocked, or about to block: it must be woken.
    armed: AtomicBool,
    wake: Wakeup,
}

impl Doorbell {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            asked: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            armed: AtomicBool::new(false),
            wake: Wakeup::new().unwrap(),
        })
    }

    /// Answers requests. Returns whether there were any.
    fn answer(&self) -> bool {
        let asked = self.asked.load(SeqCst);
        self.answered.swap(asked, SeqCst) != asked
    }

    /// Round trips per second while `others` run on the device's CPU, each called
    /// repeatedly by a separate thread.
    fn rate_beside(&self, cpu: usize, others: &[&(dyn Fn() + Sync)]) -> f64 {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for other in others {
                scope.spawn(|| {
                    pin_to(cpu);
                    while !stop.load(SeqCst) {
                        other();
                    }
                });
            }
            let rate = self.rate();
            stop.store(true, SeqCst);
            rate
        })
    }

    /// Round trips per second.
    fn rate(&self) -> f64 {
        let start = Instant::now();
        let mut trips = 0;
        while start.elapsed() < TURN {
            let asked = self.asked.load(SeqCst) + 1;
            self.asked.store(asked, SeqCst);
            if self.armed.swap(false, SeqCst) {
                self.wake.raise();
            }
            while self.answered.load(SeqCst) != asked {
                assert!(start.elapsed() < DEADLINE, "no answer to {asked}");
                std::hint::spin_loop();
            }
            trips += 1;
        }
        f64::from(trips) / start.elapsed().as_secs_f64()
    }
}

/// A device that answers immediately, pinned to a CPU.
struct Echo {
    described: Described,
    doorbell: Arc<Doorbell>,
    cpu: usize,
    relay: Relay,
    path: Path,
}

impl Available for Echo {
    fn flush(&mut self) -> Result<(), RemoteError> {
        Ok(())
    }

    fn kind(&self) -> &'static str {
        "echo"
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn check(
        &self,
        _: Option<&LeaseOwner>,
        _: Transport,
        _: &[RamRange],
    ) -> Result<(), RemoteError> {
        Ok(())
    }

    fn report(&self) -> Report {
        Report::default()
    }
}

impl DeviceSource for Echo {
    fn lease(
        self: Box<Self>,
        _: Transport,
        _: &LeaseOwner,
        _: BorrowerMemory,
    ) -> Result<Leased, NotLeased> {
        pin_to(self.cpu);
        Ok(Leased {
            device: self,
            bars: vec![BarMemory::Peer { address: BAR }],
            files: Vec::new(),
        })
    }
}

impl LeasedDevice for Echo {
    fn source(&mut self) -> &mut dyn DeviceSource {
        self
    }

    fn report(&mut self) -> Report {
        Report::default()
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        Ok(())
    }

    fn bar_read(&mut self, _: u8, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn bar_write(&mut self, _: u8, _: u64, _: &[u8]) {}

    fn irqs(&mut self) -> &mut dyn Irqs {
        self
    }

    fn path(&mut self) -> &mut dyn LenderPath {
        &mut self.path
    }

    fn map_peer(
        &mut self,
        _: PeerAddress,
        _: &MemoryRange,
        _: Arc<SharedMemory>,
    ) -> Result<(), RemoteError> {
        Ok(())
    }

    fn unmap_peer(&mut self, _: PeerAddress, _: u64) -> Result<(), RemoteError> {
        Ok(())
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn poll(&mut self) -> bool {
        let work = self.doorbell.answer();
        if work {
            self.doorbell.wake.lower();
        }
        work
    }

    fn prepare_to_block(&mut self) -> bool {
        self.doorbell.armed.store(true, SeqCst);
        self.doorbell.asked.load(SeqCst) == self.doorbell.answered.load(SeqCst)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.doorbell.wake.as_fd())
    }

    fn reset(&mut self) -> Result<(), RemoteError> {
        Ok(())
    }

    fn revoke(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        Ok(())
    }

    fn end(self: Box<Self>) -> Box<dyn DeviceSource> {
        self
    }
}

impl Irqs for Echo {
    fn set(&mut self, _: IrqUpdate, _: Vec<OwnedFd>) -> Result<(), RemoteError> {
        Ok(())
    }

    fn set_intx_disable(&mut self, _: bool) -> Result<(), RemoteError> {
        Ok(())
    }

    fn intx_status(&mut self) -> bool {
        false
    }

    fn relay(&self) -> &Relay {
        &self.relay
    }
}

fn pin_to(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).unwrap();
}

/// A thread that computes on the device's CPU, unrelated to the device, takes no more than
/// its fair share.
#[test]
fn a_busy_neighbour_does_not_starve_the_device() {
    let allowed = sched_getaffinity(None).unwrap();
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let (Some(device), Some(driver)) = (cpus.next(), cpus.next()) else {
        // For `cargo xtask test`: libtest captures `eprintln!`.
        let test = "peer_tests::neighbour::a_busy_neighbour_does_not_starve_the_device";
        writeln!(stdout().lock(), "skipped: {test}: needs two CPUs").unwrap();
        return;
    };
    let doorbell = Doorbell::new();
    let adapter = Adapter::new(NtbLimits::default()).unwrap();
    let echo = Echo {
        described: Described {
            description: DmaTest::new().description().clone(),
            bars: BarOwner::Lender,
            rom: 0,
            state: 0,
        },
        doorbell: Arc::clone(&doorbell),
        cpu: device,
        relay: Relay::new(),
        path: adapter.attach("echo", &Owner::new("vm", "user 1")).unwrap(),
    };
    let host = Host::lending(vec![Box::new(echo)], Duration::from_micros(500));
    let (_peer, token) = host.borrow("a");
    let _registers = host.registers(token).unwrap();
    pin_to(driver);
    let never_yields = Doorbell::new();
    // The thread adapts its poll time to frequent work, and busy-polls.
    doorbell.rate();
    let neighbour = std::hint::spin_loop;
    let poller = || {
        never_yields.answer();
    };
    let [mut fair, mut rate] = [0.0, 0.0];
    let mut pairs = Vec::new();
    for _ in 0..PAIRS {
        let pair = [
            never_yields.rate_beside(device, &[&neighbour, &poller]),
            doorbell.rate_beside(device, &[&neighbour]),
        ];
        fair += pair[0];
        rate += pair[1];
        pairs.push(pair);
    }
    assert!(
        rate / fair >= LEAST,
        "beside a busy thread the device has {:.4} of its due; pairs a second: {pairs:.0?}",
        rate / fair
    );
}
