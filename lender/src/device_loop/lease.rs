//! Serves a device while it is borrowed.

mod answer;
mod checks;

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use farside_daemon::VmName;
use farside_fabric::SharedFiles;
use farside_lender_protocol::{
    Channel, ChannelError, Envelope, ErrorKind, Generation, RemoteError, Reply, Request,
    Revocation,
    registers::{Access, Event},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    DeviceLoop, Line,
    busy_poll::{self, BusyPoll, Step, Waiting},
    channel::Offer,
    end::{End, LATE_ACCESSES, SEND_TIMEOUT, take_back},
};
use crate::{
    refusals::{failed, internal},
    registry::{Lease, Release},
    source::{BorrowerMemory, DeviceSource, Leased, LeasedDevice, NotLeased},
};

/// Maximum number of register accesses served per round.
const ACCESSES: usize = 64;

/// Maximum number of register accesses served before a request. More than a register channel holds, so it covers all that
/// were sent before the request; bounded, in case the borrower never stops sending.
const ACCESSES_BEFORE_REQUEST: usize = 64 * 1024;

/// Rounds of a busy device between two polls of the connections. Such a poll costs a system call, a
/// round usually none.
const ROUNDS_PER_LOOK: u32 = 16;

/// The thread's state during one lease.
pub(super) struct LeaseLoop<'a> {
    owner: &'a mut DeviceLoop,
    device: Box<dyn LeasedDevice>,
    connection: Channel,
    registers: Channel,
    /// The guest's memory.
    memory: SharedFiles,
    vm: VmName,
    generation: Generation,
    /// Number of register accesses served.
    served: u64,
    /// A request that has overtaken register accesses sent before it.
    held: Option<Held>,
    refusals: u64,
    /// A configuration access was refused.
    config_refused: bool,
}

struct Held {
    envelope: Envelope,
    fds: Vec<OwnedFd>,
    until: Instant,
}

impl<'a> LeaseLoop<'a> {
    /// Serves one lease from its grant to its end. Returns `None` if the device could not be revoked before the lender stopped.
    pub(super) fn serve(
        owner: &'a mut DeviceLoop,
        source: Box<dyn DeviceSource>,
        lease: Lease,
    ) -> Option<Box<dyn DeviceSource>> {
        let Lease {
            mut connection,
            owner: lease_owner,
            generation,
            transport,
            bar_memory,
            state,
            chain,
        } = lease;
        let vm = lease_owner.vm().clone();
        let memory = BorrowerMemory::new(bar_memory, state, chain);
        let id = owner.id.clone();
        let peer = connection.peer();
        let tokens = owner.home.tokens();
        let granted = match Offer::new(&connection, tokens) {
            Ok(offer) => source
                .lease(transport, &lease_owner, memory)
                .map(|leased| (leased, offer)),
            Err(error) => Err(NotLeased {
                source,
                error: internal(error),
            }),
        };
        let granted = granted.and_then(|(leased, offer)| {
            if leased.files.is_empty() || !connection.is_tcp() {
                return Ok((leased, offer));
            }
            Err(NotLeased {
                source: leased.device.end(),
                error: failed(format_args!(
                    "the BARs of device {id} are files, which cannot be sent over TCP"
                )),
            })
        });
        let (leased, offer) = match granted {
            Ok(granted) => granted,
            Err(NotLeased { source, error }) => {
                let line = format!("device {id}: cannot lend to VM {vm}: {error}");
                owner.home.line(Line::NotLent, &line);
                // Release first, so that the peer can retry at once.
                owner
                    .home
                    .released(generation, Release::Over(Revocation::Released));
                // The borrow fails whether or not the peer receives this.
                let _ = connection.send(&Reply::Refused(error), &[], SEND_TIMEOUT);
                return Some(source);
            }
        };
        let Leased {
            mut device,
            bars,
            files,
        } = leased;
        let (registers, theirs) = offer.for_borrower();
        let fds: Vec<_> = theirs
            .into_iter()
            .chain(&files)
            .map(OwnedFd::as_fd)
            .collect();
        let reply = Reply::Lease {
            generation,
            registers,
            bars,
            chain: chain.map(|chain| chain.secret),
        };
        if chain.is_some() {
            owner.home.begins();
        }
        let sent = connection.send(&reply, &fds, SEND_TIMEOUT);
        drop(files);
        let accepted = match sent {
            Ok(()) => offer.accepted(owner, &mut *device, &connection, generation),
            Err(error) => Err(End::PeerGone(error)),
        };
        let registers = match accepted {
            Ok(registers) => registers,
            Err(end) => {
                let line = format!(
                    "device {id}: lease dropped before VM {vm} used it (generation {generation}, {peer})"
                );
                owner.home.line(Line::Dropped, &line);
                return take_back(owner, device, connection, &vm, generation, 0, end);
            }
        };
        let mut lease = LeaseLoop {
            memory: SharedFiles::new(owner.quota.clone()),
            owner,
            device,
            connection,
            registers,
            vm,
            generation,
            served: 0,
            held: None,
            refusals: 0,
            config_refused: false,
        };
        let line = format!(
            "device {id}: borrowed by VM {} (generation {generation}, {peer})",
            lease.vm
        );
        lease.owner.home.line(Line::Borrowed, &line);
        let end = lease.run();
        let LeaseLoop {
            owner,
            device,
            connection,
            registers,
            vm,
            refusals,
            ..
        } = lease;
        let source = take_back(owner, device, connection, &vm, generation, refusals, end);
        if source.is_none() {
            // Closed, it would signal the borrower as much as the connection would.
            std::mem::forget(registers);
        }
        source
    }

