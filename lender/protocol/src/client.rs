//! The backend's end: one request, one reply, with a deadline.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farside_fabric::NtbLimits;

use crate::{
    Address, BarMemory, Channel, ChannelError, Described, DeviceEntry, DeviceStatus, Envelope,
    Epoch, IrqUpdate, RamRange, Registers, RemoteError, Reply, Request, Route, Ticket, VERSION,
};

/// How long a lender may take to answer. Longer than it waits for a device's
/// DMA to drain, shorter than a VMM's message timeout of 5 s.
const TIMEOUT: Duration = Duration::from_secs(4);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Nobody listens there.
    #[error("cannot reach the lender at {address}{}", unreachable_hint(source))]
    Unreachable {
        /// Where it should be.
        address: Address,
        /// What connecting said.
        source: std::io::Error,
    },
    /// Something else listens there.
    #[error("{address} is not a farside lender: its first bytes are \"{}\"", first.escape_ascii())]
    NotALender {
        /// Where the lender should be.
        address: Address,
        /// What it sent.
        first: [u8; 4],
    },
    /// The connection failed; the lease, if there was one, is lost.
    #[error("lost the lender")]
    Lost(#[source] ChannelError),
    /// The answer has not come in time; the lease, if there was one, stays.
    /// What was asked for may have been done, or may yet be.
    #[error("the lender has not answered within {0:.1?}: it is slow, or stopped")]
    Late(Duration),
    /// What was to be sent can only be sent within a host; nothing changed.
    #[error(transparent)]
    NotSent(ChannelError),
    /// The lender said no; nothing changed.
    #[error(transparent)]
    Refused(#[from] RemoteError),
    /// The lender answered something else than was asked.
    #[error("the lender answered {0} to a request that does not expect it")]
    Unexpected(String),
}

/// What often is behind it.
fn unreachable_hint(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => " (is `farside lend` running?)",
        ErrorKind::PermissionDenied => {
            " (connect as the user that runs it, or as a member of its socket-group)"
        }
        _ => "",
    }
}

impl From<ChannelError> for CallError {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::TimedOut(after) => Self::Late(after),
            other => Self::Lost(other),
        }
    }
}

/// What comes with a lease.
#[derive(Debug)]
pub struct Lease {
    /// The register channel.
    pub registers: Channel,
    /// For each BAR with mappable areas, how the CPU reaches them.
    pub bars: Vec<BarMemory>,
    /// The files of [`BarMemory::File`], in their order.
    pub files: Vec<OwnedFd>,
}

/// A connection to a lender.
///
/// Answers come in the order of the requests. After [`CallError::Late`] the next
/// call first waits for the late answer and drops it, so that it is not taken for
/// its own: when that call is answered, the late one has been served. After
/// [`CallError::Lost`] and [`CallError::Unexpected`] further calls fail.
#[derive(Debug)]
pub struct Client {
    address: Address,
    channel: Channel,
    epoch: Epoch,
    /// Counts what was sent on the register channel.
    accesses: Arc<AtomicU64>,
    lender: String,
    deadline: Option<Instant>,
    fence: Option<Epoch>,
    /// Requests that the lender has not answered yet. Answers come in the order
    /// of requests, so those before the last one's are late, and dropped.
    answers_due: u32,
    failed: bool,
}

impl Client {
    /// Connects to the lender at `address` and agrees on the version. `vm` is the
    /// VM that borrows through this connection; tools give none.
    pub fn connect(address: &Address, vm: Option<&str>) -> Result<Self, CallError> {
        Self::connect_by(address, vm, None)
    }

    /// As [`Client::connect`], with a [deadline](Client::set_deadline).
    pub fn connect_by(
        address: &Address,
        vm: Option<&str>,
        deadline: Option<Instant>,
    ) -> Result<Self, CallError> {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = left.map_or(TIMEOUT, |left| left.min(TIMEOUT));
        let channel =
            Channel::connect(address, timeout).map_err(|source| CallError::Unreachable {
                address: address.clone(),
                source,
            })?;
        let mut client = Self {
            address: address.clone(),
            channel,
            epoch: Epoch(0),
            accesses: Arc::default(),
            lender: String::new(),
            deadline,
            fence: None,
            answers_due: 0,
            failed: false,
        };
        let hello = Request::Hello {
            version: VERSION,
            vm: vm.map(str::to_owned),
        };
        let reply = client.call(hello, &[]).map_err(|error| match error {
            CallError::Lost(ChannelError::Foreign(first)) => CallError::NotALender {
                address: address.clone(),
                first,
            },
            other => other,
        })?;
        match reply {
            (Reply::Welcome { lender }, _) => client.lender = lender,
            (other, _) => return Err(client.unexpected(&other)),
        }
        Ok(client)
    }

    /// When calls from now on must be answered, all together. Each has
    /// 4 s at most in any case.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// What [`Client::borrow_device`] shows, for a VM that was moved to this host.
    pub fn set_fence(&mut self, fence: Option<Epoch>) {
        self.fence = fence;
    }

