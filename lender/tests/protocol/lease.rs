//! The permissions of a lease, and its end.

use std::os::{fd::AsFd, unix::fs::FileExt};

use farside_devices::dma_test::{self, Command, MAX_LENGTH, SRAM_SIZE, reg, status};
use farside_fabric::{Iova, NtbLimits, PeerAddress};
use farside_irq_relay::{Action, IrqData, IrqEventFd, IrqIndex, IrqRange, IrqTarget, SetIrqs};
use farside_lender_protocol::{
    Channel, Client, ErrorKind, Generation, IrqUpdate, Reply, Request, Transport, irq_counts,
    registers::{Access, Event},
};

use crate::peer::{DEADLINE, DEVICE, Running, interrupt_status, memory, read, until, write};

const MIB: u64 = 1 << 20;
const FAR: u64 = 64 << 30;

/// Starts the largest possible fill command, at `dst`.
fn start_fill(registers: &mut Channel, dst: u64) {
    write(registers, 0, reg::DST, 8, dst);
    write(registers, 0, reg::LENGTH, 4, MAX_LENGTH.into());
    write(registers, 0, reg::PATTERN, 4, 0xffff_ffff);
    write(registers, 0, reg::COMMAND, 4, Command::Fill as u64);
}

#[test]
fn a_stale_generation_has_no_effect() {
    let lender = Running::new();
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    let generation = peer.generation;
    for stale in [
        Generation(0),
        Generation(generation.0 - 1),
        Generation(generation.0 + 1),
        Generation(u64::MAX),
    ] {
        peer.generation = stale;
        for request in [Request::EnableBusMaster, Request::Reset, Request::Return] {
            let numbers = [generation.to_string(), stale.to_string()];
            let numbers = numbers.each_ref().map(String::as_str);
            let kind = peer.refused(request, &[], &numbers);
            assert_eq!(kind, ErrorKind::StaleGeneration);
        }
    }
    assert!(!lender.status(DEVICE).bus_master);
    peer.generation = generation;
    peer.call(Request::EnableBusMaster, &[]).unwrap();
    assert_eq!(read(&mut registers, 0, reg::ID, 4) as u32, dma_test::ID);
}

#[test]
fn a_restarted_lender_gives_out_larger_generations() {
    let mut first = Running::new();
    let generation = (0..50)
        .map(|_| {
            let (mut peer, _registers) = first.borrow(DEVICE, "a");
            peer.call(Request::Return, &[]).unwrap();
            peer.generation
        })
        .max();
    first.stop();
    // The restarted lender has none of those leases.
    let later = Running::new();
    let (peer, _registers) = later.borrow(DEVICE, "a");
    assert!(Some(peer.generation) > generation);
}

#[test]
fn closing_the_connection_returns_the_device_whenever_it_happens() {
    let lender = Running::new();
    let ram = memory(MAX_LENGTH.into());
    // With the borrow request in flight.
    let mut peer = lender.hello("a");
    let sram = memory(SRAM_SIZE);
    let device = DEVICE.parse().unwrap();
    peer.post(
        Request::Borrow {
            device,
            transport: Transport::SharedMemory,
            fence: None,
        },
        &[sram.as_fd()],
    );
    drop(peer);

    // With everything open and DMA running. The lender may serve the request above only
    // now: the device is free both before that and afterwards.
    let mut peer = lender.hello("b");
    let mut registers = None;
    until("the device is returned", || {
        registers = peer.borrow(DEVICE).ok();
        registers.is_some()
    });
    let mut registers = registers.expect("borrowed above");
    peer.open(&ram, 0, FAR, MAX_LENGTH.into());
    start_fill(&mut registers, 0);
    drop((peer, registers));
    lender.wait_until_free(DEVICE);
    let marks = vec![0x5a; MAX_LENGTH as usize];
    ram.write_all_at(&marks, 0).unwrap();
    let (mut peer, registers) = lender.borrow(DEVICE, "b");
    let mut found = vec![0; MAX_LENGTH as usize];
    ram.read_exact_at(&mut found, 0).unwrap();
    assert!(found == marks, "the last lease writes on");

    // With only the register channel closed.
    peer.open(&ram, 0, FAR, MAX_LENGTH.into());
    drop(registers);
    peer.expect_closed();
    lender.wait_until_free(DEVICE);

    // With only the sending half shut, as when a backend hangs up: the lender closes the
    // connection when everything is undone.
    let (mut peer, _registers) = lender.borrow(DEVICE, "a");
    peer.open(&ram, 0, FAR, MAX_LENGTH.into());
    peer.channel.shut_down_sending().unwrap();
    peer.expect_closed();
    assert_eq!(lender.holder(DEVICE), None);
}

