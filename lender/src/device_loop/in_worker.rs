//! Serves a lease by a worker process.

mod calls;
mod goes_on;
mod resize;
mod take_down;

use std::{
    collections::VecDeque,
    mem,
    os::{fd::AsFd, unix::process::ExitStatusExt},
    process::ExitStatus,
    sync::mpsc,
    time::{Duration, Instant},
};

use farside_daemon::RateLimit;
use farside_error_chain::Chain;
use farside_lender_protocol::{
    Channel, ChannelError, ErrorKind, Generation, RemoteError, Reply, Revocation,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{DeviceLoop, Line, end::SEND_TIMEOUT};
use goes_on::not_begun;

use crate::{
    lease_owner::LeaseOwner,
    refusals::{failed, internal, no_disk},
    registry::{DeviceRequest, GrantedChain, Lease, MAX_REQUESTS, Release},
    source::{Available, Report, Resized},
    worker::{
        Adopted, Answer, Borrower, CallReply, Handle, KeptHandle, LogReader, Numbered, OpenWindow,
        Order, Record, Worker, WorkerDevice, printable_error,
    },
};

/// Timeout for a worker to end after it was told to; then it is killed. Longer than it waits for
/// DMA in flight, shorter than the lender waits for its threads.
const STOP_TIMEOUT: Duration = Duration::from_millis(4000);

/// Timeout for a worker to end after its lease has: shorter than the next borrower waits, 4 s.
const EXIT_TIMEOUT: Duration = Duration::from_secs(3);

/// Least time between two reports of a worker: its device's thread makes them for whoever may borrow the device.
const REPORT_INTERVAL: Duration = Duration::from_millis(10);

/// Maximum number of messages of a worker that are served before everything else is looked at.
const MESSAGES: usize = 64;

impl WorkerDevice {
    /// Serves one lease, from its grant until its worker is gone. Returns false if the device's DMA
    /// could not be stopped before the lender stopped.
    pub(super) fn serve(&mut self, owner: &mut DeviceLoop, lease: Lease) -> bool {
        // The worker finds out anew.
        owner.home.problem(None, None);
        owner.problem = None;
        let (of, generation, chain) = (lease.owner.clone(), lease.generation, lease.chain);
        let entry = owner
            .home
            .entry()
            .ok_or_else(|| failed("the device is gone"));
        let resumes = chain.is_some_and(|chain| chain.goes_on);
        let ready = self.prepare(&lease);
        if ready.is_ok() && !resumes {
            // For another lease, the device was let go.
            owner.kept = None;
        }
        // It would find a device that was reset.
        let has_ended = matches!(&ready, Err(error) if error.kind == ErrorKind::ChainEnded);
        let started = match ready.and(entry) {
            Ok(entry) => {
                let poll_us = owner.poll_time.as_micros() as u64;
                let started = self.start(entry, poll_us, lease);
                started.map_err(|(connection, error)| (connection, internal(error)))
            }
            Err(error) => Err((Some(lease.connection), error)),
        };
        let (worker, borrower, record) = match started {
            Ok(started) => started,
            Err((connection, error)) => {
                let line = format!("device {}: cannot lend to VM {of}: {error}", owner.id);
                owner.home.line(Line::NotLent, &line);
                let not_told = connection.is_some();
                let chain = chain.filter(|_| !has_ended);
                let how = not_begun(chain, not_told);
                owner.home.released(generation, how);
                if let (Some(kept), Release::Cut) = (&mut owner.kept, how) {
                    // Its borrower is watched on.
                    kept.1 = generation;
                }
                // The borrow fails whether or not the peer receives this.
                let _ = connection.map(|mut it| it.send(&Reply::Refused(error), &[], SEND_TIMEOUT));
                return true;
            }
        };
        let mut lease = WorkerLease::new(owner, self, worker, Some(borrower), (of, generation));
        lease.chain = chain;
        lease.record = record;
        lease.running = lease.device.take_kept().map(|kept| kept.handle);
        lease.owner.kept = None;
        lease.run()
    }

    /// Serves on a lease of the former broker, until its worker is gone. Returns as [`WorkerDevice::serve`].
    pub(super) fn resume(&mut self, owner: &mut DeviceLoop, mut adopted: Adopted) -> bool {
        let of = (adopted.owner(), adopted.lease.generation);
        let line = format!(
            "device {}: its lease goes on (VM {}, generation {}, worker process {})",
            owner.id, of.0, of.1, adopted.lease.pid
        );
        log::info!("{line}");
        let connection = adopted.connection.as_ref().map(AsFd::as_fd);
        let connection = connection.and_then(|it| it.try_clone_to_owned().ok());
        let borrower = connection.map(|it| Borrower::Asking(Channel::from_socket(it)));
        let requester = adopted.requester;
        let chain = adopted.lease.chain;
        let handle = adopted.handle.take();
        if handle.is_some() {
            self.opened(of.0.vm());
        }
        let (mut worker, record) = self.adopt(adopted);
        // If this fails, it has ended. If there is no room, it has many of former brokers to read: a worker that makes no
        // calls reads none.
        let _ = worker.calls.try_send(&(0, CallReply::Again), &[]);
        let mut lease = WorkerLease::new(owner, self, worker, borrower, of);
        lease.chain = chain.map(|(secret, goes_on)| GrantedChain { secret, goes_on });
        lease.begun = true;
        lease.requester = requester;
        lease.running = handle.map(KeptHandle::into_handle);
        lease.orders = record.lease.first_order;
        lease.windows.clone_from(&record.lease.windows);
        lease.record = Some(record);
        lease.run()
    }
}

/// An order that the worker has not answered yet.
enum Waiting {
    Reports(Vec<mpsc::SyncSender<Report>>),
    HandOver(Generation, mpsc::SyncSender<Result<(), RemoteError>>),
    Revoke,
    Resize(Resized, mpsc::SyncSender<Result<Resized, RemoteError>>),
}

/// The broker's state during one lease.
struct WorkerLease<'a> {
    owner: &'a mut DeviceLoop,
    device: &'a mut WorkerDevice,
    worker: Worker,
    log: LogReader,
    /// Its device, if that runs on without it.
    running: Option<Handle>,
    /// Whether the borrower has an answer.
    begun: bool,
    leased: bool,
    /// Until the lease has ended: closing it tells the borrower that its memory is out of use. None if its
    /// worker has ended without a broker.
    connection: Option<Borrower>,
    /// What the keeper has of the lease.
    record: Option<Record>,
    /// The number of the next order.
    orders: u64,
    chain: Option<GrantedChain>,
    /// The end of a medium's lease, which is released once its writes are flushed.
    ended: Option<Release>,
    /// The end of the lease of a device that runs, whose DMA could not be stopped at once.
    over: Option<Release>,
    lease_owner: LeaseOwner,
    generation: Generation,
    waiting: VecDeque<Numbered<Waiting>>,
    /// Those who want the next report.
    wanted: Vec<mpsc::SyncSender<Report>>,
    /// When that is ordered.
    report_from: Instant,
    /// What the worker has not answered.
    late: Vec<Waiting>,
    requester: Option<usize>,
    /// The adapter's windows that the worker has.
    windows: Vec<OpenWindow>,
    report: Option<Report>,
    /// When the worker is killed, if it has not ended.
    kill_at: Option<Instant>,
    /// The worker was told to stop.
    stopped: bool,
    /// The worker was killed for the lease to go on in another, which its borrower can ask for at any rate.
    superseded: bool,
    /// The worker has ended.
    gone: bool,
    /// Limits the problems that a worker reports.
    problems: RateLimit,
    /// The last one, if it exceeded that.
    held_problem: Option<Option<String>>,
}

