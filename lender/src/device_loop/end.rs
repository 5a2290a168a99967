//! How a lease ends, and what is undone then.

use std::time::{Duration, Instant};

use farside_error_chain::Chain;
use farside_lender_protocol::{Channel, ChannelError, Epoch, RemoteError, Reply, TICKET_LIFE};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::DeviceLoop;
use crate::source::{DRAIN_TIMEOUT, DeviceSource, LeasedDevice};

/// How long a borrower may leave an answer unread.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// How long register accesses may take that were sent before a request.
pub(super) const LATE_ACCESSES: Duration = Duration::from_secs(2);

/// Pause after the first failed revocation; each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Longest pause between two tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Why a lease ended.
pub(super) enum End {
    Returned,
    PeerGone(ChannelError),
    /// The borrower did not connect for its registers.
    NoRegisters,
    /// Accesses that the borrower said it had sent did not come.
    LostAccesses {
        sent: u64,
        came: u64,
    },
    /// The VM goes to another host.
    HandedOver,
    Stopped,
}

/// Undoes a lease, in the order the documentation of [`super`] gives. None when
/// the device stays as it is, open, until the process exits.
pub(super) fn take_back(
    owner: &mut DeviceLoop,
    mut device: Box<dyn LeasedDevice>,
    mut connection: Channel,
    vm: &str,
    epoch: Epoch,
    refusals: u64,
    end: End,
) -> Option<Box<dyn DeviceSource>> {
    if !revoke(owner, &mut *device, vm, epoch) {
        // Neither released nor reset. Dropping it would unmap memory under a
        // device that still does DMA, and closing the connection would tell the
        // borrower that its memory is its own again.
        std::mem::forget((device, connection));
        return None;
    }
    if let Err(error) = device.source().flush() {
        log::error!("{error}", error = Chain(&error));
    }
    // All that it took of the fabric first: whoever sees the device free
    // finds room for it.
    let source = device.end();
    let why = match &end {
        End::Returned => "returned".to_owned(),
        End::PeerGone(ChannelError::Closed) => "taken back: the backend is gone".to_owned(),
        End::PeerGone(error) => format!("taken back: {error}", error = Chain(&error)),
        End::NoRegisters => format!(
            "taken back: the backend did not connect for the registers within {TICKET_LIFE:?}"
        ),
        End::LostAccesses { sent, came } => {
            format!("taken back: of {sent} register accesses, {came} came within {LATE_ACCESSES:?}")
        }
        End::HandedOver => "taken back: the VM is moving to another host".to_owned(),
        End::Stopped => "taken back: the lender stops".to_owned(),
    };
    let line = format!(
        "device {}: {why} (VM {vm}, epoch {epoch}, {} DMA faults, {refusals} requests refused)",
        owner.id,
        source.report().faults.total,
    );
    owner.lines.line("ended", &line);
    owner.registry.release(&owner.id, epoch);
    if matches!(end, End::Returned) {
        // The lease is over whether or not the borrower hears of it.
        let _ = connection.send(&Reply::Done, &[], SEND_TIMEOUT);
    }
    // Closing the connection tells the borrower that all of this is done.
    Some(source)
}

/// Takes the borrower's memory away from the device, however many tries that
/// takes. False when the lender stops before one succeeds.
fn revoke(owner: &mut DeviceLoop, device: &mut dyn LeasedDevice, vm: &str, epoch: Epoch) -> bool {
    let mut pause = FIRST_PAUSE;
    let mut patience = DRAIN_TIMEOUT;
    while let Err(error) = device.revoke(patience) {
        // From now on what drains does so in the pauses, which answer mail.
        patience = Duration::ZERO;
        owner.publish_problem(Some(&format!(
            "cannot stop its DMA: {error}; VM {vm} keeps the lease (epoch {epoch}) until that succeeds, trying again"
        )));
        if !pause_for_mail(owner, device, epoch, pause, &error) {
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

/// Answers what is asked for the length of `pause`. False when the lender
/// stops.
fn pause_for_mail(
    owner: &mut DeviceLoop,
    device: &mut dyn LeasedDevice,
    epoch: Epoch,
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
            PollFd::new(&owner.mail_wake, PollFlags::IN),
            PollFd::new(&owner.stop, PollFlags::IN),
        ];
        // An interrupted wait is only a shorter one.
        let _ = poll(&mut fds, Some(&left));
        let (mail, stop) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if mail && !owner.answer_mail(device, epoch) {
            owner.refuse_handovers(error);
        }
        if stop {
            return false;
        }
    }
}
