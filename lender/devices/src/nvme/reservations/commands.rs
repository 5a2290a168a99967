//! Reservation commands (NVM Express 1.4, 6.10 to 6.13).

use farside_fabric::Access;

use super::{
    Shared,
    lent::encode,
    sharer::{Executed, Request},
    table::{Acquire, Kind, Registration, Release},
};
use crate::{
    Bus,
    nvme::{
        admin::{copy_out, send_to},
        command::{Command, io},
        controller::{Nvme, Outcome},
        identify::MAX_TRANSFER,
        io::{Target, take_with_data},
        namespace::NSID,
        slots::Work,
        status::Status,
    },
};

/// Executes a reservation command of an I/O queue.
pub fn execute(
    nvme: &mut Nvme,
    target: Target,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    if command.nsid() != NSID {
        return Err(Status::INVALID_NAMESPACE);
    }
    let request = match command.opcode() {
        io::RESERVATION_REPORT => return report(nvme, target, command, bus),
        io::RESERVATION_REGISTER => register(nvme, command, bus)?,
        io::RESERVATION_ACQUIRE => acquire(nvme, command, bus)?,
        _ => release(nvme, command, bus)?,
    };
    ask(nvme, target, request)
}

/// Executes a request here, or has the lender do so.
fn ask(nvme: &mut Nvme, target: Target, request: Request) -> Result<Outcome, Status> {
    let number = nvme.executing.sequence;
    let host = nvme.identity();
    match &mut nvme.shared {
        None => Err(Status::INVALID_OPCODE),
        Some(Shared::Here { sharer, aborting }) => {
            let caller = super::caller_of(sharer.controller(), host);
            match sharer.execute(caller, number, request)? {
                Executed::Done(result) => Ok(Outcome::Done(result)),
                Executed::Aborting => {
                    *aborting = Some((target.sq_id, (target.command_id, nvme.executing)));
                    Ok(Outcome::Open)
                }
            }
        }
        // The table has the number of one request, should that come again.
        Some(Shared::Lent { .. }) if nvme.slots.are_any(|work| work == Work::Reserve) => {
            Err(Status::COMMAND_INTERRUPTED)
        }
        Some(Shared::Lent { .. }) => {
            let request = encode(number, request)?;
            let tag = target.take_slot(nvme, Work::Reserve)?;
            nvme.block.reserve(tag, request);
            Ok(Outcome::InFlight)
        }
    }
}

fn register(nvme: &mut Nvme, command: &Command, bus: &mut Bus<'_>) -> Result<Request, Status> {
    let [current, new] = keys(nvme, command, bus)?;
    let current = (!ignores_key(command)).then_some(current);
    let action = match command.cdw(10) & 7 {
        0 => Registration::Add { new },
        1 => Registration::Remove { current },
        2 => Registration::Replace { current, new },
        _ => return Err(Status::INVALID_FIELD),
    };
    // CPTPL.
    let persists = match command.cdw(10) >> 30 {
        0 => None,
        2 => Some(false),
        3 => Some(true),
        _ => return Err(Status::INVALID_FIELD),
    };
    Ok(Request::Register { action, persists })
}

fn acquire(nvme: &mut Nvme, command: &Command, bus: &mut Bus<'_>) -> Result<Request, Status> {
    const PREEMPT_AND_ABORT: u32 = 2;
    let [current, preempted] = keys(nvme, command, bus)?;
    let kind = Kind::from_number((command.cdw(10) >> 8) as u8)?;
    let action = match command.cdw(10) & 7 {
        _ if ignores_key(command) => return Err(Status::INVALID_FIELD),
        0 => Acquire::Acquire,
        action @ (1 | PREEMPT_AND_ABORT) => Acquire::Preempt {
            key: preempted,
            aborts: action == PREEMPT_AND_ABORT,
        },
        _ => return Err(Status::INVALID_FIELD),
    };
    Ok(Request::Acquire {
        current,
        action,
        kind,
    })
}

fn release(nvme: &mut Nvme, command: &Command, bus: &mut Bus<'_>) -> Result<Request, Status> {
    let [current] = keys(nvme, command, bus)?;
    let action = match command.cdw(10) & 7 {
        _ if ignores_key(command) => return Err(Status::INVALID_FIELD),
        0 => Release::Release(Kind::from_number((command.cdw(10) >> 8) as u8)?),
        1 => Release::Clear,
        _ => return Err(Status::INVALID_FIELD),
    };
    Ok(Request::Release { current, action })
}

fn report(
    nvme: &mut Nvme,
    target: Target,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    let extended = command.cdw(11) & 1 != 0;
    let asked = (u64::from(command.cdw(10)) + 1) * 4;
    if asked > MAX_TRANSFER {
        return Err(Status::INVALID_FIELD);
    }
    let Some(sharer) = nvme.sharer() else {
        let data = (asked, Access::Write);
        let tag = take_with_data(nvme, &target, command, Work::Report, data, bus)?;
        nvme.block.report(tag, extended);
        return Ok(Outcome::InFlight);
    };
    let mut data = sharer.report(extended)?;
    // The rest of a longer buffer is zeroes.
    data.resize(asked as usize, 0);
    let pointer = command.data_pointer()?;
    send_to(nvme, &pointer, bus.dma, &data)?;
    Ok(Outcome::Done(0))
}

/// Whether reservations persist through power loss (feature 83h, 5.21.1.27).
pub fn persistence(nvme: &mut Nvme, command: &Command) -> Result<Outcome, Status> {
    ask(nvme, Target::admin(command), Request::Persists)
}

/// Sets that, by a registrant.
pub fn set_persistence(
    nvme: &mut Nvme,
    command: &Command,
    persists: bool,
) -> Result<Outcome, Status> {
    ask(nvme, Target::admin(command), Request::SetPersists(persists))
}

/// IEKEY.
fn ignores_key(command: &Command) -> bool {
    command.cdw(10) >> 3 & 1 != 0
}

/// The keys of a command's data.
fn keys<const N: usize>(
    nvme: &mut Nvme,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<[u64; N], Status> {
    let mut data = [0; 16];
    let data = &mut data[..N * 8];
    let pointer = command.data_pointer()?;
    let slices = nvme.gather_small(bus.dma, &pointer, data.len(), Access::Read)?;
    copy_out(&slices, data);
    let mut keys = [0; N];
    for (key, raw) in keys.iter_mut().zip(data.chunks_exact(8)) {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(raw);
        *key = u64::from_le_bytes(bytes);
    }
    Ok(keys)
}