impl<'a> WorkerLease<'a> {
    fn new(
        owner: &'a mut DeviceLoop,
        device: &'a mut WorkerDevice,
        worker: Worker,
        borrower: Option<Borrower>,
        (lease_owner, generation): (LeaseOwner, Generation),
    ) -> Self {
        let prefix = format!("device {}, worker process {}", owner.id, worker.pid());
        Self {
            owner,
            device,
            log: LogReader::new(prefix),
            worker,
            running: None,
            begun: matches!(borrower, Some(Borrower::Lent(_))),
            leased: true,
            connection: borrower,
            record: None,
            orders: 1,
            chain: None,
            ended: None,
            over: None,
            lease_owner,
            generation,
            waiting: VecDeque::new(),
            wanted: Vec::new(),
            report_from: Instant::now(),
            late: Vec::new(),
            requester: None,
            windows: Vec::new(),
            report: None,
            stopped: false,
            superseded: false,
            gone: false,
            kill_at: None,
            problems: RateLimit::new(),
            held_problem: None,
        }
    }

    fn run(mut self) -> bool {
        let mut open = Open {
            calls: true,
            orders: true,
            log: true,
        };
        let status = loop {
            let ended = self.wait(&open);
            open.log = open.log && self.log.read(&self.worker.log);
            open.calls = open.calls && self.serve_calls();
            open.orders = open.orders && self.take_answers();
            if ended {
                break self.worker.status();
            }
            if self.is_leased() {
                self.take_request();
                self.order_report();
            }
        };
        self.flush(status.unwrap_or_default())
    }

