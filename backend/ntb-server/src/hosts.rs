//! Both VMs, as the model accesses them.

use std::sync::atomic::Ordering;

use farside_fabric::memory::HostSlice;
use farside_ntb::endpoint_iova;

use crate::{
    memory::{Access, Found},
    model::{HostAccess, PeerError, Port, Read, Target},
    side::{Side, Tag},
};

/// Requests of one VMM that are served before the other one's are.
const BUDGET: usize = 256;

/// Most writes in one request of QEMU (`VFIO_USER_MULTI_MAX`).
const WRITES: usize = 200;

/// Both VMs.
pub(crate) struct Hosts(pub(crate) [Side; 2]);

impl Hosts {
    pub(crate) fn side(&mut self, port: Port) -> &mut Side {
        &mut self.0[port as usize]
    }

    /// How many requests of the VMM of `port` may be served now. None while its last one waits, and while there is no room for the
    /// DMA commands that one more could cause: its writes wait then, as posted writes of PCIe do for flow control credits. They do
    /// not wait for a peer that has not answered the last command in time.
    pub(crate) fn budget(&self, port: Port) -> usize {
        let (own, other) = (&self.0[port as usize], &self.0[port.peer() as usize]);
        match own.held {
            Some(_) => 0,
            None if !other.answers => BUDGET,
            None => BUDGET.min(other.commands.room() / WRITES),
        }
    }

    /// Whether an access to shared memory of `port` must be queued behind the DMA
    /// commands to its VMM. False while that VMM waits for the reply to a read: it
    /// serves no command until then.
    fn must_queue(&self, port: Port) -> bool {
        let side = &self.0[port as usize];
        !side.commands.is_idle() && side.held.is_none()
    }
}

impl HostAccess for Hosts {
    fn memory_read(&mut self, at: Target, data: &mut [u8]) -> Result<Read, PeerError> {
        let (from, to) = (at.from, at.from.peer());
        let must_queue = self.must_queue(to);
        let number = self.side(from).reads + 1;
        let side = self.side(to);
        let iova = endpoint_iova(at.address);
        match side.memory.find(iova, Access::Read) {
            Found::Denied => return Err(PeerError::Refused),
            Found::Shared { memory, offset } if !must_queue => {
                load(memory, offset, data);
                return Ok(Read::Done);
            }
            Found::Shared { .. } | Found::Unknown => {}
        }
        if side.held.is_some() {
            return Err(PeerError::Busy);
        }
        let tag = Tag::Read { port: from, number };
        // At most a page.
        let count = data.len() as u32;
        let sent = side.commands.read(iova.get(), count, tag);
        sent.map_err(|_| PeerError::Busy)?;
        self.side(from).reads = number;
        Ok(Read::Later)
    }

    fn memory_write(&mut self, at: Target, data: &[u8]) -> Result<(), PeerError> {
        let to = at.from.peer();
        let must_queue = self.must_queue(to);
        let side = self.side(to);
        let iova = endpoint_iova(at.address);
        match side.memory.find(iova, Access::Write) {
            Found::Denied => Err(PeerError::Refused),
            Found::Shared { memory, offset } if !must_queue => {
                store(memory, offset, data);
                Ok(())
            }
            Found::Shared { .. } | Found::Unknown => side
                .commands
                .write(iova.get(), data, Tag::Write(at))
                .map_err(|_| PeerError::Busy),
        }
    }

    fn raise(&mut self, port: Port, vector: u16) {
        self.side(port).vectors.raise(vector);
    }

    fn is_pending(&self, port: Port, vector: u16) -> bool {
        self.0[port as usize].vectors.is_pending(vector)
    }
}

/// Loads aligned words of 4 and 8 bytes atomically, other lengths byte by byte. The
/// range must be inside `memory`.
fn load(memory: &HostSlice, offset: usize, data: &mut [u8]) {
    let whole = match data.len() {
        4 => memory
            .load_u32(offset, Ordering::Acquire)
            .map(|value| data.copy_from_slice(&value.to_le_bytes())),
        8 => memory
            .load_u64(offset, Ordering::Acquire)
            .map(|value| data.copy_from_slice(&value.to_le_bytes())),
        _ => None,
    };
    if whole.is_none()
        && let Some(part) = memory.slice(offset, data.len())
    {
        part.read(data);
    }
}

/// Stores, with the same atomicity.
fn store(memory: &HostSlice, offset: usize, data: &[u8]) {
    let whole = match *data {
        [a, b, c, d] => {
            memory.store_u32(offset, u32::from_le_bytes([a, b, c, d]), Ordering::Release)
        }
        [a, b, c, d, e, f, g, h] => {
            let value = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
            memory.store_u64(offset, value, Ordering::Release)
        }
        _ => None,
    };
    if whole.is_none()
        && let Some(part) = memory.slice(offset, data.len())
    {
        part.write(data);
    }
}
