//! An NTB with a VMM at each port.

use std::{path::PathBuf, thread::JoinHandle};

use farside_daemon::Wakeup;
use farside_ntb::regs::{
    link_control, link_status, lut, lut_entry, reg, requester, requester_entry,
};
use farside_ntb_server::{Config, NtbServer, PortAt, PortConfig};
use tempfile::TempDir;

use crate::vmm::{Layout, Ram, Vmm};

/// A server on a thread.
pub struct Server {
    directory: TempDir,
    stop: Wakeup,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| PortAt {
            socket: directory.path().join(name),
            sizes: PortConfig::default(),
        };
        let config = Config {
            ports: [at("a"), at("b")],
        };
        let server = NtbServer::start(&config).unwrap();
        let stop = Wakeup::new().unwrap();
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || server.run(&stop).unwrap()
        });
        Self {
            directory,
            stop,
            thread: Some(thread),
        }
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.raise();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.expect("it was started").expect("the server panicked");
        }
    }
}

/// A server with a VM at each port, whose drivers have set up all but the LUT.
pub struct World {
    pub a: Vmm,
    pub b: Vmm,
    pub ram_a: Ram,
    pub ram_b: Ram,
    // Last field: dropped after the VMMs.
    pub server: Server,
}

/// Bytes of a segment: 1 GiB in 512.
pub const SEGMENT: u64 = 2 << 20;

/// Address and size of each VM's memory.
pub const RAM: u64 = 0x1_0000_0000;
pub const RAM_SIZE: u64 = 4 << 20;

impl World {
    pub fn new() -> Self {
        Self::with(Layout::Qemu)
    }

    pub fn with(layout: Layout) -> Self {
        let server = Server::start();
        let mut a = Vmm::negotiated(&server.socket("a"), layout);
        let mut b = Vmm::negotiated(&server.socket("b"), layout);
        let (ram_a, ram_b) = (Ram::new(RAM_SIZE), Ram::new(RAM_SIZE));
        for (vmm, ram) in [(&mut a, &ram_a), (&mut b, &ram_b)] {
            vmm.map(RAM, RAM_SIZE, Some((&ram.0, 0)));
            set_up(vmm);
        }
        assert_ne!(a.get32(reg::LINK_STATUS) & link_status::UP, 0);
        Self {
            a,
            b,
            ram_a,
            ram_b,
            server,
        }
    }
}

/// A driver's initialization.
pub fn set_up(vmm: &mut Vmm) {
    vmm.set_bus_master(true);
    vmm.put32(requester_entry(0), requester::VALID | 0x08);
    vmm.put32(reg::LINK_CONTROL, link_control::ENABLE);
    vmm.put32(reg::EVENT_MASK, 0);
    vmm.put32(reg::DOORBELL_MASK, 0);
}

/// Translates a segment to a peer address.
pub fn lead(vmm: &mut Vmm, segment: u32, address: u64) {
    vmm.put64(lut_entry(segment), address | lut::VALID);
}