    /// Has the worker killed after `patience`, unless it ends.
    fn kill_in(&mut self, patience: Duration) {
        let at = Instant::now() + patience;
        self.kill_at = Some(self.kill_at.map_or(at, |before| before.min(at)));
    }

    /// Whether the lease is one of a medium, over the network.
    fn is_medium(&self) -> bool {
        matches!(self.connection, Some(Borrower::Lent(_)))
    }

    fn is_leased(&self) -> bool {
        self.leased
    }

    /// Waits for the worker, for requests and for the lender's stop. Returns whether the worker has
    /// ended.
    fn wait(&mut self, open: &Open) -> bool {
        let report_from = (self.is_leased() && !self.wanted.is_empty()).then_some(self.report_from);
        let next = self.kill_at.into_iter().chain(report_from).min();
        let left = next.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        let (worker, owner) = (&self.worker, &self.owner);
        let fds = [
            (true, worker.pidfd.as_fd()),
            (!self.stopped, owner.stop.as_fd()),
            (self.is_leased(), owner.requests_wake.as_fd()),
            (open.calls, worker.calls.as_fd()),
            (open.orders, worker.orders.as_fd()),
            (open.log, worker.log.as_fd()),
        ];
        // Of what is closed, the process is what is looked at: that is reported twice.
        let fds = fds.map(|(wanted, fd)| if wanted { fd } else { worker.pidfd.as_fd() });
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        if let Err(errno) = poll(&mut fds, left.as_ref())
            && errno != rustix::io::Errno::INTR
        {
            log::error!("device {}: cannot wait for its worker: {errno}", owner.id);
            worker.kill();
            return true;
        }
        let ended = !fds[0].revents().is_empty();
        if ended {
            return true;
        }
        if !self.stopped && !fds[1].revents().is_empty() {
            self.stopped = true;
            self.kill_in(STOP_TIMEOUT);
            self.worker.stop();
        }
        if self.kill_at.is_some_and(|at| Instant::now() >= at) {
            self.worker.kill();
            // It ends as soon as the medium lets it.
            self.kill_at = Some(Instant::now() + STOP_TIMEOUT);
        }
        false
    }

    /// Gives back what the worker has of the adapter, and then the lease. The next lease starts
    /// when this worker is gone.
    fn release(&mut self, how: Release) {
        if let Some((tables, entry)) = self.device.tables().zip(self.requester.take()) {
            for window in self.windows.drain(..) {
                tables.give_back_window(entry, window.range);
            }
            tables.give_back_requester(entry);
        }
        if !mem::take(&mut self.leased) {
            return;
        }
        if !self.device.is_kept() {
            self.owner.home.released(self.generation, how);
        }
        // Before the connection is closed: the keeper has it, too.
        if let Some(record) = &mut self.record {
            record.forget();
        }
        let borrower = self.connection.take();
        if let (Some(Borrower::Asking(mut connection)), Release::Cut) = (borrower, how) {
            // It goes on as soon as it knows. If this fails, it has gone, and is noticed.
            let _ = connection.send(&Reply::ProcessEnded, &[], SEND_TIMEOUT);
            self.owner.kept = Some((connection, self.generation));
        }
    }

