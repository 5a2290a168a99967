//! The life of a borrow: what is mapped in each state, and that every end unmaps
//! everything.

use std::io::Write;

use farside_devices::dma_test::{self, Command, reg};

use crate::{
    guest::{
        BUS_MASTER, CONFIG, Event, Job, MEMORY, SMALL, capability, command, enable, fill,
        place_bars, read_u16, read_u32, set_command, small, start,
    },
    host::{DMA, Host, Served, assert_closed, assert_open, dma_test, until},
    vmm::{DATA_EVENTFD, DMA_MAP, REGION_READ, TRIGGER, VERSION, Vmm, access, unmap, version},
};

/// A guest whose device is ready.
fn ready(host: &Host, served: &Served) -> (Vmm, crate::guest::Ram) {
    let mut vmm = served.client(DMA);
    let ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    assert_open(host, served, DMA, SMALL, 1);
    (vmm, ram)
}

#[test]
fn nothing_is_open_before_bus_master_enable() {
    let host = Host::new();
    let served = host.serve(DMA);
    assert_closed(&host, &served, DMA, "described");
    let mut vmm = served.client(DMA);
    let ram = small(&mut vmm);
    assert_closed(&host, &served, DMA, "described");
    vmm.reset().unwrap();
    assert_closed(&host, &served, DMA, "leased");

    let bars = place_bars(&mut vmm, 0xe000_0000);
    assert_eq!(bars, [(0, 0x1000), (2, 0x10000), (4, 0x10000)]);
    assert_eq!(served.status().bars.len(), 0);
    set_command(&mut vmm, MEMORY);
    assert_eq!(read_u32(&mut vmm, 0, reg::ID), dma_test::ID);
    let decoded = &served.status().bars;
    assert_eq!(decoded[0].gpa, 0xe000_0000);
    assert_eq!(decoded[1].gpa, 0xe001_0000);
    assert_closed(&host, &served, DMA, "leased");

    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, SMALL, 1);
    let status = served.status();
    assert_eq!(status.bytes_pinned_before_bme, 0);
    assert_eq!(status.guest_ram_bytes, SMALL);
    assert!(status.bme_to_ready_us > 0);
    assert!(!fill(&mut vmm, 0x1000, 0x3000, 0xa5).faulted());
    ram.assert_filled(0, 0x1000, 0);
    ram.assert_filled(0x1000, 0x3000, 0xa5);
    ram.assert_filled(0x4000, 0x1000, 0);
}

#[test]
fn bus_master_disable_closes_everything() {
    let host = Host::new();
    let served = host.serve(DMA);
    let (mut vmm, ram) = ready(&host, &served);
    set_command(&mut vmm, MEMORY);
    assert_closed(&host, &served, DMA, "leased");
    // The device receives the command nevertheless.
    assert!(fill(&mut vmm, 0x1000, 0x1000, 1).faulted());
    ram.assert_filled(0, SMALL as usize, 0);
    let faults = host.lender_status(DMA).faults;
    assert_eq!((faults.total, faults.by_reason.bus_master_disabled), (1, 1));
    // Enabled again.
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, SMALL, 1);
    assert!(!fill(&mut vmm, 0x1000, 0x1000, 1).faulted());
}

#[test]
fn function_level_reset_closes_everything_and_resets() {
    let host = Host::new();
    let served = host.serve(DMA);
    let (mut vmm, _ram) = ready(&host, &served);
    vmm.try_write(0, reg::SCRATCH, &[7; 4]).unwrap();
    let pcie = capability(&mut vmm, 0x10);
    let control = read_u16(&mut vmm, CONFIG, pcie + 8) | 1 << 15;
    vmm.try_write(CONFIG, pcie + 8, &control.to_le_bytes())
        .unwrap();
    assert_closed(&host, &served, DMA, "leased");
    assert_eq!(command(&mut vmm), 0);
    assert_eq!(read_u32(&mut vmm, 0, reg::SCRATCH), 0);
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, SMALL, 1);
}

