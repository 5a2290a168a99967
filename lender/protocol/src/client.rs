//! The backend's end: one request, one reply, with a deadline.

mod goes_on;
mod greeted;
mod medium;
mod memory;
mod operate;
mod rom;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, VmName, paths};
use farside_fabric::NtbLimits;

use crate::{
    Address, BarMemory, Channel, ChannelError, Described, DeviceEntry, DeviceStatus, Dialer,
    Envelope, Generation, Greeted, HeldFence, Instance, IrqUpdate, LimitUse, RamRange,
    RegisterToken, Registers, RemoteError, Reply, Request, Secret, Transport, VERSION,
    channel::tls_hint,
};

/// Maximum number of devices of a lender. Bounds memory and time.
pub const MAX_DEVICES: usize = 4096;

/// Timeout of a call. Longer than the lender waits for a device's DMA to drain, shorter
/// than a VMM's message timeout of 5 s.
const TIMEOUT: Duration = Duration::from_secs(4);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The connection was not established.
    #[error("cannot reach the lender at {address}{}", unreachable_hint(source))]
    Unreachable {
        /// The configured address.
        address: Address,
        /// The error of connecting.
        source: io::Error,
    },
    /// The peer does not use this protocol.
    #[error(
        "{address} is not a farside lender: its first bytes are \"{}\"{}",
        first.escape_ascii(), tls_hint(*first)
    )]
    NotALender {
        /// The configured address.
        address: Address,
        /// The first bytes received.
        first: [u8; 4],
    },
    /// The connection failed; the lease, if any, is lost.
    #[error("lost the connection to the lender")]
    Lost(#[source] ChannelError),
    /// Timeout; the lease, if any, continues. The lender may have served the request, or
    /// may still serve it.
    #[error("the lender has not answered within {0:.1?}: it is slow, or stopped")]
    Late(Duration),
    /// The request can only be sent within a host; nothing changed.
    #[error(transparent)]
    NotSent(ChannelError),
    /// The lender refused the request; nothing changed.
    #[error(transparent)]
    Refused(#[from] RemoteError),
    /// The lender's reply does not match the request.
    #[error("unexpected reply of the lender: {0}")]
    Unexpected(String),
}

/// The likely remedy.
fn unreachable_hint(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => " (is `farside lend` running?)",
        ErrorKind::PermissionDenied => {
            " (the lender's user and root may connect, and every user if `borrowers` in lender.toml names one: the socket then has mode 0666)"
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

/// The resources of a lease.
#[derive(Debug)]
pub struct Lease {
    /// The register channel.
    pub registers: Channel,
    /// How the CPU accesses the sparse mmap areas: one entry for each BAR with such areas.
    pub bars: Vec<BarMemory>,
    /// The files of [`BarMemory::File`], in the same order.
    pub files: Vec<OwnedFd>,
    /// The right to go on with it, if it can.
    pub chain: Option<Secret>,
}

/// A connection to a lender.
///
/// Replies arrive in the order of the requests. After [`CallError::Late`] the next call
/// first waits for the late reply and drops it: when a later call is answered, the late
/// one has been served. After [`CallError::Lost`] and [`CallError::Unexpected`] further
/// calls fail.
#[derive(Debug)]
pub struct Client {
    address: Address,
    dialer: Dialer,
    channel: Channel,
    generation: Generation,
    /// Counter of messages sent on the register channel.
    accesses: Arc<AtomicU64>,
    lender: String,
    /// None before Welcome.
    instance: Option<Instance>,
    deadline: Option<Instant>,
    fence: Option<HeldFence>,
    /// Unanswered requests. All replies but the last of them are late, and dropped.
    answers_due: u32,
    failed: bool,
    /// The process of the lease has ended.
    process_ended: bool,
}

impl Client {
    /// Connects to the lender at `address` and checks the version. `vm` is the VM that
    /// borrows through this connection; `None` for tools. A lender at a `tls:` address is shown the
    /// certificate in [`paths::pki_dir`].
    pub fn connect(address: &Address, vm: Option<&VmName>) -> Result<Self, CallError> {
        Self::connect_by(address, vm, &paths::pki_dir(), None)
    }

    /// As [`Client::connect`], with the certificates in another directory, and with a
    /// [deadline](Client::set_deadline).
    pub fn connect_by(
        address: &Address,
        vm: Option<&VmName>,
        pki: &Path,
        deadline: Option<Instant>,
    ) -> Result<Self, CallError> {
        Self::connect_through(&Dialer::new(pki), address, vm, deadline)
    }

    /// As [`Client::connect_by`], through `dialer`, whose [other process](crate::Dial) names its own VM.
    pub fn connect_through(
        dialer: &Dialer,
        address: &Address,
        vm: Option<&VmName>,
        deadline: Option<Instant>,
    ) -> Result<Self, CallError> {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = left.map_or(TIMEOUT, |left| left.min(TIMEOUT));
        let (channel, greeted) = match (address, dialer.other()) {
            (Address::Unix(path), Some(other)) => {
                let Greeted {
                    socket,
                    lender,
                    instance,
                } = other.greet(path, timeout)?;
                (Channel::from_socket(socket), Some((lender, instance)))
            }
            _ => {
                let connected = Channel::connect_by(address, &address.into(), dialer, timeout);
                let address = address.clone();
                let unreachable = |source| CallError::Unreachable { address, source };
                (connected.map_err(unreachable)?, None)
            }
        };
        let mut client = Self::of(address, dialer, channel);
        client.deadline = deadline;
        if let Some((lender, instance)) = greeted {
            client.lender = lender;
            client.instance = Some(instance);
            return Ok(client);
        }
        let hello = Request::Hello {
            version: VERSION,
            vm: vm.map(VmName::to_string),
        };
        let reply = client.call(hello, &[]).map_err(|error| match error {
            CallError::Lost(ChannelError::Foreign(first)) => CallError::NotALender {
                address: address.clone(),
                first,
            },
            // With TLS 1.3 the lender judges this host's certificate after the handshake is
            // complete here.
            CallError::Lost(error @ ChannelError::Tls(_)) => CallError::Unreachable {
                address: address.clone(),
                source: io::Error::other(error),
            },
            other => other,
        })?;
        match reply {
            (Reply::Welcome { lender, instance }, _) => {
                client.lender = lender;
                client.instance = Some(instance);
            }
            (other, _) => return Err(client.unexpected(&other)),
        }
        Ok(client)
    }

    fn of(address: &Address, dialer: &Dialer, channel: Channel) -> Self {
        Self {
            address: address.clone(),
            dialer: dialer.clone(),
            channel,
            generation: Generation(0),
            accesses: Arc::default(),
            lender: String::new(),
            instance: None,
            deadline: None,
            fence: None,
            answers_due: 0,
            failed: false,
            process_ended: false,
        }
    }

    /// Sets a common deadline for all further calls. Each call also has a timeout of 4 s.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Sets the fence for [`Client::borrow_device`], for a VM that was moved to this host.
    pub fn set_fence(&mut self, fence: Option<HeldFence>) {
        self.fence = fence;
    }

    /// The lender's name.
    pub fn lender(&self) -> &str {
        &self.lender
    }

    /// The lease's generation; zero without a lease.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The devices of this lender.
    pub fn devices(&mut self) -> Result<Vec<DeviceEntry>, CallError> {
        let mut devices: Vec<DeviceEntry> = Vec::new();
        loop {
            let after = devices.last().map(|last| last.id.clone());
            match self.call(Request::Devices { after }, &[])? {
                (Reply::Devices(page), _) if page.is_empty() => return Ok(devices),
                (Reply::Devices(page), _) if devices.len() + page.len() <= MAX_DEVICES => {
                    devices.extend(page);
                }
                (other, _) => return Err(self.unexpected(&other)),
            }
        }
    }

    /// The limits of this lender's fabric.
    pub fn limits(&mut self) -> Result<NtbLimits, CallError> {
        match self.call(Request::Limits, &[])? {
            (Reply::Limits(limits), _) => Ok(limits),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// How much of its limits the lender uses; empty unless this user is an operator.
    pub fn limits_in_use(&mut self) -> Result<Vec<LimitUse>, CallError> {
        match self.call(Request::LimitsInUse, &[])? {
            (Reply::LimitsInUse(limits), _) => Ok(limits),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// The description of a device.
    pub fn describe(&mut self, device: &DeviceId) -> Result<Described, CallError> {
        let device = device.to_owned();
        match self.call(Request::Describe { device }, &[])? {
            (Reply::Description(description), _) => Ok(*description),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// A device's counters.
    pub fn status(&mut self, device: &DeviceId) -> Result<DeviceStatus, CallError> {
        let device = device.to_owned();
        match self.call(Request::Status { device }, &[])? {
            (Reply::Status(status), _) => Ok(*status),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// See [`Request::Check`].
    pub fn check(
        &mut self,
        device: &DeviceId,
        transport: Transport,
        ram: Vec<RamRange>,
    ) -> Result<(), CallError> {
        let device = device.to_owned();
        self.done(
            Request::Check {
                device,
                transport,
                ram,
            },
            &[],
        )
    }

    /// Borrows a device. `bar_memory` holds the files behind its BARs with mappable
    /// areas, in BAR order, if the borrower provides them. Afterwards this connection is
    /// the lease.
    pub fn borrow_device(
        &mut self,
        device: &DeviceId,
        transport: Transport,
        bar_memory: &[BorrowedFd<'_>],
    ) -> Result<Lease, CallError> {
        let request = Request::Borrow {
            device: device.to_owned(),
            transport,
            fence: self.fence,
        };
        let (reply, fds) = self.call(request, bar_memory)?;
        self.take_lease(reply, fds)
    }

    fn take_lease(&mut self, reply: Reply, fds: Vec<OwnedFd>) -> Result<Lease, CallError> {
        match (reply, fds) {
            (
                Reply::Lease {
                    generation,
                    registers,
                    bars,
                    chain,
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
                    Registers::RegisterToken(token) => Some(self.open_registers(token)?),
                };
                let Some(registers) = channel.filter(|_| fds.len() == files) else {
                    self.failed = true;
                    return Err(CallError::Unexpected(
                        "a lease without its register channel and BAR files".into(),
                    ));
                };
                self.generation = generation;
                self.accesses = registers.sent();
                Ok(Lease {
                    registers,
                    bars,
                    files: fds.collect(),
                    chain,
                })
            }
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    /// Opens the second connection, the register channel.
    fn open_registers(&mut self, token: RegisterToken) -> Result<Channel, CallError> {
        let opened = self.try_open_registers(token);
        // A lease without register channel is unusable.
        self.failed |= opened.is_err();
        opened
    }

    fn try_open_registers(&mut self, token: RegisterToken) -> Result<Channel, CallError> {
        let (_, deadline) = self.deadline();
        let left = || deadline.saturating_duration_since(Instant::now());
        let address = &self.address;
        let connected = self.channel.connect_again(address, &self.dialer, left());
        let mut channel = connected.map_err(|source| CallError::Unreachable {
            address: address.clone(),
            source,
        })?;
        let request = Envelope {
            generation: Generation(0),
            accesses: 0,
            request: Request::Registers { token },
        };
        channel.send(&request, &[], left())?;
        match channel.receive(left())?.0 {
            // Only register accesses count as such.
            Reply::Done => Ok(channel.counted_anew()),
            Reply::Refused(error) => Err(error.into()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Returns the device.
    pub fn return_device(&mut self) -> Result<(), CallError> {
        self.done(Request::Return, &[])?;
        self.generation = Generation(0);
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
            generation: self.generation,
            accesses: self.accesses.load(Ordering::Acquire),
            request,
        };
        let answer = self.exchange(&envelope, fds, deadline);
        self.judge(answer, started)
    }

    /// The outcome of a call that was made when it was `started`.
    fn judge(
        &mut self,
        answer: Result<(Reply, Vec<OwnedFd>), ChannelError>,
        started: Instant,
    ) -> Result<(Reply, Vec<OwnedFd>), CallError> {
        match answer {
            Ok((Reply::Refused(error), _)) => Err(error.into()),
            Ok(answer) => Ok(answer),
            Err(ChannelError::TimedOut(_)) => Err(CallError::Late(started.elapsed())),
            Err(error) => {
                self.failed = true;
                Err(error.into())
            }
        }
    }

    /// Now, and the deadline of a call that is made now.
    fn deadline(&self) -> (Instant, Instant) {
        let now = Instant::now();
        let limit = now + TIMEOUT;
        (now, self.deadline.map_or(limit, |at| at.min(limit)))
    }

    fn unexpected(&mut self, reply: &Reply) -> CallError {
        self.failed = true;
        // Truncated: a description is long.
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
        self.answer_by(deadline)
    }

    /// The answer to the last request.
    fn answer_by(&mut self, deadline: Instant) -> Result<(Reply, Vec<OwnedFd>), ChannelError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = self.channel.receive(left)?;
            if let (Reply::ProcessEnded, _) = answer {
                self.process_ended = true;
                return Err(ChannelError::Closed);
            }
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
