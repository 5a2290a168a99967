//! Requests of peers without a lease: checks rights, changes the registry, and asks the device's
//! thread. Does not block.

use std::{
    sync::mpsc::{Receiver, sync_channel},
    time::Duration,
};

use farside_daemon::{DeviceId, LenderName, VmName};
use farside_fabric::NtbLimits;
use farside_lender_protocol::{
    ErrorKind, Generation, HeldFence, Identity, ROM_PART, RamRange, RemoteError, Reply, Request,
    Secret, Transport, VERSION,
};

use crate::{
    fences::Claim,
    lease_owner::LeaseOwner,
    refusals::invalid,
    registry::{DeviceRequest, Going, Registry, Viewer},
    source::Report,
};

/// Timeout for an answer of a device thread.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for ending a lease and flushing the device's writes; a tool retries after that.
pub(crate) const HANDOVER_TIMEOUT: Duration = Duration::from_millis(3500);

/// Maximum length of a migration id, in bytes.
const MAX_MIGRATION: usize = 64;

/// Maximum number of guest RAM ranges in a check.
const MAX_RAM_RANGES: usize = 4096;

/// What moves devices.
const MIGRATION: &str = "`farside migrate` and `farside migration` hand devices over";

/// The peer's claim, from its Hello.
pub(crate) struct Peer {
    pub(crate) vm: Option<VmName>,
}

/// The answer to a request.
pub(crate) enum Answer {
    Reply(Reply),
    /// The connection may become a lease: see [`Registry::grant`].
    Borrow(Borrow),
    /// The device's thread has been asked.
    Later(Pending),
    /// What is in use of the limits that all devices share, for operators.
    LimitsInUse,
    /// For operators only, which has not been checked; may block.
    Operate(Request),
}

/// The parameters of a borrow request.
pub(crate) struct Borrow {
    pub(crate) device: DeviceId,
    pub(crate) owner: LeaseOwner,
    pub(crate) transport: Transport,
    pub(crate) fence: Option<HeldFence>,
    /// For a lease that goes on.
    pub(crate) going: Option<Going>,
}

/// A question to a device's thread.
pub(crate) struct Pending {
    device: DeviceId,
    answer: Awaited,
    /// The log line for a handover, once it is done.
    pub(crate) handover: Option<String>,
}

enum Awaited {
    Status(Receiver<Report>),
    Check(Receiver<Result<(), RemoteError>>),
    Handover(Receiver<Result<(), RemoteError>>, Generation),
}

impl Pending {
    /// Waits for the answer. `viewer` is the peer.
    pub(crate) fn wait(
        &self,
        registry: &Registry,
        viewer: &Viewer<'_>,
    ) -> Result<Reply, RemoteError> {
        let timeout = match self.answer {
            Awaited::Handover(..) => HANDOVER_TIMEOUT,
            Awaited::Status(_) | Awaited::Check(_) => ANSWER_TIMEOUT,
        };
        let late = || {
            Err(RemoteError {
                kind: ErrorKind::Internal,
                message: format!("device {} does not answer within {timeout:?}", self.device),
            })
        };
        self.receive(timeout, registry, viewer).unwrap_or_else(late)
    }

    /// Returns the answer, if it arrives within `timeout`.
    pub(crate) fn receive(
        &self,
        timeout: Duration,
        registry: &Registry,
        viewer: &Viewer<'_>,
    ) -> Option<Result<Reply, RemoteError>> {
        Some(match &self.answer {
            Awaited::Status(receiver) => {
                let report = receiver.recv_timeout(timeout).ok()?;
                let entry = registry.entry(&self.device, viewer);
                entry.map(|entry| Reply::Status(Box::new(report.status_of(entry))))
            }
            Awaited::Check(receiver) => {
                let checked = receiver.recv_timeout(timeout).ok()?;
                checked.map(|()| Reply::Done)
            }
            Awaited::Handover(receiver, generation) => {
                let ended = receiver.recv_timeout(timeout).ok()?;
                ended.map(|()| Reply::Fence {
                    generation: *generation,
                })
            }
        })
    }
}

/// The peer, as the registry takes it.
pub(crate) fn viewer<'a>(identity: &'a Identity, peer: Option<&'a Peer>) -> Viewer<'a> {
    Viewer {
        identity,
        vm: peer.and_then(|peer| peer.vm.as_ref()),
    }
}

