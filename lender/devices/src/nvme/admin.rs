//! Admin commands (NVM Express 1.4, 5).

use farside_fabric::{Access, Iova, memory::HostSlice};

use super::{
    command::{Command, DataPointer, NSID_ALL, admin},
    controller::{Nvme, Outcome},
    doorbells::DoorbellBuffer,
    features::{self, Features, Select},
    identify,
    io::Target,
    logs::{self, Health},
    namespace::NSID,
    queues::{CompletionQueue, SubmissionQueue},
    registers::MAX_QUEUE_ENTRIES,
    reservations::{self, Shared},
    slots::Work,
    status::Status,
};
use crate::{Bus, Dma, block::BlockQueue};

/// Executes a command of the admin queue.
pub(super) fn execute(
    nvme: &mut Nvme,
    command: &Command,
    bus: &mut Bus<'_>,
) -> Result<Outcome, Status> {
    if command.is_fused() {
        return Err(Status::INVALID_FIELD);
    }
    match command.opcode() {
        admin::DELETE_SQ => delete_sq(nvme, command),
        admin::CREATE_SQ => create_sq(nvme, command, bus.dma),
        admin::GET_LOG_PAGE => get_log_page(nvme, command, bus.dma),
        admin::DELETE_CQ => delete_cq(nvme, command),
        admin::CREATE_CQ => create_cq(nvme, command, bus.dma),
        admin::IDENTIFY => identify(nvme, command, bus.dma),
        admin::ABORT => abort(nvme, command, bus),
        admin::SET_FEATURES => set_features(nvme, command, bus.dma),
        admin::GET_FEATURES => get_features(nvme, command, bus.dma),
        admin::ASYNC_EVENT_REQUEST => async_event_request(nvme, command),
        admin::DOORBELL_BUFFER_CONFIG if nvme.has_doorbell_buffer() => {
            doorbell_buffer_config(nvme, command, bus.dma)
        }
        admin::FORMAT_NVM => format(nvme, command),
        _ => Err(Status::INVALID_OPCODE),
    }
}

const DONE: Result<Outcome, Status> = Ok(Outcome::Done(0));

/// Dwords 10 and 11 and PRP entry 1 of both Create commands.
struct NewQueue {
    id: u16,
    entries: u16,
    base: Iova,
}

