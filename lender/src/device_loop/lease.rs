//! A device while it is borrowed.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use farside_control::{
    Channel, ChannelError, DeviceStatus, Envelope, Epoch, ErrorKind, RemoteError, Reply, Request,
    irq_counts,
    registers::{Access, Event},
};
use farside_devices::{Bus, Device};
use farside_fabric::{FarAddress, Iova, LenderPath, MemoryRange, soft::Path};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    DeviceLoop, counters,
    ports::{DmaPort, IrqPort},
    refusals::{internal, invalid, refused},
    spin::Spin,
};
use crate::registry::{Lease, Mail};

/// How long a borrower may leave an answer unread.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// How long DMA in flight may take to drain before the borrower is told that
/// it does not.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// Register accesses that are served before others have their turn.
const ACCESSES: usize = 64;

/// Register accesses that are served before a request. More than a register
/// channel holds, so all that were sent before the request are; and an end,
/// should the borrower never stop sending.
const ACCESSES_BEFORE_REQUEST: usize = 64 * 1024;

/// Refusals of one lease that are logged one by one. What a borrower is
/// refused, its guest may have caused.
const LOGGED_REFUSALS: u64 = 10;

/// Rounds of a busy device between two looks at the connections. A look costs
/// a system call, a round usually none.
const ROUNDS_PER_LOOK: u32 = 16;

/// The thread's state for the length of one lease.
pub(super) struct LeaseLoop<'a> {
    owner: &'a mut DeviceLoop,
    connection: Channel,
    registers: Channel,
    vm: String,
    epoch: Epoch,
    path: Path,
    irq: IrqPort,
    refusals: u64,
}

/// Why a lease ended.
enum End {
    Returned,
    PeerGone(ChannelError),
    Stopped,
}

impl<'a> LeaseLoop<'a> {
    /// Serves one lease from its grant to its end.
    pub(super) fn serve(owner: &'a mut DeviceLoop, lease: Lease) {
        let Lease {
            mut connection,
            vm,
            epoch,
            bar_memory,
        } = lease;
        let id = owner.id.clone();
        let granted = owner.device_memory(bar_memory).and_then(|()| {
            let counts = irq_counts(owner.device.description()).map_err(internal)?;
            let path = owner.adapter.attach(&id).map_err(refused)?;
            let (ours, theirs) = Channel::pair().map_err(internal)?;
            Ok((IrqPort::new(counts), path, ours, theirs))
        });
        let (irq, path, registers, theirs) = match granted {
            Ok(granted) => granted,
            Err(error) => {
                log::error!("device {id}: cannot lend to VM {vm}: {error}");
                owner.take_device_memory();
                // First, so that the peer can try again at once.
                owner.registry.release(&id, epoch);
                // The peer is refused either way.
                let _ = connection.send(&Reply::Refused(error), &[], SEND_TIMEOUT);
                return;
            }
        };
        owner.device.reset();
        let theirs = theirs.into_socket();
        let sent = connection.send(&Reply::Lease { epoch }, &[theirs.as_fd()], SEND_TIMEOUT);
        drop(theirs);
        let mut lease = LeaseLoop {
            owner,
            connection,
            registers,
            vm,
            epoch,
            path,
            irq,
            refusals: 0,
        };
        log::info!("device {id}: borrowed by VM {} (epoch {epoch})", lease.vm);
        let end = match sent {
            Ok(()) => lease.run(),
            Err(error) => End::PeerGone(error),
        };
        lease.take_back(end);
    }

    fn run(&mut self) -> End {
        let mut spin = Spin::new(self.owner.poll_time);
        let mut idle_since = Instant::now();
        let mut rounds = 0;
        loop {
            rounds += 1;
            let worked = self.poll_device();
            let now = Instant::now();
            if worked {
                idle_since = now;
            }
            let sleep = !worked && now - idle_since >= spin.time() && self.arm_device();
            if !sleep && rounds % ROUNDS_PER_LOOK != 0 {
                if !worked {
                    // Whoever makes the work may need this processor.
                    std::thread::yield_now();
                }
                continue;
            }
            match self.wait(sleep) {
                Ok(true) => {
                    idle_since = Instant::now();
                    if sleep {
                        spin.woke_after(idle_since - now);
                    }
                }
                Ok(false) => {}
                Err(end) => return end,
            }
        }
    }

