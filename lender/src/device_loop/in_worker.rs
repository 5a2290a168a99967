//! Serves a lease by a worker process.

use std::{
    collections::VecDeque,
    os::unix::process::ExitStatusExt,
    process::ExitStatus,
    sync::mpsc,
    time::{Duration, Instant},
};

use farside_daemon::{RateLimit, VmName};
use farside_error_chain::Chain;
use farside_fabric::LutRange;
use farside_lender_protocol::{Channel, ChannelError, Generation, RemoteError, Reply};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{DeviceLoop, Line, end::SEND_TIMEOUT};
use crate::{
    refusals::{internal, refused},
    registry::{Lease, MAX_MAIL, Mail},
    source::{Available, Report},
    worker::{Answer, Call, CallReply, Order, Worker, WorkerDevice},
};

/// Timeout for a worker to end after its lease has, or after it was told to stop; then it is
/// killed. Longer than it waits for DMA in flight, shorter than the lender waits for its threads.
const END_TIMEOUT: Duration = Duration::from_millis(4000);

/// Maximum length of a worker's log line, in characters.
const MAX_LINE: usize = 1000;

impl WorkerDevice {
    /// Serves one lease, from its grant until its worker is gone.
    pub(super) fn serve(&mut self, owner: &mut DeviceLoop, mut lease: Lease) {
        // The worker finds out anew.
        owner.problem = None;
        let started = owner.home.entry().map(|entry| {
            let poll_us = owner.poll_time.as_micros() as u64;
            self.start(entry, poll_us, &lease)
        });
        let worker = match started {
            Some(Ok(worker)) => worker,
            failed => {
                let error = match failed {
                    Some(Err(error)) => internal(error),
                    _ => internal(std::io::Error::other("the device is gone")),
                };
                let line = format!(
                    "device {}: cannot lend to VM {}: {error}",
                    owner.id, lease.vm
                );
                owner.home.line(Line::NotLent, &line);
                owner.home.released(lease.generation);
                // The borrow fails whether or not the peer receives this.
                let _ = lease
                    .connection
                    .send(&Reply::Refused(error), &[], SEND_TIMEOUT);
                return;
            }
        };
        let lease = WorkerLease {
            owner,
            device: self,
            worker,
            connection: Some(lease.connection),
            vm: lease.vm,
            generation: lease.generation,
            waiting: VecDeque::new(),
            requester: None,
            windows: Vec::new(),
            report: None,
            kill_at: None,
            problems: RateLimit::new(),
        };
        lease.run();
    }
}

/// An order that the worker has not answered yet.
enum Waiting {
    Report(mpsc::SyncSender<Report>),
    Check(mpsc::SyncSender<Result<(), RemoteError>>),
    HandOver(Generation, mpsc::SyncSender<Result<(), RemoteError>>),
}

/// The broker's state during one lease.
struct WorkerLease<'a> {
    owner: &'a mut DeviceLoop,
    device: &'a mut WorkerDevice,
    worker: Worker,
    /// Until the lease has ended: closing it tells the borrower that its memory is out of use.
    connection: Option<Channel>,
    vm: VmName,
    generation: Generation,
    waiting: VecDeque<Waiting>,
    requester: Option<usize>,
    /// The adapter's windows that the worker has.
    windows: Vec<LutRange>,
    report: Option<Report>,
    /// When the worker is killed, if it has not ended.
    kill_at: Option<Instant>,
    /// Limits the problems that a worker reports.
    problems: RateLimit,
}

