//! The controller: its state, its lifecycle from enable to reset, and the loop
//! that fetches and completes commands.
//!
//! ```text
//!            CC.EN = 1                    CC.EN = 0
//!  Disabled ───────────▶ Ready ─────────────────────▶ Draining
//!     ▲                    │ DMA fault at a queue          │
//!     │                    ▼                               │ nothing in flight
//!     │                  Fatal (CSTS.CFS) ── CC.EN = 0 ──▶ │
//!     └────────────────────────────────────────────────────┘
//! ```
//!
//! While draining, CSTS.RDY stays set, so the guest does not reuse memory that is the
//! target of I/O in flight. The results of that I/O are dropped.

mod bar;
mod device;
mod growth;
mod lifecycle;

use farside_fabric::{Access, Fault, memory::HostSlice};

use super::{
    admin,
    cmb::Cmb,
    command::{Command, DataPointer},
    config::{Config, ConfigError},
    events::{Event, Events},
    features::Features,
    identify::Names,
    io,
    logs::{ErrorEntry, Logs},
    namespace::{Namespace, uuid_from},
    queues::{DoorbellError, Queues},
    registers::{Registers, Shutdown},
    reservations::Shared,
    saved::Answered,
    slots::{IO_SLOTS, RESERVED_SLOTS, Slots, Work},
    stats::Stats,
    status::Status,
};
use farside_pci::Description;

use crate::{
    Bus, Dma,
    block::{BlockError, BlockQueue, Durability, Image, RemoteMedium, Tag, medium::Medium},
    state::{Entry, InFlight},
};

/// Most commands fetched from one queue before the next queue.
const BURST: usize = 32;

/// Most rounds of I/O per poll. Bounds the duration of a poll.
const MAX_TURNS: usize = 8;

/// Most log lines on guest errors since power-on: a guest that causes more would only fill the log.
const MAX_GUEST_ERRORS_LOGGED: u32 = 16;

/// An NVMe controller with one namespace on an image.
pub struct Nvme {
    description: Description,
    pub(super) names: Names,
    pub(super) namespace: Namespace,
    pub(super) registers: Registers,
    pub(super) cmb: Option<Cmb>,
    /// If other controllers share the namespace.
    pub(super) shared: Option<Shared>,
    pub(super) queues: Queues,
    pub(super) slots: Slots,
    pub(super) block: BlockQueue,
    pub(super) features: Features,
    pub(super) logs: Logs,
    pub(super) medium: Medium,
    pub(super) events: Events,
    pub(super) stats: Stats,
    /// Message address, data and control of each vector: plain storage, interpreted by
    /// the borrower.
    pub(super) msix_table: Box<[u8]>,
    /// CC.EN was cleared and I/O is still in flight.
    pub(super) draining: bool,
    /// The flush of a shutdown is in flight.
    shutdown_flush: bool,
    pub(super) quiesced: bool,
    /// The command that is being executed.
    pub(super) executing: Entry,
    /// Something that is saved has changed.
    pub(super) changed: bool,
    /// The result of the last admin command.
    pub(super) answered: Option<Answered>,
    pub(super) flush_failed: bool,
    /// The commands that a process before this one has left in flight, until the device can reach guest memory.
    pub(super) recovery: Option<Vec<InFlight>>,
    /// They are being executed.
    pub(super) recovering: bool,
    /// The I/O queue that the next round starts with.
    turn: usize,
    /// Number of guest errors logged.
    guest_errors_logged: u32,
}

/// The outcome of a fetched command.
pub(super) enum Outcome {
    /// Done, with dword 0 of the completion.
    Done(u32),
    /// In flight in a slot.
    InFlight,
    /// Completed later without a slot, or never (an event request).
    Open,
}

impl Nvme {
    /// Opens the image and creates a controller in its power-on state. `id` is the device
    /// id, from which the serial number is derived unless it is configured.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`].
    pub fn open(id: &str, config: &Config) -> Result<Self, ConfigError> {
        Self::with_image(id, config, config.open_image()?)
    }

