//! A connection without a lease: tools, and backends before they borrow.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, LenderName, VmName, Wakeup};
use farside_devices::state;
use farside_error_chain::Chain;
use farside_fabric::{AdapterUsage, NtbLimits, soft::Adapter};
use farside_lender_protocol::{
    Channel, ChannelError, Envelope, ErrorKind, Identity, LimitUse, MAX_DEVICES, MAX_RESIZED,
    MAX_REVOKE_LIMIT, RegisterToken, RemoteError, Reply, Request, Resource, STATE_PAGE, TOKEN_LIFE,
    Transport,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{SealFlags, fcntl_get_seals},
};

use crate::{
    chains,
    listening::{PeerCount, PeerLines},
    refusals::{invalid, limit},
    registry::{Going, Lease, Registry, Viewer},
    requests::{ANSWER_TIMEOUT, Answer, Borrow, Pending, answer, viewer},
    server::Devices,
};

/// Timeout for sending an answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for Hello. Short in tests, which wait for it.
const HELLO_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// Timeout for the next request of a peer that has sent Hello and has no lease: idle peers would
/// take the places of others. Tools and backends ask at once, or connect anew. Short in tests.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 60 });

/// What all connections share.
pub(crate) struct About {
    pub(crate) name: LenderName,
    pub(crate) limits: NtbLimits,
    pub(crate) devices: Devices,
    /// The adapter of software models.
    pub(crate) adapter: Adapter,
    /// This host's NTB endpoint, if functions are lent through it.
    pub(crate) ntb: Option<farside_ntb::Adapter>,
    /// The peers of each listener.
    pub(crate) peers: Vec<PeerCount>,
}

/// What is used of an adapter's requester and LUT entries.
fn of_adapter(usage: &AdapterUsage, resources: (Resource, Resource)) -> [LimitUse; 2] {
    let AdapterUsage {
        limits,
        devices,
        lut_entries,
        ..
    } = usage;
    let (requesters, most) = (devices.len() as u64, limits.max_devices().into());
    let (used, entries) = ((*lut_entries).into(), limits.lut_entries.into());
    [
        LimitUse::new(resources.0, requesters, most),
        LimitUse::new(resources.1, used, entries),
    ]
}

