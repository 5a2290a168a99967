//! A running command, executed piece by piece.

use farside_fabric::{Fault, Iova};

use super::{CHUNK, Command, MAX_LENGTH, Registers, SRAM_SIZE, control, sram::Sram};
use crate::{Bus, Dma};

/// One side of a transfer.
#[derive(Clone, Copy, Debug)]
enum Place {
    Iova(Iova),
    Sram(u64),
}

impl Place {
    /// `None` if `len` bytes do not fit.
    fn new(address: u64, len: u64, in_sram: bool) -> Option<Self> {
        if in_sram {
            Sram::contains(SRAM_SIZE, address, len).then_some(Self::Sram(address))
        } else {
            // The range must not wrap.
            let iova = Iova::new(address);
            iova.checked_add(len - 1)?;
            Some(Self::Iova(iova))
        }
    }

    fn read(
        self,
        skip: u64,
        buf: &mut [u8],
        r: &mut Registers,
        sram: &Sram,
        dma: &mut dyn Dma,
    ) -> Result<(), Fault> {
        match self {
            Self::Sram(offset) => sram.read(offset + skip, buf),
            Self::Iova(iova) => {
                dma.read(iova.wrapping_add(skip), buf)?;
                r.bytes_read += buf.len() as u64;
            }
        }
        Ok(())
    }

    /// On a fault the bytes before it are counted.
    fn write(
        self,
        skip: u64,
        buf: &[u8],
        r: &mut Registers,
        sram: &mut Sram,
        dma: &mut dyn Dma,
    ) -> Result<(), Fault> {
        let (written, result) = match self {
            Self::Sram(offset) => {
                sram.write(offset + skip, buf);
                (0, Ok(()))
            }
            Self::Iova(iova) => match dma.write(iova.wrapping_add(skip), buf) {
                Ok(()) => (buf.len() as u64, Ok(())),
                Err(fault) => {
                    let before = fault.iova.offset_from(iova.wrapping_add(skip));
                    (before.unwrap_or(0).min(buf.len() as u64), Err(fault))
                }
            },
        };
        r.bytes_written += written;
        if result.is_err() {
            r.moved += written as u32;
        }
        result
    }
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Copy { from: Place, to: Place },
    Fill { to: Place, pattern: u32 },
    Checksum { from: Place, crc: u32 },
    Read { from: Place },
    Write { to: Place, data: u64 },
    Raise,
}

/// A valid command, with the registers' values at the doorbell write.
#[derive(Debug)]
pub(super) struct Job {
    work: Work,
    len: u64,
    done: u64,
}

/// The result of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// There is more to do.
    More,
    /// The command is done.
    Done {
        /// The command was RAISE.
        raise: bool,
    },
}

impl Job {
    /// `None` if the registers are invalid for `command`.
    pub(super) fn new(command: Command, r: &Registers) -> Option<Self> {
        let len = u64::from(r.length);
        let fits = match command {
            Command::Raise => r.vector().is_some(),
            Command::Read | Command::Write => matches!(len, 1 | 2 | 4 | 8),
            Command::Copy | Command::Fill | Command::Checksum => {
                (1..=MAX_LENGTH).contains(&r.length)
            }
        };
        if !fits {
            return None;
        }
        let from = || Place::new(r.src, len, r.control & control::SRC_IN_SRAM != 0);
        let to = || Place::new(r.dst, len, r.control & control::DST_IN_SRAM != 0);
        let work = match command {
            Command::Copy => Work::Copy {
                from: from()?,
                to: to()?,
            },
            Command::Fill => Work::Fill {
                to: to()?,
                pattern: r.pattern,
            },
            Command::Checksum => Work::Checksum {
                from: from()?,
                crc: 0,
            },
            Command::Read => Work::Read { from: from()? },
            Command::Write => Work::Write {
                to: to()?,
                data: r.data,
            },
            Command::Raise => Work::Raise,
        };
        Some(Self { work, len, done: 0 })
    }

    /// Moves up to [`CHUNK`] bytes, through `buffer` of that size.
    pub(super) fn step(
        &mut self,
        r: &mut Registers,
        sram: &mut Sram,
        buffer: &mut [u8],
        bus: &mut Bus<'_>,
    ) -> Result<Step, Fault> {
        let skip = self.done;
        let piece = (self.len - skip).min(CHUNK as u64) as usize;
        let buf = &mut buffer[..piece];
        match &mut self.work {
            Work::Raise => return Ok(Step::Done { raise: true }),
            Work::Copy { from, to } => {
                from.read(skip, buf, r, sram, bus.dma)?;
                to.write(skip, buf, r, sram, bus.dma)?;
            }
            Work::Fill { to, pattern } => {
                // All pieces but the last are whole words.
                for (byte, value) in buf.iter_mut().zip(pattern.to_le_bytes().iter().cycle()) {
                    *byte = *value;
                }
                to.write(skip, buf, r, sram, bus.dma)?;
            }
            Work::Checksum { from, crc } => {
                from.read(skip, buf, r, sram, bus.dma)?;
                *crc = crc32c::crc32c_append(*crc, buf);
                r.result = *crc;
            }
            Work::Read { from } => {
                r.data = u64::MAX;
                from.read(skip, buf, r, sram, bus.dma)?;
                let mut word = [0; 8];
                word[..piece].copy_from_slice(buf);
                r.data = u64::from_le_bytes(word);
            }
            Work::Write { to, data } => {
                to.write(skip, &data.to_le_bytes()[..piece], r, sram, bus.dma)?;
            }
        }
        self.done += piece as u64;
        r.moved += piece as u32;
        if self.done == self.len {
            Ok(Step::Done { raise: false })
        } else {
            Ok(Step::More)
        }
    }
}