/// Answers a request of the peer `identity`, of whose Hello `peer` is the record.
pub(crate) fn answer(
    request: Request,
    lender: &LenderName,
    limits: &NtbLimits,
    registry: &Registry,
    peer: &mut Option<Peer>,
    identity: &Identity,
) -> Result<Answer, RemoteError> {
    let reply = match (request, &*peer) {
        (Request::Hello { version, vm }, None) => {
            *peer = Some(hello(lender, version, vm)?);
            Reply::Welcome {
                lender: lender.to_string(),
                instance: registry.instance(),
            }
        }
        (_, None) => return Err(invalid("the first message must be Hello".into())),
        (Request::Hello { .. }, Some(_)) => return Err(invalid("Hello was said already".into())),
        (Request::Limits, Some(_)) => Reply::Limits(limits.clone()),
        (request, Some(_)) => {
            return answer_peer(request, registry, &viewer(identity, peer.as_ref()));
        }
    };
    Ok(Answer::Reply(reply))
}

fn hello(lender: &LenderName, version: u32, vm: Option<String>) -> Result<Peer, RemoteError> {
    if version != VERSION {
        return Err(RemoteError {
            kind: ErrorKind::Version,
            message: format!(
                "lender {lender} speaks version {VERSION} of the control protocol, not {version}: install the same farside on both"
            ),
        });
    }
    let vm = vm.map(VmName::try_from).transpose();
    let vm = vm.map_err(|error| invalid(error.to_string()))?;
    Ok(Peer { vm })
}

/// Answers a request of a peer that has sent Hello.
fn answer_peer(
    request: Request,
    registry: &Registry,
    viewer: &Viewer<'_>,
) -> Result<Answer, RemoteError> {
    let may_borrow = |device: &DeviceId| registry.access(device)?.may(viewer.identity, viewer.vm);
    Ok(match request {
        Request::Devices { after } => {
            Answer::Reply(Reply::Devices(registry.entries(after.as_ref(), viewer)))
        }
        Request::LimitsInUse => Answer::LimitsInUse,
        Request::Describe { device } => {
            may_borrow(&device)?;
            let described = (*registry.described(&device)?).clone();
            Answer::Reply(Reply::Description(Box::new(described)))
        }
        Request::Rom { device, offset } => {
            may_borrow(&device)?;
            let rom = registry.rom(&device)?;
            let rest = rom.get(offset as usize..).unwrap_or_default();
            let part = &rest[..rest.len().min(ROM_PART)];
            Answer::Reply(Reply::Rom(part.to_vec()))
        }
        Request::Status { device } => {
            may_borrow(&device)?;
            let (reply, report) = sync_channel(1);
            registry
                .queue(&device)?
                .post(DeviceRequest::Report(reply))?;
            later(device, Awaited::Status(report))
        }
        Request::Check {
            device,
            transport,
            ram,
        } => {
            may_borrow(&device)?;
            check(registry, viewer, device, transport, ram)?
        }
        Request::Borrow {
            device,
            transport,
            fence,
        } => {
            let owner = borrows(viewer)?;
            may_borrow(&device)?;
            carries(transport, viewer.identity)?;
            if transport == Transport::Network {
                return Err(invalid("over the network, BorrowMedium borrows".into()));
            }
            Answer::Borrow(Borrow {
                device,
                owner,
                transport,
                fence,
                going: None,
            })
        }
        Request::BorrowAndKeep {
            device,
            fence,
            keep_ms,
            resumes,
        } => {
            let owner = borrows(viewer)?;
            may_borrow(&device)?;
            carries(Transport::SharedMemory, viewer.identity)?;
            let keep = Duration::from_millis(keep_ms);
            Answer::Borrow(Borrow {
                device,
                owner,
                transport: Transport::SharedMemory,
                fence,
                going: Some(Going { keep, resumes }),
            })
        }
        Request::BorrowMedium {
            device,
            fence,
            keep_ms,
            resumes,
        } => {
            let owner = borrows(viewer)?;
            may_borrow(&device)?;
            carries(Transport::Network, viewer.identity)?;
            let keep = Duration::from_millis(keep_ms);
            Answer::Borrow(Borrow {
                device,
                owner,
                transport: Transport::Network,
                fence,
                going: Some(Going { keep, resumes }),
            })
        }
        Request::Handover {
            device,
            vm,
            migration,
            supersedes,
            secret,
        } => hand_over(registry, viewer, device, vm, migration, supersedes, secret)?,
        Request::EndReservation { device, secret } => {
            let operator = may_claim(registry, viewer, &device, None)?;
            registry.end_reservation(&device, secret, operator)?;
            Answer::Reply(Reply::Done)
        }
        request @ (Request::Revoke { .. }
        | Request::SetAvailable { .. }
        | Request::AddDevice { .. }
        | Request::RemoveDevice { .. }
        | Request::ResizeDevice { .. }) => Answer::Operate(request),
        Request::Registers { .. } => {
            return Err(invalid(
                "Registers must be the first message of a connection".into(),
            ));
        }
        _ => return Err(invalid("that needs a lease: Borrow first".into())),
    })
}

