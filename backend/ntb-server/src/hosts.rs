//! Both VMs, as the model accesses them.

use std::sync::atomic::Ordering;

use farside_fabric::memory::HostSlice;
use farside_ntb::endpoint_iova;

use crate::{
    memory::{Access, Found},
    model::{HostAccess, PeerError, Port, Read, Target},
    side::{Side, Tag},
};

/// Outstanding DMA commands to a VMM from which on the requests of the other one wait. Linux's buffer of a UNIX socket has room for
/// so many answers without data, so that a VMM which writes them while the server writes to it does not block.
const ENOUGH: usize = 256;

/// Both VMs.
pub(crate) struct Hosts(pub(crate) [Side; 2]);

impl Hosts {
    pub(crate) fn side(&mut self, port: Port) -> &mut Side {
        &mut self.0[port as usize]
    }

    /// Whether the requests of the VMM of `port` must wait: for its own load, or until the other VMM has executed commands, as
    /// posted writes of PCIe wait for flow control credits. An answer may be behind a request that waits. So they do not wait for a
    /// VMM that executes no commands, because it waits itself or has not answered in time: writes beyond the limit of
    /// commands are refused then.
    pub(crate) fn must_wait(&self, port: Port) -> bool {
        let (own, other) = (&self.0[port as usize], &self.0[port.peer() as usize]);
        let executes = other.answers && !other.waits;
        own.held.is_some() || executes && other.commands.outstanding() >= ENOUGH
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