    /// As [`Nvme::open`], on the open image of the same configuration.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`].
    pub fn with_image(id: &str, config: &Config, image: Image) -> Result<Self, ConfigError> {
        let Image {
            file,
            size,
            punches_holes,
        } = image;
        let block = BlockQueue::open(file, config.engine, IO_SLOTS + RESERVED_SLOTS)
            .and_then(|block| block.limited(config.limits));
        Self::with_block(id, config, block, (size, punches_holes))
    }

    /// As [`Nvme::open`], on a medium of `size` bytes that another host has, and whose deallocated
    /// blocks read as zeroes if it `punches_holes`.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`].
    pub fn with_remote(
        id: &str,
        config: &Config,
        medium: RemoteMedium,
        (size, punches_holes): (u64, bool),
    ) -> Result<Self, ConfigError> {
        config.validate()?;
        let block = BlockQueue::remote(medium, IO_SLOTS + RESERVED_SLOTS)
            .and_then(|block| block.limited(config.limits));
        Self::with_block(id, config, block, (size, punches_holes))
    }

    pub(super) fn with_block(
        id: &str,
        config: &Config,
        block: std::io::Result<BlockQueue>,
        (size, punches_holes): (u64, bool),
    ) -> Result<Self, ConfigError> {
        let serial = config.serial_for(id);
        let block_shift = config.block_size.trailing_zeros();
        let namespace = Namespace {
            block_shift,
            blocks: size >> block_shift,
            read_only: config.read_only,
            punches_holes,
            uuid: uuid_from(&serial),
        };
        let block = block.map_err(|source| ConfigError::Engine {
            image: config.image.clone(),
            source,
        })?;
        Ok(Self {
            description: config.description(size),
            names: Names {
                serial,
                model: config.model.clone(),
            },
            namespace,
            registers: Registers::default(),
            cmb: config.cmb.map(Cmb::new),
            shared: None,
            queues: Queues::new(config.queues),
            slots: Slots::new(),
            block,
            features: Features::new(config.queues),
            logs: Logs::new(),
            medium: Medium::new(format!("image {}", config.image.display()), size),
            events: Events::default(),
            stats: Stats::default(),
            msix_table: power_on_table(config.vectors()),
            draining: false,
            shutdown_flush: false,
            quiesced: false,
            executing: Entry::default(),
            changed: false,
            answered: None,
            flush_failed: false,
            recovery: None,
            recovering: false,
            turn: 0,
            guest_errors_logged: 0,
        })
    }

    /// Whether it offers Doorbell Buffer Config, which has no use beside mapped doorbells: they never trap.
    pub(super) fn has_doorbell_buffer(&self) -> bool {
        let bar = self.description.bars[0].as_ref();
        bar.is_some_and(|bar| bar.mappable.is_empty())
    }

    /// Critical warnings of the health log.
    pub(super) fn warnings(&self) -> u8 {
        self.features.warnings() | self.medium.warnings()
    }

    /// Raises an event for those of `warnings` that are enabled as events.
    pub(super) fn raise_warnings(&mut self, warnings: u8) {
        if let Some(event) = Event::of_warnings(self.features.enabled_events(warnings)) {
            self.events.raise(event);
        }
    }

    /// The number of interrupt vectors.
    pub(super) fn vectors(&self) -> u16 {
        self.description.msix_vectors
    }

    /// The memory page size set by the guest, in bytes.
    pub(super) fn page_size(&self) -> u64 {
        self.registers.cc.page_size()
    }

    /// DMA to a queue or its doorbells has faulted: only CSTS can report it (9.5).
    pub(super) fn fatal(&mut self, fault: Fault) {
        if !self.registers.csts.fatal {
            self.changed = true;
            self.log_guest_error(format_args!("controller fatal status: {fault}"));
            self.registers.csts.fatal = true;
        }
    }

