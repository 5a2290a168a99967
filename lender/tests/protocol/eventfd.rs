//! A borrower whose eventfd blocks the thread that writes it. It costs its own lease only.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use farside_devices::dma_test::{self, Command, reg};
use farside_fabric::NtbLimits;
use farside_irq_relay::{Action, IrqData, IrqEventFd, IrqIndex, IrqRange, IrqTarget, SetIrqs};
use farside_lender_protocol::{Channel, Client, IrqUpdate, Request, irq_counts};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{OFlags, fcntl_setfl},
};

use crate::peer::{DEVICE, Peer, Running, read, write};

/// The time in which a lender stops, whatever its borrowers do.
const STOP: Duration = Duration::from_secs(5);

/// A lease whose first vectors have eventfds that are full, and in blocking mode since the lender
/// received them.
fn with_full_eventfds(lender: &Running, vectors: u32) -> (Peer, Channel, Vec<OwnedFd>) {
    let (mut peer, registers) = lender.borrow(DEVICE, "evil");
    let client = Client::connect(&lender.socket().into(), None);
    let described = client.unwrap().describe(&DEVICE.parse().unwrap());
    let counts = irq_counts(&described.unwrap().description).unwrap();
    let fds: Vec<_> = (0..vectors)
        .map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
        .collect();
    let targets = fds.iter().map(|fd| {
        let trigger = IrqEventFd::try_from(fd.try_clone().unwrap()).unwrap();
        Some(IrqTarget::from(trigger))
    });
    let targets = IrqData::Targets(targets.collect());
    let range = IrqRange::new(&counts, IrqIndex::Msix as u32, 0, vectors).unwrap();
    let request = SetIrqs::new(range, Action::Trigger, targets).unwrap();
    let (update, _) = IrqUpdate::new(&request, false);
    let borrowed: Vec<_> = fds.iter().map(OwnedFd::as_fd).collect();
    peer.call(Request::SetIrqs(update), &borrowed).unwrap();
    for fd in &fds {
        fcntl_setfl(fd, OFlags::empty()).unwrap();
        rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }
    (peer, registers, fds)
}

fn raise(registers: &mut Channel, vectors: u32) {
    for vector in 0..vectors {
        write(registers, 0, reg::VECTOR, 4, vector.into());
        write(registers, 0, reg::COMMAND, 4, Command::Raise as u64);
    }
}

#[test]
fn a_device_is_lent_again_after_its_eventfds_were_blocked() {
    let lender = Running::with(2, NtbLimits::default());
    let (_neighbour, mut others) = lender.borrow("dma1", "neighbour");
    let (peer, mut registers, _fds) = with_full_eventfds(&lender, 8);
    let began = Instant::now();
    raise(&mut registers, 8);
    assert_eq!(read(&mut others, 0, reg::ID, 4) as u32, dma_test::ID);
    // The borrower gets no interrupts, and the device is there.
    assert_eq!(read(&mut registers, 0, reg::ID, 4) as u32, dma_test::ID);
    raise(&mut registers, 8);
    drop((peer, registers));
    lender.wait_until_free(DEVICE);
    assert!(began.elapsed() < STOP, "{:?}", began.elapsed());
    let (_peer, mut registers) = lender.borrow(DEVICE, "next");
    assert_eq!(read(&mut registers, 0, reg::ID, 4) as u32, dma_test::ID);
}

#[test]
fn a_lender_stops_although_an_eventfd_blocks() {
    let mut lender = Running::new();
    let (_peer, mut registers, _fds) = with_full_eventfds(&lender, 1);
    raise(&mut registers, 1);
    let began = Instant::now();
    lender.stop();
    assert!(began.elapsed() < STOP, "{:?}", began.elapsed());
}
