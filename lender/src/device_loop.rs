//! One thread per device: it serves the lease and drives the device; no other thread accesses
//! either.
//!
//! ```text
//!   DeviceSource --DeviceRequest::Lease--> LeasedDevice --Return / peer gone / stop--> DeviceSource
//! ```
//!
//! A lease always ends in the same order: bus mastering off, DMA in flight drained, windows closed,
//! memory unmapped, device reset, lease released. While DMA cannot be stopped, the lease stays: a
//! device that could still write to a VM's memory must not be lent again. Revoking its memory is
//! retried with exponential back-off until it succeeds or the lender stops.

pub(crate) mod busy_poll;
mod channel;
mod end;
mod home;
mod in_worker;
mod lease;

pub(crate) use home::{Home, InLender, Line};

use std::{
    convert::Infallible,
    io,
    sync::mpsc,
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, Wakeup};
use farside_devices::block::ImageId;
use farside_fabric::SharedQuota;
use farside_lender_protocol::{
    Channel, Generation, LimitUse, RemoteError, Reply, Resource, Revocation,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    registry::{DeviceRequest, Lease, MAX_REQUESTS, Release, RequestQueue},
    source::{Available, DeviceSource, LeasedDevice, Report},
    worker::WorkerDevice,
};
use end::{FIRST_PAUSE, LONGEST_PAUSE, SEND_TIMEOUT, has_hung_up};
use lease::LeaseLoop;

/// The state of a device thread, apart from the device.
pub(crate) struct DeviceLoop {
    id: DeviceId,
    home: Box<dyn Home>,
    requests: mpsc::Receiver<DeviceRequest>,
    requests_wake: Wakeup,
    stop: Wakeup,
    poll_time: Duration,
    /// The device's share of the memory that this process may map for borrowers.
    quota: SharedQuota,
    /// The last requested revocation.
    revoke: Option<Revoke>,
    /// Set when the thread has to end; dropped after the device is closed.
    end: Option<mpsc::SyncSender<Infallible>>,
    /// Handovers waiting for the end of the lease.
    handovers: Vec<(Generation, mpsc::SyncSender<Result<(), RemoteError>>)>,
    /// The last published problem.
    problem: Option<String>,
    /// The borrower for which the device is kept after the lease of that generation, within the host.
    kept: Option<(Channel, Generation)>,
    /// Those who wait until a device that was kept does no DMA.
    let_go: Vec<mpsc::SyncSender<Infallible>>,
}

/// A requested revocation of the lease `generation`.
#[derive(Clone, Copy)]
struct Revoke {
    generation: Generation,
    /// When the lease ends.
    until: Instant,
    /// The borrower has been asked to release the device.
    asked: bool,
}

/// A device in either state, for requests that are valid in both.
enum Device<'a> {
    Available(&'a mut dyn Available),
    Leased(&'a mut dyn LeasedDevice),
}

impl Device<'_> {
    fn source(&mut self) -> &mut dyn Available {
        match self {
            Self::Available(source) => *source,
            Self::Leased(device) => device.source(),
        }
    }
}

/// A device to be lent.
pub(crate) enum Lendable {
    /// Its leases are served by the device thread.
    Here(Box<dyn DeviceSource>),
    /// Each lease is served by a process of its own, unless its transport needs the lender's.
    InWorker(Box<WorkerDevice>),
}

impl Lendable {
    /// As [`WorkerDevice::medium`].
    pub(crate) fn medium(&self) -> Option<io::Result<ImageId>> {
        match self {
            Self::Here(_) => None,
            Self::InWorker(device) => device.medium(),
        }
    }

    pub(crate) fn available(&mut self) -> &mut dyn Available {
        match self {
            Self::Here(source) => &mut **source,
            Self::InWorker(device) => &mut **device,
        }
    }
}

/// How a device thread ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The device is closed.
    Closed,
    /// Its DMA could not be stopped: the device and its DMA path stay open until the process exits.
    Unclosed,
}

impl DeviceLoop {
    /// Creates the loop and the queue of its thread.
    pub(crate) fn new(
        id: DeviceId,
        home: Box<dyn Home>,
        stop: Wakeup,
        poll_time: Duration,
        quota: SharedQuota,
    ) -> io::Result<(Self, RequestQueue)> {
        let (sender, requests) = mpsc::sync_channel(MAX_REQUESTS);
        let requests_wake = Wakeup::new()?;
        let queue = RequestQueue::new(sender, requests_wake.clone());
        let device_loop = Self {
            id,
            home,
            requests,
            requests_wake,
            stop,
            poll_time,
            quota,
            revoke: None,
            end: None,
            handovers: Vec::new(),
            problem: None,
            kept: None,
            let_go: Vec::new(),
        };
        Ok((device_loop, queue))
    }