#[test]
fn device_reset_closes_everything_and_resets() {
    let host = Host::new();
    let served = host.serve(DMA);
    let (mut vmm, _ram) = ready(&host, &served);
    let generation = served.status().generation;
    vmm.try_write(0, reg::SCRATCH, &[7; 4]).unwrap();
    vmm.reset().unwrap();
    assert_closed(&host, &served, DMA, "leased");
    assert_eq!(command(&mut vmm), 0);
    assert_eq!(read_u32(&mut vmm, 0, reg::SCRATCH), 0);
    assert_eq!(
        served.status().generation,
        generation,
        "it is the same lease"
    );
}

#[test]
fn d3hot_closes_everything_and_d0_opens_it() {
    let host = Host::new();
    let served = host.serve(DMA);
    let (mut vmm, _ram) = ready(&host, &served);
    let pm = capability(&mut vmm, 0x01);
    let sleep = |vmm: &mut Vmm, state: u16| {
        let control = read_u16(vmm, CONFIG, pm + 4) & !3 | state;
        vmm.try_write(CONFIG, pm + 4, &control.to_le_bytes())
            .unwrap();
    };
    sleep(&mut vmm, 3);
    assert_closed(&host, &served, DMA, "leased");
    // This device has No_Soft_Reset: the bus-master bit is still set.
    sleep(&mut vmm, 0);
    assert_eq!(command(&mut vmm) & BUS_MASTER, BUS_MASTER);
    assert_open(&host, &served, DMA, SMALL, 1);
}

#[test]
fn a_client_that_goes_returns_the_device_and_the_next_starts_over() {
    let host = Host::new();
    let served = host.serve(DMA);
    let (mut vmm, _ram) = ready(&host, &served);
    vmm.try_write(2, 0, b"secret").unwrap();
    vmm.try_write(CONFIG, 0x10, &0xe000_0000u32.to_le_bytes())
        .unwrap();
    let generation = served.status().generation;
    drop(vmm);
    until("the device is returned", || served.state() == "described");
    assert_closed(&host, &served, DMA, "described");

    let (mut vmm, _ram) = ready(&host, &served);
    assert!(served.status().generation > generation);
    assert_eq!(read_u32(&mut vmm, CONFIG, 0x10), 0);
    let mut sram = [1; 6];
    vmm.try_read(2, 0, &mut sram).unwrap();
    assert_eq!(sram, [0; 6]);
}

#[test]
fn a_client_that_asks_and_goes_at_once_returns_the_device() {
    let host = Host::new();
    let served = host.serve(DMA);
    // Whether the backend sees request and disconnect together is a matter of timing.
    for _ in 0..20 {
        let mut vmm = served.client(DMA);
        vmm.reset().unwrap();
        assert_eq!(served.state(), "leased");
        vmm.post(REGION_READ, &access(CONFIG, 0, 4), &[]);
        drop(vmm);
        until("returned", || served.state() == "described");
    }
}

#[test]
fn a_stopped_backend_returns_the_device_and_unlinks_its_sockets() {
    let host = Host::new();
    let mut served = host.serve(DMA);
    let (_vmm, _ram) = ready(&host, &served);
    served.stop();
    let lender = host.lender_status(DMA);
    assert_eq!(lender.entry.borrowed_by, None);
    assert_eq!(lender.usage, Default::default());
    assert!(!served.socket(DMA).exists());
    assert!(!host.directory("a").join("status").exists());
}

#[test]
fn a_second_client_is_turned_away() {
    let host = Host::new();
    let served = host.serve(DMA);
    let (mut vmm, _ram) = ready(&host, &served);
    served.connect(DMA).expect_closed();
    assert!(!fill(&mut vmm, 0, 0x1000, 1).faulted());
    assert_open(&host, &served, DMA, SMALL, 1);
}

