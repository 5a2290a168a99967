//! A device that notes what is done to it.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use farside_devices::{Device as _, dma_test::DmaTest};
use farside_fabric::{FarAddress, Iova, MemoryRange};
use farside_irq_relay::{Fire, Relay};
use farside_lender_protocol::{
    BarMemory, BarOwner, Described, IrqUpdate, RamRange, RemoteError, Route, irq_counts,
};

use crate::{
    borrowable::{Begun, Borrowable, Report},
    refusals::{failed, invalid},
};

/// What was done to a device, in order.
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

/// Writing here fires MSI-X vector 0.
pub(super) const DOORBELL: u64 = 8;

/// The device has a problem for as long as this is not zero.
pub(super) const PROBLEM: u64 = 16;

/// Keeps the last value written to it.
pub(super) const SCRATCH: u64 = 0;

pub(super) struct Recorder {
    described: Described,
    log: Arc<Mutex<Vec<Done>>>,
    relay: Arc<Relay>,
    scratch: u64,
    bus_master: bool,
    /// Calls of `close` that fail before one succeeds.
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

impl Borrowable for Recorder {
    fn source(&self) -> &'static str {
        "recorder"
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn check(&self, _route: Route, _ram: &[RamRange]) -> Result<(), RemoteError> {
        Ok(())
    }

    fn begin(
        &mut self,
        _route: Route,
        _vm: &str,
        _bar_memory: Vec<OwnedFd>,
    ) -> Result<Begun, RemoteError> {
        self.note(Done::Begin);
        Ok(Begun {
            bars: vec![BarMemory::Far { address: 1 << 40 }],
            files: Vec::new(),
        })
    }

    fn end(&mut self) {
        self.note(Done::End);
    }

    fn reset(&mut self) -> Result<(), RemoteError> {
        self.note(Done::Reset);
        Ok(())
    }

    fn close(&mut self, _patience: Duration) -> Result<(), RemoteError> {
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

    fn settle(&mut self) -> Result<(), RemoteError> {
        self.note(Done::Settle);
        Ok(())
    }

    fn enable_bus_master(&mut self) -> Result<(), RemoteError> {
        self.bus_master = true;
        self.note(Done::BusMaster);
        Ok(())
    }

    fn far_map(&mut self, _at: FarAddress, _memory: MemoryRange) -> Result<(), RemoteError> {
        Err(invalid("nobody can have sent a file".into()))
    }

    fn far_unmap(&mut self, _at: FarAddress, _len: u64) -> Result<(), RemoteError> {
        Ok(())
    }

    fn open_window(&mut self, _: Iova, _: FarAddress, _: u64) -> Result<u32, RemoteError> {
        self.note(Done::Window);
        Ok(1)
    }

    fn close_window(&mut self, _iova: Iova) -> Result<(), RemoteError> {
        Ok(())
    }

    fn set_irqs(&mut self, update: IrqUpdate, fds: Vec<OwnedFd>) -> Result<(), RemoteError> {
        let counts = irq_counts(&self.described.description).unwrap();
        match update.into_request(&counts, fds, &self.relay) {
            Ok(_) => Ok(()),
            Err(error) => Err(invalid(error.to_string())),
        }
    }

    fn set_intx_disable(&mut self, _disabled: bool) -> Result<(), RemoteError> {
        Ok(())
    }

    fn interrupt_status(&mut self) -> bool {
        false
    }

    fn relay_waits(&self) -> bool {
        !self.relay.is_empty()
    }

    fn drain_relay(&mut self, send: &mut dyn FnMut(Fire) -> bool) {
        self.relay
            .drain(|fire| assert!(send(fire), "there is room for one"));
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
            let fire = Fire::new(farside_irq_relay::IrqIndex::Msix, 0).unwrap();
            self.relay.post(fire).unwrap();
        }
        if offset == PROBLEM {
            self.problem = (self.scratch != 0).then(|| format!("problem {}", self.scratch));
        }
        self.note(Done::Write(self.scratch));
    }

    fn poll(&mut self) -> bool {
        false
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
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
