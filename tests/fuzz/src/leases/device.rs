//! A device's thread, one step at a time.

use std::{
    sync::mpsc::{Receiver, SyncSender},
    time::Duration,
};

use farside_daemon::DeviceId;
use farside_lender_protocol::{
    Envelope, ErrorKind, Generation, MediumLease, Registers, RemoteError, Reply, Request,
    Revocation,
};

use super::{
    check::Cause,
    host::DEVICES,
    world::{World, name},
};
use crate::{
    input::Input,
    registry::{DeviceRequest, GrantedChain, Lease, Release},
    source::Report,
};

const RELEASED: Release = Release::Over(Revocation::Released);
const ENDED: Release = Release::Over(Revocation::Ended);

const SEND_TIMEOUT: Duration = Duration::from_secs(20);

/// The state of the physical device.
pub enum State {
    /// Without access to any memory.
    Quiet,
    Leased(Lease),
    /// The lease has to end; DMA may still be in flight.
    Ending(Lease, Release),
}

pub struct Device {
    pub requests: Receiver<DeviceRequest>,
    pub state: State,
    /// Its DMA does not stop.
    pub jammed: bool,
    /// The registry has removed the device, and its thread has ended.
    pub ended: bool,
    /// The last lease.
    last: Generation,
    /// The last lease to be revoked.
    revoked: Option<Generation>,
    /// The last lease whose VM goes on by another connection.
    superseded: Option<Generation>,
    handovers: Vec<(Generation, SyncSender<Result<(), RemoteError>>)>,
}

impl Device {
    pub fn new(requests: Receiver<DeviceRequest>) -> Self {
        Self {
            requests,
            state: State::Quiet,
            jammed: false,
            ended: false,
            last: Generation(0),
            revoked: None,
            superseded: None,
            handovers: Vec::new(),
        }
    }

    /// The lease under which it may access memory.
    pub fn lease(&self) -> Option<&Lease> {
        match &self.state {
            State::Quiet => None,
            State::Leased(lease) | State::Ending(lease, _) => Some(lease),
        }
    }

    pub fn keep(&mut self, fence: Generation, reply: SyncSender<Result<(), RemoteError>>) {
        self.handovers.push((fence, reply));
    }

    /// Answers the handovers that no lease withstands; refuses the others if the lease cannot end.
    /// Returns whether some wait for the end of the lease.
    pub fn answer_handovers(&mut self) -> bool {
        let generation = self.lease().map(|lease| lease.generation);
        let stuck = self.jammed && matches!(self.state, State::Ending(..));
        self.handovers.retain(|(fence, reply)| {
            let older = generation.is_some_and(|generation| generation < *fence);
            let answer = match (older, stuck) {
                (false, _) => Ok(()),
                (true, false) => return true,
                (true, true) => Err(RemoteError {
                    kind: ErrorKind::Internal,
                    message: "the lease cannot be ended yet".into(),
                }),
            };
            // Fails if the requester has gone.
            let _ = reply.try_send(answer);
            false
        });
        !self.handovers.is_empty()
    }
}

/// The answer to a borrower.
fn reply(lease: &Lease) -> Reply {
    let generation = lease.generation;
    match lease.chain {
        Some(GrantedChain { secret, .. }) => Reply::Medium(Box::new(MediumLease {
            generation,
            chain: secret,
            model: String::new(),
            size: 4096,
            punches_holes: false,
        })),
        None => Reply::Lease {
            chain: None,
            generation,
            registers: Registers::Descriptor,
            bars: Vec::new(),
        },
    }
}

impl World {
    pub fn jam_device(&mut self, input: &mut Input<'_>) {
        let device = &mut self.devices[usize::from(input.u8()) % DEVICES.len()];
        device.jammed = !device.jammed;
    }

    /// A device's thread takes a message, or goes on with its lease.
    pub fn step_device(&mut self, input: &mut Input<'_>) {
        self.step(usize::from(input.u8()) % DEVICES.len());
    }

