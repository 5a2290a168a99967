//! Finds a device at the lenders and creates its server. Blocks until the lenders answer, so it
//! runs on its own thread while the backend runs.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use farside_daemon::{DeviceId, VmName};
use farside_discovery::Known;
use farside_error_chain::Chain;
use farside_fabric::{Budget, SharedQuota, pin::PinPolicy};
use farside_irq_relay::Interrupts;
use farside_keeper::Kept;
use farside_lender_protocol::{
    Address, CallError, Client, Described, Dialer, FindError, RamRange, Transport, find_device,
};
use farside_ntb::Adapter;

use crate::{
    Config, ReleaseHook, StartError,
    borrow::{
        memory_limit::MemoryLimit,
        network::NetworkState,
        vm_memory::{PeerWindows, VmMemory},
        worker::Settings,
    },
    device::{Device, DeviceError},
    helper::Helper,
    peer_bars::PeerBars,
    records::Start,
    server::DeviceServer,
    sockets::{SocketName, Sockets},
};

/// The settings that all devices of a VM share.
pub(crate) struct Lookup {
    vm: VmName,
    lenders: Vec<Address>,
    /// Whether the helper finds more of them.
    finds: bool,
    dialer: Dialer,
    helper: Option<Helper>,
    /// With the windows of devices that are reached through it.
    ntb: Option<(Adapter, PeerWindows)>,
    fences: Option<PathBuf>,
    interrupts: Interrupts,
    pin_policy: PinPolicy,
    memory: VmMemory,
    /// Those of other devices.
    windows: PeerWindows,
    peer_bars: PeerBars,
    ram: Vec<RamRange>,
    open_timeout: Duration,
    message_timeout: Duration,
    lost_after: Duration,
    quota: SharedQuota,
    release: Option<ReleaseHook>,
    sockets: Mutex<Sockets>,
    kept: Kept,
}

/// A device found at a lender that can reach the VM's RAM.
pub(crate) struct Found {
    lender: Address,
    described: Described,
    /// Its expansion ROM; empty if it has none.
    rom: Vec<u8>,
    transport: Transport,
}

impl Lookup {
    pub(crate) fn new(config: &Config, ntb: Option<Adapter>, sockets: Sockets) -> Self {
        Self {
            vm: config.vm.clone(),
            lenders: config.lenders.clone(),
            finds: config.discovery.is_some(),
            dialer: match config.helper.clone() {
                Some(helper) => Dialer::by(&config.pki, Arc::new(helper)),
                None => Dialer::new(&config.pki),
            },
            helper: config.helper.clone(),
            windows: PeerWindows::default(),
            peer_bars: PeerBars::default(),
            ntb: ntb.map(|ntb| {
                let windows = PeerWindows::new(ntb.peer_space().clone());
                (ntb, windows)
            }),
            fences: config.fences.clone(),
            interrupts: config.interrupts,
            pin_policy: config.pin_policy,
            memory: VmMemory::new(MemoryLimit::new(config.memory)),
            ram: config.ram.clone(),
            open_timeout: config.open_timeout,
            message_timeout: config.message_timeout,
            lost_after: config.lost_after,
            quota: Budget::of_this_process().shared_by(1).into(),
            release: config.release.clone(),
            sockets: Mutex::new(sockets),
            kept: config.past.kept().clone(),
        }
    }

    pub(crate) fn vm(&self) -> &VmName {
        &self.vm
    }

    /// Looks a device up. Borrows nothing.
    pub(crate) fn find(&self, device: &DeviceId) -> Result<Found, StartError> {
        let (lender, described) = self.describe(device)?;
        let transport = Transport::between(&lender, described.bars);
        if transport == Transport::Ntb && self.ntb.is_none() {
            return Err(StartError::NoNtb {
                device: device.to_owned(),
                lender,
            });
        }
        self.check_ram(device, &lender, transport)?;
        let rom = self.rom(device, &lender, &described);
        Ok(Found {
            lender,
            described,
            rom,
            transport,
        })
    }

    /// Creates a device's socket and server.
    pub(crate) fn serve(&self, id: &DeviceId, found: Found) -> Result<DeviceServer, StartError> {
        let start = Start::fresh(&self.kept)?;
        self.start(id, found, start)
    }

    /// As [`serve`](Self::serve), with what the process before has left.
    pub(crate) fn go_on(&self, left: Start) -> Result<(DeviceId, DeviceServer), StartError> {
        let invalid = || io::Error::other("what the backend before has left names no device");
        let saved = &left.left.as_ref().ok_or_else(invalid)?.saved;
        let id: DeviceId = saved.device.parse().map_err(|_| invalid())?;
        let found = Found {
            lender: saved.lender.parse().map_err(|_| invalid())?,
            described: saved.described(),
            // QEMU has it.
            rom: Vec::new(),
            transport: saved.transport,
        };
        let server = self.start(&id, found, left)?;
        Ok((id, server))
    }