    fn run(&mut self) -> End {
        let mut idle_since = Instant::now();
        let mut busy_poll = BusyPoll::new(self.owner.poll_time, idle_since);
        let mut rounds = 0;
        loop {
            rounds += 1;
            let before = busy_poll.is_blocked().then(Instant::now);
            let worked = self.poll_device();
            let now = Instant::now();
            if worked {
                idle_since = now;
                before.into_iter().for_each(|now| busy_poll.woke(now));
            }
            let mut step = match worked {
                true => Step::Poll,
                false => busy_poll.step_of(self.device.waiting(), now - idle_since, now),
            };
            if step == Step::Block && !self.device.prepare_to_block() {
                step = Step::Poll;
            }
            let limit = match step {
                Step::Block => {
                    busy_poll.blocks(now);
                    let interval = busy_poll::interval(now - idle_since);
                    let polled = self.device.is_polled().then_some(interval);
                    polled.or_else(|| self.device.looks_again())
                }
                Step::Nap(time) => Some(time),
                Step::Poll | Step::Yield if rounds % ROUNDS_PER_LOOK == 0 => Some(Duration::ZERO),
                Step::Poll => continue,
                Step::Yield => {
                    std::thread::yield_now();
                    let back = Instant::now();
                    busy_poll.yielded(back - now, back);
                    continue;
                }
            };
            // The medium's descriptor may be readable for completions that are reaped. Nothing is in flight.
            let rests = matches!(step, Step::Nap(_)) && self.device.waiting() == Waiting::Nap;
            match self.wait(limit, !rests) {
                Ok(true) => {
                    idle_since = Instant::now();
                    busy_poll.woke(idle_since);
                }
                Ok(false) => {}
                Err(end) => return end,
            }
        }
    }

