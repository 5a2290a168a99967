//! I/O commands (NVM Express 1.4, 6) and their steps at the medium.

use std::time::Instant;

use farside_fabric::{Access, memory::HostSlice};

use super::{
    admin::copy_out,
    command::{Command, io},
    controller::{Nvme, Outcome},
    identify::MAX_TRANSFER,
    namespace::Extent,
    reservations,
    slots::Work,
    status::Status,
};
use crate::{
    Bus,
    block::{BlockError, BlockQueue, Durability, Tag, medium::Direction},
};

/// The command that a slot is for.
pub(super) struct Target {
    pub(super) sq_id: u16,
    pub(super) command_id: u16,
    nsid: u32,
    lba: u64,
}

impl Target {
    fn io(sq_id: u16, command: &Command) -> Self {
        Self {
            sq_id,
            command_id: command.id(),
            nsid: command.nsid(),
            lba: command.starting_lba(),
        }
    }

    pub(super) fn admin(command: &Command) -> Self {
        Self {
            sq_id: 0,
            command_id: command.id(),
            nsid: command.nsid(),
            lba: 0,
        }
    }

    /// Takes a slot. One is free: otherwise no command is fetched.
    pub(super) fn take_slot(&self, nvme: &mut Nvme, work: Work) -> Result<Tag, Status> {
        let tag = nvme.slots.take().ok_or(Status::INTERNAL_ERROR)?;
        let entry = nvme.executing;
        let slot = &mut nvme.slots[tag];
        slot.work = work;
        slot.sq_id = self.sq_id;
        slot.command_id = self.command_id;
        slot.entry = entry;
        slot.nsid = self.nsid;
        slot.lba = self.lba;
        Ok(tag)
    }
}

/// Executes a command of an I/O queue.
pub(super) fn execute(
    nvme: &mut Nvme,
    sq_id: u16,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    if command.is_fused() {
        return Err(Status::INVALID_FIELD);
    }
    let target = Target::io(sq_id, command);
    nvme.check_reservation(command.opcode())?;
    match command.opcode() {
        io::READ => read(nvme, target, command, bus),
        io::WRITE => write(nvme, target, command, bus),
        io::FLUSH => flush(nvme, target, command),
        io::WRITE_ZEROES => write_zeroes(nvme, target, command),
        io::DATASET_MANAGEMENT => dataset_management(nvme, target, command, bus),
        io::COMPARE => compare(nvme, target, command, bus),
        io::VERIFY => verify(nvme, target, command),
        opcode if io::is_of_reservations(opcode) && nvme.shared.is_some() => {
            reservations::execute(nvme, target, command, bus)
        }
        _ => Err(Status::INVALID_OPCODE),
    }
}

/// The blocks of a command that transfers data.
fn transfer_extent(nvme: &Nvme, command: &Command) -> Result<Extent, Status> {
    nvme.namespace.check_id(command.nsid())?;
    let extent = nvme
        .namespace
        .extent(command.starting_lba(), command.block_count())?;
    match extent.len <= MAX_TRANSFER {
        true => Ok(extent),
        false => Err(Status::INVALID_FIELD),
    }
}

/// Takes a slot and the guest memory of `len` bytes for it.
pub(super) fn take_with_data(
    nvme: &mut Nvme,
    target: &Target,
    command: &Command,
    work: Work,
    (len, access): (u64, Access),
    bus: &mut Bus<'_>,
) -> Result<Tag, Status> {
    let pointer = command.data_pointer()?;
    let tag = target.take_slot(nvme, work)?;
    match nvme.gather(bus.dma, tag, &pointer, len, access) {
        Ok(()) => Ok(tag),
        Err(status) => {
            nvme.release(tag);
            Err(status)
        }
    }
}

/// 6.9.
fn read(
    nvme: &mut Nvme,
    target: Target,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    let extent = transfer_extent(nvme, command)?;
    let work = Work::Read { len: extent.len };
    let data = (extent.len, Access::Write);
    let tag = take_with_data(nvme, &target, command, work, data, bus)?;
    nvme.block.read(tag, extent.offset);
    Ok(Outcome::InFlight)
}

/// 6.15.
fn write(
    nvme: &mut Nvme,
    target: Target,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    let extent = transfer_extent(nvme, command)?;
    nvme.namespace.check_writable()?;
    let work = Work::Write { len: extent.len };
    let data = (extent.len, Access::Read);
    let tag = take_with_data(nvme, &target, command, work, data, bus)?;
    let durability = nvme.durability(command.is_fua());
    nvme.block.write(tag, extent.offset, durability);
    Ok(Outcome::InFlight)
}