#[test]
fn a_stopped_lender_takes_everything_back() {
    let mut lender = Running::new();
    let ram = memory(MAX_LENGTH.into());
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    let mut idle = lender.hello("b");
    peer.open(&ram, 0, FAR, MAX_LENGTH.into());
    start_fill(&mut registers, 0);
    lender.stop();
    assert!(!lender.socket().exists());
    ram.write_all_at(&[1; 4096], 0).unwrap();
    peer.expect_closed();
    idle.expect_closed();
    let mut found = [0; 4096];
    ram.read_exact_at(&mut found, 0).unwrap();
    assert_eq!(found, [1; 4096]);
}

#[test]
fn a_request_does_not_overtake_the_accesses_before_it() {
    let lender = Running::new();
    let ram = memory(MIB);
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    peer.open(&ram, 0, FAR, MIB);
    for round in 0..200u64 {
        let value = 0x0101_0101 * (round & 0xff);
        write(&mut registers, 0, reg::DST, 8, 0);
        write(&mut registers, 0, reg::LENGTH, 4, 4096);
        write(&mut registers, 0, reg::PATTERN, 4, value);
        write(&mut registers, 0, reg::COMMAND, 4, Command::Fill as u64);
        // The command was issued before the window closed.
        let (iova, peer_address) = (Iova::new(0), PeerAddress::new(FAR));
        peer.call(Request::CloseWindow { iova }, &[]).unwrap();
        let mut found = [0; 4];
        ram.read_exact_at(&mut found, 4092).unwrap();
        assert_eq!(u64::from(u32::from_le_bytes(found)), value);
        peer.call(
            Request::OpenWindow {
                iova,
                peer_address,
                len: MIB,
            },
            &[],
        )
        .unwrap();
    }
}

#[test]
fn every_requester_entry_can_be_had_and_no_more() {
    let lender = Running::with(31, NtbLimits::default());
    let mut leases: Vec<_> = (0..30)
        .map(|n| lender.borrow(&format!("dma{n}"), "a"))
        .collect();
    for _ in 0..20 {
        let mut last = lender.hello("b");
        let error = last.borrow("dma30").expect_err("no entry is left");
        assert_eq!(error.kind, ErrorKind::Limit);
        assert!(error.message.contains("requester-entries = 32"), "{error}");
        assert_eq!(lender.holder("dma30"), None);
        // A reply to Return guarantees that the entry is free.
        let (mut peer, _registers) = leases.pop().unwrap();
        assert!(matches!(peer.call(Request::Return, &[]), Ok(Reply::Done)));
        leases.push(lender.borrow("dma30", "b"));
        let (mut peer, _registers) = leases.pop().unwrap();
        peer.call(Request::Return, &[]).unwrap();
        leases.push(lender.borrow("dma29", "a"));
    }
}

#[test]
fn interrupt_status_is_the_line_whatever_holds_it_back() {
    let lender = Running::new();
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    assert_eq!(interrupt_status(&mut registers), 0);
    write(&mut registers, 0, reg::COMMAND, 4, Command::Raise as u64);
    assert_eq!(interrupt_status(&mut registers), 1);
    for disabled in [true, false] {
        peer.call(Request::SetIntxDisable { disabled }, &[])
            .unwrap();
        assert_eq!(interrupt_status(&mut registers), 1);
    }
    let acknowledge = status::INTERRUPT.into();
    write(&mut registers, 0, reg::STATUS, 4, acknowledge);
    assert_eq!(interrupt_status(&mut registers), 0);
    write(&mut registers, 0, reg::COMMAND, 4, Command::Raise as u64);
    assert_eq!(interrupt_status(&mut registers), 1);
    peer.call(Request::Reset, &[]).unwrap();
    assert_eq!(interrupt_status(&mut registers), 0);
}

/// As on PCIe, where a read completion does not pass posted messages.
#[test]
fn a_relayed_interrupt_comes_before_the_read_after_it() {
    let lender = Running::new();
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    let counts = irq_counts(
        &Client::connect(&lender.socket().into(), None)
            .unwrap()
            .describe(&DEVICE.parse().unwrap())
            .unwrap()
            .description,
    );
    let range = IrqRange::new(&counts.unwrap(), IrqIndex::Msix as u32, 0, 1).unwrap();
    let sinks = IrqData::Targets(vec![Some(IrqTarget::from(IrqEventFd::new().unwrap()))]);
    let request = SetIrqs::new(range, Action::Trigger, sinks).unwrap();
    let (update, _) = IrqUpdate::new(&request, true);
    peer.call(Request::SetIrqs(update), &[]).unwrap();
    for _ in 0..2000 {
        write(&mut registers, 0, reg::COMMAND, 4, Command::Raise as u64);
        let access = Access::Read {
            bar: 0,
            offset: reg::ID,
            len: 4,
        };
        registers.send(&access, &[], DEADLINE).unwrap();
        let mut event = || registers.receive::<Event>(DEADLINE).unwrap().0;
        assert!(matches!(event(), Event::Interrupt(_)));
        assert!(matches!(event(), Event::Data { .. }));
    }
}
