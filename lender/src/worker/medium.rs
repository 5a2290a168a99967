//! A worker that serves a medium over the network: operations of the borrower's controller.
//!
//! It has the image and the borrower's connection, and neither memory of a guest nor a part of the fabric.

use std::{
    io,
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, VmName};
use farside_devices::block::{Ended, LentMedium, Turn};
use farside_error_chain::Chain;
use farside_lender_protocol::{Channel, Counter, Generation, LimitUse, Resource, Revocation};
use farside_medium::{Link, LinkError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    calls::{CALL_TIMEOUT, Calls, end_chain},
    messages::{Answer, Call, Numbered, Order},
};
use crate::{
    device_loop::{
        Line,
        busy_poll::{BusyPoll, Step},
    },
    registry::Release,
    source::Report,
};

/// Rounds of busy-polling between two looks at the broker.
const ROUNDS_PER_LOOK: u32 = 16;

/// The lease of a medium.
pub(super) struct MediumLease {
    pub(super) id: DeviceId,
    pub(super) vm: VmName,
    pub(super) generation: Generation,
    pub(super) medium: LentMedium,
    pub(super) poll_time: Duration,
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
        calls.tell(Call::Line(
            Line::Borrowed,
            format!("device {id}: lent over the network ({whose})"),
        ));
        let end = self.run(orders, calls)?;
        // Another lender may have lent the device meanwhile.
        let end_of_lender = matches!(end, End::Stopped);
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
        // Both wait for what is in flight on the medium.
        match end_of_lender {
            true => drop(self.medium),
            false => self.medium.end(),
        }
        calls.tell(Call::Line(Line::Ended, line));
        calls.released(release);
        // Fails if the broker is gone.
        let _ = orders.send(&(0, Answer::Ended(Box::new(report))), &[], CALL_TIMEOUT);
        Ok(())
    }

    fn run(&mut self, orders: &mut Channel, calls: &Calls) -> io::Result<End> {
        let mut tick = Instant::now() + Link::TICK;
        let mut idle_since = Instant::now();
        let mut busy_poll = BusyPoll::new(self.poll_time, idle_since);
        let mut revoked = None;
        let mut rounds = 0u32;
        loop {
            let turned = self.medium.turn(&mut || end_chain(calls));
            self.report_problem(calls);
            let now = Instant::now();
            let ticked = match now >= tick {
                true => {
                    tick = now + Link::TICK;
                    self.medium.tick()
                }
                false => Ok(()),
            };
            let turn = match ticked.and(turned) {
                Ok(turn) => turn,
                Err(Ended::Returned) => return Ok(End::Returned),
                Err(Ended::Cut(error)) => return Ok(End::Cut(error)),
            };
            if revoked.is_some_and(|until| now >= until) {
                return Ok(End::Revoked);
            }
            rounds = rounds.wrapping_add(1);
            if turn != Turn::Idle {
                idle_since = now;
            }
            let step = match turn {
                Turn::Idle => busy_poll.step(now - idle_since, now),
                Turn::Busy | Turn::More => Step::Poll,
            };
            let patience = match step {
                Step::Block => {
                    let left = tick.saturating_duration_since(now);
                    self.medium
                        .looks_again()
                        .map_or(left, |again| again.min(left))
                }
                Step::Nap(time) => time,
                Step::Poll | Step::Yield if rounds.is_multiple_of(ROUNDS_PER_LOOK) => {
                    Duration::ZERO
                }
                Step::Poll => continue,
                Step::Yield => {
                    std::thread::yield_now();
                    let after = Instant::now();
                    busy_poll.yielded(after - now, after);
                    continue;
                }
            };
            let ordered = self.wait(orders, patience)?;
            if step == Step::Block {
                busy_poll.blocks(now);
                busy_poll.woke(Instant::now());
                idle_since = Instant::now();
            }
            if !ordered {
                continue;
            }
            match orders.try_receive::<Numbered<Order>>() {
                Ok(None) => {}
                Ok(Some(((number, order), _))) => {
                    let (answer, end) = self.obey(order, &mut revoked);
                    if orders.send(&(number, answer), &[], CALL_TIMEOUT).is_err() {
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
            calls.tell(Call::Problem(self.problem.clone()));
        }
    }

    /// Waits for the borrower, the medium or the broker, for up to `patience`. Returns whether the broker
    /// has sent something.
    fn wait(&mut self, orders: &Channel, patience: Duration) -> io::Result<bool> {
        let left = Timespec::try_from(patience).unwrap_or_default();
        let (link, has_room, wants_write) = self.medium.link();
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::IN, has_room);
        interest.set(PollFlags::OUT, wants_write);
        let mut fds = vec![
            PollFd::new(orders, PollFlags::IN),
            PollFd::from_borrowed_fd(self.medium.wake_fd(), PollFlags::IN),
        ];
        // The end of a connection is reported whatever is asked for.
        if !interest.is_empty() {
            fds.push(PollFd::from_borrowed_fd(link, interest));
        }
        match poll(&mut fds, Some(&left)) {
            Ok(_) => Ok(!fds[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => Ok(false),
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
            Order::Resize { to } => {
                self.medium.grow(to);
                (Answer::Resized(Ok(())), None)
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
