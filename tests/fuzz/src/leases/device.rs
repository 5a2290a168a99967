//! A device's thread, one step at a time.

use std::{
    sync::mpsc::{Receiver, SyncSender},
    time::Duration,
};

use farside_daemon::DeviceId;
use farside_lender_protocol::{
    Envelope, ErrorKind, Generation, Registers, RemoteError, Reply, Request, Revocation,
};

use super::{
    check::Cause,
    host::DEVICES,
    world::{World, name},
};
use crate::{
    input::Input,
    registry::{DeviceRequest, Lease, Release},
    source::Report,
};

const SEND_TIMEOUT: Duration = Duration::from_secs(20);

/// The state of the physical device.
pub enum State {
    /// Without access to any memory.
    Quiet,
    Leased(Lease),
    /// The lease has to end; DMA may still be in flight.
    Ending(Lease, Revocation),
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
                let reply = Reply::Lease {
                    generation: lease.generation,
                    registers: Registers::Descriptor,
                    bars: Vec::new(),
                };
                device.last = lease.generation;
                let sent = lease.connection.send(&reply, &[], SEND_TIMEOUT);
                device.state = match sent {
                    Ok(()) => State::Leased(lease),
                    Err(_) => State::Ending(lease, Revocation::Released),
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
            // No lease of a medium is asked for.
            Ok(DeviceRequest::Supersede { .. }) => unreachable!("no lease is to go on"),
            Ok(DeviceRequest::End(_)) => {
                assert!(matches!(device.state, State::Quiet), "removed with a lease");
                device.ended = true;
            }
            Ok(DeviceRequest::Check { reply, .. }) => {
                // Fails if the requester has gone.
                let _ = reply.try_send(Ok(()));
            }
            Err(_) => match std::mem::replace(&mut device.state, State::Quiet) {
                State::Quiet => {}
                State::Leased(mut lease) => {
                    let returned = match lease.connection.try_receive::<Envelope>() {
                        Ok(Some((envelope, _))) => matches!(envelope.request, Request::Return),
                        Ok(None) => false,
                        Err(_) => true,
                    };
                    let revoked = device.revoked == Some(lease.generation);
                    device.state = match (returned, revoked) {
                        (true, _) => State::Ending(lease, Revocation::Released),
                        // Its time is over.
                        (false, true) => State::Ending(lease, Revocation::Ended),
                        (false, false) => State::Leased(lease),
                    };
                }
                State::Ending(lease, how) if device.jammed => {
                    device.state = State::Ending(lease, how);
                }
                State::Ending(lease, how) => {
                    self.registry
                        .release(&id, lease.generation, Release::Over(how));
                    let cause = Cause::Release(lease.generation, how);
                    self.cause = Some((at, cause));
                }
            },
        }
        if device.answer_handovers() {
            let state = std::mem::replace(&mut device.state, State::Quiet);
            device.state = match state {
                State::Leased(lease) => State::Ending(lease, Revocation::Ended),
                other => other,
            };
        }
    }
}