/// 6.8.
fn flush(nvme: &mut Nvme, target: Target, command: &Command) -> Result<Outcome, Status> {
    nvme.namespace.check_id_or_all(command.nsid())?;
    nvme.stats.flushes += 1;
    if nvme.namespace.read_only {
        return Ok(Outcome::Done(0));
    }
    let tag = target.take_slot(nvme, Work::Flush)?;
    nvme.block.flush(tag);
    Ok(Outcome::InFlight)
}

/// 6.17.
fn write_zeroes(nvme: &mut Nvme, target: Target, command: &Command) -> Result<Outcome, Status> {
    nvme.namespace.check_id(command.nsid())?;
    let extent = nvme
        .namespace
        .extent(command.starting_lba(), command.block_count())?;
    nvme.namespace.check_writable()?;
    let deallocate = command.cdw(12) >> 25 & 1 != 0;
    let durable = nvme.durability(command.is_fua()) == Durability::Durable;
    let tag = target.take_slot(nvme, Work::Zero { durable })?;
    nvme.block.zero(tag, extent.offset, extent.len, deallocate);
    Ok(Outcome::InFlight)
}

const RANGE_SIZE: usize = 16;
const MAX_RANGES: usize = 256;

/// 6.7. Only deallocation has an effect; the other attributes are hints.
fn dataset_management(
    nvme: &mut Nvme,
    target: Target,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    nvme.namespace.check_id(command.nsid())?;
    let count = (command.cdw(10) & 0xff) as usize + 1;
    let deallocate = command.cdw(11) >> 2 & 1 != 0;
    if !deallocate {
        return Ok(Outcome::Done(0));
    }
    nvme.namespace.check_writable()?;
    let len = (count * RANGE_SIZE) as u64;
    let data = (len, Access::Read);
    let tag = take_with_data(nvme, &target, command, Work::Deallocate, data, bus)?;
    let mut raw = [0; MAX_RANGES * RANGE_SIZE];
    let raw = &mut raw[..count * RANGE_SIZE];
    copy_out(nvme.block.slices(tag), raw);
    if let Err(status) = parse_ranges(nvme, tag, raw) {
        nvme.release(tag);
        return Err(status);
    }
    match nvme.slots[tag].ranges.pop() {
        Some(range) => {
            nvme.block.punch(tag, range.offset, range.len);
            Ok(Outcome::InFlight)
        }
        None => {
            nvme.release(tag);
            Ok(Outcome::Done(0))
        }
    }
}

/// Checks all ranges (figure 362) before any is deallocated, and merges adjacent ones.
fn parse_ranges(nvme: &mut Nvme, tag: Tag, raw: &[u8]) -> Result<(), Status> {
    let slot = &mut nvme.slots[tag];
    slot.ranges.clear();
    for range in raw.chunks_exact(RANGE_SIZE) {
        let blocks = u32::from_le_bytes([range[4], range[5], range[6], range[7]]);
        let mut first = [0; 8];
        first.copy_from_slice(&range[8..]);
        let extent = nvme
            .namespace
            .extent(u64::from_le_bytes(first), blocks.into())?;
        if extent.len == 0 {
            continue;
        }
        match slot.ranges.last_mut() {
            Some(last) if last.offset + last.len == extent.offset => last.len += extent.len,
            _ => slot.ranges.push(extent),
        }
    }
    Ok(())
}

/// 6.6.
fn compare(
    nvme: &mut Nvme,
    target: Target,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    let rest = transfer_extent(nvme, command)?;
    let work = Work::Compare { rest, done: 0 };
    let data = (rest.len, Access::Read);
    let tag = take_with_data(nvme, &target, command, work, data, bus)?;
    read_part(nvme, tag, rest);
    Ok(Outcome::InFlight)
}

/// 6.14.
fn verify(nvme: &mut Nvme, target: Target, command: &Command) -> Result<Outcome, Status> {
    nvme.namespace.check_id(command.nsid())?;
    let rest = nvme
        .namespace
        .extent(command.starting_lba(), command.block_count())?;
    let tag = target.take_slot(nvme, Work::Verify { rest })?;
    read_part(nvme, tag, rest);
    Ok(Outcome::InFlight)
}

fn part_of(rest: Extent) -> u64 {
    rest.len.min(BlockQueue::SCRATCH as u64)
}

fn read_part(nvme: &mut Nvme, tag: Tag, rest: Extent) {
    let len = part_of(rest) as usize;
    nvme.block.read_scratch(tag, rest.offset, len);
}

