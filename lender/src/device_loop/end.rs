//! The end of a lease, and its clean-up.

use std::time::{Duration, Instant};

use farside_daemon::VmName;
use farside_error_chain::Chain;
use farside_lender_protocol::{
    Channel, ChannelError, Generation, RemoteError, Reply, Revocation, TOKEN_LIFE,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{DeviceLoop, Line};
use crate::{
    registry::Release,
    source::{DRAIN_TIMEOUT, DeviceSource, LeasedDevice},
};

/// Timeout for sending an answer.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for register accesses that were sent before a request.
pub(super) const LATE_ACCESSES: Duration = Duration::from_secs(2);

/// Pause after the first failed revocation; each further failure doubles it.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Maximum pause between two attempts.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The reason for the end of a lease.
pub(super) enum End {
    Returned,
    PeerGone(ChannelError),
    /// The borrower did not connect its register channel.
    NoRegisters,
    /// Register accesses that the borrower counted as sent did not arrive.
    LostAccesses {
        sent: u64,
        came: u64,
    },
    /// The VM moves to another host.
    HandedOver,
    /// The guest did not release the revoked device in time.
    Revoked,
    /// The device has gone.
    Gone,
    Stopped,
}

/// Ends a lease, in the order documented in [`super`]. Returns `None` if the device has to stay
/// open until the process exits.
pub(super) fn take_back(
    owner: &mut DeviceLoop,
    mut device: Box<dyn LeasedDevice>,
    mut connection: Channel,
    vm: &VmName,
    generation: Generation,
    refusals: u64,
    end: End,
) -> Option<Box<dyn DeviceSource>> {
    // A backend that is killed leaves its connection to the next one, and nothing else.
    let is_left = matches!(end, End::PeerGone(_)) && !has_hung_up(&connection);
    let is_wanted = owner.revocation(generation).is_some() || !owner.handovers.is_empty();
    if is_left && !is_wanted && device.is_left_running() {
        let line = format!(
            "device {}: kept for its VM: the backend is gone (VM {vm}, generation {generation})",
            owner.id
        );
        owner.home.line(Line::Ended, &line);
        // As if this process was killed.
        std::mem::forget((device, connection));
        return None;
    }
    if !revoke(owner, &mut *device, vm, generation) {
        // Neither released nor reset. Dropping it would unmap memory under a device that still does
        // DMA, and closing the connection would signal the borrower that its memory is safe to
        // reuse.
        std::mem::forget((device, connection));
        return None;
    }
    // The next process goes on from it.
    let stays = is_left && device.leave_state();
    // Within the host, what was written stays in the kernel's cache, of which the next worker reports errors. The guest
    // would wait for the disk, and a process that is killed meanwhile does not end.
    if !stays && let Err(error) = device.source().flush() {
        log::error!("{error}", error = Chain(&error));
    }
    let goes_on = stays || matches!(end, End::Stopped) && device.leave_state();
    // Release fabric resources first, so that the next borrower of the free device has room.
    let source = device.end();
    let why = match &end {
        End::Returned => "returned".to_owned(),
        End::PeerGone(_) if goes_on => "kept for its VM: the backend is gone".to_owned(),
        End::PeerGone(ChannelError::Closed) => "revoked: the backend is gone".to_owned(),
        End::PeerGone(error) => format!("revoked: {error}", error = Chain(&error)),
        End::NoRegisters => {
            format!("revoked: the backend did not connect for the registers within {TOKEN_LIFE:?}")
        }
        End::LostAccesses { sent, came } => {
            format!("revoked: of {sent} register accesses, {came} came within {LATE_ACCESSES:?}")
        }
        End::HandedOver => "revoked: the VM is moving to another host".to_owned(),
        End::Revoked => "revoked: the guest did not release it in time".to_owned(),
        End::Gone => "lost: the device is gone".to_owned(),
        End::Stopped if goes_on => "kept for its VM: the lender stops".to_owned(),
        End::Stopped => "revoked: the lender stops".to_owned(),
    };
    let line = format!(
        "device {}: {why} (VM {vm}, generation {generation}, {} DMA faults, {refusals} requests refused)",
        owner.id,
        owner.home.dma_faults(source.report().faults.total),
    );
    owner.home.line(Line::Ended, &line);
    let how = match end {
        End::Revoked | End::HandedOver | End::Stopped => Revocation::Ended,
        End::Returned
        | End::PeerGone(_)
        | End::NoRegisters
        | End::LostAccesses { .. }
        | End::Gone => Revocation::Released,
    };
    let how = match goes_on {
        true => Release::Cut,
        false => Release::Over(how),
    };
    owner.home.released(generation, how);
    if matches!(end, End::Returned) {
        // The lease is over whether or not the borrower receives this.
        let _ = connection.send(&Reply::Done, &[], SEND_TIMEOUT);
    }
    // Closing the connection signals the borrower that all of this is done.
    Some(source)
}

/// Revokes the device's access to the borrower's memory, and retries until that succeeds. Returns
/// false if the lender stops first.
fn revoke(
    owner: &mut DeviceLoop,
    device: &mut dyn LeasedDevice,
    vm: &VmName,
    generation: Generation,
) -> bool {
    let mut pause = FIRST_PAUSE;
    let mut patience = DRAIN_TIMEOUT;
    while let Err(error) = device.revoke(patience) {
        // Further draining happens during the pauses, which answer messages.
        patience = Duration::ZERO;
        owner.publish_problem(Some(&format!(
            "cannot stop its DMA: {error}; VM {vm} keeps the lease (generation {generation}) until that succeeds, trying again"
        )));
        if !pause_for_request(owner, device, generation, pause, &error) {
            log::error!(
                "device {}: the lender stops, and its DMA is not stopped: {error}; it stays as it is until the process has exited",
                owner.id
            );
            return false;
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    owner.publish_problem(device.source().problem());
    true
}

/// Answers messages for the length of `pause`. Returns false when the lender stops.
fn pause_for_request(
    owner: &mut DeviceLoop,
    device: &mut dyn LeasedDevice,
    generation: Generation,
    pause: Duration,
    error: &RemoteError,
) -> bool {
    let until = Instant::now() + pause;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        let left = Timespec::try_from(left).unwrap_or_default();
        let mut fds = [
            PollFd::new(&owner.requests_wake, PollFlags::IN),
            PollFd::new(&owner.stop, PollFlags::IN),
        ];
        // An interrupted wait is only shorter.
        let _ = poll(&mut fds, Some(&left));
        let (requests, stop) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if requests && !owner.answer_requests(device, generation) {
            owner.refuse_handovers(error);
        }
        if stop {
            return false;
        }
    }
}

/// Whether the peer of a connection has closed it.
pub(super) fn has_hung_up(connection: &Channel) -> bool {
    let mut fds = [PollFd::new(connection, PollFlags::RDHUP)];
    let ready = poll(&mut fds, Some(&Timespec::default()));
    ready.is_ok_and(|_| !fds[0].revents().is_empty())
}
