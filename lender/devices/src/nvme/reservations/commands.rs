//! Reservation commands (NVM Express 1.4, 6.10 to 6.13).

use std::time::Instant;

use farside_fabric::Access;

use super::{
    ABORTED, Aborting, FileError,
    table::{Acquire, Kind, Registration, Release, Table},
};
use crate::{
    Bus,
    nvme::{
        admin::{copy_out, send_to},
        command::{Command, io},
        controller::{Nvme, Outcome},
        identify::MAX_TRANSFER,
        namespace::NSID,
        status::Status,
    },
};

/// Executes a reservation command of an I/O queue.
pub fn execute(
    nvme: &mut Nvme,
    sq_id: u16,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    if command.nsid() != NSID {
        return Err(Status::INVALID_NAMESPACE);
    }
    // The table has the number of one command that has changed it, and that one may be executed again.
    if nvme.is_aborting() && command.opcode() != io::RESERVATION_REPORT {
        return Err(Status::COMMAND_INTERRUPTED);
    }
    match command.opcode() {
        io::RESERVATION_REGISTER => register(nvme, command, bus),
        io::RESERVATION_REPORT => report(nvme, command, bus),
        io::RESERVATION_ACQUIRE => acquire(nvme, sq_id, command, bus),
        _ => release(nvme, command, bus),
    }
}

fn register(nvme: &mut Nvme, command: &Command, bus: &mut Bus<'_>) -> Result<Outcome, Status> {
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
    change(nvme, |table, caller| {
        table.register(caller, action)?;
        if let Some(persists) = persists {
            table.set_persists(persists);
        }
        Ok(())
    })?;
    Ok(Outcome::Done(0))
}

fn acquire(
    nvme: &mut Nvme,
    sq_id: u16,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    const PREEMPT_AND_ABORT: u32 = 2;
    let [current, preempted] = keys(nvme, command, bus)?;
    let kind = Kind::from_number((command.cdw(10) >> 8) as u8)?;
    let action = match command.cdw(10) & 7 {
        _ if ignores_key(command) => return Err(Status::INVALID_FIELD),
        0 => Acquire::Acquire,
        1 | PREEMPT_AND_ABORT => Acquire::Preempt(preempted),
        _ => return Err(Status::INVALID_FIELD),
    };
    let aborts = command.cdw(10) & 7 == PREEMPT_AND_ABORT;
    let version = change(nvme, |table, caller| {
        table.acquire(caller, current, (action, kind))
    })?;
    let Some(shared) = nvme.shared.as_mut().filter(|_| aborts) else {
        return Ok(Outcome::Done(0));
    };
    shared.aborting = Some(Aborting {
        sq_id,
        command: (command.id(), nvme.executing),
        version,
        until: Instant::now() + ABORTED,
    });
    Ok(Outcome::Open)
}

fn release(nvme: &mut Nvme, command: &Command, bus: &mut Bus<'_>) -> Result<Outcome, Status> {
    let [current] = keys(nvme, command, bus)?;
    let action = match command.cdw(10) & 7 {
        _ if ignores_key(command) => return Err(Status::INVALID_FIELD),
        0 => Release::Release(Kind::from_number((command.cdw(10) >> 8) as u8)?),
        1 => Release::Clear,
        _ => return Err(Status::INVALID_FIELD),
    };
    change(nvme, |table, caller| {
        table.release(caller.host, current, action)
    })?;
    Ok(Outcome::Done(0))
}

fn report(nvme: &mut Nvme, command: &Command, bus: &mut Bus<'_>) -> Result<Outcome, Status> {
    let extended = command.cdw(11) & 1 != 0;
    let shared = nvme.shared.as_ref().ok_or(Status::INVALID_OPCODE)?;
    let (table, _) = shared.file.read().map_err(|error| status_of(&error))?;
    let mut data = table.report(extended)?;
    let asked = (u64::from(command.cdw(10)) + 1) * 4;
    if asked > MAX_TRANSFER {
        return Err(Status::INVALID_FIELD);
    }
    // The rest of a longer buffer is zeroes.
    data.resize(asked as usize, 0);
    let pointer = command.data_pointer()?;
    send_to(nvme, &pointer, bus.dma, &data)?;
    Ok(Outcome::Done(0))
}

/// Whether reservations persist through power loss (feature 83h, 5.21.1.27).
pub fn persistence(nvme: &Nvme) -> Result<bool, Status> {
    let shared = nvme.shared.as_ref().ok_or(Status::INVALID_FIELD)?;
    let (table, _) = shared.file.read().map_err(|error| status_of(&error))?;
    Ok(table.persists())
}

/// Sets that, by a registrant.
pub fn set_persistence(nvme: &Nvme, persists: bool) -> Result<(), Status> {
    let changed = change(nvme, |table, caller| {
        table.check_registered(caller.host)?;
        table.set_persists(persists);
        Ok(())
    });
    changed.map(drop)
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

/// Changes the table, as the controller's host, unless the command has done that already, in a process that was killed.
/// Returns the table's version.
fn change(
    nvme: &Nvme,
    change: impl FnOnce(&mut Table, super::Caller) -> Result<(), Status>,
) -> Result<u64, Status> {
    let shared = nvme.shared.as_ref().ok_or(Status::INVALID_OPCODE)?;
    let caller = nvme.caller(shared);
    let number = nvme.executing.sequence;
    let changed = shared.file.change(|table| {
        if nvme.recovering && table.was_executed(caller.controller, number) {
            return Ok(());
        }
        change(table, caller)?;
        table.set_executed(caller.controller, number);
        Ok(())
    });
    changed.map_err(|error| status_of(&error))?
}

fn status_of(error: &FileError) -> Status {
    match error {
        FileError::Locked => Status::COMMAND_INTERRUPTED,
        error => {
            log::warn!("reservations: {error}");
            Status::INTERNAL_ERROR
        }
    }
}