    /// Handles what is there; first waits for it when `sleep`. Returns whether
    /// there was anything.
    fn wait(&mut self, sleep: bool) -> Result<bool, End> {
        let relay_waits = if self.irq.relay_waits() {
            PollFlags::OUT
        } else {
            PollFlags::empty()
        };
        let owner = &self.owner;
        // A device with no descriptor of its own is woken by its other ones.
        let device = owner.device.wake_fd().unwrap_or(owner.stop.as_fd());
        let mut fds = [
            PollFd::new(&self.registers, PollFlags::IN | relay_waits),
            PollFd::new(&self.connection, PollFlags::IN),
            PollFd::new(&owner.mail_wake, PollFlags::IN),
            PollFd::new(&owner.stop, PollFlags::IN),
            PollFd::from_borrowed_fd(device, PollFlags::IN),
        ];
        let now = Timespec::default();
        let ready = match poll(&mut fds, (!sleep).then_some(&now)) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => 0,
            Err(errno) => {
                log::error!("device {}: cannot wait: {errno}", owner.id);
                return Err(End::Stopped);
            }
        };
        if ready == 0 {
            return Ok(false);
        }
        let is_ready = |n: usize| !fds[n].revents().is_empty();
        let (registers, connection) = (is_ready(0), is_ready(1));
        let (mail, stop) = (is_ready(2), is_ready(3));
        if registers {
            self.serve_registers(ACCESSES)?;
        }
        if mail {
            self.serve_mail();
        }
        if connection {
            // A request must not overtake the register accesses that went
            // before it.
            self.serve_registers(ACCESSES_BEFORE_REQUEST)?;
            self.serve_request()?;
        }
        if stop {
            return Err(End::Stopped);
        }
        Ok(true)
    }

    fn poll_device(&mut self) -> bool {
        let worked = self.with_bus(|device, bus| device.poll(bus));
        if worked {
            self.send_relayed();
        }
        worked
    }

    fn arm_device(&mut self) -> bool {
        self.with_bus(|device, bus| device.arm(bus))
    }

    fn with_bus<T>(&mut self, call: impl FnOnce(&mut dyn Device, &mut Bus<'_>) -> T) -> T {
        let mut dma = DmaPort(&mut self.path);
        let mut bus = Bus {
            dma: &mut dma,
            irq: &mut self.irq,
        };
        call(&mut *self.owner.device, &mut bus)
    }

    fn serve_registers(&mut self, most: usize) -> Result<(), End> {
        for _ in 0..most {
            let access = match self.registers.try_receive::<Access>() {
                Ok(Some((access, _))) => access,
                Ok(None) => break,
                Err(error) => return Err(End::PeerGone(error)),
            };
            match access {
                Access::Read { bar, offset, len } => {
                    let mut data = [0xff; 8];
                    if self.owner.is_valid(bar, offset, len) {
                        let data = &mut data[..usize::from(len)];
                        self.with_bus(|device, bus| device.bar_read(bar, offset, data, bus));
                    }
                    let value = u64::from_le_bytes(data);
                    // As on PCIe, where a completion does not pass messages.
                    if self.irq.relay_waits() {
                        self.send_relayed();
                    }
                    self.registers
                        .send(&Event::Data { value }, &[], SEND_TIMEOUT)
                        .map_err(End::PeerGone)?;
                }
                Access::Write {
                    bar,
                    offset,
                    len,
                    value,
                } => {
                    if self.owner.is_valid(bar, offset, len) {
                        let data = value.to_le_bytes();
                        let data = &data[..usize::from(len)];
                        self.with_bus(|device, bus| device.bar_write(bar, offset, data, bus));
                    }
                }
            }
        }
        self.send_relayed();
        Ok(())
    }

    /// Sends what fired in the relayed form. What finds no room stays in the
    /// relay, where repeats of a vector cost nothing.
    fn send_relayed(&mut self) {
        let registers = &mut self.registers;
        self.irq.drain_relay(|fire| {
            // An error shows again, and is handled, when the channel is read.
            matches!(registers.try_send(&Event::Interrupt(fire), &[]), Ok(true))
        });
    }

    fn serve_mail(&mut self) {
        self.owner.mail_wake.lower();
        while let Ok(mail) = self.owner.mail.try_recv() {
            match mail {
                Mail::Status(reply) => {
                    if let Some(status) = self.status() {
                        // Whoever asked may have gone.
                        let _ = reply.try_send(status);
                    }
                }
                Mail::Lease(lease) => {
                    // The registry grants one lease at a time.
                    log::error!(
                        "device {}: a second lease (epoch {}) while epoch {} runs",
                        self.owner.id,
                        lease.epoch,
                        self.epoch
                    );
                }
            }
        }
    }

    fn serve_request(&mut self) -> Result<(), End> {
        let (envelope, fds) = match self.connection.try_receive::<Envelope>() {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(()),
            // A guest that enables more vectors than there are descriptors
            // left does not lose its device for that.
            Err(error @ ChannelError::DescriptorsLost) => {
                let refused = RemoteError {
                    kind: ErrorKind::Limit,
                    message: error.to_string(),
                };
                return self.reply(Err(refused));
            }
            Err(error) => return Err(End::PeerGone(error)),
        };
        let returned = matches!(envelope.request, Request::Return);
        let reply = if envelope.epoch == self.epoch {
            self.answer(envelope.request, fds)
        } else {
            Err(RemoteError {
                kind: ErrorKind::StaleEpoch,
                message: format!(
                    "device {}: request under epoch {}, but the lease has epoch {}",
                    self.owner.id, envelope.epoch, self.epoch
                ),
            })
        };
        if returned && reply.is_ok() {
            // Answered when all is undone.
            return Err(End::Returned);
        }
        self.reply(reply)
    }

    fn reply(&mut self, reply: Result<Reply, RemoteError>) -> Result<(), End> {
        let reply = reply.unwrap_or_else(|error| {
            self.refusals += 1;
            if self.refusals <= LOGGED_REFUSALS {
                log::warn!(
                    "device {}: refused a request of VM {}: {error}",
                    self.owner.id,
                    self.vm
                );
            }
            Reply::Refused(error)
        });
        self.connection
            .send(&reply, &[], SEND_TIMEOUT)
            .map_err(End::PeerGone)
    }

    fn answer(&mut self, request: Request, fds: Vec<OwnedFd>) -> Result<Reply, RemoteError> {
        match request {
            Request::Reset => {
                self.close()?;
                self.owner.device.reset();
                self.irq.reset();
            }
            Request::EnableBusMaster => self.path.set_bus_master(true).map_err(internal)?,
            Request::Close => {
                self.close()?;
                self.resume();
            }
            Request::SetIntxDisable { disabled } => self.irq.set_intx_disable(disabled),
            Request::FarMap {
                far,
                len,
                offset,
                writable,
            } => {
                let file = fds.into_iter().next().ok_or_else(|| {
                    invalid(format!("FarMap of {far:#x} came without a descriptor"))
                })?;
                let memory = MemoryRange {
                    file: Arc::new(file.into()),
                    offset,
                    len,
                    writable,
                };
                self.path
                    .far_map(FarAddress::new(far), memory)
                    .map_err(refused)?;
            }
            Request::FarUnmap { far, len } => {
                self.drained(|path| path.far_unmap(FarAddress::new(far), len).map_err(refused))?;
            }
            Request::OpenWindow { iova, far, len } => {
                let window = self
                    .path
                    .open_window(Iova::new(iova), FarAddress::new(far), len)
                    .map_err(refused)?;
                return Ok(Reply::Window {
                    lut_entries: window.lut_entries,
                });
            }
            Request::CloseWindow { iova } => {
                self.drained(|path| path.close_window(Iova::new(iova)).map_err(refused))?;
            }
            Request::SetIrqs(update) => {
                self.irq.apply(update, fds)?;
                self.send_relayed();
            }
            Request::Status { .. } => {
                return self
                    .status()
                    .map(|status| Reply::Status(Box::new(status)))
                    .ok_or_else(|| invalid("the device is gone".into()));
            }
            Request::Return => {}
            other @ (Request::Hello { .. }
            | Request::Devices
            | Request::Limits
            | Request::Describe { .. }
            | Request::Borrow { .. }) => {
                return Err(invalid(format!("{other:?} has no place within a lease")));
            }
        }
        Ok(Reply::Done)
    }

    /// Does `change` while no DMA is in flight, then lets the device go on.
    fn drained(
        &mut self,
        change: impl FnOnce(&mut Path) -> Result<(), RemoteError>,
    ) -> Result<(), RemoteError> {
        let drained = self.drain(DRAIN_TIMEOUT);
        let changed = drained.and_then(|()| change(&mut self.path));
        self.resume();
        changed
    }

    /// Leaves the device quiesced, with no way to memory.
    fn close(&mut self) -> Result<(), RemoteError> {
        // In this order: what is in flight completes in the guest's memory. What
        // does not, is cut off.
        let drained = self.drain(DRAIN_TIMEOUT);
        self.path.set_bus_master(false).map_err(internal)?;
        drained?;
        self.path.close_all().map_err(internal)?;
        self.path.far_unmap_all();
        Ok(())
    }

    fn drain(&mut self, timeout: Duration) -> Result<(), RemoteError> {
        let deadline = Instant::now() + timeout;
        while !self.with_bus(|device, bus| device.quiesce(bus)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(RemoteError {
                    kind: ErrorKind::Internal,
                    message: format!(
                        "device {}: DMA in flight has not drained within {timeout:?}",
                        self.owner.id
                    ),
                });
            }
            let Some(fd) = self.owner.device.wake_fd() else {
                continue;
            };
            let left = Timespec::try_from(left).unwrap_or_default();
            // An interrupted or failed wait is only a shorter one.
            let _ = poll(
                &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
                Some(&left),
            );
        }
        Ok(())
    }

    fn resume(&mut self) {
        self.with_bus(|device, bus| device.resume(bus));
    }

    fn status(&self) -> Option<DeviceStatus> {
        Some(DeviceStatus {
            entry: self.owner.registry.entry(&self.owner.id)?,
            bus_master: self.path.bus_master(),
            usage: self.path.usage(),
            interrupts: self.irq.fired(),
            faults: self.path.faults().summary(),
            counters: counters(&*self.owner.device),
        })
    }

    /// Undoes the lease, in the order the module documentation gives.
    fn take_back(mut self, end: End) {
        while let Err(error) = self.close() {
            log::error!("{error}; VM {} keeps its lease until it has", self.vm);
        }
        self.owner.device.reset();
        self.owner.take_device_memory();
        self.owner.last_faults = self.path.faults().summary();
        let why = match &end {
            End::Returned => "returned".to_owned(),
            End::PeerGone(ChannelError::Closed) => "taken back: the backend is gone".to_owned(),
            End::PeerGone(error) => format!("taken back: {error}"),
            End::Stopped => "taken back: the lender stops".to_owned(),
        };
        log::info!(
            "device {}: {why} (VM {}, epoch {}, {} DMA faults, {} requests refused)",
            self.owner.id,
            self.vm,
            self.epoch,
            self.path.faults().total(),
            self.refusals
        );
        let Self {
            owner,
            mut connection,
            path,
            epoch,
            ..
        } = self;
        // The requester entry first: whoever sees the device free finds one.
        drop(path);
        owner.registry.release(&owner.id, epoch);
        if matches!(end, End::Returned) {
            // The lease is over whether or not the borrower hears of it.
            let _ = connection.send(&Reply::Done, &[], SEND_TIMEOUT);
        }
        // Closing the connection tells the borrower that all of this is done.
    }
}
