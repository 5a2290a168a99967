//! A connection without a lease: tools, and backends before they borrow.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, LenderName, VmName, Wakeup};
use farside_error_chain::Chain;
use farside_fabric::{NtbLimits, soft::Adapter};
use farside_lender_protocol::{
    Channel, ChannelError, Envelope, ErrorKind, Generation, HeldFence, Identity, LimitUse,
    MAX_DEVICES, MAX_REVOKE_LIMIT, RegisterToken, RemoteError, Reply, Request, Resource,
    Revocation, Route, TOKEN_LIFE, VERSION,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    fences::Claim,
    listening::{PeerCount, PeerLines},
    refusals::invalid,
    registry::{Lease, Mail, Mailbox, Registry, Viewer},
    server::Devices,
};

/// Timeout for sending an answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for Hello. Short in tests, which wait for it.
const HELLO_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// Timeout for the next request of a peer that has sent Hello and has no lease: idle peers would
/// take the places of others. Tools and backends ask at once, or connect anew. Short in tests.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 60 });

/// Timeout for an answer of a device thread.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for ending a lease and flushing the device's writes; a tool retries after that.
pub(crate) const HANDOVER_TIMEOUT: Duration = Duration::from_millis(3500);

/// Maximum length of a migration id, in bytes.
const MAX_MIGRATION: usize = 64;

/// Maximum number of guest RAM ranges in a check.
const MAX_RAM_RANGES: usize = 4096;

/// What all connections share.
pub(crate) struct About {
    pub(crate) name: LenderName,
    pub(crate) limits: NtbLimits,
    pub(crate) devices: Devices,
    /// The adapter of software models.
    pub(crate) adapter: Adapter,
    /// The peers of each listener.
    pub(crate) peers: Vec<PeerCount>,
}

impl About {
    /// What is in use of the limits that all devices share.
    fn limits_in_use(&self, registry: &Registry) -> Vec<LimitUse> {
        let mut limits = Vec::new();
        if let Some(usage) = self.adapter.tables().usage() {
            let entries = usage.limits.max_devices().into();
            let requesters = usage.devices.len() as u64;
            let (used, lut_entries) = (usage.lut_entries.into(), usage.limits.lut_entries.into());
            limits.extend([
                LimitUse::new(Resource::RequesterEntries, requesters, entries),
                LimitUse::new(Resource::LutEntries, used, lut_entries),
            ]);
        }
        let devices = registry.count() as u64;
        limits.push(LimitUse::new(
            Resource::Devices,
            devices,
            MAX_DEVICES as u64,
        ));
        limits.extend(
            self.peers
                .iter()
                .map(PeerCount::in_use)
                .max_by_key(|peers| peers.used),
        );
        limits
    }
}

/// Answers requests until the peer disconnects, `stop` is readable, or a lease takes over the
/// connection. With TLS the handshake comes first, in the time for Hello.
pub(crate) fn serve(
    mut channel: Channel,
    lender: &About,
    registry: &Arc<Registry>,
    stop: &Wakeup,
    lines: &PeerLines,
) {
    let name = channel.peer();
    let mut peer = None;
    let mut known = None;
    let mut asked = Instant::now();
    loop {
        let (envelope, fds): (Envelope, _) = match channel.try_receive() {
            Ok(Some(message)) => message,
            Ok(None) => {
                let patience = match peer {
                    Some(_) => IDLE_TIMEOUT,
                    None => HELLO_TIMEOUT,
                };
                let left = patience.saturating_sub(asked.elapsed());
                if left.is_zero() {
                    return log_idle(&name, peer.is_some(), lines);
                }
                let left = Timespec::try_from(left).unwrap_or_default();
                let mut fds = [
                    PollFd::new(&channel, channel.interest()),
                    PollFd::new(stop, PollFlags::IN),
                ];
                match poll(&mut fds, Some(&left)) {
                    Err(errno) if errno != rustix::io::Errno::INTR => return,
                    _ if !fds[1].revents().is_empty() => return,
                    _ => continue,
                }
            }
            Err(ChannelError::Closed) => return,
            Err(error) => return log_broken(&name, &error, lines),
        };
        // A message comes after the handshake.
        let identity = match known.take().map_or_else(|| channel.identity(), Ok) {
            Ok(identity) => &*known.insert(identity),
            // The peer has disconnected.
            Err(_) => return,
        };
        if let (Request::Registers { token }, None) = (&envelope.request, &peer) {
            return become_registers(channel, *token, identity, registry, lines);
        }
        let answered = answer(
            envelope.request,
            lender,
            registry,
            &mut peer,
            identity,
            lines,
        );
        let reply = match answered {
            Ok(Answer::Reply(reply)) => reply,
            Ok(Answer::Borrow(borrow)) => match lend(channel, fds, borrow, registry, lines) {
                Ok(()) => return,
                Err((kept, error)) => {
                    channel = kept;
                    Reply::Refused(error)
                }
            },
            Err(error) => Reply::Refused(error),
        };
        if let Err(error) = channel.send(&reply, &[], SEND_TIMEOUT) {
            return log_broken(&name, &error, lines);
        }
        match peer {
            Some(_) => asked = Instant::now(),
            // Refused requests before Hello gain no time.
            None if asked.elapsed() >= HELLO_TIMEOUT => return log_idle(&name, false, lines),
            None => {}
        }
    }
}