#[test]
fn a_client_that_goes_while_its_request_is_held_leaves_nothing() {
    let host = Host::new();
    let served = host.serve(DMA);
    // The version waits for the lender, the reset for a lease, bus-master enable for
    // pinning; the client does not wait for any of them.
    type Leave = fn(&mut Vmm);
    let leave: [Leave; 3] = [
        |vmm| vmm.post(VERSION, &version(), &[]),
        |vmm| {
            vmm.negotiate().unwrap();
            vmm.post(crate::vmm::RESET, &[], &[]);
        },
        |vmm| {
            vmm.negotiate().unwrap();
            small(vmm);
            vmm.reset().unwrap();
            let write = crate::vmm::write(CONFIG, 4, &BUS_MASTER.to_le_bytes());
            vmm.post(crate::vmm::REGION_WRITE, &write, &[]);
        },
    ];
    for leave in leave {
        leave(&mut served.connect(DMA));
        // The next client is served after the clean-up of the last one.
        let mut vmm = served.client(DMA);
        assert_closed(&host, &served, DMA, "described");
        vmm.reset().unwrap();
        drop(vmm);
        until("the device is returned", || served.state() == "described");
        assert_closed(&host, &served, DMA, "described");
    }
}

#[test]
fn half_a_message_holds_nobody_up() {
    let host = Host::lending(Default::default(), |_| {
        vec![dma_test(DMA), dma_test("dma1")]
    });
    let served = Served::start(host.config("a", &[DMA, "dma1"]));
    let (mut half, _ram) = ready(&host, &served);
    let bytes = half.command(REGION_READ, &access(CONFIG, 0, 4));
    half.socket.write_all(&bytes[..20]).unwrap();
    // Another device, and status.
    let mut other = served.client("dma1");
    other.reset().unwrap();
    assert_eq!(read_u32(&mut other, 0, reg::ID), dma_test::ID);
    assert_open(&host, &served, DMA, SMALL, 1);
    // The rest of the message.
    half.socket.write_all(&bytes[20..]).unwrap();
    let reply = half.reply().unwrap();
    assert_eq!(reply[16..18], dma_test::VENDOR_ID.to_le_bytes());
    // Half a message, then a disconnect.
    let bytes = half.command(DMA_MAP, &unmap(0, 0));
    half.socket.write_all(&bytes[..30]).unwrap();
    drop(half);
    until("the device is returned", || served.state() == "described");
    assert_closed(&host, &served, DMA, "described");
}

#[test]
fn a_client_that_goes_while_a_command_runs_stops_it() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = crate::guest::Ram::new(32 << 20);
    vmm.map(0, 32 << 20, ram.fd(0)).unwrap();
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    let job = Job {
        length: dma_test::MAX_LENGTH,
        pattern: !0,
        ..Job::default()
    };
    start(&mut vmm, Command::Fill, job);
    drop(vmm);
    until("the device is returned", || served.state() == "described");
    ram.fill(0, dma_test::MAX_LENGTH as usize, 0x11);
    assert_closed(&host, &served, DMA, "described");
    // After the next lease has begun, guest memory is unchanged: no DMA was left in flight.
    let mut vmm = served.client(DMA);
    vmm.reset().unwrap();
    ram.assert_filled(0, dma_test::MAX_LENGTH as usize, 0x11);
}

#[test]
fn a_device_is_borrowed_by_a_bar_access_too() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    assert_eq!(read_u32(&mut vmm, 0, reg::ID), dma_test::ID);
    assert_closed(&host, &served, DMA, "leased");
    drop(vmm);
    until("the device is returned", || served.state() == "described");
    // And by bus-master enable, which then opens the DMA path.
    let mut vmm = served.client(DMA);
    let _ram = small(&mut vmm);
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, SMALL, 1);
}

/// QEMU keeps the connection of an unplugged device; removing the eventfd of the error
/// interrupt notifies the backend.
#[test]
fn a_client_that_lets_the_device_go_returns_it() {
    let host = Host::new();
    let served = host.serve(DMA);
    let (mut vmm, _ram) = ready(&host, &served);
    let event = Event::new();
    vmm.set_irqs(3, DATA_EVENTFD | TRIGGER, 0, 1, &[&event])
        .unwrap();
    assert_open(&host, &served, DMA, SMALL, 1);
    vmm.set_irqs::<Event>(3, DATA_EVENTFD | TRIGGER, 0, 1, &[])
        .unwrap();
    assert_closed(&host, &served, DMA, "described");
    // The connection is still usable.
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, SMALL, 1);
}