/// Handles a finished step of `tag`. Returns the command's result, or `None` if another
/// step was started.
pub(super) fn step(
    nvme: &mut Nvme,
    tag: Tag,
    result: Result<(), BlockError>,
) -> Option<Result<u32, Status>> {
    let work = nvme.slots[tag].work;
    // Deallocation is advice (6.7): a medium without holes keeps the data.
    if work == Work::Deallocate && matches!(result, Ok(()) | Err(BlockError::Unsupported)) {
        let Some(range) = nvme.slots[tag].ranges.pop() else {
            return Some(Ok(0));
        };
        nvme.block.punch(tag, range.offset, range.len);
        return None;
    }
    if let Err(error) = result {
        return Some(Err(status_of(work, error)));
    }
    match work {
        Work::Read { len } => {
            nvme.stats.reads += 1;
            nvme.stats.bytes_read += len;
            Some(Ok(0))
        }
        Work::Write { len } => {
            nvme.stats.writes += 1;
            nvme.stats.bytes_written += len;
            Some(Ok(0))
        }
        Work::Zero { durable: true } => {
            nvme.slots[tag].work = Work::Flush;
            nvme.block.flush(tag);
            None
        }
        Work::Compare { rest, done } => {
            let len = part_of(rest);
            let (disk, guest) = nvme.block.scratch(tag);
            if !equal(disk, guest, done as usize) {
                return Some(Err(Status::COMPARE_FAILURE));
            }
            let done = done + len;
            match advance(rest) {
                Some(rest) => {
                    nvme.slots[tag].work = Work::Compare { rest, done };
                    read_part(nvme, tag, rest);
                    None
                }
                None => {
                    nvme.stats.reads += 1;
                    Some(Ok(0))
                }
            }
        }
        Work::Verify { rest } => {
            let rest = match advance(rest) {
                Some(rest) => rest,
                None => return Some(Ok(0)),
            };
            nvme.slots[tag].work = Work::Verify { rest };
            read_part(nvme, tag, rest);
            None
        }
        Work::Reserve => Some(Ok(nvme.block.moved(tag) as u32)),
        Work::Free
        | Work::Report
        | Work::Flush
        | Work::Zero { .. }
        | Work::Deallocate
        | Work::Shutdown => Some(Ok(0)),
    }
}

/// Updates the medium's state from the result of a step of `work`.
pub(super) fn note_medium(nvme: &mut Nvme, work: Work, result: Result<(), BlockError>) {
    let direction = match work {
        Work::Read { .. } | Work::Compare { .. } | Work::Verify { .. } => Direction::Read,
        _ => Direction::Write,
    };
    let block = &nvme.block;
    match result {
        // The common case.
        Ok(()) if nvme.medium.problem().is_none() => {}
        Ok(()) => nvme
            .medium
            .succeeded(direction, || block.condition(), Instant::now()),
        Err(error) => {
            let before = nvme.medium.warnings();
            let condition = block.condition();
            nvme.medium
                .failed(error, direction, condition, Instant::now());
            let new = nvme.medium.warnings() & !before;
            nvme.raise_warnings(new);
        }
    }
}

/// The rest after the part that was read.
fn advance(rest: Extent) -> Option<Extent> {
    let len = part_of(rest);
    (rest.len > len).then(|| Extent {
        offset: rest.offset + len,
        len: rest.len - len,
    })
}

/// Whether guest memory from byte `from` on equals `disk`. Compares copied pieces, since
/// the guest may change its memory meanwhile.
fn equal(disk: &[u8], guest: &[HostSlice], from: usize) -> bool {
    let mut skip = from;
    let mut rest = disk;
    for slice in guest {
        if skip >= slice.len() {
            skip -= slice.len();
            continue;
        }
        let mut at = skip;
        skip = 0;
        while at < slice.len() && !rest.is_empty() {
            let mut piece = [0; 4096];
            let len = piece.len().min(slice.len() - at).min(rest.len());
            let Some(part) = slice.slice(at, len) else {
                return false;
            };
            part.read(&mut piece[..len]);
            if piece[..len] != rest[..len] {
                return false;
            }
            at += len;
            rest = &rest[len..];
        }
    }
    rest.is_empty()
}

fn status_of(work: Work, error: BlockError) -> Status {
    match (error, work) {
        (BlockError::GuestMemory, _) => Status::DATA_TRANSFER_ERROR,
        (BlockError::NoSpace, _) => Status::CAPACITY_EXCEEDED,
        (BlockError::Unreachable, _) => Status::NAMESPACE_NOT_READY,
        (BlockError::Refused(bits @ 1..), _) => Status::restored(bits),
        (BlockError::Refused(0), _) => Status::INTERNAL_ERROR,
        (_, Work::Reserve | Work::Report) => Status::INTERNAL_ERROR,
        (_, Work::Read { .. } | Work::Compare { .. } | Work::Verify { .. }) => {
            Status::UNRECOVERED_READ
        }
        _ => Status::WRITE_FAULT,
    }
}