fn log_idle(name: &str, greeted: bool, lines: &PeerLines) {
    let (limit, omitted, patience) = match greeted {
        true => (&lines.idle, "requested anything", IDLE_TIMEOUT),
        false => (&lines.silent, "sent Hello", HELLO_TIMEOUT),
    };
    if let Some(held_back) = limit.allow() {
        log::warn!("dropping {name}: it has not {omitted} within {patience:?}{held_back}");
    }
}

fn log_broken(name: &str, error: &ChannelError, lines: &PeerLines) {
    if let Some(held_back) = lines.broken.allow() {
        log::warn!(
            "dropping {name}, a peer of the lender: {error}{held_back}",
            error = Chain(error)
        );
    }
}

/// Turns the connection into the register channel of the lease that issued `token`. An invalid
/// token closes the connection.
fn become_registers(
    mut channel: Channel,
    token: RegisterToken,
    identity: &Identity,
    registry: &Registry,
    lines: &PeerLines,
) {
    let name = channel.peer();
    let redeemed = registry.tokens().redeem(token, identity, Instant::now());
    let reply = match &redeemed {
        Some(_) => Reply::Done,
        None => {
            if let Some(held_back) = lines.token.allow() {
                log::warn!("dropping {name}: invalid register-channel token{held_back}");
            }
            Reply::Refused(RemoteError {
                kind: ErrorKind::Invalid,
                message: format!(
                    "invalid register-channel token: it was used, is older than {TOKEN_LIFE:?}, is another host's, or its lease has ended"
                ),
            })
        }
    };
    match (channel.send(&reply, &[], SEND_TIMEOUT), redeemed) {
        (Ok(()), Some(redeemed)) => redeemed.hand_over(channel),
        (Ok(()), None) => {}
        (Err(error), _) => log_broken(&name, &error, lines),
    }
}

enum Answer {
    Reply(Reply),
    Borrow(Borrow),
}

/// The parameters of a borrow request.
struct Borrow {
    device: DeviceId,
    vm: VmName,
    route: Route,
    fence: Option<HeldFence>,
    operator: bool,
}

/// The peer's claim, from its Hello.
struct Peer {
    vm: Option<VmName>,
}

