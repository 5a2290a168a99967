//! One thread a device: it serves the lease, drives the device, and is the only
//! one to touch either.
//!
//! ```text
//!   no lease --Mail::Lease--> leased --Return / peer gone / stop--> no lease
//! ```
//!
//! The end of a lease has one order, whatever ended it: bus mastering off,
//! what is in flight drained, windows closed, memory unmapped, device reset,
//! lease released. While DMA cannot be stopped, the lease stays: a device that
//! could still write to a VM's memory is nobody else's. Closing it is tried
//! again, with growing pauses, until it succeeds or the lender stops.

mod busy_poll;
mod channel;
mod end;
mod lease;

use std::{
    io,
    sync::{Arc, mpsc},
    time::Duration,
};

use farside_daemon::{RateLimit, StateLog, Wakeup};
use farside_lender_protocol::{Channel, DeviceStatus, Epoch, RemoteError};
use rustix::event::{PollFd, PollFlags, poll};

use crate::{
    borrowable::{Borrowable, Report},
    registry::{Lease, MAX_MAIL, Mail, Mailbox, Registry},
};
use lease::LeaseLoop;

/// A device and what its thread needs.
pub(crate) struct DeviceLoop {
    id: String,
    device: Box<dyn Borrowable>,
    registry: Arc<Registry>,
    mail: mpsc::Receiver<Mail>,
    mail_wake: Wakeup,
    stop: Wakeup,
    poll_time: Duration,
    /// Handovers that wait for the end of the lease.
    handovers: Vec<(Epoch, mpsc::SyncSender<Result<(), RemoteError>>)>,
    /// What borrowers can have logged as often as they borrow.
    lines: StateLog,
    /// Borrows and requests that were refused, which a borrower's guest may have
    /// caused.
    refused: RateLimit,
    /// Why the device cannot be closed at the end of a lease, while that is so.
    unclosable: Option<String>,
    /// What is wrong, as it was published last.
    problem: Option<String>,
    /// The borrower's connection, when the lender stopped before the device
    /// could be closed.
    unclosed: Option<Channel>,
}

/// How a device's thread ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The device is given back.
    Closed,
    /// Its DMA could not be stopped: the device, and all it reaches memory by,
    /// stay open until the process exits.
    Unclosed,
}

impl DeviceLoop {
    /// The loop and the mailbox of its thread.
    pub(crate) fn new(
        id: String,
        device: Box<dyn Borrowable>,
        registry: Arc<Registry>,
        stop: Wakeup,
        poll_time: Duration,
    ) -> io::Result<(Self, Mailbox)> {
        let (sender, mail) = mpsc::sync_channel(MAX_MAIL);
        let mail_wake = Wakeup::new()?;
        let mailbox = Mailbox::new(sender, mail_wake.clone());
        let device_loop = Self {
            id,
            device,
            registry,
            mail,
            mail_wake,
            stop,
            poll_time,
            handovers: Vec::new(),
            lines: StateLog::new(|line| log::info!("{line}")),
            refused: RateLimit::new(),
            unclosable: None,
            problem: None,
            unclosed: None,
        };
        Ok((device_loop, mailbox))
    }

    /// Serves leases one after another until stopped.
    pub(crate) fn run(mut self) -> Stopped {
        self.serve_leases();
        let Self {
            device, unclosed, ..
        } = self;
        match unclosed {
            None => Stopped::Closed,
            Some(connection) => {
                // Dropping it would unmap memory under a device that still does
                // DMA, and tell the borrower that its memory is its own again.
                std::mem::forget((device, connection));
                Stopped::Unclosed
            }
        }
    }

    fn serve_leases(&mut self) {
        while self.unclosed.is_none() {
            let mut fds = [
                PollFd::new(&self.mail_wake, PollFlags::IN),
                PollFd::new(&self.stop, PollFlags::IN),
            ];
            if let Err(errno) = poll(&mut fds, None)
                && errno != rustix::io::Errno::INTR
            {
                log::error!("device {}: cannot wait for borrowers: {errno}", self.id);
                return;
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            self.mail_wake.lower();
            while let Ok(mail) = self.mail.try_recv() {
                if let Some(lease) = self.take_mail(mail) {
                    LeaseLoop::serve(self, lease);
                    if self.unclosed.is_some() {
                        return;
                    }
                }
                self.answer_handovers(|_| true);
            }
        }
    }

    /// Answers a question; a lease is for the caller.
    fn take_mail(&mut self, mail: Mail) -> Option<Lease> {
        // Whoever asked may have gone.
        match mail {
            Mail::Status(reply) => {
                if let Some(status) = self.status() {
                    let _ = reply.try_send(status);
                }
                None
            }
            Mail::Check { route, ram, reply } => {
                let _ = reply.try_send(self.device.check(route, &ram));
                None
            }
            Mail::HandOver { fence, reply } => {
                self.handovers.push((fence, reply));
                None
            }
            Mail::Lease(lease) => Some(lease),
        }
    }

    /// Answers the handovers that `may` be.
    fn answer_handovers(&mut self, may: impl Fn(Epoch) -> bool) {
        if self.handovers.is_empty() {
            return;
        }
        let settled = self.device.settle();
        self.handovers.retain(|(fence, reply)| {
            if may(*fence) {
                // Whoever asked may have gone.
                let _ = reply.try_send(settled.clone());
            }
            !may(*fence)
        });
    }

    /// Answers the handovers that wait: the lease cannot be ended.
    fn refuse_handovers(&mut self, error: &RemoteError) {
        for (_, reply) in self.handovers.drain(..) {
            let message = format!("the lease cannot be ended yet: {error}; ask again");
            // Whoever asked may have gone.
            let _ = reply.try_send(Err(RemoteError {
                kind: error.kind,
                message,
            }));
        }
    }

    /// Answers what is asked while there is the lease `epoch`. False when that
    /// has to end.
    fn answer_mail(&mut self, epoch: Epoch) -> bool {
        self.mail_wake.lower();
        while let Ok(mail) = self.mail.try_recv() {
            if let Some(lease) = self.take_mail(mail) {
                // The registry grants one lease at a time.
                log::error!(
                    "device {}: a second lease (epoch {}) while there is one",
                    self.id,
                    lease.epoch
                );
            }
        }
        // Under a fence that is older, the lease is the one it was for.
        self.answer_handovers(|fence| fence < epoch);
        self.handovers.is_empty()
    }

    /// Logs what is wrong with the device, and shows it to whoever asks for its
    /// entry, when that has changed.
    fn publish_problem(&mut self) {
        let now = self.unclosable.as_deref().or(self.device.problem());
        if now == self.problem.as_deref() {
            return;
        }
        let now = now.map(str::to_owned);
        match (&now, &self.problem) {
            (Some(now), _) => log::error!("device {}: {now}", self.id),
            (None, Some(before)) => log::info!("device {}: recovered: {before}", self.id),
            (None, None) => {}
        }
        self.registry.set_problem(&self.id, now.clone());
        self.problem = now;
    }

    fn status(&self) -> Option<DeviceStatus> {
        let Report {
            bus_master,
            usage,
            interrupts,
            faults,
            counters,
        } = self.device.report();
        Some(DeviceStatus {
            entry: self.registry.entry(&self.id)?,
            bus_master,
            usage,
            interrupts,
            faults,
            counters,
        })
    }
}