    /// Serves leases, one at a time, until stopped or removed.
    pub(crate) fn run(mut self, mut device: Lendable) -> Stopped {
        if let Lendable::InWorker(mut worker) = device {
            let adopted = worker.take_adopted();
            if adopted.is_some_and(|adopted| !worker.resume(&mut self, adopted)) {
                std::mem::forget(worker);
                return Stopped::Unclosed;
            }
            device = Lendable::InWorker(worker);
        }
        while let Some(lease) = self.wait_for_lease(device.available()) {
            device = match device {
                Lendable::Here(source) => match LeaseLoop::serve(&mut self, source, lease) {
                    Some(source) => Lendable::Here(source),
                    None => return Stopped::Unclosed,
                },
                Lendable::InWorker(mut device) => {
                    let closed = match device.in_thread(lease.transport) {
                        Some(source) => match device.let_go_for_a_lease() {
                            Ok(()) => LeaseLoop::serve(&mut self, source, lease).is_some(),
                            Err(error) => {
                                self.refuse(lease, error);
                                true
                            }
                        },
                        None => device.serve(&mut self, lease),
                    };
                    if !closed {
                        // Unbinding the function would wait for its handle, which is kept.
                        std::mem::forget(device);
                        return Stopped::Unclosed;
                    }
                    Lendable::InWorker(device)
                }
            };
        }
        if !device.available().let_go() {
            log::error!(
                "device {}: the lender stops, and its DMA is not stopped: it stays as it is until the process has exited",
                self.id
            );
            std::mem::forget((device, self.kept.take()));
            return Stopped::Unclosed;
        }
        // Before `end`.
        drop(device);
        Stopped::Closed
    }

    /// Serves the first lease that is posted. Returns the device's last report.
    pub(crate) fn run_once(mut self, mut source: Box<dyn DeviceSource>) -> Option<Report> {
        let lease = self.wait_for_lease(&mut *source)?;
        let mut source = LeaseLoop::serve(&mut self, source, lease)?;
        // The lease has ended.
        self.answer_handovers(&mut *source, |_| true);
        Some(source.report())
    }

    /// Answers messages until a lease is granted. Returns `None` when the lender stops or the device
    /// is removed.
    fn wait_for_lease(&mut self, source: &mut dyn Available) -> Option<Lease> {
        let mut pause = FIRST_PAUSE;
        loop {
            let is_quiet = self.let_go(source);
            if let Ok(request) = self.requests.try_recv() {
                match self.take_request(request, Device::Available(source)) {
                    Some(lease) => return Some(lease),
                    None if self.end.is_some() => return None,
                    None => continue,
                }
            }
            let mut fds = vec![
                PollFd::new(&self.requests_wake, PollFlags::IN),
                PollFd::new(&self.stop, PollFlags::IN),
            ];
            let retry = match is_quiet {
                true => None,
                false => Some(Timespec::try_from(pause).unwrap_or_default()),
            };
            pause = match is_quiet {
                true => FIRST_PAUSE,
                false => (pause * 2).min(LONGEST_PAUSE),
            };
            if is_quiet && let Some((borrower, _)) = &self.kept {
                fds.push(PollFd::new(borrower, PollFlags::RDHUP));
            }
            if let Err(errno) = poll(&mut fds, retry.as_ref())
                && errno != rustix::io::Errno::INTR
            {
                log::error!("device {}: cannot wait for borrowers: {errno}", self.id);
                return None;
            }
            if !fds[1].revents().is_empty() {
                return None;
            }
            self.requests_wake.lower();
        }
    }

    /// Lets a device go that was kept, for those who wait for that, and if its borrower has gone. Returns false if it still
    /// does DMA: nobody is told otherwise before.
    fn let_go(&mut self, source: &mut dyn Available) -> bool {
        let has_left = matches!(&self.kept, Some((borrower, _)) if has_hung_up(borrower));
        if !has_left && self.let_go.is_empty() && self.handovers.is_empty() {
            return true;
        }
        if !source.let_go() {
            self.publish_problem(Some("cannot stop its DMA: see the log; trying again"));
            return false;
        }
        self.publish_problem(source.problem());
        self.let_go.clear();
        // No lease has to end first.
        self.answer_handovers(source, |_| true);
        // Closing the connection tells the borrower that it is done.
        if let Some((_borrower, generation)) = self.kept.take_if(|_| has_left) {
            // Whom it was kept for can cause that at any rate.
            let line = format!(
                "device {}: its borrower has gone, for whom it was kept",
                self.id
            );
            self.home.line(Line::Ended, &line);
            self.home.left(generation);
        }
        true
    }

    /// Refuses a lease before it begins.
    fn refuse(&mut self, mut lease: Lease, error: RemoteError) {
        let line = format!(
            "device {}: cannot lend to VM {}: {error}",
            self.id, lease.owner
        );
        self.home.line(Line::NotLent, &line);
        let over = Release::Over(Revocation::Released);
        self.home.released(lease.generation, over);
        // The borrow fails whether or not the peer receives this.
        let refused = Reply::Refused(error);
        let _ = lease.connection.send(&refused, &[], SEND_TIMEOUT);
    }

