//! Requests and their replies.

mod exchange;

use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Instant,
};

use farside_irq_relay::{Action, IrqData, IrqTarget, SetIrqs, wire as irq};
use farside_vfio_user_wire::{Cursor, MessageType};
use serde::{Deserialize, Serialize};

use crate::{
    CONFIG_REGION, ClientError, Command, DeviceInfo, MAX_DATA, REQUEST_TIMEOUT, RegionInfo,
    info::{self, Region},
    socket::{self, MAX_FDS},
};

/// The version of the protocol.
const MAJOR: u16 = 0;
const MINOR: u16 = 1;

/// Most bytes of a server's version data.
const MAX_VERSION: usize = 16 << 10;

/// Most accesses of the server that [`Client::serve`] answers at a time.
const BURST: usize = 16;

/// What the server allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Most descriptors of a message.
    pub max_msg_fds: u64,
    /// Most bytes of the data of a message.
    pub max_data_xfer_size: u64,
}

/// The capabilities that matter here; a server that does not state them has the protocol's defaults.
#[derive(Default, Deserialize)]
struct Stated {
    #[serde(default)]
    capabilities: Capabilities,
}

#[derive(Deserialize)]
#[serde(default)]
struct Capabilities {
    max_msg_fds: u64,
    max_data_xfer_size: u64,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            max_msg_fds: 1,
            max_data_xfer_size: MAX_DATA as u64,
        }
    }
}

/// The client's memory, for a server that has not mapped it.
pub trait Memory {
    /// Copies from `address` of the device's bus. Returns whether all of it may be read.
    fn read(&mut self, address: u64, data: &mut [u8]) -> bool;

    /// Copies to `address` of the device's bus. Returns whether all of it may be written.
    fn write(&mut self, address: u64, data: &[u8]) -> bool;
}

/// No memory: each access is refused.
#[derive(Clone, Copy, Debug)]
pub struct NoMemory;

impl Memory for NoMemory {
    fn read(&mut self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn write(&mut self, _: u64, _: &[u8]) -> bool {
        false
    }
}

/// A connection to a server.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    limits: Limits,
    next_id: u16,
    /// What comes before the reply to the first request is a reply to a process that is gone.
    adopted: bool,
    ended: bool,
}

