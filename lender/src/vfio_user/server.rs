//! The connection to a server during a lease.

use std::{
    collections::BTreeMap,
    fs::File,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use farside_error_chain::Chain;
use farside_fabric::{FabricError, Iova, memory::HostSlice};
use farside_irq_relay::{Action, IrqCounts, IrqData, IrqIndex, IrqRange, SetIrqs};
use farside_lender_protocol::{Described, RemoteError};
use farside_pci::{
    Bar,
    regs::{COMMAND_IO, COMMAND_MASTER, COMMAND_MEMORY},
};
use farside_vfio_user_client::{CONFIG_REGION, Client, ClientError, Limits, Memory};

use super::{
    Device, Files, bars,
    messages::{Messages, enable_bits},
    record::{Inherited, Record, State},
};
use crate::{
    refusals::{failed, internal},
    vfio::{ConfigAccess, Raises},
};

/// A server, and its device. Calls come from the device's thread.
pub(super) struct Server {
    path: PathBuf,
    counts: IrqCounts,
    /// The enable bits of MSI and MSI-X in configuration space: index, offset, bit.
    enables: Vec<(IrqIndex, u64, u16)>,
    /// Where its BARs are placed: offsets and values of doublewords in configuration space.
    places: Vec<(u64, u32)>,
    /// For waiting.
    socket: OwnedFd,
    connection: Mutex<Connection>,
}

struct Connection {
    client: Client,
    mapped: Mapped,
    /// What a process before this one has left, until it is settled.
    inherited: Option<Left>,
    messages: Messages,
    /// The end of the connection was logged.
    logged: bool,
}

/// What a process that was killed has set up at the server, as far as this one has not yet.
struct Left {
    mappings: Inherited,
    /// Types of interrupts that may be enabled.
    irqs: Vec<IrqIndex>,
    /// Vectors that are set up again, by their type.
    again: BTreeMap<IrqIndex, u16>,
}

/// Of which a function has one at a time. libvfio-user keeps one set of eventfds for all three.
const EXCLUSIVE: [IrqIndex; 3] = [IrqIndex::Intx, IrqIndex::Msi, IrqIndex::Msix];

impl Left {
    /// The types to disable before `index` is set up again.
    fn make_way_for(&mut self, index: IrqIndex) -> Vec<IrqIndex> {
        let is_in_the_way = |other: &mut IrqIndex| {
            let both = [*other, index];
            *other != index && both.iter().all(|it| EXCLUSIVE.contains(it))
        };
        self.irqs.extract_if(.., is_in_the_way).collect()
    }

    fn set_up_again(&mut self, range: IrqRange) {
        let index = range.index();
        self.irqs.retain(|other| *other != index);
        // The others would tell the guest of an error, or of a removal.
        if EXCLUSIVE.contains(&index) {
            let vectors = self.again.entry(index).or_default();
            *vectors = (*vectors).max(range.vectors().end);
        }
    }
}

/// The memory that the device may access, by its IOVA.
#[derive(Default)]
pub(super) struct Mapped {
    rows: BTreeMap<u64, (HostSlice, bool)>,
    /// For a process that goes on with the connection.
    record: Option<Record>,
}

impl Mapped {
    /// A server whose request has no reply when this process is killed waits for that, and serves nothing else: no process
    /// can go on with it.
    fn asked_by_message(&mut self) {
        if let Some(record) = &mut self.record {
            record.give_up();
        }
    }

    fn note(&mut self, range: (u64, u64), state: Option<State>) {
        match (&mut self.record, state) {
            (Some(record), Some(state)) => record.set(range, state),
            (Some(record), None) => record.clear(range),
            (None, _) => {}
        }
    }

    /// Calls `copy` with the slices behind `len` bytes at `address`, which must all be there.
    fn each(
        &self,
        mut address: u64,
        len: usize,
        write: bool,
        mut copy: impl FnMut(HostSlice, std::ops::Range<usize>),
    ) -> bool {
        let mut done = 0;
        while done < len {
            let row = self.rows.range(..=address).next_back();
            let slice = row.and_then(|(start, (slice, writable))| {
                let skip = usize::try_from(address - start).ok()?;
                let left = slice.len().checked_sub(skip).filter(|left| *left > 0)?;
                let part = slice.slice(skip, left.min(len - done))?;
                (*writable || !write).then_some(part)
            });
            let Some(slice) = slice else { return false };
            let end = done + slice.len();
            copy(slice, done..end);
            let Some(next) = address.checked_add((end - done) as u64) else {
                return end == len;
            };
            (address, done) = (next, end);
        }
        true
    }
}

impl Memory for Mapped {
    fn read(&mut self, address: u64, data: &mut [u8]) -> bool {
        self.asked_by_message();
        self.each(address, data.len(), false, |slice, at| {
            slice.read(&mut data[at]);
        })
    }

    fn write(&mut self, address: u64, data: &[u8]) -> bool {
        self.asked_by_message();
        // All or nothing.
        self.each(address, data.len(), true, |_, _| ())
            && self.each(address, data.len(), true, |slice, at| {
                slice.write(&data[at]);
            })
    }
}

impl Server {
    /// Resets the device, and checks that it is still the one that was `described`.
    pub(super) fn open(
        mut client: Client,
        path: &Path,
        described: &Described,
    ) -> Result<(Arc<Self>, Files), RemoteError> {
        let named = |problem: &dyn std::fmt::Display| {
            failed(format_args!(
                "vfio-user server {}: {problem}",
                path.display()
            ))
        };
        let mut read = || {
            client.reset(&mut farside_vfio_user_client::NoMemory)?;
            Device::read(&mut client)
        };
        let device: Device = read().map_err(|error: ClientError| named(&Chain(&error)))?;
        let now = device.describe(path).map_err(|problem| named(&problem))?;
        if now.description != described.description {
            return Err(named(&"its device has changed; restart the lender"));
        }
        let opened = Self::with_device(client, path, &described.description.bars, device)
            .map_err(|error| named(&error))?;
        opened.0.decode()?;
        Ok(opened)
    }

    /// Goes on with the connection of a process that was killed, and with the device as it runs.
    pub(super) fn adopt(
        socket: OwnedFd,
        limits: Limits,
        path: &Path,
        described: &Described,
    ) -> Result<(Arc<Self>, Files), RemoteError> {
        let mut client = Client::adopt(socket, limits).map_err(internal)?;
        let device = Device::read(&mut client).map_err(internal)?;
        Self::with_device(client, path, &described.description.bars, device).map_err(internal)
    }

    fn with_device(
        client: Client,
        path: &Path,
        bars: &[Option<Bar>; 6],
        device: Device,
    ) -> std::io::Result<(Arc<Self>, Files)> {
        let server = Self {
            path: path.to_owned(),
            counts: device.counts,
            enables: enable_bits(&device.config),
            places: bars::places(bars),
            socket: client.as_fd().try_clone_to_owned()?,
            connection: Mutex::new(Connection {
                client,
                mapped: Mapped::default(),
                inherited: None,
                messages: Messages::default(),
                logged: false,
            }),
        };
        Ok((Arc::new(server), device.files))
    }

    /// Records what is mapped in `page`, for the next process. With `goes_on`, this one goes on with what is recorded there;
    /// returns whether it can.
    pub(super) fn record_in(&self, page: &HostSlice, goes_on: bool) -> bool {
        let mut connection = self.lock();
        if !goes_on {
            connection.mapped.record = Some(Record::start(page.clone()));
            return true;
        }
        let Some((record, mappings)) = Record::resume(page.clone()) else {
            return false;
        };
        connection.mapped.record = Some(record);
        let irqs = [IrqIndex::Intx, IrqIndex::Msi, IrqIndex::Msix].into_iter();
        connection.inherited = Some(Left {
            mappings,
            irqs: irqs.filter(|it| self.counts.count(*it) != 0).collect(),
            again: BTreeMap::new(),
        });
        true
    }

    /// Whether another process can go on with the connection.
    pub(super) fn can_be_adopted(&self) -> bool {
        let connection = self.lock();
        let record = connection.mapped.record.as_ref();
        !connection.client.has_ended() && record.is_some_and(|record| !record.is_void())
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Readable when [`Server::poll`] has work.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Serves what the server asks for. Returns whether that was anything.
    pub(super) fn poll(&self) -> bool {
        let served = self.with(|client, mapped| client.serve(mapped));
        served.unwrap_or(false)
    }

    /// Reads a BAR; all ones of a device that is gone.
    pub(super) fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        let read = self.with(|client, mapped| client.region_read(region, offset, data, mapped));
        if let Err(error) = read {
            log::debug!("{}: {}", self.path.display(), Chain(&error));
            data.fill(0xff);
        }
    }

    /// Writes a BAR.
    pub(super) fn write(&self, region: u32, offset: u64, data: &[u8]) {
        let written = self.with(|client, mapped| client.region_write(region, offset, data, mapped));
        if let Err(error) = written {
            log::debug!("{}: {}", self.path.display(), Chain(&error));
        }
    }

    /// Resets the device.
    pub(super) fn reset(&self) -> Result<(), RemoteError> {
        self.with(|client, mapped| client.reset(mapped))
            .map_err(internal)?;
        self.decode()?;
        // A reset keeps the eventfds, and clears what the kernel restores of its functions.
        let set_up = self.lock().messages.set_up();
        let Some((index, vectors)) = set_up else {
            return Ok(());
        };
        self.enable_messages(index, true)?;
        self.unmask(index, 0..vectors)
    }

    /// Has the device answer at its BARs, without DMA. The guest's command register is the backend's.
    fn decode(&self) -> Result<(), RemoteError> {
        for &(at, value) in &self.places {
            self.unless_refused(self.config_write(at, &value.to_le_bytes()))?;
        }
        self.set_command(COMMAND_MEMORY | COMMAND_IO, COMMAND_MASTER)
    }

    /// Has the device reach `memory`, a part of `file`, at `at`.
    pub(super) fn map(
        &self,
        at: Iova,
        memory: &HostSlice,
        file: &File,
        writable: bool,
    ) -> Result<(), FabricError> {
        let offset = memory.memory().file_offset() + memory.offset() as u64;
        let size = memory.len() as u64;
        let range = (at.get(), size);
        if !self.take_left(range)? {
            self.lock().mapped.note(range, Some(State::Asked));
            let mapped =
                self.with(|client, _| client.dma_map(at.get(), size, (file, offset), writable));
            if let Err(error) = mapped {
                if !error.is_fatal() {
                    self.lock().mapped.note(range, None);
                }
                return Err(FabricError::Other(error.into()));
            }
        }
        let mapped = &mut self.lock().mapped;
        mapped.note(range, Some(State::Mapped));
        mapped.rows.insert(at.get(), (memory.clone(), writable));
        Ok(())
    }

    /// Returns whether a process before this one has mapped `range`. Unmaps what that has left otherwise where it is.
    fn take_left(&self, range: (u64, u64)) -> Result<bool, FabricError> {
        let end = |(start, len): (u64, u64)| start.saturating_add(len);
        let overlap: Vec<_> = {
            let Some(left) = &mut self.lock().inherited else {
                return Ok(false);
            };
            let mappings = &mut left.mappings;
            if let Some(n) = mappings.iter().position(|it| *it == (range, State::Mapped)) {
                mappings.swap_remove(n);
                return Ok(true);
            }
            let overlaps = |other: (u64, u64)| other.0 < end(range) && end(other) > range.0;
            let extracted = mappings.extract_if(.., |(other, _)| overlaps(*other));
            extracted.map(|(other, _)| other).collect()
        };
        overlap
            .into_iter()
            .try_for_each(|other| self.drop_left(other))?;
        Ok(false)
    }

    /// Unmaps what a process before this one may have mapped.
    fn drop_left(&self, range: (u64, u64)) -> Result<(), FabricError> {
        match self.with(|client, _| client.dma_unmap(range.0, range.1)) {
            // It is not mapped.
            Ok(()) | Err(ClientError::Refused { .. }) => {
                self.lock().mapped.note(range, None);
                Ok(())
            }
            Err(error) => Err(FabricError::Other(error.into())),
        }
    }

    /// Once what the former process had set up and is still wanted is set up again, takes down what else there is of that
    /// one, mappings and interrupts. Signals each interrupt that is set up again: one may have been lost meanwhile.
    pub(super) fn settle(&self) -> Result<(), FabricError> {
        let Some(left) = self.lock().inherited.take() else {
            return Ok(());
        };
        for (range, _) in left.mappings {
            self.drop_left(range)?;
        }
        let disabled = left.irqs.into_iter().map(|index| (index, 0));
        for (index, vectors) in disabled.chain(left.again) {
            let done = self.trigger(index, vectors);
            done.map_err(|error| FabricError::Other(error.into()))?;
        }
        Ok(())
    }

    /// Signals the first `vectors` of a type; of none, disables it.
    fn trigger(&self, index: IrqIndex, vectors: u16) -> Result<(), RemoteError> {
        let range = IrqRange::new(&self.counts, index as u32, 0, vectors.into());
        let request = range
            .and_then(|range| SetIrqs::new(range, Action::Trigger, IrqData::None))
            .map_err(internal)?;
        match self.with(|client, _| client.set_irqs(&request)) {
            // They are not enabled.
            Ok(()) | Err(ClientError::Refused { .. }) => {}
            Err(error) => return Err(internal(error)),
        }
        match vectors {
            0 => self.enable_messages(index, false),
            _ => Ok(()),
        }
    }

    /// Sets or clears the enable bit of MSI or MSI-X, which a guest writes in the capability that the borrower emulates. The
    /// kernel does so for its functions; SPDK's server raises no interrupt without it. A server may refuse the write.
    fn enable_messages(&self, index: IrqIndex, enable: bool) -> Result<(), RemoteError> {
        let mut enables = self.enables.iter();
        let Some(&(_, at, bit)) = enables.find(|(it, ..)| *it == index) else {
            return Ok(());
        };
        let (set, clear) = if enable { (bit, 0) } else { (0, bit) };
        self.unless_refused(self.change_config(at, set, clear))
    }

    /// Unmasks vectors of MSI-X that were set up.
    fn unmask(&self, index: IrqIndex, vectors: Range<u16>) -> Result<(), RemoteError> {
        if index != IrqIndex::Msix {
            return Ok(());
        }
        let ranges = self.lock().messages.to_unmask(vectors);
        for Range { start, end } in ranges {
            let (start, count) = (start.into(), (end - start).into());
            let range = IrqRange::new(&self.counts, index as u32, start, count);
            let request = range
                .and_then(|range| SetIrqs::new(range, Action::Unmask, IrqData::None))
                .map_err(internal)?;
            let unmasked = self.with(|client, _| client.set_irqs(&request));
            self.unless_refused(unmasked.map_err(internal))?;
        }
        Ok(())
    }

    /// What a server refuses it does not need.
    fn unless_refused(&self, done: Result<(), RemoteError>) -> Result<(), RemoteError> {
        match done {
            Err(error) if !self.has_ended() => {
                log::debug!("{}: {error}", self.place());
                Ok(())
            }
            done => done,
        }
    }

    /// Ends the connection.
    pub(super) fn end(&self) {
        self.lock().client.end();
    }

    /// Ends what one [`Server::map`] has begun. A server that does not answer has lost its connection, and nothing else can be
    /// done.
    pub(super) fn unmap(&self, at: Iova, len: u64) -> Result<(), FabricError> {
        let range = (at.get(), len);
        {
            let mapped = &mut self.lock().mapped;
            mapped.rows.remove(&range.0);
            mapped.note(range, Some(State::Asked));
        }
        match self.with(|client, _| client.dma_unmap(range.0, range.1)) {
            Err(error) if !error.is_fatal() => Err(FabricError::Other(error.into())),
            _ => {
                self.lock().mapped.note(range, None);
                Ok(())
            }
        }
    }

    /// Whether the connection has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.lock().client.has_ended()
    }

    fn with<T>(
        &self,
        call: impl FnOnce(&mut Client, &mut Mapped) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let mut connection = self.lock();
        let Connection {
            client,
            mapped,
            logged,
            ..
        } = &mut *connection;
        let result = call(client, mapped);
        if client.has_ended() && !std::mem::replace(logged, true) {
            let error = result.as_ref().err();
            let error = error.map_or(String::new(), |error| format!(": {}", Chain(error)));
            log::error!(
                "vfio-user server {} is lost{error}; it may access the memory of the lease's VM for as long as it runs",
                self.path.display()
            );
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // The client's state is right at each call.
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Raises for Server {
    fn counts(&self) -> IrqCounts {
        self.counts
    }

    fn set_irqs(&self, request: &SetIrqs) -> Result<(), RemoteError> {
        let range = request.range();
        let targets = matches!(request.data(), IrqData::Targets(_));
        let in_the_way = match &mut self.lock().inherited {
            Some(left) if targets => left.make_way_for(range.index()),
            _ => Vec::new(),
        };
        for index in in_the_way {
            self.trigger(index, 0)?;
        }
        self.with(|client, _| client.set_irqs(request))
            .map_err(internal)?;
        if let Some(left) = &mut self.lock().inherited
            && targets
        {
            left.set_up_again(range);
        }
        self.lock().messages.note(request);
        if targets {
            self.unmask(range.index(), range.vectors())?;
        }
        let disables = request.action() == Action::Trigger && range.count() == 0;
        match targets || disables {
            true => self.enable_messages(range.index(), targets),
            false => Ok(()),
        }
    }
}

impl ConfigAccess for Server {
    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) -> Result<(), RemoteError> {
        self.with(|client, mapped| client.region_read(CONFIG_REGION, offset, data, mapped))
            .map_err(internal)
    }

    fn config_write(&self, offset: u64, data: &[u8]) -> Result<(), RemoteError> {
        self.with(|client, mapped| client.region_write(CONFIG_REGION, offset, data, mapped))
            .map_err(internal)
    }
}

#[cfg(test)]
mod tests;