    /// Takes the worker's answers. Returns false when there will be no more.
    fn take_answers(&mut self) -> bool {
        for _ in 0..MESSAGES {
            let received = self.worker.orders.try_receive::<Numbered<Answer>>();
            let (number, answer) = match received {
                Ok(Some((answer, _))) => answer,
                Ok(None) => return true,
                Err(ChannelError::Closed) => return false,
                Err(error) => return self.violated(&Chain(&error)),
            };
            if let Answer::Ended(report) = answer {
                self.report = Some(*report);
                // The last one.
                return false;
            }
            let first = self.record.as_ref().map_or(1, |it| it.lease.first_order);
            if number < first {
                // To the former broker's order.
                continue;
            }
            let waiting = self.waiting.pop_front();
            let waiting = waiting.filter(|(order, _)| *order == number);
            // Each fails if the requester has gone.
            match (waiting.map(|(_, waiting)| waiting), answer) {
                (Some(Waiting::Reports(replies)), Answer::Status(report)) => {
                    let report = self.device.completed(*report);
                    for reply in replies {
                        let _ = reply.try_send(report.clone());
                    }
                }
                (Some(waiting), Answer::Nothing) => self.answer_later(waiting),
                (Some(Waiting::HandOver(fence, reply)), Answer::HandedOver(Ok(())))
                    if !self.is_leased() || fence < self.generation =>
                {
                    let _ = reply.try_send(Ok(()));
                }
                (Some(Waiting::Resize(resized, reply)), Answer::Resized(done)) => {
                    let done = done.map(|()| resized);
                    let _ = reply.try_send(done.map_err(printable_error));
                }
                (Some(Waiting::HandOver(_, reply)), Answer::HandedOver(Err(error))) => {
                    let _ = reply.try_send(Err(printable_error(error)));
                }
                _ => return self.violated(&"it has given the answer to another order"),
            }
        }
        true
    }

    /// Passes requests to the worker as orders.
    fn take_request(&mut self) {
        self.owner.requests_wake.lower();
        while let Ok(request) = self.owner.requests.try_recv() {
            let (order, waiting) = match request {
                // Of those that are dropped, the requesters hear at once.
                DeviceRequest::Report(reply) if self.gone => {
                    self.answer_later(Waiting::Reports(vec![reply]));
                    continue;
                }
                DeviceRequest::Report(reply) => {
                    if self.wanted.len() < MAX_REQUESTS {
                        self.wanted.push(reply);
                    }
                    continue;
                }
                DeviceRequest::HandOver { fence, reply } => {
                    (Order::HandOver { fence }, Waiting::HandOver(fence, reply))
                }
                DeviceRequest::TakeSize(reply) => match self.resize(reply) {
                    Some(ordered) => ordered,
                    None => continue,
                },
                // The worker has the order from this process.
                DeviceRequest::Resize { reply, .. } => {
                    let _ = reply.try_send(Err(no_disk()));
                    continue;
                }
                DeviceRequest::Check {
                    owner,
                    transport,
                    ram,
                    reply,
                } => {
                    // Fails if the requester has gone.
                    let _ = reply.try_send(self.device.check(owner.as_ref(), transport, &ram));
                    continue;
                }
                DeviceRequest::Revoke { until, .. } => {
                    let limit = until.saturating_duration_since(Instant::now());
                    // A worker that does not end the lease is ended.
                    self.kill_in(limit + STOP_TIMEOUT);
                    (Order::Revoke { limit }, Waiting::Revoke)
                }
                // What the worker has begun on the medium is over when it is gone.
                DeviceRequest::Supersede { generation } => {
                    if generation == self.generation {
                        self.superseded = true;
                        self.worker.kill();
                    }
                    continue;
                }
                // It is lent again: the function is another lease's, or was let go for that.
                DeviceRequest::LetGo(_) => continue,
                // The registry ends the thread of a device that is not lent.
                DeviceRequest::End(end) => {
                    self.owner.end = Some(end);
                    continue;
                }
                // The registry grants one lease at a time.
                DeviceRequest::Lease(lease) => {
                    let (id, generation) = (&self.owner.id, lease.generation);
                    log::error!("device {id}: a second lease (generation {generation})");
                    continue;
                }
            };
            self.order(order, waiting);
        }
    }

    fn order(&mut self, order: Order, waiting: Waiting) {
        let fits = self.waiting.len() < MAX_REQUESTS;
        let order = (self.orders, order);
        match fits && matches!(self.worker.orders.try_send(&order, &[]), Ok(true)) {
            true => {
                self.waiting.push_back((order.0, waiting));
                self.orders += 1;
            }
            false => self.answer_later(waiting),
        }
    }