impl WorkerLease<'_> {
    fn run(mut self) {
        let (mut calls, mut orders) = (true, true);
        let status = loop {
            let ended = self.wait(calls, orders);
            calls = calls && self.serve_calls();
            orders = orders && self.take_answers();
            if ended {
                break self.worker.status();
            }
            if self.is_leased() {
                self.take_mail();
            }
        };
        self.settle(status.unwrap_or_default());
    }

    fn is_leased(&self) -> bool {
        self.connection.is_some()
    }

    /// Waits for the worker, for mail and for the lender's stop. Returns whether the worker has
    /// ended.
    fn wait(&mut self, calls: bool, orders: bool) -> bool {
        let left = self
            .kill_at
            .map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        let mut fds = vec![PollFd::new(&self.worker.pidfd, PollFlags::IN)];
        for (channel, open) in [(&self.worker.calls, calls), (&self.worker.orders, orders)] {
            if open {
                fds.push(PollFd::new(channel, PollFlags::IN));
            }
        }
        let first = fds.len();
        if self.kill_at.is_none() {
            fds.push(PollFd::new(&self.owner.stop, PollFlags::IN));
        }
        if self.connection.is_some() {
            fds.push(PollFd::new(&self.owner.mail_wake, PollFlags::IN));
        }
        if let Err(errno) = poll(&mut fds, left.as_ref())
            && errno != rustix::io::Errno::INTR
        {
            log::error!(
                "device {}: cannot wait for its worker: {errno}",
                self.owner.id
            );
            self.worker.kill();
            return true;
        }
        let ended = !fds[0].revents().is_empty();
        let stop = self.kill_at.is_none() && !fds[first].revents().is_empty();
        drop(fds);
        if stop {
            self.worker.stop.raise();
            self.kill_at = Some(Instant::now() + END_TIMEOUT);
        }
        if self.kill_at.is_some_and(|at| Instant::now() >= at) && !ended {
            self.worker.kill();
            // It ends as soon as the medium lets it.
            self.kill_at = Some(Instant::now() + END_TIMEOUT);
        }
        ended
    }

    /// Answers the worker's calls. Returns false when there will be no more.
    fn serve_calls(&mut self) -> bool {
        loop {
            let call = match self.worker.calls.try_receive() {
                Ok(Some((call, _))) => call,
                Ok(None) => return true,
                Err(ChannelError::Closed) => return false,
                Err(error) => return self.violated(&error),
            };
            let reply = self.serve_call(call);
            if self.worker.calls.send(&reply, &[], SEND_TIMEOUT).is_err() {
                return false;
            }
        }
    }

    fn violated(&self, error: &ChannelError) -> bool {
        let (id, pid) = (&self.owner.id, self.worker.pid());
        log::error!(
            "device {id}: ending its worker process {pid}: {}",
            Chain(error)
        );
        self.worker.kill();
        false
    }

    fn serve_call(&mut self, call: Call) -> CallReply {
        let tables = self.device.adapter.tables();
        match call {
            Call::TakeRequester if self.requester.is_none() => {
                match tables.take_requester(&self.owner.id) {
                    Ok(entry) => {
                        self.requester = Some(entry);
                        CallReply::Done
                    }
                    Err(error) => CallReply::Refused(refused(error)),
                }
            }
            // It has one.
            Call::TakeRequester => CallReply::Done,
            Call::TakeWindow {
                peer_address,
                bytes,
            } => match tables.take_window(peer_address, bytes) {
                Ok(window) => {
                    self.windows.push(window);
                    CallReply::Window(window)
                }
                Err(error) => CallReply::Refused(refused(error)),
            },
            Call::GiveBackWindow(window) => {
                if let Some(n) = self.windows.iter().position(|known| *known == window) {
                    self.windows.swap_remove(n);
                    tables.give_back_window(window);
                }
                CallReply::Done
            }
            Call::Released => {
                self.release();
                self.kill_at
                    .get_or_insert_with(|| Instant::now() + END_TIMEOUT);
                CallReply::Done
            }
            Call::Problem(problem) => {
                if self.problems.allow().is_some() {
                    let problem = problem.map(|problem| printable(&problem));
                    self.owner.publish_problem(problem.as_deref());
                }
                CallReply::Done
            }
            Call::Line(kind, line) => {
                self.owner.home.line(kind, &printable(&line));
                CallReply::Done
            }
        }
    }

    /// Gives back what the worker has of the adapter, and then the lease. The next lease starts
    /// when this worker is gone.
    fn release(&mut self) {
        let tables = self.device.adapter.tables();
        for window in self.windows.drain(..) {
            tables.give_back_window(window);
        }
        if let Some(entry) = self.requester.take() {
            tables.give_back_requester(entry);
        }
        if self.connection.take().is_some() {
            self.owner.home.released(self.generation);
        }
    }

    /// Takes the worker's answers. Returns false when there will be no more.
    fn take_answers(&mut self) -> bool {
        loop {
            let answer = match self.worker.orders.try_receive() {
                Ok(Some((answer, _))) => answer,
                Ok(None) => return true,
                Err(ChannelError::Closed) => return false,
                Err(error) => return self.violated(&error),
            };
            if let Answer::Ended(report) = answer {
                self.report = Some(*report);
                continue;
            }
            // Each fails if the requester has gone.
            match (self.waiting.pop_front(), answer) {
                (Some(Waiting::Report(reply)), Answer::Status(report)) => {
                    let _ = reply.try_send(self.device.with_former(*report));
                }
                (Some(Waiting::Check(reply)), Answer::Checked(checked)) => {
                    let _ = reply.try_send(checked);
                }
                (Some(Waiting::HandOver(_, reply)), Answer::HandedOver(result)) => {
                    let _ = reply.try_send(result);
                }
                (Some(_), Answer::Nothing) => {}
                _ => return self.violated(&ChannelError::Closed),
            }
        }
    }

    /// Passes mail to the worker as orders.
    fn take_mail(&mut self) {
        self.owner.mail_wake.lower();
        while let Ok(mail) = self.owner.mail.try_recv() {
            let (order, waiting) = match mail {
                Mail::Report(reply) => (Order::Status, Waiting::Report(reply)),
                Mail::Check { route, ram, reply } => {
                    (Order::Check { route, ram }, Waiting::Check(reply))
                }
                Mail::HandOver { fence, reply } => {
                    (Order::HandOver { fence }, Waiting::HandOver(fence, reply))
                }
                // The registry grants one lease at a time.
                Mail::Lease(lease) => {
                    let (id, generation) = (&self.owner.id, lease.generation);
                    log::error!("device {id}: a second lease (generation {generation})");
                    continue;
                }
            };
            let fits = self.waiting.len() < MAX_MAIL;
            if fits && matches!(self.worker.orders.try_send(&order, &[]), Ok(true)) {
                self.waiting.push_back(waiting);
            }
        }
    }

    /// Cleans up after the worker.
    fn settle(mut self, status: ExitStatus) {
        for waiting in std::mem::take(&mut self.waiting) {
            // Each fails if the requester has gone.
            match waiting {
                Waiting::Report(reply) => {
                    let _ = reply.try_send(self.device.report());
                }
                Waiting::Check(_) => {}
                // Answered as for any device that is not lent.
                Waiting::HandOver(fence, reply) => self.owner.handovers.push((fence, reply)),
            }
        }
        if let Some(report) = self.report.take() {
            self.device.ended(report);
        }
        let (id, pid) = (self.owner.id.clone(), self.worker.pid());
        if !status.success() {
            log::error!("device {id}: its worker process {pid} {}", ended(status));
        }
        if self.is_leased() {
            if let Err(error) = self.device.flush() {
                log::error!("{error}");
            }
            let line = format!(
                "device {id}: revoked: its worker process {pid} is gone (VM {}, generation {})",
                self.vm, self.generation
            );
            self.owner.home.line(Line::Ended, &line);
        }
        self.release();
    }
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

/// A worker's text, as one line.
fn printable(text: &str) -> String {
    let printable = text.chars().filter(|c| !c.is_control());
    printable.take(MAX_LINE).collect()
}