    /// Logs a guest error, up to [`MAX_GUEST_ERRORS_LOGGED`].
    fn log_guest_error(&mut self, error: std::fmt::Arguments<'_>) {
        if self.guest_errors_logged < MAX_GUEST_ERRORS_LOGGED {
            self.guest_errors_logged += 1;
            log::warn!("NVMe {}: {error}", self.names.serial);
        }
    }

    /// Whether the controller may access queues in guest memory. Clear bus-master enable
    /// is no error: a guest that resets or unbinds a controller without shutdown clears it
    /// while the controller is enabled.
    fn may_fetch(&self, bus: &Bus<'_>) -> bool {
        self.is_running() && bus.dma.is_bus_master() && self.recovery.is_none()
    }

    /// Whether it fetches commands where it may access guest memory.
    pub(super) fn is_running(&self) -> bool {
        let csts = self.registers.csts;
        csts.ready
            && !csts.fatal
            && !self.draining
            && !self.quiesced
            && csts.shutdown == Shutdown::None
    }

    fn fetch_all(&mut self, bus: &mut Bus<'_>) -> Result<bool, Fault> {
        self.queues.refresh_tail(bus.dma, 0)?;
        let mut busy = self.fetch_from(0, bus)?;
        let count = self.queues.io_queues();
        let first = self.turn;
        for queue in (0..count).map(|step| (first + step) % count) {
            if let Some(id) = self.queues.io_queue(queue) {
                self.queues.refresh_tail(bus.dma, id)?;
                self.save_changes();
                if self.fetch_from(id, bus)? {
                    busy = true;
                    // A poll that takes nothing changes no queue's turn.
                    self.turn = (queue + 1) % count;
                }
            }
        }
        Ok(busy)
    }

    fn has_slot_for(&self, id: u16) -> bool {
        match id {
            0 => self.slots.has_room_for_admin(),
            _ => self.slots.has_room_for_io(),
        }
    }

    /// Admin commands have no limits.
    fn may_take_from(&mut self, id: u16) -> bool {
        id == 0 || (!self.is_fenced() && self.reservations_admit() && self.block.may_take())
    }

    fn fetch_from(&mut self, id: u16, bus: &mut Bus<'_>) -> Result<bool, Fault> {
        for fetched in 0..BURST {
            if !self.has_slot_for(id) || !self.may_fetch(bus) || !self.may_take_from(id) {
                return Ok(fetched > 0);
            }
            let Some((command, entry)) = self.queues.fetch(bus.dma, id)? else {
                return Ok(fetched > 0);
            };
            self.execute(id, &command, entry, bus);
        }
        Ok(true)
    }

    /// Executes a command of queue `id`.
    pub(super) fn execute(&mut self, id: u16, command: &Command, entry: Entry, bus: &mut Bus<'_>) {
        self.executing = entry;
        let outcome = match id {
            0 => {
                self.stats.admin_commands += 1;
                admin::execute(self, command, bus)
            }
            _ => {
                self.stats.io_commands += 1;
                io::execute(self, id, command, bus)
            }
        };
        let lba = match id {
            0 => 0,
            _ => command.starting_lba(),
        };
        let about = Some((lba, command.nsid()));
        let command = (command.id(), entry);
        match outcome {
            Ok(Outcome::Done(result)) => self.complete(bus, id, command, Ok(result), about),
            Ok(Outcome::InFlight | Outcome::Open) => {}
            Err(status) => self.complete(bus, id, command, Err(status), about),
        }
    }