    /// Orders a report for all who want one: the device's thread makes it, and others than its borrower may want many.
    fn order_report(&mut self) {
        let now = Instant::now();
        if !self.wanted.is_empty() && now >= self.report_from {
            self.report_from = now + REPORT_INTERVAL;
            let wanted = mem::take(&mut self.wanted);
            self.order(Order::Status, Waiting::Reports(wanted));
        }
    }

    /// Keeps what the worker does not answer, as when its lease is about to end, until it has ended.
    fn answer_later(&mut self, waiting: Waiting) {
        if let (Waiting::Reports(replies), true) = (&waiting, self.gone) {
            for reply in replies {
                // Fails if the requester has gone.
                let _ = reply.try_send(self.device.report());
            }
            return;
        }
        if let (Waiting::Resize(resized, reply), true) = (&waiting, self.gone) {
            // The next worker has that size.
            let _ = reply.try_send(Ok(resized.clone()));
            return;
        }
        // Of those that are dropped, the requesters hear at once.
        if self.late.len() < MAX_REQUESTS {
            self.late.push(waiting);
        }
    }

    /// Cleans up after the worker. Returns false if the device's DMA could not be stopped before the
    /// lender stopped.
    fn flush(mut self, status: ExitStatus) -> bool {
        // What is left in the pipe, of 64 KiB.
        let _ = (0..16).all(|_| self.log.read(&self.worker.log));
        self.gone = true;
        if self.is_leased() {
            // Those that end the lease.
            self.take_request();
        }
        let wanted = Waiting::Reports(mem::take(&mut self.wanted));
        self.answer_later(wanted);
        for waiting in mem::take(&mut self.late)
            .into_iter()
            .chain(mem::take(&mut self.waiting).into_iter().map(|(_, it)| it))
        {
            self.answer_later(waiting);
        }
        let Some(goes_on) = self.leave_or_take_down() else {
            // As in `take_back`.
            std::mem::forget((self.running, self.connection));
            return false;
        };
        if let Some(problem) = self.held_problem.take() {
            self.owner.publish_problem(problem.as_deref());
        }
        let (id, pid) = (self.owner.id.clone(), self.worker.pid());
        if !(status.success() || self.superseded) {
            log::error!("device {id}: its worker process {pid} {}", ended(status));
        }
        // Within the host, what was written stays in the kernel's cache, of which the next worker reports errors.
        let stays = goes_on && !self.is_medium() && self.late.is_empty();
        let flushed = match stays {
            true => Ok(()),
            false => self.device.flush(),
        };
        if let Err(error) = &flushed {
            log::error!("{error}");
            if self.is_medium() {
                // The kernel reports that once.
                self.owner.home.end_chain();
            }
        }
        for waiting in self.late.drain(..) {
            if let Waiting::HandOver(_, reply) = waiting {
                // Fails if the requester has gone. The kernel reports a failed write once.
                let _ = reply.try_send(flushed.clone());
            }
        }
        if self.is_leased() && self.ended.is_none() {
            let what = if goes_on {
                "kept for its VM"
            } else {
                "revoked"
            };
            let line = format!(
                "device {id}: {what}: its worker process {pid} is gone (VM {}, generation {})",
                self.lease_owner, self.generation
            );
            self.owner.home.line(Line::Ended, &line);
        }
        // Closed after the release, so that the peer, which is not told more, can borrow again at once.
        let _asking = match self.begun || goes_on {
            true => None,
            false => self.connection.take(),
        };
        let ended = match goes_on {
            true => Release::Cut,
            false => Release::Over(Revocation::Ended),
        };
        let ended = self.ended.or(self.over).unwrap_or(ended);
        self.release(ended);
        true
    }
}

/// Which of a worker's channels are open.
struct Open {
    calls: bool,
    orders: bool,
    log: bool,
}

/// How a process has ended, and where to look.
fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (_, Some(libc::SIGSYS)) => {
            "made a system call that its filter does not allow: the kernel log names it".into()
        }
        (_, Some(signal)) => format!("was ended by signal {signal}"),
        (code, None) => format!("has exited with status {}", code.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests;