/// The VM that the peer names, of the peer.
fn owner(viewer: &Viewer<'_>) -> Option<LeaseOwner> {
    let vm = viewer.vm.cloned()?;
    Some(LeaseOwner::new(vm, Some(viewer.identity)))
}

/// The owner of a lease that the peer borrows.
fn borrows(viewer: &Viewer<'_>) -> Result<LeaseOwner, RemoteError> {
    owner(viewer).ok_or_else(|| invalid("only a VM can borrow: Hello named none".into()))
}

/// Asks the device's thread whether a borrow could work.
fn check(
    registry: &Registry,
    viewer: &Viewer<'_>,
    device: DeviceId,
    transport: Transport,
    ram: Vec<RamRange>,
) -> Result<Answer, RemoteError> {
    carries(transport, viewer.identity)?;
    if ram.len() > MAX_RAM_RANGES {
        return Err(invalid(format!(
            "guest RAM in {} ranges; at most {MAX_RAM_RANGES} are looked at",
            ram.len()
        )));
    }
    let (reply, checked) = sync_channel(1);
    let request = DeviceRequest::Check {
        owner: owner(viewer),
        transport,
        ram,
        reply,
    };
    registry.queue(&device)?.post(request)?;
    Ok(later(device, Awaited::Check(checked)))
}

/// Reserves the device for `vm` where it goes, and ends its lease here.
fn hand_over(
    registry: &Registry,
    viewer: &Viewer<'_>,
    device: DeviceId,
    vm: String,
    migration: String,
    supersedes: Option<HeldFence>,
    secret: Secret,
) -> Result<Answer, RemoteError> {
    let vm = VmName::try_from(vm).map_err(|error| invalid(error.to_string()))?;
    let operator = may_claim(registry, viewer, &device, Some(&vm))?;
    check_migration(&migration)?;
    let claim = Claim {
        device: &device,
        vm: &vm,
        migration: &migration,
        supersedes,
        secret,
        operator,
    };
    let (reply, ended) = sync_channel(1);
    let fence = registry.hand_over(&claim, reply)?;
    let line = format!(
        "device {device}: handed over to where VM {vm} goes (migration {migration}, fence {fence})"
    );
    Ok(Answer::Later(Pending {
        device,
        answer: Awaited::Handover(ended, fence),
        handover: Some(line),
    }))
}

fn later(device: DeviceId, answer: Awaited) -> Answer {
    Answer::Later(Pending {
        device,
        answer,
        handover: None,
    })
}

/// Checks that a tool may change the fences of `vm`. Returns whether it needs no proof.
fn may_claim(
    registry: &Registry,
    viewer: &Viewer<'_>,
    device: &DeviceId,
    vm: Option<&VmName>,
) -> Result<bool, RemoteError> {
    let access = registry.access(device)?;
    access.may(viewer.identity, vm)?;
    viewer.names_no_vm(MIGRATION)?;
    Ok(access.may_claim(viewer.identity, vm))
}

/// Refuses a transport that the peer's transport does not support.
fn carries(transport: Transport, identity: &Identity) -> Result<(), RemoteError> {
    match transport {
        Transport::SharedMemory if identity.is_network() => Err(invalid(
            "files of guest RAM cannot be sent over TCP: a device reaches a VM of another host through an NTB, and one of this host borrows at the lender's UNIX socket".into(),
        )),
        Transport::Network if !identity.is_network() => Err(invalid(
            "the medium of a device is lent to other hosts, over TCP: at this socket, borrow the device".into(),
        )),
        Transport::SharedMemory | Transport::Ntb | Transport::Network => Ok(()),
    }
}

fn check_migration(id: &str) -> Result<(), RemoteError> {
    if id.is_empty() || id.len() > MAX_MIGRATION || !id.chars().all(|c| c.is_ascii_graphic()) {
        return Err(invalid(format!(
            "a migration's id has 1 to {MAX_MIGRATION} printable characters"
        )));
    }
    Ok(())
}