impl NewQueue {
    /// `entry_shift` is CC's entry size of this kind of queue, `needed` the required one.
    fn parse(
        nvme: &Nvme,
        command: &Command,
        entry_shift: u32,
        needed: u32,
    ) -> Result<Self, Status> {
        let id = command.cdw(10) as u16;
        let entries = (command.cdw(10) >> 16) + 1;
        if !(2..=MAX_QUEUE_ENTRIES).contains(&entries) || entry_shift != needed {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        // CAP.CQR: physically contiguous only.
        if command.cdw(11) & 1 == 0 {
            return Err(Status::INVALID_FIELD);
        }
        let base = command.prp1();
        if !base.is_aligned_to(nvme.page_size()) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        Ok(Self {
            id,
            entries: entries as u16,
            base,
        })
    }
}

/// 5.3.
fn create_cq(nvme: &mut Nvme, command: &Command, dma: &mut dyn Dma) -> Result<Outcome, Status> {
    nvme.queues.check_new_cq(command.cdw(10) as u16)?;
    let queue = NewQueue::parse(nvme, command, nvme.registers.cc.cqe_shift(), 4)?;
    let vector = (command.cdw(11) >> 16) as u16;
    let interrupts = command.cdw(11) >> 1 & 1 != 0;
    if interrupts && vector >= nvme.vectors() {
        return Err(Status::INVALID_VECTOR);
    }
    let vector = interrupts.then_some(vector);
    nvme.queues
        .create_cq(
            dma,
            queue.id,
            CompletionQueue::new(queue.base, queue.entries, vector),
        )
        .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
    DONE
}

/// 5.4.
fn create_sq(nvme: &mut Nvme, command: &Command, dma: &mut dyn Dma) -> Result<Outcome, Status> {
    let cq = (command.cdw(11) >> 16) as u16;
    nvme.queues.check_new_sq(command.cdw(10) as u16, cq)?;
    let queue = NewQueue::parse(nvme, command, nvme.registers.cc.sqe_shift(), 6)?;
    nvme.queues
        .create_sq(
            dma,
            queue.id,
            SubmissionQueue::new(queue.base, queue.entries, cq),
        )
        .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
    DONE
}

/// 5.5.
fn delete_cq(nvme: &mut Nvme, command: &Command) -> Result<Outcome, Status> {
    nvme.queues.delete_cq(command.cdw(10) as u16)?;
    DONE
}

/// 5.6. Completes after the queue's last command.
fn delete_sq(nvme: &mut Nvme, command: &Command) -> Result<Outcome, Status> {
    nvme.queues
        .start_delete_sq(command.cdw(10) as u16, command.id(), nvme.executing)?;
    Ok(Outcome::Open)
}

/// 5.15.
fn identify(nvme: &mut Nvme, command: &Command, dma: &mut dyn Dma) -> Result<Outcome, Status> {
    let nsid = command.nsid();
    let controller = (command.cdw(10) >> 16) as u16;
    let data = match command.cdw(10) as u8 {
        0x00 | 0x11 => {
            nvme.namespace.check_id(nsid)?;
            identify::namespace(&nvme.namespace, nvme.shared.is_some())
        }
        0x01 => identify::controller(
            &nvme.names,
            nvme.has_doorbell_buffer(),
            nvme.shared.as_ref().map(Shared::controller),
        ),
        // The two largest identifiers are invalid here (5.15.2.3).
        0x02 | 0x10 if nsid >= NSID_ALL - 1 => return Err(Status::INVALID_NAMESPACE),
        0x02 | 0x10 => identify::namespace_list(nsid),
        0x03 => {
            nvme.namespace.check_id(nsid)?;
            identify::descriptors(&nvme.namespace)
        }
        // Only the NVM command set, number 0 (dword 11, CSI).
        0x06 if command.cdw(11) >> 24 == 0 => identify::command_set_controller(),
        0x12 => {
            nvme.namespace.check_id(nsid)?;
            identify::controller_list(controller, &controllers(nvme))
        }
        0x13 => identify::controller_list(controller, &controllers(nvme)),
        _ => return Err(Status::INVALID_FIELD),
    };
    send(nvme, command, dma, &data[..])?;
    DONE
}

/// The numbers of the subsystem's controllers.
fn controllers(nvme: &Nvme) -> Vec<u16> {
    let shared = nvme.shared.as_ref();
    shared.map_or(vec![0], Shared::controllers)
}

/// Largest transfer of a log page, in bytes.
const MAX_LOG: u64 = identify::MAX_TRANSFER;

/// 5.14.
fn get_log_page(nvme: &mut Nvme, command: &Command, dma: &mut dyn Dma) -> Result<Outcome, Status> {
    let page = command.cdw(10) as u8;
    let retain_event = command.cdw(10) >> 15 & 1 != 0;
    let dwords = u64::from(command.cdw(10) >> 16) | u64::from(command.cdw(11) & 0xffff) << 16;
    let len = (dwords + 1) * 4;
    let from = u64::from(command.cdw(12)) | u64::from(command.cdw(13)) << 32;
    if len > MAX_LOG || from & 3 != 0 {
        return Err(Status::INVALID_FIELD);
    }
    // The health of the only namespace is the controller's.
    if !matches!(command.nsid(), 0 | NSID | NSID_ALL) {
        return Err(Status::INVALID_NAMESPACE);
    }
    if page == logs::RESERVATION_NOTIFICATION {
        nvme.take_notifications();
    }
    let health = Health {
        warnings: nvme.warnings(),
        read_only: nvme.namespace.read_only,
    };
    let log = nvme
        .logs
        .page(
            page,
            &nvme.stats,
            health,
            (nvme.has_doorbell_buffer(), nvme.shared.is_some()),
        )
        .ok_or(Status::INVALID_LOG_PAGE)?;
    let from = usize::try_from(from)
        .ok()
        .filter(|&from| from <= log.len())
        .ok_or(Status::INVALID_FIELD)?;
    // Guest memory for data beyond the end of the log is not written.
    let end = log.len().min(from + len as usize);
    if from < end {
        send(nvme, command, dma, &log[from..end])?;
    }
    if !retain_event {
        match page {
            logs::CHANGED_NAMESPACES => nvme.logs.namespace_changed = false,
            // What was not read is not lost.
            logs::RESERVATION_NOTIFICATION if from < end => nvme.logs.reservations.consume(),
            _ => {}
        }
        let is_empty = nvme.logs.reservations.is_empty();
        nvme.events.unmask(page, is_empty);
    }
    DONE
}

/// 5.1. Only event requests can be aborted; other commands complete by themselves.
fn abort(nvme: &mut Nvme, command: &Command, bus: &mut Bus<'_>) -> Result<Outcome, Status> {
    const NOT_ABORTED: u32 = 1;
    let sq_id = command.cdw(10) as u16;
    let command_id = (command.cdw(10) >> 16) as u16;
    if !nvme.queues.has_sq(sq_id) {
        return Err(Status::INVALID_FIELD);
    }
    if sq_id == 0
        && nvme.events.is_open(command_id)
        && nvme.queues.reserve_completion(0)
        && let Some(entry) = nvme.events.close(command_id)
    {
        let aborted = Err(Status::ABORT_REQUESTED);
        nvme.complete(bus, 0, (command_id, entry), aborted, None);
        return DONE;
    }
    Ok(Outcome::Done(NOT_ABORTED))
}

/// 5.21.
fn set_features(nvme: &mut Nvme, command: &Command, dma: &mut dyn Dma) -> Result<Outcome, Status> {
    let feature = command.cdw(10) as u8;
    if command.cdw(10) >> 31 != 0 {
        return Err(Status::NOT_SAVEABLE);
    }
    match command.nsid() {
        0 if feature == features::RESERVATION_MASK && nvme.shared.is_some() => {
            return Err(Status::INVALID_NAMESPACE);
        }
        0 | NSID_ALL => {}
        NSID if Features::is_of_namespace(feature) => {}
        NSID => return Err(Status::NOT_NAMESPACE_SPECIFIC),
        _ => return Err(Status::INVALID_NAMESPACE),
    }
    match feature {
        features::TIMESTAMP => {
            let mut data = [0; 8];
            let pointer = command.admin_data_pointer()?;
            let slices = nvme.gather_small(dma, &pointer, data.len(), Access::Read)?;
            copy_out(&slices, &mut data);
            nvme.features.set_timestamp(data);
            DONE
        }
        features::HOST_IDENTIFIER if nvme.shared.is_some() => {
            let is_extended = command.cdw(11) & 1 != 0;
            let mut data = [0; 16];
            let data_len = if is_extended { 16 } else { 8 };
            let pointer = command.admin_data_pointer()?;
            let slices = nvme.gather_small(dma, &pointer, data_len, Access::Read)?;
            copy_out(&slices, &mut data[..data_len]);
            let id = u128::from_le_bytes(data);
            // Those before are of the host without an identifier.
            nvme.take_notifications();
            nvme.features.set_host_identifier(id, is_extended)?;
            nvme.tell_host();
            DONE
        }
        features::RESERVATION_MASK if nvme.shared.is_some() => {
            // Those before are masked as before.
            nvme.take_notifications();
            nvme.features.reservation_mask = command.cdw(11) & features::RESERVATIONS_MASKED;
            DONE
        }
        features::RESERVATION_PERSISTENCE if nvme.shared.is_some() => {
            reservations::set_persistence(nvme, command, command.cdw(11) & 1 != 0)
        }
        features::QUEUE_COUNT if nvme.queues.has_io_queues() => Err(Status::COMMAND_SEQUENCE_ERROR),
        features::WRITE_CACHE => {
            // A process before this one may have set it, and not have flushed.
            let was_on = nvme.features.write_cache || nvme.recovering;
            nvme.features.set(feature, command.cdw(11))?;
            // Flush before the cache is disabled.
            match was_on && !nvme.features.write_cache && !nvme.namespace.read_only {
                true => flush_cache(nvme, command),
                false => DONE,
            }
        }
        _ => {
            let noticed = nvme.features.notices_namespaces();
            let result = nvme.features.set(feature, command.cdw(11))?;
            nvme.raise_warnings(nvme.warnings());
            if !noticed && nvme.logs.namespace_changed {
                nvme.raise_change();
            }
            Ok(Outcome::Done(result))
        }
    }
}

fn flush_cache(nvme: &mut Nvme, command: &Command) -> Result<Outcome, Status> {
    let tag = Target::admin(command).take_slot(nvme, Work::Flush)?;
    nvme.stats.flushes += 1;
    nvme.block.flush(tag);
    Ok(Outcome::InFlight)
}

/// 5.13.
fn get_features(nvme: &mut Nvme, command: &Command, dma: &mut dyn Dma) -> Result<Outcome, Status> {
    let feature = command.cdw(10) as u8;
    let select = Select::from_bits(command.cdw(10) >> 8)?;
    let is_one = command.nsid() == NSID;
    let is_valid = match feature {
        // Each namespace has one of its own.
        features::RESERVATION_MASK if nvme.shared.is_some() => is_one,
        _ => is_one || matches!(command.nsid(), 0 | NSID_ALL),
    };
    if !is_valid {
        return Err(Status::INVALID_NAMESPACE);
    }
    if nvme.shared.is_some() {
        const OF_NAMESPACE: u32 = 1 << 1;
        const CHANGEABLE: u32 = 1 << 2;
        let value = match feature {
            features::HOST_IDENTIFIER => {
                return get_host_identifier(nvme, command, select, dma);
            }
            features::RESERVATION_MASK => Some(nvme.features.reservation_mask),
            features::RESERVATION_PERSISTENCE if select == Select::Current => {
                return reservations::persistence(nvme, command);
            }
            features::RESERVATION_PERSISTENCE => Some(0),
            _ => None,
        };
        if let Some(value) = value {
            return Ok(Outcome::Done(match select {
                Select::Current => value,
                Select::Default => 0,
                Select::Capabilities => OF_NAMESPACE | CHANGEABLE,
            }));
        }
    }
    let result = nvme.features.get(feature, select, command.cdw(11))?;
    if feature == features::TIMESTAMP && select != Select::Capabilities {
        let data = nvme.features.timestamp(select);
        send(nvme, command, dma, &data)?;
    }
    Ok(Outcome::Done(result))
}

/// 5.21.1.25.
fn get_host_identifier(
    nvme: &mut Nvme,
    command: &Command,
    select: Select,
    dma: &mut dyn Dma,
) -> Result<Outcome, Status> {
    const CHANGEABLE: u32 = 1 << 2;
    if select == Select::Capabilities {
        return Ok(Outcome::Done(CHANGEABLE));
    }
    let is_extended = command.cdw(11) & 1 != 0;
    let id = match (select, nvme.features.host_identifier()) {
        (Select::Default, _) => 0,
        // In the other format, it cannot be told.
        (_, (1.., kept)) if kept != is_extended => return Err(Status::INVALID_FIELD),
        (_, (id, _)) => id,
    };
    let data_len = if is_extended { 16 } else { 8 };
    send(nvme, command, dma, &id.to_le_bytes()[..data_len])?;
    DONE
}

/// 5.2.
fn async_event_request(nvme: &mut Nvme, command: &Command) -> Result<Outcome, Status> {
    if !nvme.events.open(command.id(), nvme.executing) {
        return Err(Status::TOO_MANY_EVENT_REQUESTS);
    }
    // It may stay open indefinitely, so it must not reserve a completion entry.
    nvme.queues.release_completion(0);
    Ok(Outcome::Open)
}

/// 5.7.
fn doorbell_buffer_config(
    nvme: &mut Nvme,
    command: &Command,
    dma: &mut dyn Dma,
) -> Result<Outcome, Status> {
    let page_size = nvme.page_size();
    let (values, events) = (command.prp1(), command.prp2());
    if !(values.is_aligned_to(page_size) && events.is_aligned_to(page_size)) {
        return Err(Status::INVALID_FIELD);
    }
    let buffer = DoorbellBuffer::new(values, events, page_size as usize);
    match nvme.queues.set_buffer(dma, buffer) {
        Ok(()) => DONE,
        Err(_) => Err(Status::DATA_TRANSFER_ERROR),
    }
}

/// 5.23. There is one format. A secure erase zeroes all blocks; without one they are
/// deallocated, where the medium supports it.
fn format(nvme: &mut Nvme, command: &Command) -> Result<Outcome, Status> {
    const NO_ERASE: u32 = 0;
    const USER_DATA_ERASE: u32 = 1;
    let options = command.cdw(10);
    nvme.namespace.check_id_or_all(command.nsid())?;
    nvme.namespace.check_writable()?;
    nvme.check_reservation_to_format()?;
    // LBA format 0, no metadata or protection information.
    if options & 0x1ff != 0 {
        return Err(Status::INVALID_FORMAT);
    }
    let whole = nvme.namespace.whole();
    match options >> 9 & 7 {
        NO_ERASE => {
            let tag = Target::admin(command).take_slot(nvme, Work::Deallocate)?;
            nvme.block.punch(tag, whole.offset, whole.len);
        }
        USER_DATA_ERASE => {
            let tag = Target::admin(command).take_slot(nvme, Work::Zero { durable: true })?;
            nvme.block.zero(tag, whole.offset, whole.len, true);
        }
        _ => return Err(Status::INVALID_FIELD),
    }
    Ok(Outcome::InFlight)
}

/// Writes a data structure to the command's data pointer.
fn send(nvme: &mut Nvme, command: &Command, dma: &mut dyn Dma, data: &[u8]) -> Result<(), Status> {
    let pointer = command.admin_data_pointer()?;
    send_to(nvme, &pointer, dma, data)
}

/// Writes a data structure to where `pointer` points.
pub(super) fn send_to(
    nvme: &mut Nvme,
    pointer: &DataPointer,
    dma: &mut dyn Dma,
    data: &[u8],
) -> Result<(), Status> {
    let slices = nvme.gather_small(dma, pointer, data.len(), Access::Write)?;
    let mut rest = data;
    for slice in slices {
        let (part, after) = rest.split_at(slice.len().min(rest.len()));
        slice.write(part);
        rest = after;
    }
    Ok(())
}

/// Copies the front of `slices`, reading each byte once.
pub(super) fn copy_out(slices: &[HostSlice], data: &mut [u8]) {
    let mut done = 0;
    for slice in slices {
        let len = slice.len().min(data.len() - done);
        slice.read(&mut data[done..done + len]);
        done += len;
    }
}

const _: () = assert!(BlockQueue::SCRATCH.is_multiple_of(4096));