    /// Answers a message, or returns the lease that it contains.
    fn take_request(&mut self, request: DeviceRequest, mut device: Device<'_>) -> Option<Lease> {
        // Fails if the requester has gone.
        match request {
            DeviceRequest::Report(reply) => {
                let report = match device {
                    Device::Available(source) => source.report(),
                    Device::Leased(device) => self.report(device),
                };
                let _ = reply.try_send(report);
                None
            }
            DeviceRequest::Check {
                owner,
                transport,
                ram,
                reply,
            } => {
                let checked = device.source().check(owner.as_ref(), transport, &ram);
                let _ = reply.try_send(checked);
                None
            }
            DeviceRequest::TakeSize(reply) => {
                let _ = reply.try_send(device.source().take_size());
                None
            }
            DeviceRequest::Resize { to, reply } => {
                let _ = reply.try_send(device.source().resize(to));
                None
            }
            DeviceRequest::HandOver { fence, reply } => {
                self.handovers.push((fence, reply));
                None
            }
            DeviceRequest::Revoke { generation, until } => {
                self.revoke = Some(match self.revoke {
                    // Asked again: the limit can only be shortened.
                    Some(before) if before.generation == generation => Revoke {
                        until: before.until.min(until),
                        ..before
                    },
                    _ => {
                        let limit = until.saturating_duration_since(Instant::now());
                        log::info!("device {}: being revoked, within {limit:?}", self.id);
                        Revoke {
                            generation,
                            until,
                            asked: false,
                        }
                    }
                });
                None
            }
            DeviceRequest::LetGo(done) => {
                // Else it is lent, and nothing is kept.
                if let Device::Available(_) = device {
                    self.let_go.push(done);
                }
                None
            }
            // Only workers serve leases that go on.
            DeviceRequest::Supersede { .. } => None,
            // The registry ends the thread of a device that is not lent.
            DeviceRequest::End(end) => {
                self.end = Some(end);
                None
            }
            DeviceRequest::Lease(lease) => Some(lease),
        }
    }

    /// The report of a leased device, with what the lease has of this process's memory.
    fn report(&self, device: &mut dyn LeasedDevice) -> Report {
        let (used, limit) = self.quota.used_of();
        let mut report = device.report();
        let (files, bytes) = (Resource::MemoryFiles, Resource::MemoryBytes);
        report.limits.extend([
            LimitUse::new(files, used.mappings as u64, limit.mappings as u64),
            LimitUse::new(bytes, used.bytes, limit.bytes),
        ]);
        report
    }

    /// The revocation of the lease `generation`, if requested.
    fn revocation(&mut self, generation: Generation) -> Option<&mut Revoke> {
        let revoke = self.revoke.as_mut();
        revoke.filter(|revoke| revoke.generation == generation)
    }

    /// Answers the handovers whose fence satisfies `may`.
    fn answer_handovers(&mut self, source: &mut dyn Available, may: impl Fn(Generation) -> bool) {
        if self.handovers.is_empty() {
            return;
        }
        let flushed = source.flush();
        self.handovers.retain(|(fence, reply)| {
            if may(*fence) {
                // Fails if the requester has gone.
                let _ = reply.try_send(flushed.clone());
            }
            !may(*fence)
        });
    }

    /// Refuses the waiting handovers: the lease cannot be ended.
    fn refuse_handovers(&mut self, error: &RemoteError) {
        for (_, reply) in self.handovers.drain(..) {
            let message = format!("the lease cannot be ended yet: {error}; ask again");
            // Fails if the requester has gone.
            let _ = reply.try_send(Err(RemoteError {
                kind: error.kind,
                message,
            }));
        }
    }

    /// Answers messages during the lease `generation`. Returns false if the lease has to end.
    fn answer_requests(&mut self, device: &mut dyn LeasedDevice, generation: Generation) -> bool {
        self.requests_wake.lower();
        while let Ok(request) = self.requests.try_recv() {
            if let Some(lease) = self.take_request(request, Device::Leased(device)) {
                // The registry grants one lease at a time.
                log::error!(
                    "device {}: a second lease (generation {}) while there is one",
                    self.id,
                    lease.generation
                );
            }
        }
        // If the fence is older than the lease, the lease was granted under it and need not end.
        self.answer_handovers(device.source(), |fence| fence < generation);
        self.handovers.is_empty()
    }

    /// Publishes the device's problem if it has changed.
    fn publish_problem(&mut self, now: Option<&str>) {
        if now != self.problem.as_deref() {
            self.home.problem(self.problem.as_deref(), now);
            self.problem = now.map(str::to_owned);
        }
    }
}