fn answer(
    request: Request,
    lender: &About,
    registry: &Registry,
    peer: &mut Option<Peer>,
    identity: &Identity,
    lines: &PeerLines,
) -> Result<Answer, RemoteError> {
    let viewer = Viewer {
        identity,
        vm: peer.as_ref().and_then(|peer| peer.vm.as_ref()),
    };
    let may_borrow = |device: &DeviceId, vm: Option<&VmName>| {
        let access = registry.access(device)?;
        access.may(identity, vm)?;
        Ok::<_, RemoteError>(access)
    };
    let reply = match (request, &*peer) {
        (Request::Hello { version, vm }, None) => {
            if version != VERSION {
                return Err(RemoteError {
                    kind: ErrorKind::Version,
                    message: format!(
                        "lender {} speaks version {VERSION} of the control protocol, not {version}: install the same farside on both",
                        lender.name
                    ),
                });
            }
            let vm = vm.map(VmName::try_from).transpose();
            let vm = vm.map_err(|error| invalid(error.to_string()))?;
            *peer = Some(Peer { vm });
            Reply::Welcome {
                lender: lender.name.to_string(),
            }
        }
        (_, None) => return Err(invalid("the first message must be Hello".into())),
        (Request::Devices { after }, _) => {
            Reply::Devices(registry.entries(after.as_ref(), &viewer))
        }
        (Request::Limits, _) => Reply::Limits(lender.limits.clone()),
        (Request::LimitsInUse, _) => {
            let is_operator = lender.devices.check_operator(identity).is_ok();
            Reply::LimitsInUse(if is_operator {
                lender.limits_in_use(registry)
            } else {
                Vec::new()
            })
        }
        (Request::Describe { device }, _) => {
            may_borrow(&device, viewer.vm)?;
            Reply::Description(Box::new((*registry.described(&device)?).clone()))
        }
        (Request::Status { device }, _) => {
            may_borrow(&device, viewer.vm)?;
            let report = ask(registry, &device, Mail::Report)?;
            let entry = registry.entry(&device, &viewer)?;
            Reply::Status(Box::new(report.status_of(entry)))
        }
        (Request::Check { device, route, ram }, _) => {
            may_borrow(&device, viewer.vm)?;
            carries(route, identity)?;
            if ram.len() > MAX_RAM_RANGES {
                return Err(invalid(format!(
                    "guest RAM in {} ranges; at most {MAX_RAM_RANGES} are looked at",
                    ram.len()
                )));
            }
            ask(registry, &device, |reply| Mail::Check { route, ram, reply })??;
            Reply::Done
        }
        (
            Request::Borrow {
                device,
                route,
                fence,
            },
            Some(Peer { vm: Some(vm) }),
        ) => {
            let operator = may_borrow(&device, Some(vm))?.is_operator(identity);
            carries(route, identity)?;
            return Ok(Answer::Borrow(Borrow {
                device,
                vm: vm.clone(),
                route,
                fence,
                operator,
            }));
        }
        (Request::Borrow { .. }, Some(Peer { vm: None })) => {
            return Err(invalid("only a VM can borrow: Hello named none".into()));
        }
        (
            Request::Handover {
                device,
                vm,
                migration,
                supersedes,
                secret,
            },
            _,
        ) => {
            let vm = VmName::try_from(vm).map_err(|error| invalid(error.to_string()))?;
            let operator = may_borrow(&device, Some(&vm))?.may_claim(identity, Some(&vm));
            let claim = Claim {
                device: &device,
                vm: &vm,
                migration: &migration,
                supersedes,
                secret,
                operator,
            };
            Reply::Fence {
                generation: hand_over(registry, &claim, lines)?,
            }
        }
        (Request::EndReservation { device, secret }, _) => {
            let operator = may_borrow(&device, None)?.may_claim(identity, None);
            registry.end_reservation(&device, secret, operator)?;
            Reply::Done
        }
        (
            request @ (Request::Revoke { .. }
            | Request::SetAvailable { .. }
            | Request::AddDevice { .. }
            | Request::RemoveDevice { .. }),
            _,
        ) => {
            lender.devices.check_operator(identity)?;
            operate(request, &lender.devices, registry, identity)?
        }
        (Request::Registers { .. }, Some(_)) => {
            return Err(invalid(
                "Registers must be the first message of a connection".into(),
            ));
        }
        (Request::Hello { .. }, Some(_)) => return Err(invalid("Hello was said already".into())),
        (_, Some(_)) => return Err(invalid("that needs a lease: Borrow first".into())),
    };
    Ok(Answer::Reply(reply))
}

