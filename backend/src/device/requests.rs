//! Handles the requests of a client.

use std::sync::Arc;

use farside_error_chain::Chain;
use farside_fabric::memory::HostSlice;
use farside_guest_layout::Gpa;
use farside_irq_relay::{SetIrqs, SetIrqsMessage};
use farside_pci::{Description, rom};
use farside_vfio_user::{
    DeviceInfo, DmaMap, DmaUnmap, Refusal, Region, RegionInfo, RegionWrite, Reply, ReplyTo,
    Request,
    serve::{Answer, Handler},
};
use rustix::io::Errno;

use super::{
    Device,
    pending::{self, Finish, RegisterRead, Task},
    registers,
};
use crate::{
    borrow::{Event, State, worker::Job},
    dma_table::{Backing, Blocked, DmaError, Mapping, Target},
};

impl Device {
    fn read(&mut self, region: Region, offset: u64, count: u32, to: ReplyTo) -> Answer<'_> {
        let count = count as usize;
        self.buffer.clear();
        self.buffer.resize(count, 0xff);
        let mut interrupt_status = None;
        let mut config = Vec::new();
        let bar = match self.reached(region, offset, count, Access::Read) {
            (Region::Config, offset) => {
                let size = self.config.size();
                if self.is_present() && offset + count as u64 <= size {
                    self.config.read(offset, &mut self.buffer);
                    interrupt_status = self.config.interrupt_status_at(offset, count);
                    let parts = self.config.reads(offset, count);
                    config.extend(parts.map(|piece| RegisterRead::Config { piece, offset }));
                }
                None
            }
            (Region::Bar(bar), _) => match self.bars.shared(bar, offset, count) {
                Some(memory) => {
                    if self.is_present() {
                        memory.read(&mut self.buffer);
                    }
                    None
                }
                None => self.in_bar(bar, offset, count).then_some(bar),
            },
            (Region::Rom, _) => {
                let offset = usize::try_from(offset).unwrap_or(usize::MAX);
                let rest = self.rom.get(offset..).filter(|_| self.is_present());
                for (byte, rom) in self.buffer.iter_mut().zip(rest.unwrap_or_default()) {
                    *byte = *rom;
                }
                None
            }
            (Region::Vga, _) => None,
        };
        let finish = Finish::Read { region, offset };
        match bar {
            Some(bar) => {
                let borrow = Task::Event(Event::BarAccess);
                let done = 0;
                let read = Task::Read(RegisterRead::Bar { bar, offset, done });
                self.hold(to, finish, [borrow, read])
            }
            None => {
                let status = interrupt_status.map(|at| RegisterRead::InterruptStatus { at });
                self.hold(to, finish, status.into_iter().chain(config).map(Task::Read))
            }
        }
    }

    fn write(&mut self, write: RegionWrite<'_>, to: ReplyTo) -> Answer<'_> {
        let RegionWrite {
            region,
            offset,
            data,
        } = write;
        let count = data.len() as u32;
        let reply = Reply::RegionWrite {
            region,
            offset,
            count,
        };
        let finish = Finish::Always(reply);
        if let Some(memory) = self.shared(&write) {
            self.write_shared(&memory, data);
            return Answer::Reply(reply);
        }
        let (reached, at) = self.reached(region, offset, data.len(), Access::Write);
        if let (Region::Bar(bar), Some(channel)) = (reached, &mut self.registers) {
            // The common case: no task and no copy.
            if !in_bar(&self.described.description, bar, offset, data.len()) {
                return Answer::Error(Errno::INVAL);
            }
            match registers::post_write(channel, &mut self.log, bar, offset, data) {
                Ok(done) if done == data.len() => return Answer::Reply(reply),
                Ok(done) => {
                    let rest = Task::bar_write(bar, offset, data, done);
                    return self.hold(to, finish, [rest]);
                }
                Err((done, error)) => {
                    let rest = Task::bar_write(bar, offset, data, done);
                    self.registers_ended(&error);
                    return self.hold(to, finish, [rest]);
                }
            }
        }
        match self.write_tasks(reached, at, data) {
            Ok(tasks) => self.hold(to, finish, tasks),
            Err(errno) => Answer::Error(errno),
        }
    }

    /// The memory behind a BAR that a write is to.
    fn shared(&self, write: &RegionWrite<'_>) -> Option<HostSlice> {
        let Region::Bar(bar) = write.region else {
            return None;
        };
        self.bars.shared(bar, write.offset, write.data.len())
    }

    fn write_shared(&self, memory: &HostSlice, data: &[u8]) {
        if self.is_present() {
            memory.write(data);
        }
    }

    /// The region that an access reaches, and the offset in it: a BAR may have a mirror of configuration space.
    fn reached(&self, region: Region, offset: u64, count: usize, access: Access) -> (Region, u64) {
        let (Region::Bar(bar), Some(mirror)) = (region, &self.mirror) else {
            return (region, offset);
        };
        let served = match access {
            Access::Read => mirror.read(bar, offset, count),
            Access::Write => mirror.write(bar, offset, count),
        };
        served.map_or((region, offset), |at| (Region::Config, at))
    }

    /// Whether a request may change what the next backend is to find.
    fn changes_state(&self, request: &Request<'_>) -> bool {
        match request {
            Request::DeviceGetInfo
            | Request::DeviceGetRegionInfo { .. }
            | Request::DeviceGetIrqInfo { .. }
            | Request::RegionRead { .. } => false,
            Request::RegionWrite(write) => {
                let RegionWrite {
                    region,
                    offset,
                    data,
                } = write;
                let reached = self.reached(*region, *offset, data.len(), Access::Write);
                !matches!(reached, (Region::Bar(_), _))
            }
            _ => true,
        }
    }

    /// The tasks of a write.
    fn write_tasks(&self, region: Region, offset: u64, data: &[u8]) -> Result<Vec<Task>, Errno> {
        match region {
            Region::Config => {
                let end = offset.checked_add(data.len() as u64);
                if end.is_none_or(|end| end > self.config.size()) {
                    return Err(Errno::INVAL);
                }
                Ok(vec![Task::ConfigWrite {
                    offset,
                    data: data.to_vec(),
                }])
            }
            Region::Bar(bar) if self.in_bar(bar, offset, data.len()) => Ok(vec![
                Task::Event(Event::BarAccess),
                Task::bar_write(bar, offset, data, 0),
            ]),
            Region::Bar(_) | Region::Rom | Region::Vga => Err(Errno::INVAL),
        }
    }

    /// Whether the device is visible to the guest.
    fn is_present(&self) -> bool {
        !self.absent && self.state != State::Lost
    }

    fn in_bar(&self, bar: u8, offset: u64, count: usize) -> bool {
        in_bar(&self.described.description, bar, offset, count)
    }

    fn map(&mut self, request: DmaMap, to: ReplyTo) -> Answer<'_> {
        let start = Gpa::new(request.address);
        let target = match request.fd {
            Some(file) => Target::Ram(Backing {
                file: Arc::new(file.into()),
                offset: request.offset,
            }),
            None => self.target_without_descriptor(start, request.size),
        };
        let mapped = self
            .memory
            .map(start, request.size, request.writable, target);
        match mapped {
            Ok(mapping) => {
                let added = Task::Event(Event::mapped(mapping));
                self.hold(to, Finish::Reply(Reply::Done), [added])
            }
            Err(error) => {
                self.refuse_memory(&error);
                // The client continues as if the memory were mapped.
                let refused = Task::Event(Event::MemoryRefused(Blocked::Refused(error)));
                self.hold(to, Finish::Error(error.errno()), [refused])
            }
        }
    }

    fn unmap(&mut self, request: DmaUnmap, to: ReplyTo) -> Answer<'_> {
        let mappings = match request {
            DmaUnmap::All => self.memory.unmap_all(),
            DmaUnmap::Range { address, size } => match self.memory.unmap(Gpa::new(address), size) {
                Ok(mappings) => mappings,
                Err(error) => {
                    self.refuse_memory(&error);
                    return Answer::Error(error.errno());
                }
            },
        };
        self.ram_taken |= mappings.iter().any(Mapping::is_low_ram);
        let removed = Task::Event(Event::MemoryRemoved(mappings));
        self.hold(to, Finish::Always(Reply::DmaUnmap(request)), [removed])
    }

    /// Logs a refused mapping: the client only prints the error reply.
    fn refuse_memory(&mut self, error: &DmaError) {
        if let Some(held_back) = self.line_limits.memory.allow() {
            log::warn!(
                "{}: guest memory refused: {error}{held_back}",
                self.name(),
                error = Chain(&error)
            );
        }
        self.report.last_error = Some(Chain(&error).to_string());
    }

    pub(super) fn region_info(&self, region: Region) -> RegionInfo<'_> {
        match region {
            Region::Config => RegionInfo {
                readable: true,
                writable: true,
                size: self.config.size(),
                ..RegionInfo::absent(region)
            },
            Region::Bar(bar) => match self.described.description.bars.get(usize::from(bar)) {
                Some(Some(description)) => RegionInfo {
                    readable: true,
                    writable: true,
                    size: description.size,
                    mappable: self.bars.mappable(bar),
                    ..RegionInfo::absent(region)
                },
                _ => RegionInfo::absent(region),
            },
            Region::Rom => RegionInfo {
                readable: !self.rom.is_empty(),
                size: rom::bar_size(self.rom.len()),
                ..RegionInfo::absent(region)
            },
            Region::Vga => RegionInfo::absent(region),
        }
    }

    fn set_irqs(&mut self, message: SetIrqsMessage<'_>, to: ReplyTo) -> Answer<'_> {
        let request = match SetIrqs::decode(&self.counts, message) {
            Ok(request) => request,
            Err(error) => {
                if let Some(held_back) = self.line_limits.irqs.allow() {
                    log::warn!(
                        "{}: interrupts refused: {error}{held_back}",
                        self.name(),
                        error = Chain(&error)
                    );
                }
                return Answer::Error(error.errno());
            }
        };
        // A loopback trigger goes to the side that signals; other requests are recorded.
        let loopback = pending::is_loopback(&request);
        let we_signal = self.settings.relay_interrupts || self.registers.is_none();
        if (!loopback || we_signal)
            && let Err(error) = self.vectors.apply(request.clone())
        {
            return Answer::Error(error.errno());
        }
        let unplugs = request.is_unplug_notification();
        self.unplugged |= unplugs;
        let give_back = unplugs.then_some([Task::Event(Event::ClientGone), Task::ResetConfig]);
        let forward = (!loopback || !we_signal).then_some(Task::Work(Job::SetIrqs(request)));
        self.hold(
            to,
            Finish::Reply(Reply::Done),
            forward.into_iter().chain(give_back.into_iter().flatten()),
        )
    }
}

