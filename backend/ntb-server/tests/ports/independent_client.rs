//! The independent client of the crate `vfio_user`, at both ports.

use std::os::fd::AsRawFd;

use farside_ntb::regs::{
    REGISTERS_BAR, WINDOW_BAR, link_control, lut, lut_entry, reg, requester, requester_entry,
};
use rustix::event::EventfdFlags;
use vfio_user::Client;
use vmm_sys_util::eventfd::EventFd;

use crate::{vmm::Ram, world::Server};

const CONFIG: u32 = 7;
const MSIX: u32 = 2;
const EVENTFD_TRIGGER: u32 = 1 << 2 | 1 << 5;
const RAM: u64 = 0x4000_0000;

/// A driver's initialization.
fn set_up(client: &mut Client) {
    client.region_write(CONFIG, 4, &[6, 0]).unwrap();
    for (offset, value) in [
        (requester_entry(0), requester::VALID),
        (reg::LINK_CONTROL, link_control::ENABLE),
        (reg::DOORBELL_MASK, 0),
    ] {
        let value = value.to_le_bytes();
        client
            .region_write(REGISTERS_BAR.into(), offset, &value)
            .unwrap();
    }
}

#[test]
fn stores_loads_and_rings() {
    let server = Server::start();
    let mut a = Client::new(&server.socket("a")).unwrap();
    let mut b = Client::new(&server.socket("b")).unwrap();
    let ram = Ram::new(0x10_0000);
    b.dma_map(0, RAM, 0x10_0000, ram.0.as_raw_fd()).unwrap();
    let nonblocking = EventfdFlags::NONBLOCK.bits() as i32;
    let bell = EventFd::new(nonblocking).unwrap();
    b.set_irqs(MSIX, EVENTFD_TRIGGER, 4, 1, &[bell.as_raw_fd()])
        .unwrap();
    set_up(&mut a);
    set_up(&mut b);

    let entry = (RAM | lut::VALID).to_le_bytes();
    a.region_write(REGISTERS_BAR.into(), lut_entry(2), &entry)
        .unwrap();
    let window = 2 * (2 << 20);
    a.region_write(WINDOW_BAR.into(), window + 0x123, b"hello")
        .unwrap();
    assert_eq!(ram.read(0x123, 5), b"hello");
    let mut read = [0; 5];
    a.region_read(WINDOW_BAR.into(), window + 0x123, &mut read)
        .unwrap();
    assert_eq!(&read, b"hello");

    let bells = (1u32 << 4).to_le_bytes();
    a.region_write(REGISTERS_BAR.into(), reg::DOORBELL_SET_PEER, &bells)
        .unwrap();
    // Signalled before the reply to the write.
    assert_eq!(bell.read().unwrap(), 1);

    // No sparse mmap area: QEMU posts its writes.
    for region in 0..9 {
        assert!(
            a.region(region)
                .is_none_or(|region| region.file_offset.is_none())
        );
    }
}
