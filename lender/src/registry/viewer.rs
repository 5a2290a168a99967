//! What a peer may see of the registry.

use farside_daemon::{DeviceId, VmName};
use farside_lender_protocol::{ErrorKind, Fence, Identity, RemoteError};

use super::Slot;
use crate::fences::FenceBook;

/// The peer that asks.
pub(crate) struct Viewer<'a> {
    pub(crate) identity: &'a Identity,
    /// The VM for which it borrows; tools name none.
    pub(crate) vm: Option<&'a VmName>,
}

impl Viewer<'_> {
    /// Refuses the connection of a VM, which has the VM's rights alone: the backend that made it may
    /// have been taken over by its guest. `remedy` names what does instead what is refused.
    pub(crate) fn names_no_vm(&self, remedy: &str) -> Result<(), RemoteError> {
        let Some(vm) = self.vm else {
            return Ok(());
        };
        Err(RemoteError {
            kind: ErrorKind::Denied,
            message: format!(
                "this connection's Hello named VM {vm}: it may borrow for that VM, and not take, move or operate devices as its user may; {remedy}, by connections that name no VM"
            ),
        })
    }

    pub(super) fn sees(&self, slot: &Slot) -> bool {
        slot.access.allows(self.identity, self.vm)
    }

    /// The fences of its own VM; operators' tools see all.
    pub(super) fn fences(&self, id: &DeviceId, slot: &Slot, fences: &FenceBook) -> Vec<Fence> {
        let all = self.vm.is_none() && slot.access.is_operator(self.identity);
        let newest = fences.newest(id);
        let visible = newest.filter(|fence| all || self.vm == Some(&fence.vm));
        visible.cloned().collect()
    }
}