/// Performs a request of an operator.
fn operate(
    request: Request,
    devices: &Devices,
    registry: &Registry,
    identity: &Identity,
) -> Result<Reply, RemoteError> {
    match request {
        Request::Revoke { device, limit_ms } => {
            let limit = Duration::from_millis(limit_ms);
            if limit > MAX_REVOKE_LIMIT {
                return Err(invalid(format!(
                    "a limit of {limit:?} for the guest to release device {device}: at most {MAX_REVOKE_LIMIT:?}"
                )));
            }
            let revoked = registry.revoke(&device, limit, ANSWER_TIMEOUT)?;
            return Ok(Reply::Revocation(revoked));
        }
        Request::SetAvailable { device, available } => {
            registry.set_available(&device, available)?
        }
        Request::AddDevice { table } => devices.add(&table, identity)?,
        Request::RemoveDevice { device } => {
            devices.remove(&device, ANSWER_TIMEOUT)?;
            log::info!("device {device} is no longer lent, removed by {identity}");
        }
        other => return Err(invalid(format!("{other:?} is not an operator's request"))),
    }
    Ok(Reply::Done)
}

/// Refuses a route that the peer's transport does not support.
fn carries(route: Route, identity: &Identity) -> Result<(), RemoteError> {
    match route {
        Route::Memory if identity.is_network() => Err(invalid(
            "files of guest RAM cannot be sent over TCP: a device reaches a VM of another host through an NTB, and one of this host borrows at the lender's UNIX socket".into(),
        )),
        Route::Memory | Route::Ntb => Ok(()),
    }
}

/// Posts a request to a device thread and waits for the answer.
fn ask<T>(
    registry: &Registry,
    device: &DeviceId,
    question: impl FnOnce(mpsc::SyncSender<T>) -> Mail,
) -> Result<T, RemoteError> {
    ask_for(
        &*registry.mailbox(device)?,
        device,
        question,
        ANSWER_TIMEOUT,
    )
}

fn ask_for<T>(
    mailbox: &Mailbox,
    device: &DeviceId,
    question: impl FnOnce(mpsc::SyncSender<T>) -> Mail,
    timeout: Duration,
) -> Result<T, RemoteError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    mailbox.post(question(sender))?;
    receiver.recv_timeout(timeout).map_err(|_| RemoteError {
        kind: ErrorKind::Internal,
        message: format!("device {device} does not answer within {timeout:?}"),
    })
}

/// Revokes a device's lease from the VM's former host.
fn hand_over(
    registry: &Registry,
    claim: &Claim<'_>,
    lines: &PeerLines,
) -> Result<Generation, RemoteError> {
    let id = claim.migration;
    if id.is_empty() || id.len() > MAX_MIGRATION || !id.chars().all(|c| c.is_ascii_graphic()) {
        return Err(invalid(format!(
            "a migration's id has 1 to {MAX_MIGRATION} printable characters"
        )));
    }
    let (fence, mailbox) = registry.hand_over(claim)?;
    let end = |reply| Mail::HandOver { fence, reply };
    ask_for(&mailbox, claim.device, end, HANDOVER_TIMEOUT)??;
    if let Some(held_back) = lines.handover.allow() {
        log::info!(
            "device {}: handed over to where VM {} goes (migration {id}, fence {fence}){held_back}",
            claim.device,
            claim.vm
        );
    }
    Ok(fence)
}

/// Moves the connection into the device's thread, which answers the request.
fn lend(
    connection: Channel,
    bar_memory: Vec<OwnedFd>,
    Borrow {
        device,
        vm,
        route,
        fence,
        operator,
    }: Borrow,
    registry: &Registry,
    lines: &PeerLines,
) -> Result<(), (Channel, RemoteError)> {
    let (generation, mailbox) = match registry.borrow_device(&device, &vm, fence, operator) {
        Ok(granted) => granted,
        Err(error) => return Err((connection, error)),
    };
    // If the thread is gone, the connection closes with the message, and the borrower sees that the
    // lender is gone.
    let posted = mailbox.post(Mail::Lease(Lease {
        connection,
        vm,
        generation,
        route,
        bar_memory,
    }));
    if let Err(error) = posted {
        if let Some(held_back) = lines.refused.allow() {
            log::error!("device {device}: {error}{held_back}", error = Chain(&error));
        }
        registry.release(&device, generation, Revocation::Released);
    }
    Ok(())
}