impl Client {
    /// Connects to the server at `path`, and negotiates the version.
    ///
    /// # Errors
    /// [`ClientError::Connect`], or as of a request, [`Command::Version`].
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let socket = socket::connect(path);
        let socket = socket.map_err(|errno| ClientError::Connect(errno.into()))?;
        let limits = Limits {
            max_msg_fds: 1,
            max_data_xfer_size: MAX_DATA as u64,
        };
        let mut client = Self::resume(socket, limits);
        client.negotiate()?;
        Ok(client)
    }

    /// A connection on which the version was negotiated, and no request is unanswered.
    pub fn resume(socket: OwnedFd, limits: Limits) -> Self {
        Self {
            socket,
            limits,
            next_id: 0,
            adopted: false,
            ended: false,
        }
    }

    /// The connection of a process that was killed, of which one request may be unanswered.
    ///
    /// # Errors
    /// As of a request, [`Command::DeviceGetInfo`]. If that process had received or sent a part of a message, the connection ends.
    pub fn adopt(socket: OwnedFd, limits: Limits) -> Result<Self, ClientError> {
        let mut client = Self::resume(socket, limits);
        // Ids are 16 bits, and that request may have any.
        client.next_id = getrandom::u32().unwrap_or_default() as u16;
        client.adopted = true;
        client.device_info()?;
        Ok(client)
    }

    /// The socket, for passing to another process.
    pub fn into_socket(self) -> (OwnedFd, Limits) {
        (self.socket, self.limits)
    }

    /// What the server allows.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether the connection has ended: the device is gone.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    fn negotiate(&mut self) -> Result<(), ClientError> {
        let command = Command::Version;
        let offer = format!(
            "{{\"capabilities\":{{\"max_msg_fds\":{},\"max_data_xfer_size\":{MAX_DATA}}}}}\0",
            crate::MAX_REPLY_FDS,
        );
        let message = self.message(command).u16(MAJOR).u16(MINOR);
        let message = message.bytes(offer.as_bytes());
        let (payload, _) = self.request(
            command,
            message,
            &[],
            MAX_VERSION,
            REQUEST_TIMEOUT,
            &mut NoMemory,
        )?;
        let mut cursor = Cursor::new(&payload);
        let (major, minor) = (cursor.u16(), cursor.u16());
        let invalid = |problem: String| ClientError::Invalid { command, problem };
        if (major, minor.is_some()) != (Some(MAJOR), true) {
            self.end();
            return Err(invalid(format!(
                "version {major:?}.{minor:?}, this is a client of version {MAJOR}.{MINOR}"
            )));
        }
        let data = cursor.rest();
        let data = data.strip_suffix(b"\0").unwrap_or(data);
        let stated = match data.is_empty() {
            true => Ok(Stated::default()),
            false => serde_json::from_slice(data),
        };
        let Capabilities {
            max_msg_fds,
            max_data_xfer_size,
        } = stated
            .map_err(|error| invalid(error.to_string()))?
            .capabilities;
        self.limits = Limits {
            max_msg_fds: max_msg_fds.min(MAX_FDS as u64),
            max_data_xfer_size: max_data_xfer_size.min(MAX_DATA as u64),
        };
        Ok(())
    }

    /// The device.
    ///
    /// # Errors
    /// See [`ClientError`], here and below.
    pub fn device_info(&mut self) -> Result<DeviceInfo, ClientError> {
        let command = Command::DeviceGetInfo;
        let message = self.message(command).u32(16).u32(0).u32(0).u32(0);
        let (payload, _) = self.ask(command, message, 64, &mut NoMemory)?;
        self.checked(command, DeviceInfo::decode(&payload))
    }

    /// Region `index`.
    ///
    /// # Errors
    /// As above.
    pub fn region_info(&mut self, index: u32) -> Result<RegionInfo, ClientError> {
        let command = Command::DeviceGetRegionInfo;
        let mut argsz = info::REGION_INFO as u32;
        loop {
            let message = self.message(command).u32(argsz).u32(0).u32(index).u32(0);
            let message = message.u64(0).u64(0);
            let (payload, fds) =
                self.ask(command, message, info::MAX_REGION_INFO, &mut NoMemory)?;
            let decoded = Region::decode(&payload, index, fds.into_iter().next());
            match self.checked(command, decoded)? {
                Region::Info(info) => return Ok(info),
                Region::Longer(needed) if needed > argsz => argsz = needed,
                Region::Longer(needed) => {
                    let problem = format!(
                        "the description of region {index} lacks some of its {needed} bytes"
                    );
                    return self.checked(command, Err(problem));
                }
            }
        }
    }

    /// The number of vectors of interrupt type `index`.
    ///
    /// # Errors
    /// As above.
    pub fn irq_count(&mut self, index: u32) -> Result<u32, ClientError> {
        let command = Command::DeviceGetIrqInfo;
        let message = self.message(command).u32(16).u32(0).u32(index).u32(0);
        let (payload, _) = self.ask(command, message, 64, &mut NoMemory)?;
        self.checked(command, info::irq_count(&payload, index))
    }

    /// Reads `data.len()` bytes at `offset` of a region.
    ///
    /// # Errors
    /// As above.
    pub fn region_read(
        &mut self,
        region: u32,
        offset: u64,
        data: &mut [u8],
        memory: &mut dyn Memory,
    ) -> Result<(), ClientError> {
        let command = Command::RegionRead;
        self.check_size(command, data.len())?;
        let count = data.len() as u32;
        let message = self.message(command).u64(offset).u32(region).u32(count);
        let (payload, _) = self.ask(command, message, 16 + data.len(), memory)?;
        let read = payload.get(16..).filter(|read| read.len() == data.len());
        let read = read.ok_or_else(|| format!("{} bytes for {count}", payload.len()));
        data.copy_from_slice(self.checked(command, read)?);
        Ok(())
    }

    /// Reads configuration space.
    ///
    /// # Errors
    /// As above.
    pub fn config_read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), ClientError> {
        self.region_read(CONFIG_REGION, offset, data, &mut NoMemory)
    }

    /// Writes `data` at `offset` of a region.
    ///
    /// # Errors
    /// As above.
    pub fn region_write(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
        memory: &mut dyn Memory,
    ) -> Result<(), ClientError> {
        let command = Command::RegionWrite;
        self.check_size(command, data.len())?;
        let message = self.message(command).u64(offset).u32(region);
        let message = message.u32(data.len() as u32).bytes(data);
        self.ask(command, message, 16, memory).map(drop)
    }

    /// Has the device reach `size` bytes at `offset` of `file` at `address` of its bus.
    ///
    /// # Errors
    /// As above.
    pub fn dma_map(
        &mut self,
        address: u64,
        size: u64,
        (file, offset): (&File, u64),
        writable: bool,
    ) -> Result<(), ClientError> {
        const READ: u32 = 1 << 0;
        const WRITE: u32 = 1 << 1;
        let command = Command::DmaMap;
        let flags = READ | if writable { WRITE } else { 0 };
        let message = self.message(command).u32(32).u32(flags);
        let message = message.u64(offset).u64(address).u64(size);
        let fds = [file.as_fd()];
        self.request(command, message, &fds, 64, REQUEST_TIMEOUT, &mut NoMemory)
            .map(drop)
    }

    /// Ends what one [`Client::dma_map`] has begun. The device does not reach the memory once this has returned.
    ///
    /// # Errors
    /// As above.
    pub fn dma_unmap(&mut self, address: u64, size: u64) -> Result<(), ClientError> {
        let command = Command::DmaUnmap;
        let message = self.message(command).u32(24).u32(0).u64(address).u64(size);
        self.ask(command, message, 64, &mut NoMemory).map(drop)
    }

    /// Resets the device.
    ///
    /// # Errors
    /// As above.
    pub fn reset(&mut self, memory: &mut dyn Memory) -> Result<(), ClientError> {
        let command = Command::DeviceReset;
        let message = self.message(command);
        self.ask(command, message, 0, memory).map(drop)
    }

    /// Sets up, masks or triggers interrupts, by as many messages as the server's limit of descriptors takes.
    ///
    /// # Errors
    /// As above. Some vectors may be set up then.
    pub fn set_irqs(&mut self, request: &SetIrqs) -> Result<(), ClientError> {
        let action = match request.action() {
            Action::Mask => irq::SET_ACTION_MASK,
            Action::Unmask => irq::SET_ACTION_UNMASK,
            Action::Trigger => irq::SET_ACTION_TRIGGER,
        };
        let range = request.range();
        let (index, start) = (range.index() as u32, u32::from(range.start()));
        match request.data() {
            IrqData::None => {
                let flags = action | irq::SET_DATA_NONE;
                self.set(flags, (index, start, range.count().into()), &[], &[])
            }
            IrqData::Bool(chosen) => {
                let flags = action | irq::SET_DATA_BOOL;
                let chosen: Vec<u8> = chosen.iter().map(|chosen| u8::from(*chosen)).collect();
                self.set(flags, (index, start, range.count().into()), &chosen, &[])
            }
            IrqData::Targets(targets) => {
                let most = self.limits.max_msg_fds.max(1) as usize;
                let flags = action | irq::SET_DATA_EVENTFD;
                let mut start = start;
                // A message has a descriptor for each of its vectors, or none: then they lose theirs.
                for run in targets.chunk_by(|a, b| a.is_some() == b.is_some()) {
                    let most = if run[0].is_some() { most } else { run.len() };
                    for part in run.chunks(most) {
                        let triggers = part.iter().flatten().filter_map(IrqTarget::trigger);
                        let fds: Vec<_> = triggers.map(AsFd::as_fd).collect();
                        let count = part.len() as u32;
                        self.set(flags, (index, start, count), &[], &fds)?;
                        start += count;
                    }
                }
                Ok(())
            }
        }
    }

    fn set(
        &mut self,
        flags: u32,
        (index, start, count): (u32, u32, u32),
        data: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let command = Command::DeviceSetIrqs;
        let message = self.message(command).u32(20 + data.len() as u32).u32(flags);
        let message = message.u32(index).u32(start).u32(count).bytes(data);
        self.request(command, message, fds, 64, REQUEST_TIMEOUT, &mut NoMemory)
            .map(drop)
    }

    /// Answers accesses to memory that the server has asked for meanwhile, some at a time. Returns whether there were
    /// any.
    ///
    /// # Errors
    /// As above: the connection has ended.
    pub fn serve(&mut self, memory: &mut dyn Memory) -> Result<bool, ClientError> {
        let command = Command::DmaRead;
        let mut served = false;
        for _ in 0..BURST {
            if self.ended {
                return Err(ClientError::Ended);
            }
            if !socket::is_readable(&self.socket) {
                break;
            }
            let deadline = (Instant::now() + REQUEST_TIMEOUT, REQUEST_TIMEOUT);
            let begun = self.receive_header(command, deadline, &mut Vec::new())?;
            if begun.header.message_type() == MessageType::Reply {
                let problem = "a reply to no request".to_owned();
                return self.checked(command, Err(problem));
            }
            self.answer(begun, command, deadline, memory)?;
            served = true;
        }
        Ok(served)
    }
}

impl AsFd for Client {
    /// Readable when [`Client::serve`] has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
