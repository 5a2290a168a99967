//! Answers the requests of a lease.

use std::{os::fd::OwnedFd, sync::Arc};

use farside_fabric::MemoryRange;
use farside_lender_protocol::{RemoteError, Reply, Request};

use super::LeaseLoop;
use crate::{
    refusals::{invalid, refused},
    source::DRAIN_TIMEOUT,
};

impl LeaseLoop<'_> {
    pub(super) fn answer(
        &mut self,
        request: Request,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, RemoteError> {
        let device = &mut self.device;
        match request {
            Request::Reset => {
                device.revoke(DRAIN_TIMEOUT)?;
                device.reset()?;
            }
            Request::EnableBusMaster => device.path().set_bus_master(true).map_err(refused)?,
            Request::Close => {
                device.revoke(DRAIN_TIMEOUT)?;
                device.resume();
            }
            Request::SetIntxDisable { disabled } => device.irqs().set_intx_disable(disabled)?,
            Request::MapPeer {
                peer_address,
                len,
                offset,
                writable,
            } => {
                let file = fds.into_iter().next().ok_or_else(|| {
                    let hint = match self.connection.is_tcp() {
                        true => ", which TCP cannot carry: between hosts, memory is reached through an NTB",
                        false => "",
                    };
                    invalid(format!("MapPeer of {peer_address} came without a descriptor{hint}"))
                })?;
                let range = MemoryRange {
                    file: Arc::new(file.into()),
                    offset,
                    len,
                    writable,
                };
                let memory = self.memory.map(&range).map_err(refused)?;
                device.map_peer(peer_address, &range, memory)?;
            }
            Request::UnmapPeer { peer_address, len } => device.unmap_peer(peer_address, len)?,
            Request::OpenWindow {
                iova,
                peer_address,
                len,
            } => {
                let window = device.path().open_window(iova, peer_address, len);
                let lut_entries = window.map_err(refused)?.lut_entries;
                return Ok(Reply::Window { lut_entries });
            }
            Request::ReachBar {
                iova,
                exported,
                len,
            } => device.reach_bar(iova, exported, len)?,
            Request::CloseWindow { iova } => {
                let quiesced = device.quiesce(DRAIN_TIMEOUT);
                let closed =
                    quiesced.and_then(|()| device.path().close_window(iova).map_err(refused));
                device.resume();
                closed?;
            }
            Request::SetIrqs(update) => {
                if self.connection.is_tcp() && update.descriptors() != 0 {
                    return Err(invalid(
                        "SetIrqs with eventfds, which TCP cannot carry: between hosts, interrupts are relayed".into(),
                    ));
                }
                // An unmasked INTx line is asserted as the guest has left it.
                let _ = device.is_polled() && device.poll();
                device.irqs().set(update, fds)?;
                self.send_relayed();
            }
            Request::Status { .. } => {
                let entry = self.owner.home.entry();
                let entry = entry.ok_or_else(|| invalid("the device is gone".into()))?;
                let report = self.owner.report(&mut *self.device);
                return Ok(Reply::Status(Box::new(report.status_of(entry))));
            }
            Request::Return => {}
            other @ (Request::Hello { .. }
            | Request::Devices { .. }
            | Request::Limits
            | Request::LimitsInUse
            | Request::Describe { .. }
            | Request::Rom { .. }
            | Request::Check { .. }
            | Request::Borrow { .. }
            | Request::BorrowMedium { .. }
            | Request::BorrowAndKeep { .. }
            | Request::Handover { .. }
            | Request::EndReservation { .. }
            | Request::Revoke { .. }
            | Request::SetAvailable { .. }
            | Request::AddDevice { .. }
            | Request::RemoveDevice { .. }
            | Request::ResizeDevice { .. }
            | Request::Registers { .. }) => {
                return Err(invalid(format!("{other:?} has no place within a lease")));
            }
        }
        Ok(Reply::Done)
    }
}
