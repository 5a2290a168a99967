//! One VMM's requests, and its replies to the server's commands.

use farside_irq_relay::{SetIrqs, SetIrqsMessage};
use farside_vfio_user::{
    DeviceInfo, Errno, Header, Matched, Negotiated, Refusal, Region, RegionInfo, RegionWrite,
    Reply, ReplyTo, Request,
    serve::{Answer, Handler},
};

use crate::{
    hosts::Hosts,
    model::{Ntb, PeerError, Port, Read},
    side::{Held, Tag},
};

/// The NTB and both VMs.
pub(crate) struct Machine {
    pub(crate) ntb: Ntb,
    pub(crate) hosts: Hosts,
}

/// The machine at one VMM's port.
pub(crate) struct PortHandler<'a> {
    pub(crate) machine: &'a mut Machine,
    pub(crate) port: Port,
}

impl Machine {
    /// A VMM has disconnected: drops its memory, eventfds and requests.
    pub(crate) fn client_gone(&mut self, port: Port) {
        let side = self.hosts.side(port);
        side.memory.clear();
        side.vectors.disable_all();
        side.held = None;
        side.answers = true;
        side.waits = false;
        side.unplugged = false;
        let outstanding = side.commands.clear();
        self.ntb.cancel_read(port);
        self.host_gone(port);
        for tag in outstanding {
            self.concluded(tag, Err(PeerError::Refused));
        }
    }

    /// A VM no longer has the port.
    fn host_gone(&mut self, port: Port) {
        self.ntb.set_present(port, false, &mut self.hosts);
        self.reset(port);
    }

    /// A conventional reset.
    pub(crate) fn reset(&mut self, port: Port) {
        let side = self.hosts.side(port);
        side.config.reset();
        side.vectors.reset();
        self.ntb.set_bus_master(port, false, &mut self.hosts);
        self.ntb.reset(port, &mut self.hosts);
    }

    /// An access by a DMA command is complete.
    pub(crate) fn concluded(&mut self, tag: Tag, result: Result<&[u8], PeerError>) {
        match tag {
            Tag::Write(at) => {
                if let Err(error) = result {
                    self.ntb.write_failed(at, error, &mut self.hosts);
                }
            }
            Tag::Read { port, number } => {
                // Ignore the reply for a read that was reset or whose VMM has
                // disconnected.
                let side = self.hosts.side(port);
                if side.held.is_none() || side.reads != number {
                    return;
                }
                let data = self.ntb.complete_read(port, result, &mut self.hosts);
                if let Some(data) = data {
                    let side = self.hosts.side(port);
                    side.buffer.clear();
                    side.buffer.extend_from_slice(data);
                    if let Some(held) = &mut side.held {
                        held.done = true;
                    }
                }
            }
        }
    }

    fn config_write(&mut self, port: Port, offset: u64, data: &[u8]) {
        let side = self.hosts.side(port);
        let effects = side.config.write(offset, data);
        let bus_master = side.config.may_dma();
        if effects.reset().is_some() {
            side.vectors.reset();
            self.ntb.reset(port, &mut self.hosts);
        }
        self.ntb.set_bus_master(port, bus_master, &mut self.hosts);
    }
}