    /// Posts a completion. `about` is the LBA and namespace for the error log.
    pub(super) fn complete(
        &mut self,
        bus: &mut Bus<'_>,
        sq_id: u16,
        (command_id, entry): (u16, Entry),
        result: Result<u32, Status>,
        about: Option<(u64, u32)>,
    ) {
        let (dword, status) = match result {
            Ok(dword) => (dword, Status::SUCCESS),
            Err(status) => {
                let (lba, nsid) = about.unwrap_or_default();
                self.stats.errors += 1;
                self.logs.record(ErrorEntry {
                    sq_id,
                    command_id,
                    status,
                    lba,
                    nsid,
                });
                (0, status.with_more())
            }
        };
        if sq_id == 0 {
            self.save_answer(Some(Answered {
                sequence: entry.sequence,
                result: dword,
                status: status.bits(),
            }));
        }
        self.post(bus, sq_id, (command_id, entry), dword, status);
    }

    /// Posts a completion that is in the error log, and saved if it is an admin command's.
    pub(super) fn post(
        &mut self,
        bus: &mut Bus<'_>,
        sq_id: u16,
        command: (u16, Entry),
        result: u32,
        status: Status,
    ) {
        let posted = self
            .queues
            .complete(bus.dma, sq_id, command, result, status);
        if let Err(fault) = posted {
            self.fatal(fault);
        }
    }

    /// Advances I/O without blocking. Returns whether any finished.
    fn turn_block(&mut self, bus: &mut Bus<'_>) -> bool {
        let mut busy = false;
        for _ in 0..MAX_TURNS {
            self.block.turn();
            let mut any = false;
            while let Some((tag, result)) = self.block.next_done() {
                any = true;
                self.finish_io(tag, result, bus);
            }
            if !any {
                break;
            }
            busy = true;
        }
        self.fence();
        busy
    }

    fn finish_io(&mut self, tag: Tag, result: Result<(), BlockError>, bus: &mut Bus<'_>) {
        let work = self.slots[tag].work;
        io::note_medium(self, work, result);
        let has_failed = !matches!(result, Ok(()) | Err(BlockError::Refused(_)));
        if has_failed && matches!(work, Work::Flush | Work::Shutdown) && !self.flush_failed {
            // Before the command completes: executed again, it would succeed.
            self.flush_failed = true;
            self.save();
        }
        if work == Work::Shutdown {
            self.shutdown_flush = false;
            if self.registers.csts.shutdown == Shutdown::Occurring {
                self.registers.csts.shutdown = Shutdown::Complete;
                self.changed = true;
            }
            self.release(tag);
            return;
        }
        // A disabled controller starts no further steps.
        let status = match self.draining {
            true => Err(Status::ABORT_REQUESTED),
            false => match io::step(self, tag, result) {
                Some(status) => status,
                None => return,
            },
        };
        let slot = &self.slots[tag];
        let (sq_id, command) = (slot.sq_id, (slot.command_id, slot.entry));
        let about = Some((slot.lba, slot.nsid));
        self.release(tag);
        if !self.draining {
            self.complete(bus, sq_id, command, status, about);
        }
    }

    pub(super) fn release(&mut self, tag: Tag) {
        self.block.release(tag);
        self.slots.release(tag);
    }

    /// Raises events for doorbell errors and completes event requests. Returns whether
    /// any was completed.
    fn report_events(&mut self, bus: &mut Bus<'_>) -> bool {
        while let Some(error) = self.queues.take_error() {
            self.events.raise(match error {
                DoorbellError::InvalidRegister => Event::InvalidDoorbellRegister,
                DoorbellError::InvalidValue => Event::InvalidDoorbellValue,
            });
        }
        if !self.may_fetch(bus) {
            return false;
        }
        let mut busy = false;
        if self.events.is_due()
            && let Err(fault) = self.queues.refresh_head(bus.dma, 0)
        {
            self.fatal(fault);
        }
        while self.events.is_due() && self.queues.reserve_completion(0) {
            if let Some((command, result)) = self.events.take() {
                self.complete(bus, 0, command, Ok(result), None);
                busy = true;
            }
        }
        busy
    }

