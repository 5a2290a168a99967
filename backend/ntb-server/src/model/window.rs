//! Accesses through a window.

use farside_fabric::PeerAddress;

use super::{
    HostAccess, Ntb, PeerError, Port, Read, Target,
    regs::{ADDRESS_ALIGN_SHIFT, error, event},
};

/// Accesses are split at multiples of this, as PCIe requests are. Segments consist of
/// whole pages and peer addresses are page-aligned, so each piece is in one segment,
/// and in one page of the peer.
const PAGE: u64 = 1 << ADDRESS_ALIGN_SHIFT;

/// A read that waits for the peer.
#[derive(Debug)]
pub(super) struct PendingRead {
    /// Offset in the window.
    offset: u64,
    data: Vec<u8>,
    piece: Piece,
}

/// Bytes of the piece that begins at `offset` when `left` are left.
fn piece_len(offset: u64, left: usize) -> usize {
    let room = PAGE - offset % PAGE; // at most 4096
    left.min(room as usize)
}

/// The outstanding piece of a read: `len` bytes of its data, from `at` on.
#[derive(Clone, Copy, Debug)]
struct Piece {
    at: usize,
    len: usize,
    address: PeerAddress,
}

impl Ntb {
    pub(super) fn window_read(
        &mut self,
        port: Port,
        offset: u64,
        data: &mut [u8],
        hosts: &mut dyn HostAccess,
    ) -> Read {
        match self.read_pieces(port, offset, data, 0, hosts) {
            None => Read::Done,
            Some(piece) => {
                self.ports[port].pending = Some(PendingRead {
                    offset,
                    data: data.to_vec(),
                    piece,
                });
                Read::Later
            }
        }
    }

    /// Takes the peer's reply for the pending read through the window of `port`. Returns
    /// the data of the whole read once that is complete; `None` if another piece is
    /// outstanding or no read is pending.
    pub fn complete_read(
        &mut self,
        port: Port,
        answer: Result<&[u8], PeerError>,
        hosts: &mut dyn HostAccess,
    ) -> Option<&[u8]> {
        let mut read = self.ports[port].pending.take()?;
        let Piece { at, len, address } = read.piece;
        let part = &mut read.data[at..at + len];
        let answer = answer.and_then(|answer| match answer.len() == part.len() {
            true => Ok(answer),
            false => Err(PeerError::Refused),
        });
        match answer {
            Ok(answer) => {
                part.copy_from_slice(answer);
                self.ports[port].registers.window_reads += 1;
            }
            Err(error) => {
                part.fill(0xff);
                let target = Target {
                    from: port,
                    offset: read.offset + at as u64,
                    address,
                };
                self.refuse(target, error.reason(), false, hosts);
            }
        }
        let done = at + len;
        match self.read_pieces(port, read.offset, &mut read.data, done, hosts) {
            Some(piece) => {
                self.ports[port].pending = Some(PendingRead { piece, ..read });
                None
            }
            None => {
                let finished = &mut self.ports[port].finished;
                *finished = read.data;
                Some(finished)
            }
        }
    }

    /// Nobody waits for the read through the window of `port` any more.
    pub fn cancel_read(&mut self, port: Port) {
        self.ports[port].pending = None;
    }

    /// The peer host has refused a posted write.
    pub fn write_failed(&mut self, at: Target, error: PeerError, hosts: &mut dyn HostAccess) {
        self.refuse(at, error.reason(), true, hosts);
    }

    /// Reads the pieces from `data[done..]` on, until one has to wait.
    fn read_pieces(
        &mut self,
        port: Port,
        offset: u64,
        data: &mut [u8],
        mut done: usize,
        hosts: &mut dyn HostAccess,
    ) -> Option<Piece> {
        while done < data.len() {
            let at = offset + done as u64;
            let len = piece_len(at, data.len() - done);
            let part = &mut data[done..done + len];
            match self.translate(port, at) {
                Err(reason) => {
                    part.fill(0xff);
                    let at = Target {
                        from: port,
                        offset: at,
                        address: PeerAddress::new(0),
                    };
                    self.refuse(at, reason, false, hosts);
                }
                Ok(target) => match hosts.memory_read(target, part) {
                    Ok(Read::Done) => self.ports[port].registers.window_reads += 1,
                    Ok(Read::Later) => {
                        return Some(Piece {
                            at: done,
                            len,
                            address: target.address,
                        });
                    }
                    Err(error) => {
                        part.fill(0xff);
                        self.refuse(target, error.reason(), false, hosts);
                    }
                },
            }
            done += len;
        }
        None
    }

    pub(super) fn window_write(
        &mut self,
        port: Port,
        offset: u64,
        data: &[u8],
        hosts: &mut dyn HostAccess,
    ) {
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let len = piece_len(at, data.len() - done);
            match self.translate(port, at) {
                Err(reason) => {
                    let at = Target {
                        from: port,
                        offset: at,
                        address: PeerAddress::new(0),
                    };
                    self.refuse(at, reason, true, hosts);
                }
                Ok(target) => match hosts.memory_write(target, &data[done..done + len]) {
                    Ok(()) => self.ports[port].registers.window_writes += 1,
                    Err(error) => self.refuse(target, error.reason(), true, hosts),
                },
            }
            done += len;
        }
    }

    fn translate(&self, port: Port, offset: u64) -> Result<Target, u32> {
        let state = &self.ports[port];
        if state.closed != 0 {
            return Err(state.closed);
        }
        let address = state.translate(offset)?;
        Ok(Target {
            from: port,
            offset,
            address,
        })
    }

    /// The reason to refuse all accesses through the window of `port`, or 0.
    pub(super) fn closed(&self, port: Port) -> u32 {
        if !self.link_is_up() {
            error::LINK_DOWN
        } else if !self.ports[port].has_requester() {
            error::NO_REQUESTER
        } else if !self.ports[port.peer()].bus_master {
            error::NOT_BUS_MASTER
        } else {
            0
        }
    }

    fn refuse(&mut self, at: Target, reason: u32, write: bool, hosts: &mut dyn HostAccess) {
        let registers = &mut self.ports[at.from].registers;
        registers.error_count = registers.error_count.saturating_add(1);
        registers.error_info = reason | if write { error::WRITE } else { 0 };
        registers.error_offset = at.offset;
        registers.error_address = at.address.get();
        self.event(at.from, event::ERROR, hosts);
    }
}