impl About {
    /// What is in use of the limits that all devices share.
    fn limits_in_use(&self, registry: &Registry) -> Vec<LimitUse> {
        let mut limits = Vec::new();
        if let Some(usage) = self.adapter.tables().usage() {
            let resources = (Resource::RequesterEntries, Resource::LutEntries);
            limits.extend(of_adapter(&usage, resources));
        }
        if let Some(ntb) = &self.ntb {
            let resources = (Resource::NtbRequesterEntries, Resource::NtbLutEntries);
            limits.extend(of_adapter(&ntb.usage(), resources));
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
/// connection. With TLS the handshake comes first, in the time for Hello. `count` counts a peer of the
/// VM that its Hello names.
pub(crate) fn serve(
    mut channel: Channel,
    lender: &About,
    registry: &Arc<Registry>,
    stop: &Wakeup,
    lines: &PeerLines,
    count: &dyn Fn(&VmName) -> Result<(), String>,
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
                if !wait(&channel, stop, left) {
                    return;
                }
                continue;
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
        let is_hello = peer.is_none();
        let answered = answer(
            envelope.request,
            &lender.name,
            &lender.limits,
            registry,
            &mut peer,
            identity,
        );
        let vm = peer.as_ref().and_then(|peer| peer.vm.as_ref());
        if let Some(Err(most)) = vm.filter(|_| is_hello).map(count) {
            if let Some(held_back) = lines.refused.allow() {
                log::warn!("refusing {name}: {most} are connected already{held_back}");
            }
            let refused = limit(format_args!("{most} are connected already"));
            // The peer may be gone.
            let _ = channel.send(&Reply::Refused(refused), &[], ANSWER_TIMEOUT);
            return;
        }
        let asking = viewer(identity, peer.as_ref());
        let reply = match answered {
            Ok(Answer::Reply(reply)) => Ok(reply),
            Ok(Answer::Later(pending)) => {
                let answered = pending.wait(registry, &asking);
                log_handover(&pending, &answered, lines);
                answered
            }
            Ok(Answer::LimitsInUse) => {
                let is_operator = lender.devices.check_operator(&asking).is_ok();
                Ok(Reply::LimitsInUse(match is_operator {
                    true => lender.limits_in_use(registry),
                    false => Vec::new(),
                }))
            }
            Ok(Answer::Operate(request)) => operate(request, &lender.devices, registry, &asking),
            Ok(Answer::Borrow(borrow)) => match lend(channel, fds, borrow, registry, lines) {
                Ok(()) => return,
                Err((kept, error)) => {
                    channel = kept;
                    Err(error)
                }
            },
            Err(error) => Err(error),
        };
        let reply = reply.unwrap_or_else(Reply::Refused);
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

/// Waits for the channel. Returns whether to go on.
fn wait(channel: &Channel, stop: &Wakeup, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).unwrap_or_default();
    let mut fds = [
        PollFd::new(channel, channel.interest()),
        PollFd::new(stop, PollFlags::IN),
    ];
    match poll(&mut fds, Some(&timeout)) {
        Err(errno) if errno != rustix::io::Errno::INTR => false,
        _ => fds[1].revents().is_empty(),
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

fn log_handover(pending: &Pending, answered: &Result<Reply, RemoteError>, lines: &PeerLines) {
    if let (Some(line), Ok(_)) = (&pending.handover, answered)
        && let Some(held_back) = lines.handover.allow()
    {
        log::info!("{line}{held_back}");
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

/// Performs a request of an operator.
fn operate(
    request: Request,
    devices: &Devices,
    registry: &Registry,
    asking: &Viewer<'_>,
) -> Result<Reply, RemoteError> {
    devices.check_operator(asking)?;
    let identity = asking.identity;
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
        Request::ResizeDevice { device } => {
            let mut devices = devices.resize(&device, &format_args!("by {identity}"))?;
            let more = devices.len().saturating_sub(MAX_RESIZED) as u32;
            devices.truncate(MAX_RESIZED);
            return Ok(Reply::Resized { devices, more });
        }
        Request::RemoveDevice { device } => {
            devices.remove(&device, ANSWER_TIMEOUT)?;
            log::info!("device {device} is no longer lent, removed by {identity}");
        }
        other => return Err(invalid(format!("{other:?} is not an operator's request"))),
    }
    Ok(Reply::Done)
}

/// Refuses to go on from a state of a version that workers of this lender do not read, before anything is granted: the
/// device stays kept for its VM, and another lender may read it.
fn check_state(device: &DeviceId, state: &OwnedFd) -> Result<(), RemoteError> {
    // Reading memory does not block, whatever else a peer may send. A worker says what is wrong with that.
    let is_memory = fcntl_get_seals(state).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    let mut header = [0; state::HEADER];
    if !is_memory || rustix::io::pread(state, &mut header, STATE_PAGE) != Ok(header.len()) {
        return Ok(());
    }
    match state::check_version(&header) {
        Err(state::StateError::Version(why)) => Err(RemoteError {
            kind: ErrorKind::Invalid,
            message: format!(
                "device {device} cannot go on with this lender: {why}: start the lender of {}, until then I/O waits, for lost-after at most",
                why.remedy()
            ),
        }),
        _ => Ok(()),
    }
}

/// Moves the connection into the device's thread, which answers the request.
fn lend(
    connection: Channel,
    mut bar_memory: Vec<OwnedFd>,
    Borrow {
        device,
        owner,
        transport,
        fence,
        going,
    }: Borrow,
    registry: &Registry,
    lines: &PeerLines,
) -> Result<(), (Channel, RemoteError)> {
    let keeps_state = going.is_some() && transport == Transport::SharedMemory;
    let state = bar_memory.pop_if(|_| keeps_state);
    if keeps_state && state.is_none() {
        let error = invalid("BorrowAndKeep without the file of the state".into());
        return Err((connection, error));
    }
    if let (Some(state), true) = (&state, going.is_some_and(|it| it.resumes.is_some()))
        && let Err(error) = check_state(&device, state)
    {
        return Err((connection, error));
    }
    let granted = match going {
        Some(Going {
            resumes: Some(_), ..
        }) if !registry.can_go_on(&device, transport) => Err(chains::ended(
            &device,
            owner.vm(),
            "its leases do not go on: it is neither a disk whose image is told from another, nor a function of a VM of this host; reset the VM to borrow it anew",
        )),
        Some(going) if registry.can_go_on(&device, transport) || !keeps_state => {
            let granted = registry.grant_medium(&device, (&owner, transport), fence, going);
            granted.map(|(grant, chain)| (grant, Some(chain)))
        }
        _ => registry
            .grant(&device, &owner, fence)
            .map(|grant| (grant, None)),
    };
    let (grant, chain) = match granted {
        Ok(granted) => granted,
        Err(error) => return Err((connection, error)),
    };
    let generation = grant.generation();
    // If the thread is gone, the connection closes with the message, and the borrower sees that the
    // lender is gone.
    let posted = grant.post(Lease {
        connection,
        owner,
        generation,
        transport,
        bar_memory,
        state,
        chain,
    });
    if let Err(error) = posted
        && let Some(held_back) = lines.refused.allow()
    {
        log::error!("device {device}: {error}{held_back}", error = Chain(&error));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_both_adapters_are_shown_apart() {
        let usage = AdapterUsage {
            limits: NtbLimits::default(),
            devices: vec!["nvme0".into(), "nvme1".into()],
            windows: 1,
            lut_entries: 128,
            largest_free_run: 128,
        };
        let shown = |resources| of_adapter(&usage, resources).map(|limit| limit.to_string());
        let devices = usage.limits.max_devices();
        assert_eq!(
            shown((Resource::RequesterEntries, Resource::LutEntries)),
            [
                format!("2 of {devices} requester entries"),
                "128 of 256 LUT entries".into()
            ]
        );
        assert_eq!(
            shown((Resource::NtbRequesterEntries, Resource::NtbLutEntries)),
            [
                format!("2 of {devices} NTB requester entries"),
                "128 of 256 NTB LUT entries".into()
            ]
        );
    }
}