    fn run(&mut self, bus: &mut Bus<'_>) -> bool {
        self.take_growth();
        let mut busy = self.recover(bus);
        self.fence();
        if self.may_fetch(bus) {
            match self.fetch_all(bus) {
                Ok(fetched) => busy |= fetched,
                Err(fault) => self.fatal(fault),
            }
        }
        busy |= self.turn_block(bus);
        while let Some(command) = self.queues.take_deleted() {
            self.complete(bus, 0, command, Ok(0), None);
            busy = true;
        }
        busy |= self.take_notifications();
        busy |= self.report_events(bus);
        busy |= self.finish_abort(bus);
        self.advance(bus);
        // Mapped doorbells are read without DMA.
        if (self.may_fetch(bus) || self.queues.are_mapped())
            && bus.irq.intx_in_use()
            && let Err(fault) = self
                .queues
                .refresh_asserting(bus.dma, self.registers.interrupt_mask)
        {
            self.fatal(fault);
        }
        self.interrupt_driver(bus);
        self.save_changes();
        busy
    }

    /// A function that is no bus master sends no messages (PCIe 6.0, 7.5.1.1.3).
    fn interrupt_driver(&mut self, bus: &mut Bus<'_>) {
        let mask = self.registers.interrupt_mask;
        match bus.dma.is_bus_master() {
            true => self.queues.interrupt(bus.irq, mask),
            false => self.queues.update_line(bus.irq, mask),
        }
    }

    /// Enables the guest's notifications, then returns whether there is work already.
    fn enable_notifications(&mut self, bus: &mut Bus<'_>) -> Result<bool, Fault> {
        if !self.may_fetch(bus) {
            return Ok(self.can_recover(bus));
        }
        let line = bus.irq.intx_in_use();
        self.queues.publish_events(bus.dma, line)?;
        self.queues.refresh_tail(bus.dma, 0)?;
        let mut pending = self.has_slot_for(0) && self.queues.can_fetch(bus.dma, 0)?;
        for index in 0..self.queues.io_queues() {
            if let Some(id) = self.queues.io_queue(index) {
                self.queues.refresh_tail(bus.dma, id)?;
                pending |= self.has_slot_for(id)
                    && self.queues.can_fetch(bus.dma, id)?
                    && !self.is_fenced()
                    && self.reservations_would_admit()
                    && self.block.may_take();
            }
        }
        if line {
            let mask = self.registers.interrupt_mask;
            self.queues.refresh_asserting(bus.dma, mask)?;
            self.queues.update_line(bus.irq, mask);
        }
        self.save_changes();
        Ok(pending || self.queues.has_errors())
    }

    /// Gathers the guest memory of a command's data for slot `tag`.
    pub(super) fn gather(
        &mut self,
        dma: &mut dyn Dma,
        tag: Tag,
        pointer: &DataPointer,
        len: u64,
        access: Access,
    ) -> Result<(), Status> {
        let page_size = self.page_size();
        let slices = self.block.slices(tag);
        slices.clear();
        super::gather(dma, pointer, len as usize, page_size, access, slices)
    }

    /// The guest memory of a small data structure of an admin command.
    pub(super) fn gather_small(
        &mut self,
        dma: &mut dyn Dma,
        pointer: &DataPointer,
        len: usize,
        access: Access,
    ) -> Result<Vec<HostSlice>, Status> {
        let mut slices = Vec::new();
        super::gather(dma, pointer, len, self.page_size(), access, &mut slices)?;
        Ok(slices)
    }

    /// The durability of a write: FUA, or the write cache is disabled.
    pub(super) fn durability(&self, fua: bool) -> Durability {
        match fua || !self.features.write_cache {
            true => Durability::Durable,
            false => Durability::Cached,
        }
    }
}

/// An MSI-X table with every vector masked (PCI 3.0, 6.8.2.9).
fn power_on_table(vectors: u16) -> Box<[u8]> {
    let mut table = vec![0; usize::from(vectors) * 16].into_boxed_slice();
    for entry in table.chunks_exact_mut(16) {
        entry[12] = 1;
    }
    table
}
