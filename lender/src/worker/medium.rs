//! A worker that serves a medium over the network: operations of the borrower's controller.
//!
//! It has the image and the borrower's connection, and neither memory of a guest nor a part of the fabric.

use std::{io, time::Instant};

use farside_daemon::{DeviceId, VmName};
use farside_devices::nvme::{Ended, LentMedium};
use farside_error_chain::Chain;
use farside_lender_protocol::{Channel, Counter, Generation, LimitUse, Resource, Revocation};
use farside_medium::{Link, LinkError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    messages::{Answer, Call, Order},
    process::{CALL_TIMEOUT, Calls},
};
use crate::{device_loop::Line, registry::Release, source::Report};

/// The lease of a medium.
pub(super) struct MediumLease {
    pub(super) id: DeviceId,
    pub(super) vm: VmName,
    pub(super) generation: Generation,
    pub(super) medium: LentMedium,
    /// The last failure of the medium that the broker was told of.
    pub(super) problem: Option<String>,
}

/// Why the lease has ended.
enum End {
    Returned,
    Cut(LinkError),
    /// The borrower did not return the revoked device in time.
    Revoked,
    /// The VM moves to another host.
    HandedOver,
    Stopped,
}

impl MediumLease {
    /// Serves the borrower until the lease has ended.
    pub(super) fn serve(mut self, orders: &mut Channel, calls: &Calls) -> io::Result<()> {
        let Self {
            id, vm, generation, ..
        } = &self;
        let whose = format!("VM {vm}, generation {generation}");
        calls.tell(&Call::Line(
            Line::Borrowed,
            format!("device {id}: its medium is lent over the network ({whose})"),
        ));
        let end = self.run(orders, calls)?;
        let (why, release) = match end {
            End::Returned => ("returned".to_owned(), Release::Over(Revocation::Released)),
            End::Cut(error) => (
                format!("the connection was cut: {}", Chain(&error)),
                Release::Cut,
            ),
            End::Stopped => ("the lender stops".to_owned(), Release::Cut),
            End::Revoked => (
                "revoked: the guest did not release it in time".to_owned(),
                Release::Over(Revocation::Ended),
            ),
            End::HandedOver => (
                "revoked: the VM is moving to another host".to_owned(),
                Release::Over(Revocation::Ended),
            ),
        };
        let line = format!("device {}: {why} ({whose})", self.id);
        let report = self.report();
        // Waits for what is in flight on the medium.
        drop(self.medium);
        calls.tell(&Call::Line(Line::Ended, line));
        calls.tell(&Call::Released(release));
        // Fails if the broker is gone.
        let _ = orders.send(&Answer::Ended(Box::new(report)), &[], CALL_TIMEOUT);
        Ok(())
    }

    fn run(&mut self, orders: &mut Channel, calls: &Calls) -> io::Result<End> {
        let mut tick = Instant::now() + Link::TICK;
        let mut revoked = None;
        loop {
            let turned = self.medium.turn(&mut || calls.tell(&Call::EndChain));
            self.report_problem(calls);
            let ticked = match Instant::now() >= tick {
                true => {
                    tick = Instant::now() + Link::TICK;
                    self.medium.tick()
                }
                false => Ok(()),
            };
            let more = match ticked.and(turned) {
                Ok(more) => more,
                Err(Ended::Returned) => return Ok(End::Returned),
                Err(Ended::Cut(error)) => return Ok(End::Cut(error)),
            };
            if revoked.is_some_and(|until| Instant::now() >= until) {
                return Ok(End::Revoked);
            }
            if !more {
                self.wait(orders, tick)?;
            }
            match orders.try_receive::<Order>() {
                Ok(None) => {}
                Ok(Some((order, _))) => {
                    let (answer, end) = self.obey(order, &mut revoked);
                    if orders.send(&answer, &[], CALL_TIMEOUT).is_err() {
                        return Ok(End::Stopped);
                    }
                    if let Some(end) = end {
                        return Ok(end);
                    }
                }
                Err(_) => return Ok(End::Stopped),
            }
        }
    }

    /// Tells the broker of a failure of the medium, when it begins and when it ends.
    fn report_problem(&mut self, calls: &Calls) {
        let now = self.medium.problem();
        if now != self.problem.as_deref() {
            self.problem = now.map(str::to_owned);
            calls.tell(&Call::Problem(self.problem.clone()));
        }
    }

    /// Waits for the borrower, the medium or the broker, until `tick`.
    fn wait(&mut self, orders: &Channel, tick: Instant) -> io::Result<()> {
        let left = tick.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap_or_default();
        let (link, has_room, wants_write) = self.medium.link();
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::IN, has_room);
        interest.set(PollFlags::OUT, wants_write);
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.medium.wake_fd(), PollFlags::IN),
            PollFd::new(orders, PollFlags::IN),
        ];
        // The end of a connection is reported whatever is asked for.
        if !interest.is_empty() {
            fds.push(PollFd::from_borrowed_fd(link, interest));
        }
        match poll(&mut fds, Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn obey(&mut self, order: Order, revoked: &mut Option<Instant>) -> (Answer, Option<End>) {
        match order {
            Order::Status => (Answer::Status(Box::new(self.report())), None),
            // The broker flushes after the end, and answers.
            Order::HandOver { fence } if fence > self.generation => {
                (Answer::Nothing, Some(End::HandedOver))
            }
            Order::HandOver { .. } => (Answer::HandedOver(Ok(())), None),
            Order::Revoke { limit } => {
                let until = Instant::now() + limit;
                let until = revoked.map_or(until, |before: Instant| before.min(until));
                *revoked = Some(until);
                self.medium
                    .release(until.saturating_duration_since(Instant::now()));
                (Answer::Nothing, None)
            }
            Order::Start(_) => (Answer::Nothing, None),
        }
    }

    fn report(&self) -> Report {
        let counters = self.medium.stats().into_iter();
        let (used, limit) = self.medium.in_flight();
        Report {
            counters: counters
                .map(|(name, value)| Counter {
                    name: name.to_owned(),
                    value,
                })
                .collect(),
            limits: vec![LimitUse::new(Resource::Commands, used, limit)],
            ..Report::default()
        }
    }
}
