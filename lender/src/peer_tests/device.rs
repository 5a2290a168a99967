//! A device that records all calls.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use farside_devices::{Device as _, dma_test::DmaTest};
use farside_fabric::{
    BusAddress, FabricError, Iova, LenderPath, MemoryRange, PeerAddress, Usage, WindowUse,
    memory::SharedMemory,
};
use farside_irq_relay::{IrqEvent, Relay};
use farside_lender_protocol::{
    BarMemory, BarOwner, Described, IrqUpdate, RamRange, RemoteError, Transport, irq_counts,
};

use crate::{
    lease_owner::LeaseOwner,
    refusals::{failed, invalid},
    source::{
        Available, BorrowerMemory, DeviceSource, Irqs, Leased, LeasedDevice, NotLeased, Report,
    },
};

/// Calls of a device, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Done {
    Begin,
    Reset,
    BusMaster,
    Window,
    Write(u64),
    CloseFailed,
    Close,
    Settle,
    End,
    Drop,
}

/// The peer address of its BAR.
pub(super) const BAR: PeerAddress = PeerAddress::new(1 << 40);

/// A write here raises MSI-X vector 0.
pub(super) const DOORBELL: u64 = 8;

/// While this is not zero, the device reports a problem.
pub(super) const PROBLEM: u64 = 16;

/// Retains the last value written.
pub(super) const SCRATCH: u64 = 0;

pub(super) struct Recorder {
    described: Described,
    log: Arc<Mutex<Vec<Done>>>,
    relay: Arc<Relay>,
    scratch: u64,
    bus_master: bool,
    /// Number of `revoke` calls that fail before one succeeds.
    failing_closes: Arc<AtomicU32>,
    problem: Option<String>,
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.note(Done::Drop);
    }
}

impl Recorder {
    pub(super) fn new(failing_closes: &Arc<AtomicU32>) -> (Self, Arc<Mutex<Vec<Done>>>) {
        let log = Arc::default();
        let device = Self {
            described: Described {
                description: DmaTest::new().description().clone(),
                bars: BarOwner::Lender,
                rom: 0,
                state: 0,
            },
            log: Arc::clone(&log),
            relay: Arc::new(Relay::new()),
            scratch: 0,
            bus_master: false,
            failing_closes: Arc::clone(failing_closes),
            problem: None,
        };
        (device, log)
    }

    fn note(&self, done: Done) {
        self.log.lock().unwrap().push(done);
    }
}

impl Available for Recorder {
    fn kind(&self) -> &'static str {
        "recorder"
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

    fn flush(&mut self) -> Result<(), RemoteError> {
        self.note(Done::Settle);
        Ok(())
    }

    fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    fn report(&self) -> Report {
        Report {
            bus_master: self.bus_master,
            ..Report::default()
        }
    }
}

impl DeviceSource for Recorder {
    fn lease(
        self: Box<Self>,
        _route: Transport,
        _owner: &LeaseOwner,
        _memory: BorrowerMemory,
    ) -> Result<Leased, NotLeased> {
        self.note(Done::Begin);
        Ok(Leased {
            device: self,
            bars: vec![BarMemory::Peer { address: BAR }],
            files: Vec::new(),
        })
    }
}

impl LeasedDevice for Recorder {
    fn source(&mut self) -> &mut dyn DeviceSource {
        self
    }

    fn report(&mut self) -> Report {
        Available::report(self)
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        Ok(())
    }

    fn bar_read(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        let len = data.len();
        data.copy_from_slice(&self.scratch.to_le_bytes()[..len]);
    }

    fn bar_write(&mut self, _bar: u8, offset: u64, data: &[u8]) {
        let mut value = [0; 8];
        value[..data.len()].copy_from_slice(data);
        self.scratch = u64::from_le_bytes(value);
        if offset == DOORBELL {
            let event = IrqEvent::new(farside_irq_relay::IrqIndex::Msix, 0).unwrap();
            self.relay.post(event).unwrap();
        }
        if offset == PROBLEM {
            self.problem = (self.scratch != 0).then(|| format!("problem {}", self.scratch));
        }
        self.note(Done::Write(self.scratch));
    }

    fn irqs(&mut self) -> &mut dyn Irqs {
        self
    }

    fn path(&mut self) -> &mut dyn LenderPath {
        self
    }

    fn map_peer(
        &mut self,
        _at: PeerAddress,
        _range: &MemoryRange,
        _memory: Arc<SharedMemory>,
    ) -> Result<(), RemoteError> {
        Err(invalid("nobody can have sent a file".into()))
    }

    fn unmap_peer(&mut self, _at: PeerAddress, _len: u64) -> Result<(), RemoteError> {
        Ok(())
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn poll(&mut self) -> bool {
        false
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn reset(&mut self) -> Result<(), RemoteError> {
        self.note(Done::Reset);
        Ok(())
    }

    fn revoke(&mut self, _patience: Duration) -> Result<(), RemoteError> {
        let one_less = |left: u32| left.checked_sub(1);
        let fails =
            self.failing_closes
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        if fails.is_ok() {
            self.note(Done::CloseFailed);
            return Err(failed("the command register cannot be written"));
        }
        self.bus_master = false;
        self.note(Done::Close);
        Ok(())
    }

    fn end(self: Box<Self>) -> Box<dyn DeviceSource> {
        self.note(Done::End);
        self
    }
}

impl Irqs for Recorder {
    fn set(&mut self, update: IrqUpdate, fds: Vec<OwnedFd>) -> Result<(), RemoteError> {
        let counts = irq_counts(&self.described.description).unwrap();
        match update.into_request(&counts, fds, &self.relay) {
            Ok(_) => Ok(()),
            Err(error) => Err(invalid(error.to_string())),
        }
    }

    fn set_intx_disable(&mut self, _disabled: bool) -> Result<(), RemoteError> {
        Ok(())
    }

    fn intx_status(&mut self) -> bool {
        false
    }

    fn relay(&self) -> &Relay {
        &self.relay
    }
}

impl LenderPath for Recorder {
    fn open_window(&mut self, _: Iova, _: PeerAddress, _: u64) -> Result<WindowUse, FabricError> {
        self.note(Done::Window);
        Ok(WindowUse {
            bus: BusAddress::new(0),
            bytes: 0,
            first_lut_entry: 0,
            lut_entries: 1,
        })
    }

    fn close_window(&mut self, _iova: Iova) -> Result<(), FabricError> {
        Ok(())
    }

    fn close_all(&mut self) -> Result<(), FabricError> {
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }

    fn set_bus_master(&mut self, enabled: bool) -> Result<(), FabricError> {
        self.bus_master = enabled;
        self.note(Done::BusMaster);
        Ok(())
    }
}