    fn start(&self, id: &DeviceId, found: Found, start: Start) -> Result<DeviceServer, StartError> {
        let Found {
            lender,
            described,
            rom,
            transport,
        } = found;
        let (ntb, windows) = match (transport, &self.ntb) {
            (Transport::Ntb, Some((adapter, windows))) => (Some(adapter.clone()), windows),
            _ => (None, &self.windows),
        };
        let settings = Settings {
            vm: self.vm.clone(),
            device: id.to_owned(),
            // Eventfds cannot be sent to another host.
            relay_interrupts: self.interrupts == Interrupts::Relayed || transport == Transport::Ntb,
            ntb,
            transport,
            lender,
            dialer: self.dialer.clone(),
            helper: self.helper.clone(),
            fences: self.fences.clone(),
            pin_policy: self.pin_policy,
            memory: self.memory.clone(),
            windows: windows.clone(),
            peer_bars: self.peer_bars.clone(),
            open_timeout: self.open_timeout,
            message_timeout: self.message_timeout,
            lost_after: self.lost_after,
            network: NetworkState::default(),
            quota: self.quota.clone(),
            release: self.release.clone(),
        };
        let device = Device::new(settings, described, rom, start);
        let (device, client) = device.map_err(|source: DeviceError| StartError::Device {
            device: id.to_owned(),
            source: source.into(),
        })?;
        let listener = self.sockets().open(&SocketName::Device(id.clone()))?;
        let socket = listener.path().to_owned();
        let server = DeviceServer::new(device, listener.into(), client)?;
        let vm = &self.vm;
        log::info!("device {id} (VM {vm}): served at {}", socket.display());
        Ok(server)
    }

    pub(crate) fn sockets(&self) -> std::sync::MutexGuard<'_, Sockets> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lender that has the device, and its description.
    fn describe(&self, device: &DeviceId) -> Result<(Address, Described), FindError> {
        let Known { now, before } = self.found();
        let lenders = [self.lenders.as_slice(), &now].concat();
        let found = self.describe_at(device, &lenders);
        match found {
            // Those that etcd does not name any more: asked last, as most of them have ended.
            Err(FindError::Unknown { .. } | FindError::Lender(_)) if !before.is_empty() => {
                self.describe_at(device, &before).or(found)
            }
            found => found,
        }
    }

    /// The lenders that are found beside the configured ones.
    fn found(&self) -> Known {
        let Some(helper) = self.helper.as_ref().filter(|_| self.finds) else {
            return Known::default();
        };
        helper.lenders().unwrap_or_else(|error| {
            log::warn!("cannot find lenders: {}", Chain(&error));
            Known::default()
        })
    }

    fn describe_at(
        &self,
        device: &DeviceId,
        lenders: &[Address],
    ) -> Result<(Address, Described), FindError> {
        find_device(device, lenders, |lender| {
            let mut client = self.connect(lender)?;
            Ok((client.instance()?, client.describe(device)?))
        })
    }

    /// The device's expansion ROM. A device works without.
    fn rom(&self, device: &DeviceId, lender: &Address, described: &Described) -> Vec<u8> {
        if described.rom == 0 {
            return Vec::new();
        }
        let rom = self
            .connect(lender)
            .and_then(|mut client| client.rom(device, described.rom));
        rom.unwrap_or_else(|error| {
            log::warn!(
                "device {device} (VM {}): served without its expansion ROM: {}",
                self.vm,
                Chain(&error)
            );
            Vec::new()
        })
    }

    fn connect(&self, lender: &Address) -> Result<Client, CallError> {
        Client::connect_through(&self.dialer, lender, Some(&self.vm), None)
    }

    /// Checks that the device can reach the VM's RAM ranges.
    fn check_ram(
        &self,
        device: &DeviceId,
        lender: &Address,
        transport: Transport,
    ) -> Result<(), StartError> {
        if self.ram.is_empty() {
            return Ok(());
        }
        if let (Transport::Ntb, Some((ntb, _))) = (transport, &self.ntb) {
            let spans: Vec<u64> = self.ram.iter().map(|range| range.len).collect();
            ntb.check_ram(&spans)?;
        }
        let mut client = self.connect(lender)?;
        client.check(device, transport, self.ram.clone())?;
        Ok(())
    }
}