impl Handler for Device {
    fn refused(&mut self, refusal: &Refusal) {
        self.log.other_message();
        self.client_log.refused(&self.name(), refusal);
    }

    fn handle(&mut self, request: Request<'_>, to: ReplyTo) -> Answer<'_> {
        self.ram_taken &= matches!(request, Request::DmaUnmap(_));
        self.records.is_dirty |= self.changes_state(&request);
        match request {
            Request::RegionWrite(_) | Request::RegionWriteMulti(_) => {
                self.log.message(self.records.turn());
            }
            _ => self.log.other_message(),
        }
        match request {
            Request::Version(negotiated) => {
                self.negotiated = Some(negotiated);
                let finish = Finish::Reply(Reply::Version(negotiated));
                self.hold(to, finish, [Task::Work(Job::Check)])
            }
            Request::DmaMap(request) => self.map(request, to),
            Request::DmaUnmap(request) => self.unmap(request, to),
            Request::DeviceGetInfo => {
                Answer::Reply(Reply::DeviceInfo(DeviceInfo { resettable: true }))
            }
            Request::DeviceGetRegionInfo { region, argsz } => {
                // The memory of a physical BAR comes with a lease.
                let borrow = matches!(region, Region::Bar(bar) if self.bars.need_a_lease(bar));
                let borrow = borrow.then_some(Task::Event(Event::BarAccess));
                self.hold(to, Finish::RegionInfo { region, argsz }, borrow)
            }
            Request::DeviceGetIrqInfo { index } => {
                let info = self.counts.info(index);
                Answer::Reply(Reply::IrqInfo { index, info })
            }
            Request::DeviceSetIrqs(request) => self.set_irqs(request, to),
            Request::RegionRead {
                region,
                offset,
                count,
            } => self.read(region, offset, count, to),
            Request::RegionWrite(write) => self.write(write, to),
            Request::RegionWriteMulti(writes) => {
                let done = writes.len() as u64;
                let (mut tasks, mut shared) = (Vec::new(), Vec::new());
                for write in writes.writes() {
                    if let Some(memory) = self.shared(&write) {
                        shared.push((memory, write.data));
                        continue;
                    }
                    let RegionWrite {
                        region,
                        offset,
                        data,
                    } = write;
                    let (region, offset) = self.reached(region, offset, data.len(), Access::Write);
                    match self.write_tasks(region, offset, data) {
                        Ok(more) => tasks.extend(more),
                        Err(errno) => return Answer::Error(errno),
                    }
                }
                for (memory, data) in shared {
                    self.write_shared(&memory, data);
                }
                let finish = Finish::Always(Reply::RegionWriteMulti { done });
                self.hold(to, finish, tasks)
            }
            Request::DeviceReset => self.hold(
                to,
                Finish::Reply(Reply::Done),
                // Reset the registers first: the lender must receive their values after the reset.
                [Task::ResetConfig, Task::Event(Event::Reset)],
            ),
        }
    }
}

#[derive(Clone, Copy)]
enum Access {
    Read,
    Write,
}

fn in_bar(description: &Description, bar: u8, offset: u64, count: usize) -> bool {
    let size = match description.bars.get(usize::from(bar)) {
        Some(Some(bar)) => bar.size,
        _ => return false,
    };
    offset
        .checked_add(count as u64)
        .is_some_and(|end| end <= size)
}