    /// Closes the connection, and waits for at most `patience` until the
    /// lender has done the same. Under a lease it does that last: when this
    /// returns true, the device does no DMA any more and nothing is open. So
    /// it is, too, if the lender is dead.
    pub fn hang_up(mut self, patience: Duration) -> bool {
        // If the lender closed it first, that shows below.
        let _ = self.channel.shut_down_sending();
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.channel.receive::<Reply>(left) {
                Err(ChannelError::Closed) => return true,
                Err(ChannelError::TimedOut(_) | ChannelError::Io(_)) => return false,
                // Late answers.
                Ok(_)
                | Err(
                    ChannelError::Malformed(_)
                    | ChannelError::Foreign(_)
                    | ChannelError::TooLarge { .. }
                    | ChannelError::DescriptorsLost
                    | ChannelError::NoDescriptors(_),
                ) => {}
            }
        }
    }

    /// The lender's name.
    pub fn lender(&self) -> &str {
        &self.lender
    }

    /// The lease's fencing number; zero when there is no lease.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The devices of this lender.
    pub fn devices(&mut self) -> Result<Vec<DeviceEntry>, CallError> {
        match self.call(Request::Devices, &[])? {
            (Reply::Devices(devices), _) => Ok(devices),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// The limits of this lender's fabric.
    pub fn limits(&mut self) -> Result<NtbLimits, CallError> {
        match self.call(Request::Limits, &[])? {
            (Reply::Limits(limits), _) => Ok(limits),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// What a device looks like.
    pub fn describe(&mut self, device: &str) -> Result<Described, CallError> {
        let device = device.to_owned();
        match self.call(Request::Describe { device }, &[])? {
            (Reply::Description(description), _) => Ok(*description),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// A device's counters.
    pub fn status(&mut self, device: &str) -> Result<DeviceStatus, CallError> {
        let device = device.to_owned();
        match self.call(Request::Status { device }, &[])? {
            (Reply::Status(status), _) => Ok(*status),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// See [`Request::Check`].
    pub fn check(
        &mut self,
        device: &str,
        route: Route,
        ram: Vec<RamRange>,
    ) -> Result<(), CallError> {
        let device = device.to_owned();
        self.done(Request::Check { device, route, ram }, &[])
    }

    /// Borrows a device. `bar_memory` backs its BARs with mappable areas, in
    /// their order, where those are the borrower's. From now on this
    /// connection is the lease.
    pub fn borrow_device(
        &mut self,
        device: &str,
        route: Route,
        bar_memory: &[BorrowedFd<'_>],
    ) -> Result<Lease, CallError> {
        let request = Request::Borrow {
            device: device.to_owned(),
            route,
            fence: self.fence,
        };
        match self.call(request, bar_memory)? {
            (
                Reply::Lease {
                    epoch,
                    registers,
                    bars,
                },
                fds,
            ) => {
                let mut fds = fds.into_iter();
                let files = bars
                    .iter()
                    .filter(|bar| matches!(bar, BarMemory::File { .. }))
                    .count();
                let channel = match registers {
                    Registers::Descriptor => fds.next().map(Channel::from_socket),
                    Registers::Ticket(ticket) => Some(self.open_registers(ticket)?),
                };
                let Some(registers) = channel.filter(|_| fds.len() == files) else {
                    self.failed = true;
                    return Err(CallError::Unexpected(
                        "a lease without its register channel and BAR files".into(),
                    ));
                };
                self.epoch = epoch;
                self.accesses = registers.sent();
                Ok(Lease {
                    registers,
                    bars,
                    files: fds.collect(),
                })
            }
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// See [`Request::Handover`]. Returns the VM's fence.
    pub fn hand_over(
        &mut self,
        device: &str,
        vm: &str,
        migration: &str,
        supersedes: Option<Epoch>,
    ) -> Result<Epoch, CallError> {
        let request = Request::Handover {
            device: device.to_owned(),
            vm: vm.to_owned(),
            migration: migration.to_owned(),
            supersedes,
        };
        match self.call(request, &[])? {
            (Reply::Fence { epoch }, _) => Ok(epoch),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// See [`Request::EndReservation`].
    pub fn end_reservation(&mut self, device: &str) -> Result<(), CallError> {
        let device = device.to_owned();
        self.done(Request::EndReservation { device }, &[])
    }

    /// Connects once more, for the register channel.
    fn open_registers(&mut self, ticket: Ticket) -> Result<Channel, CallError> {
        let opened = self.try_open_registers(ticket);
        // Without it the lease is of no use.
        self.failed |= opened.is_err();
        opened
    }

    fn try_open_registers(&mut self, ticket: Ticket) -> Result<Channel, CallError> {
        let (_, deadline) = self.deadline();
        let left = || deadline.saturating_duration_since(Instant::now());
        let mut channel = self.channel.connect_again(left()).map_err(|source| {
            let address = self.address.clone();
            CallError::Unreachable { address, source }
        })?;
        let request = Envelope {
            epoch: Epoch(0),
            accesses: 0,
            request: Request::Registers { ticket },
        };
        channel.send(&request, &[], left())?;
        match channel.receive(left())?.0 {
            // From here on its messages count.
            Reply::Done => Ok(channel.counted_anew()),
            Reply::Refused(error) => Err(error.into()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Gives the device back.
    pub fn return_device(&mut self) -> Result<(), CallError> {
        self.done(Request::Return, &[])?;
        self.epoch = Epoch(0);
        self.accesses = Arc::default();
        Ok(())
    }

    /// See [`Request::Reset`].
    pub fn reset(&mut self) -> Result<(), CallError> {
        self.done(Request::Reset, &[])
    }

    /// See [`Request::EnableBusMaster`].
    pub fn enable_bus_master(&mut self) -> Result<(), CallError> {
        self.done(Request::EnableBusMaster, &[])
    }

    /// See [`Request::Close`].
    pub fn close(&mut self) -> Result<(), CallError> {
        self.done(Request::Close, &[])
    }

    /// See [`Request::SetIntxDisable`].
    pub fn set_intx_disable(&mut self, disabled: bool) -> Result<(), CallError> {
        self.done(Request::SetIntxDisable { disabled }, &[])
    }

    /// See [`Request::FarMap`].
    pub fn far_map(
        &mut self,
        far: u64,
        len: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        writable: bool,
    ) -> Result<(), CallError> {
        self.done(
            Request::FarMap {
                far,
                len,
                offset,
                writable,
            },
            &[file],
        )
    }

    /// See [`Request::FarUnmap`].
    pub fn far_unmap(&mut self, far: u64, len: u64) -> Result<(), CallError> {
        self.done(Request::FarUnmap { far, len }, &[])
    }

    /// See [`Request::OpenWindow`]. Returns the LUT entries it costs.
    pub fn open_window(&mut self, iova: u64, far: u64, len: u64) -> Result<u32, CallError> {
        match self.call(Request::OpenWindow { iova, far, len }, &[])? {
            (Reply::Window { lut_entries }, _) => Ok(lut_entries),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// See [`Request::CloseWindow`].
    pub fn close_window(&mut self, iova: u64) -> Result<(), CallError> {
        self.done(Request::CloseWindow { iova }, &[])
    }

    /// See [`Request::SetIrqs`].
    pub fn set_irqs(&mut self, update: IrqUpdate, fds: &[BorrowedFd<'_>]) -> Result<(), CallError> {
        self.done(Request::SetIrqs(update), fds)
    }

    fn done(&mut self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<(), CallError> {
        match self.call(request, fds)? {
            (Reply::Done, _) => Ok(()),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    fn call(
        &mut self,
        request: Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), CallError> {
        if self.failed {
            return Err(ChannelError::Closed.into());
        }
        if !fds.is_empty() && self.channel.is_tcp() {
            return Err(CallError::NotSent(ChannelError::NoDescriptors(fds.len())));
        }
        let (started, deadline) = self.deadline();
        let envelope = Envelope {
            epoch: self.epoch,
            accesses: self.accesses.load(Ordering::Acquire),
            request,
        };
        match self.exchange(&envelope, fds, deadline) {
            Ok((Reply::Refused(error), _)) => Err(error.into()),
            Ok(answer) => Ok(answer),
            Err(ChannelError::TimedOut(_)) => Err(CallError::Late(started.elapsed())),
            Err(error) => {
                self.failed = true;
                Err(error.into())
            }
        }
    }

    /// Now, and when a call that is made now must be answered.
    fn deadline(&self) -> (Instant, Instant) {
        let now = Instant::now();
        let limit = now + TIMEOUT;
        (now, self.deadline.map_or(limit, |at| at.min(limit)))
    }

    fn unexpected(&mut self, reply: &Reply) -> CallError {
        self.failed = true;
        // A description is long.
        CallError::Unexpected(format!("{reply:?}").chars().take(200).collect())
    }

    fn exchange(
        &mut self,
        envelope: &Envelope,
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(Reply, Vec<OwnedFd>), ChannelError> {
        let left = || deadline.saturating_duration_since(Instant::now());
        if left().is_zero() {
            return Err(ChannelError::TimedOut(Duration::ZERO));
        }
        let sent = self.channel.sent();
        let before = sent.load(Ordering::Relaxed);
        let result = self.channel.send(envelope, fds, left());
        if sent.load(Ordering::Relaxed) != before {
            self.answers_due += 1;
        }
        result?;
        loop {
            let answer = self.channel.receive(left())?;
            self.answers_due -= 1;
            if self.answers_due == 0 {
                return Ok(answer);
            }
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

#[cfg(test)]
mod tests;