    pub fn step(&mut self, at: usize) {
        let id: DeviceId = name(DEVICES[at]);
        let device = &mut self.devices[at];
        let request = device.requests.try_recv();
        assert!(request.is_err() || !device.ended, "a message after the end");
        match request {
            Ok(DeviceRequest::Lease(mut lease)) => {
                assert!(matches!(device.state, State::Quiet), "two holders");
                let ledger = &self.ledgers[at];
                assert!(lease.generation > ledger.answered, "of a fenced VM");
                device.last = lease.generation;
                let reply = reply(&lease);
                let sent = lease.connection.send(&reply, &[], SEND_TIMEOUT);
                let goes_on = lease.chain.is_some_and(|chain| chain.goes_on);
                device.state = match (sent, goes_on) {
                    (Ok(()), _) => State::Leased(lease),
                    (Err(_), true) => State::Ending(lease, Release::Cut),
                    (Err(_), false) => State::Ending(lease, RELEASED),
                };
            }
            Ok(DeviceRequest::HandOver { fence, reply }) => device.keep(fence, reply),
            Ok(DeviceRequest::Report(reply)) => {
                // Fails if the requester has gone.
                let _ = reply.try_send(Report::default());
            }
            Ok(DeviceRequest::Revoke { generation, .. }) => {
                assert!(generation <= device.last, "overtook the lease that it ends");
                device.revoked = Some(generation);
            }
            Ok(DeviceRequest::Supersede { generation }) => {
                assert!(generation <= device.last, "overtook the lease that it ends");
                device.superseded = Some(generation);
            }
            // Its devices have media.
            Ok(DeviceRequest::LetGo(_)) => unreachable!("of a device that is no function"),
            Ok(DeviceRequest::End(_)) => {
                assert!(matches!(device.state, State::Quiet), "removed with a lease");
                device.ended = true;
            }
            Ok(DeviceRequest::TakeSize(_) | DeviceRequest::Resize { .. }) => {
                unreachable!("media are the lender's")
            }
            Ok(DeviceRequest::Check { reply, .. }) => {
                // Fails if the requester has gone.
                let _ = reply.try_send(Ok(()));
            }
            Err(_) => match std::mem::replace(&mut device.state, State::Quiet) {
                State::Quiet => {}
                State::Leased(mut lease) => {
                    let gone = match lease.chain {
                        Some(_) => Release::Cut,
                        None => RELEASED,
                    };
                    let ended = match lease.connection.try_receive::<Envelope>() {
                        Ok(Some((envelope, _))) => {
                            matches!(envelope.request, Request::Return).then_some(RELEASED)
                        }
                        Ok(None) => None,
                        Err(_) => Some(gone),
                    };
                    let generation = Some(lease.generation);
                    // Its time is over, or its VM has come back.
                    let ended = ended.or(match (device.revoked, device.superseded) {
                        (revoked, _) if revoked == generation => Some(ENDED),
                        (_, superseded) if superseded == generation => Some(Release::Cut),
                        _ => None,
                    });
                    device.state = match ended {
                        Some(how) => State::Ending(lease, how),
                        None => State::Leased(lease),
                    };
                }
                State::Ending(lease, how) if device.jammed => {
                    device.state = State::Ending(lease, how);
                }
                State::Ending(lease, how) => {
                    self.registry.release(&id, lease.generation, how);
                    if how != Release::Cut || !self.ledgers[at].is_available() {
                        self.chains.end(at);
                    }
                    let cause = Cause::Release(lease.generation, how);
                    self.cause = Some((at, cause));
                }
            },
        }
        if device.answer_handovers() {
            let state = std::mem::replace(&mut device.state, State::Quiet);
            device.state = match state {
                State::Leased(lease) => State::Ending(lease, ENDED),
                other => other,
            };
        }
    }
}
