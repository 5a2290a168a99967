//! How a lease ends, and what is undone then.

use std::time::Duration;

use farside_control::{Channel, ChannelError, Epoch, Reply, TICKET_LIFE};

use super::DeviceLoop;

/// How long a borrower may leave an answer unread.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// How long register accesses may take that were sent before a request.
pub(super) const LATE_ACCESSES: Duration = Duration::from_secs(2);

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

/// Undoes a lease, in the order the documentation of [`super`] gives.
pub(super) fn take_back(
    owner: &mut DeviceLoop,
    mut connection: Channel,
    vm: &str,
    epoch: Epoch,
    refusals: u64,
    end: End,
) {
    while let Err(error) = owner.device.close() {
        log::error!("{error}; VM {vm} keeps its lease until it has");
    }
    if let Err(error) = owner.device.settle() {
        log::error!("{error}");
    }
    // All that it took of the fabric first: whoever sees the device free
    // finds room for it.
    owner.device.end();
    let why = match &end {
        End::Returned => "returned".to_owned(),
        End::PeerGone(ChannelError::Closed) => "taken back: the backend is gone".to_owned(),
        End::PeerGone(error) => format!("taken back: {error}"),
        End::NoRegisters => format!(
            "taken back: the backend did not connect for the registers within {TICKET_LIFE:?}"
        ),
        End::LostAccesses { sent, came } => {
            format!("taken back: of {sent} register accesses, {came} came within {LATE_ACCESSES:?}")
        }
        End::HandedOver => "taken back: the VM is moving to another host".to_owned(),
        End::Stopped => "taken back: the lender stops".to_owned(),
    };
    log::info!(
        "device {}: {why} (VM {vm}, epoch {epoch}, {} DMA faults, {refusals} requests refused)",
        owner.id,
        owner.device.report().faults.total,
    );
    owner.registry.release(&owner.id, epoch);
    if matches!(end, End::Returned) {
        // The lease is over whether or not the borrower hears of it.
        let _ = connection.send(&Reply::Done, &[], SEND_TIMEOUT);
    }
    // Closing the connection tells the borrower that all of this is done.
}