impl PortHandler<'_> {
    fn negotiate(&mut self, negotiated: Negotiated) -> Answer<'_> {
        let Machine { ntb, hosts } = &mut *self.machine;
        ntb.set_present(self.port, true, hosts);
        Answer::Reply(Reply::Version(negotiated))
    }

    fn set_irqs(&mut self, message: SetIrqsMessage<'_>) -> Result<(), Errno> {
        let side = self.machine.hosts.side(self.port);
        let applied = SetIrqs::decode(&side.counts, message).and_then(|request| {
            let unplugs = request.is_unplug_notification();
            side.vectors.apply(request).map(|()| unplugs)
        });
        match applied {
            Ok(true) => {
                if let Some(held_back) = side.unplugs.allow() {
                    log::info!("{}: the VMM has unplugged the port{held_back}", side.name);
                }
                side.unplugged = true;
                self.machine.host_gone(self.port);
                Ok(())
            }
            Ok(false) => Ok(()),
            Err(error) => {
                log::debug!("{}: DEVICE_SET_IRQS: {error}", side.name);
                Err(error.errno())
            }
        }
    }

    fn read(&mut self, region: Region, offset: u64, count: u32, to: ReplyTo) -> Answer<'_> {
        let Machine { ntb, hosts } = &mut *self.machine;
        let side = hosts.side(self.port);
        let mut buffer = std::mem::take(&mut side.buffer);
        buffer.clear();
        buffer.resize(count as usize, 0xff);
        let read = match region {
            Region::Bar(bar) => ntb.read(self.port, bar, offset, &mut buffer, hosts),
            Region::Config => {
                if side.contains(region, offset, buffer.len()) {
                    side.config.read(offset, &mut buffer);
                }
                Read::Done
            }
            Region::Rom | Region::Vga => Read::Done,
        };
        let side = hosts.side(self.port);
        side.buffer = buffer;
        match read {
            Read::Done => Answer::Reply(Reply::RegionRead {
                region,
                offset,
                data: &side.buffer,
            }),
            Read::Later => {
                side.held = Some(Held {
                    to,
                    region,
                    offset,
                    done: false,
                });
                Answer::Later
            }
        }
    }

    fn write(&mut self, write: RegionWrite<'_>) -> Result<(), Errno> {
        let RegionWrite {
            region,
            offset,
            data,
        } = write;
        let side = self.machine.hosts.side(self.port);
        if !side.contains(region, offset, data.len()) {
            return Err(Errno::INVAL);
        }
        match region {
            Region::Bar(bar) => {
                let Machine { ntb, hosts } = &mut *self.machine;
                ntb.write(self.port, bar, offset, data, hosts);
            }
            _ => self.machine.config_write(self.port, offset, data),
        }
        Ok(())
    }

    fn region_info(&mut self, region: Region) -> RegionInfo<'static> {
        let size = self.machine.hosts.side(self.port).region_size(region);
        match size {
            0 => RegionInfo::absent(region),
            // Without sparse mmap areas QEMU may post writes.
            _ => RegionInfo {
                region,
                size,
                readable: true,
                writable: true,
                mappable: None,
            },
        }
    }
}

impl Handler for PortHandler<'_> {
    fn refused(&mut self, refusal: &Refusal) {
        let side = self.machine.hosts.side(self.port);
        side.client_log.refused(&side.name, refusal);
    }

    fn handle(&mut self, request: Request<'_>, to: ReplyTo) -> Answer<'_> {
        let done = match request {
            Request::Version(negotiated) => return self.negotiate(negotiated),
            Request::DmaMap(map) => {
                log::trace!("port {:?}: {map:x?}", self.port);
                let mapped = self.machine.hosts.side(self.port).memory.map(map);
                mapped.map(|()| Reply::Done)
            }
            Request::DmaUnmap(unmap) => {
                log::trace!("port {:?}: {unmap:x?}", self.port);
                let unmapped = self.machine.hosts.side(self.port).memory.unmap(unmap);
                unmapped.map(|()| Reply::DmaUnmap(unmap))
            }
            Request::DeviceGetInfo => Ok(Reply::DeviceInfo(DeviceInfo { resettable: true })),
            Request::DeviceGetRegionInfo { region, argsz } => {
                let info = self.region_info(region);
                Ok(Reply::RegionInfo { info, argsz })
            }
            Request::DeviceGetIrqInfo { index } => {
                let info = self.machine.hosts.side(self.port).counts.info(index);
                Ok(Reply::IrqInfo { index, info })
            }
            Request::DeviceSetIrqs(request) => self.set_irqs(request).map(|()| Reply::Done),
            Request::RegionRead {
                region,
                offset,
                count,
            } => return self.read(region, offset, count, to),
            Request::RegionWrite(write) => self.write(write).map(|()| Reply::RegionWrite {
                region: write.region,
                offset: write.offset,
                count: write.data.len() as u32,
            }),
            Request::RegionWriteMulti(writes) => writes
                .writes()
                .try_for_each(|write| self.write(write))
                .map(|()| Reply::RegionWriteMulti {
                    done: writes.len() as u64,
                }),
            Request::DeviceReset => {
                self.machine.reset(self.port);
                Ok(Reply::Done)
            }
        };
        match done {
            Ok(reply) => Answer::Reply(reply),
            Err(errno) => Answer::Error(errno),
        }
    }

    fn reply(&mut self, header: &Header, payload: &[u8]) -> bool {
        let side = self.machine.hosts.side(self.port);
        match side.commands.on_reply(header, payload) {
            Matched::Nothing => false,
            Matched::Probe => true,
            Matched::Command { tag, result } => {
                side.answers = true;
                let result = result.map_err(|errno| {
                    log::debug!("{}: DMA command failed: {errno}", side.name);
                    PeerError::Refused
                });
                self.machine.concluded(tag, result);
                true
            }
        }
    }
}
