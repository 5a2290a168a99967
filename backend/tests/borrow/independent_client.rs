//! The third-party client of the crate `vfio_user` against backend and lender: every
//! message that it implements, and a guest on top.

use std::os::fd::{AsFd, AsRawFd};

use farside_devices::dma_test::{self, Command, reg};
use vfio_user::Client;

use crate::{
    guest::{Event, Job, Ram, capability, command, enable, place_bars, raise, read_u32, run},
    host::{DMA, Host, assert_closed, assert_open, until},
    vmm::{DATA_EVENTFD, DATA_NONE, MASK, TRIGGER, UNMASK},
};

const MIB: u64 = 1 << 20;

#[test]
fn every_message_of_another_client_works_on_the_whole() {
    let host = Host::new();
    let served = host.serve(DMA);

    // VERSION, DEVICE_GET_INFO, DEVICE_GET_REGION_INFO of every region.
    let mut client = Client::new(&served.socket(DMA)).unwrap();
    let sizes: Vec<_> = (0..9).map(|n| client.region(n).unwrap().size).collect();
    assert_eq!(sizes, [0x1000, 0, 0x10000, 0, 0x10000, 0, 0, 4096, 0]);
    let sram = client.region(2).unwrap();
    assert_eq!(sram.flags & 7, 7, "readable, writable, can be mapped");
    let file = sram.file_offset.as_ref().expect("a descriptor of BAR 2");
    assert_eq!(file.start(), 0);
    let sram = Ram {
        file: file.file().try_clone().unwrap(),
    };
    assert!(client.region(0).unwrap().file_offset.is_none());
    // Version 0.1.7 of the client inverts this.
    assert!(!client.resettable());

    // DEVICE_GET_IRQ_INFO.
    let counts: Vec<_> = (0..5)
        .map(|n| client.get_irq_info(n).unwrap().count)
        .collect();
    assert_eq!(counts, [1, 32, 2048, 1, 1]);
    assert_eq!(client.get_irq_info(0).unwrap().flags, 0b111);

    // DMA_MAP, DEVICE_RESET.
    let ram = Ram::new(4 * MIB);
    let fd = ram.file.as_fd().as_raw_fd();
    client.dma_map(0, 0, 2 * MIB, fd).unwrap();
    client.dma_map(2 * MIB, 4 << 30, 2 * MIB, fd).unwrap();
    assert_closed(&host, &served, DMA, "described");
    client.reset().unwrap();
    assert_closed(&host, &served, DMA, "leased");

    // REGION_READ and REGION_WRITE of configuration space and BARs.
    place_bars(&mut client, 0xe000_0000);
    assert_eq!(capability(&mut client, 0x11), 0x60);
    assert_eq!(read_u32(&mut client, 0, reg::ID), dma_test::ID);
    assert!(enable(&mut client));
    assert_open(&host, &served, DMA, 4 * MIB, 2);

    // DMA both ways, and BAR memory that is mapped rather than trapped.
    sram.write(0x100, b"through the mapping");
    let job = Job {
        src: 0x100,
        dst: (4 << 30) + 0x1000,
        length: 19,
        control: dma_test::control::SRC_IN_SRAM,
        ..Job::default()
    };
    assert!(!run(&mut client, Command::Copy, job).faulted());
    assert_eq!(ram.read(2 * MIB + 0x1000, 19), b"through the mapping");
    let mut trapped = [0; 7];
    client.region_read(2, 0x100, &mut trapped).unwrap();
    assert_eq!(&trapped, b"through");
    client.region_write(2, 0x100, b"trapped").unwrap();
    client.region_read(2, 0x100, &mut trapped).unwrap();
    assert_eq!(&trapped, b"trapped");
    assert_eq!(sram.read(0x100, 7), b"trapped");

    // DEVICE_SET_IRQS: triggers, masks, loopback, disable.
    let events = Event::many(4);
    let fds: Vec<_> = events
        .iter()
        .map(|event| event.as_fd().as_raw_fd())
        .collect();
    client
        .set_irqs(2, DATA_EVENTFD | TRIGGER, 8, 4, &fds)
        .unwrap();
    raise(&mut client, 9);
    assert_eq!(events[1].wait(), 1);
    client.set_irqs(2, DATA_NONE | MASK, 10, 1, &[]).unwrap();
    raise(&mut client, 10);
    assert_eq!(events[2].count(), 0);
    client.set_irqs(2, DATA_NONE | UNMASK, 10, 1, &[]).unwrap();
    assert_eq!(events[2].wait(), 1);
    client.set_irqs(2, DATA_NONE | TRIGGER, 8, 4, &[]).unwrap();
    for event in &events {
        assert_eq!(event.wait(), 1);
    }
    client
        .set_irqs(2, DATA_EVENTFD | TRIGGER, 9, 1, &[])
        .unwrap();
    raise(&mut client, 9);
    assert_eq!(events[1].count(), 0);
    client.set_irqs(2, DATA_NONE | TRIGGER, 0, 0, &[]).unwrap();
    client
        .set_irqs(0, DATA_EVENTFD | TRIGGER, 0, 1, &fds[..1])
        .unwrap();
    raise(&mut client, 0);
    assert_eq!(events[0].wait(), 1);

    // DMA_UNMAP.
    client.dma_unmap(4 << 30, 2 * MIB).unwrap();
    assert_open(&host, &served, DMA, 2 * MIB, 1);
    assert!(run(&mut client, Command::Copy, job).faulted());

    client.reset().unwrap();
    assert_eq!(command(&mut client), 0);
    assert_closed(&host, &served, DMA, "leased");
    client.shutdown().unwrap();
    until("the device is returned", || served.state() == "described");
    assert_closed(&host, &served, DMA, "described");
}

/// This client waits for the rest of a reply that is an error.
#[test]
fn a_device_that_is_taken_does_not_hang_another_client() {
    let host = Host::new();
    let first = host.serve(DMA);
    let mut vmm = first.client(DMA);
    vmm.reset().unwrap();
    let second = crate::host::Served::start(host.config("b", &[DMA]));
    assert!(Client::new(&second.socket(DMA)).is_err());
    drop(vmm);
    until("the device is returned", || first.state() == "described");
    Client::new(&second.socket(DMA)).unwrap();
}

/// All ones, as PCIe specifies for an Unsupported Request.
#[test]
fn reads_of_what_is_not_there_are_all_ones() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut client = Client::new(&served.socket(DMA)).unwrap();
    for (region, offset) in [(1, 0), (6, 0), (8, 0), (0, 0x1000), (7, 4096), (7, 1 << 40)] {
        let mut data = [0; 4];
        client.region_read(region, offset, &mut data).unwrap();
        assert_eq!(data, [0xff; 4], "region {region}, {offset:#x}");
    }
}