    /// Waits for events, the medium's too if that `may_wake`, up to `limit`, and handles them. Returns whether there were any.
    fn wait(&mut self, limit: Option<Duration>, may_wake: bool) -> Result<bool, End> {
        self.owner.publish_problem(self.device.source().problem());
        if self.device.is_gone() {
            return Err(End::Gone);
        }
        let revoked = self.request_release()?;
        let must_ask = self.owner.revocation(self.generation);
        let must_ask = must_ask.is_some_and(|revoke| !revoke.asked);
        let mut registers = self.registers.interest();
        registers.set(
            PollFlags::OUT,
            self.registers.wants_write() || !self.device.irqs().relay().is_empty() || must_ask,
        );
        let now = Instant::now();
        // While a request is held, others stay in the socket; poll reports a hang-up nevertheless.
        let (requests, patience) = match &self.held {
            Some(held) => (
                PollFlags::empty(),
                Some(held.until.saturating_duration_since(now)),
            ),
            None => (PollFlags::IN, None),
        };
        let patience = patience.into_iter().chain(limit).chain(revoked).min();
        let patience = patience.map(|patience| Timespec::try_from(patience).unwrap_or_default());
        let owner = &self.owner;
        // A device without its own descriptor wakes up by the other ones.
        let device = self.device.wake_fd().filter(|_| may_wake);
        let device = device.unwrap_or(owner.stop.as_fd());
        let mut fds = [
            PollFd::new(&self.registers, registers),
            PollFd::new(&self.connection, requests),
            PollFd::new(&owner.requests_wake, PollFlags::IN),
            PollFd::new(&owner.stop, PollFlags::IN),
            PollFd::from_borrowed_fd(device, PollFlags::IN),
        ];
        let ready = match poll(&mut fds, patience.as_ref()) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => 0,
            Err(errno) => {
                log::error!("device {}: cannot wait: {errno}", owner.id);
                return Err(End::Stopped);
            }
        };
        if ready == 0 {
            self.give_held_up()?;
            return Ok(false);
        }
        let is_ready = |n: usize| !fds[n].revents().is_empty();
        let (registers, connection) = (is_ready(0), is_ready(1));
        let (requests, stop) = (is_ready(2), is_ready(3));
        if registers {
            self.serve_registers(ACCESSES)?;
        }
        if requests
            && !self
                .owner
                .answer_requests(&mut *self.device, self.generation)
        {
            return Err(End::HandedOver);
        }
        if self.held.is_some() {
            if connection {
                return Err(End::PeerGone(ChannelError::Closed));
            }
            self.serve_held()?;
        } else if connection {
            // A request must not overtake earlier register accesses.
            self.serve_registers(ACCESSES_BEFORE_REQUEST)?;
            self.serve_request()?;
        }
        if stop {
            return Err(End::Stopped);
        }
        Ok(true)
    }

    /// While the lease is being revoked: asks the borrower once to release the device, as soon as
    /// the register channel has room. Returns the time left, or ends the lease.
    fn request_release(&mut self) -> Result<Option<Duration>, End> {
        let Some(revoke) = self.owner.revocation(self.generation) else {
            return Ok(None);
        };
        let left = revoke.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(End::Revoked);
        }
        if !revoke.asked {
            let limit_ms = left.as_millis() as u64;
            // An error recurs when the channel is read, and is handled there.
            revoke.asked = matches!(
                self.registers.try_send(&Event::Release { limit_ms }, &[]),
                Ok(true)
            );
        }
        Ok(Some(left))
    }

    fn poll_device(&mut self) -> bool {
        let worked = self.device.poll();
        if worked {
            self.send_relayed();
        }
        worked
    }

    fn serve_registers(&mut self, most: usize) -> Result<(), End> {
        for _ in 0..most {
            let access = match self.registers.try_receive::<Access>() {
                Ok(Some((access, _))) => access,
                Ok(None) => break,
                Err(error) => return Err(End::PeerGone(error)),
            };
            self.served = self.served.wrapping_add(1);
            let value = match access {
                Access::Read { bar, offset, len } => {
                    let mut data = [0xff; 8];
                    if self.is_valid(bar, offset, len) {
                        let data = &mut data[..usize::from(len)];
                        self.device.bar_read(bar, offset, data);
                    }
                    u64::from_le_bytes(data)
                }
                Access::InterruptStatus => {
                    // Process the guest's earlier stores to polled memory before this read, as PCIe
                    // orders posted writes before reads.
                    self.device.poll();
                    self.device.irqs().intx_status().into()
                }
                Access::ConfigRead { offset, len } => self.config_read(offset, len).into(),
                Access::ConfigWrite { offset, len, value } => {
                    self.config_write(offset, len, value);
                    0
                }
                Access::Write {
                    bar,
                    offset,
                    len,
                    value,
                } => {
                    if self.is_valid(bar, offset, len) {
                        let data = value.to_le_bytes();
                        let data = &data[..usize::from(len)];
                        self.device.bar_write(bar, offset, data);
                    }
                    self.device.accessed(self.served);
                    continue;
                }
            };
            self.device.accessed(self.served);
            // As on PCIe, where a completion does not pass posted requests.
            self.send_relayed();
            self.registers
                .send(&Event::Data { value }, &[], SEND_TIMEOUT)
                .map_err(End::PeerGone)?;
        }
        self.send_relayed();
        Ok(())
    }

    /// Sends the relayed interrupts. If the channel is full, the rest stay in the relay, which
    /// coalesces repeats of a vector.
    fn send_relayed(&mut self) {
        let relay = self.device.irqs().relay();
        let mut room = true;
        relay.drain(|irq| {
            // The error recurs when the channel is read, and is handled there.
            room = room
                && matches!(
                    self.registers.try_send(&Event::Interrupt(irq), &[]),
                    Ok(true)
                );
            if !room {
                // Retried next time; posting to a bit set cannot fail.
                let _ = relay.post(irq);
            }
        });
    }

    fn serve_request(&mut self) -> Result<(), End> {
        let (envelope, fds) = match self.connection.try_receive::<Envelope>() {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(()),
            // Keep the lease: the guest only enabled more vectors than there are free descriptors.
            Err(error @ ChannelError::DescriptorsLost) => {
                let refused = RemoteError {
                    kind: ErrorKind::Limit,
                    message: error.to_string(),
                };
                return self.reply(Err(refused));
            }
            Err(error) => return Err(End::PeerGone(error)),
        };
        // On the same host all accesses have arrived by now; between hosts, the other connection
        // may lag behind.
        if envelope.generation == self.generation && envelope.accesses > self.served {
            self.held = Some(Held {
                envelope,
                fds,
                until: Instant::now() + LATE_ACCESSES,
            });
            return Ok(());
        }
        self.serve_envelope(envelope, fds)
    }

    /// Answers the held request once all earlier accesses are served.
    fn serve_held(&mut self) -> Result<(), End> {
        match self.held.take() {
            Some(held) if held.envelope.accesses <= self.served => {
                self.serve_envelope(held.envelope, held.fds)
            }
            held => {
                self.held = held;
                self.give_held_up()
            }
        }
    }

    /// Ends the lease if the held request has waited too long.
    fn give_held_up(&mut self) -> Result<(), End> {
        match &self.held {
            Some(held) if Instant::now() >= held.until => Err(End::LostAccesses {
                sent: held.envelope.accesses,
                came: self.served,
            }),
            _ => Ok(()),
        }
    }

    fn serve_envelope(&mut self, envelope: Envelope, fds: Vec<OwnedFd>) -> Result<(), End> {
        let returned = matches!(envelope.request, Request::Return);
        let reply = if envelope.generation == self.generation {
            self.answer(envelope.request, fds)
        } else {
            Err(RemoteError {
                kind: ErrorKind::StaleGeneration,
                message: format!(
                    "device {}: request under generation {}, but the lease has generation {}",
                    self.owner.id, envelope.generation, self.generation
                ),
            })
        };
        if returned && reply.is_ok() {
            // Answered when the lease has ended.
            return Err(End::Returned);
        }
        self.reply(reply)
    }

    fn reply(&mut self, reply: Result<Reply, RemoteError>) -> Result<(), End> {
        let reply = reply.unwrap_or_else(|error| {
            self.refusals += 1;
            let line = format!(
                "device {}: refused a request of VM {}: {error}",
                self.owner.id, self.vm
            );
            self.owner.home.line(Line::Refused, &line);
            Reply::Refused(error)
        });
        self.connection
            .send(&reply, &[], SEND_TIMEOUT)
            .map_err(End::PeerGone)
    }
}
