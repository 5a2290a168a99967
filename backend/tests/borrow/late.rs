//! Lenders that reply late: this takes time, but never loses the device.

use std::{sync::mpsc::Receiver, time::Duration};

use farside_backend_api::BorrowState;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::{
    guest::{Event, MEMORY, Ram, SMALL, command, enable, fill, read_u32, set_command, small},
    host::{DEADLINE, DMA, Host, Served, dma_test, until},
    lender_loss::{Kind, Mute, Muted, muted_within},
    vmm::{DATA_EVENTFD, DMA_UNMAP, TRIGGER, Vmm, unmap},
};

/// How long the VMM waits in these tests: time for the round trips between threads
/// on a loaded host. The lender never answers within it.
const SHORT: Duration = Duration::from_secs(2);

/// A backend whose lender delays its reply to one request.
fn late(kind: Kind) -> (tempfile::TempDir, Muted, Served) {
    muted_within(Mute::Until(kind), Duration::ZERO, SHORT)
}

/// The requests that the lender received, from the first of a kind on.
fn from(asked: &Receiver<Kind>, first: Kind) -> Vec<Kind> {
    asked.try_iter().skip_while(|kind| *kind != first).collect()
}

fn finish(lender: Muted, vmm: Vmm, mut served: Served) {
    drop(vmm);
    let leave = lender.hung_up.recv_timeout(DEADLINE).unwrap();
    leave.send(()).unwrap();
    served.stop();
    lender.thread.join().unwrap();
}

/// Whichever request of a bus-master enable is answered late: the enable is refused,
/// nothing is unpinned before the lender has replied, its effects are undone before the
/// next request, and the next enable works.
#[test]
fn a_bus_master_enable_answered_late_is_refused_and_the_next_one_works() {
    for kind in [Kind::OpenWindow, Kind::MapPeer, Kind::EnableBusMaster] {
        let (_dir, lender, served) = late(kind);
        let mut vmm = served.client(DMA);
        let _ram = small(&mut vmm);
        vmm.reset().unwrap();
        assert!(!enable(&mut vmm), "{kind:?}");
        assert_eq!(command(&mut vmm), MEMORY);
        let status = served.status();
        assert_eq!(status.state, BorrowState::Closing, "{kind:?} {status:?}");
        assert!(served.last_error().contains("slow"), "{status:?}");
        let pinned = if kind == Kind::OpenWindow { 0 } else { SMALL };
        if kind == Kind::EnableBusMaster {
            assert_eq!(status.bytes_pinned, pinned, "{status:?}");
        }
        // The reply is still outstanding.
        assert!(!enable(&mut vmm), "{kind:?}");
        assert_eq!(served.state(), "closing");
        lender.answer.send(()).unwrap();
        assert!(enable(&mut vmm), "{kind:?}: {}", served.last_error());
        assert_eq!(served.state(), "ready");
        assert_eq!(served.status().bytes_pinned, SMALL);
        let asked = from(&lender.asked, kind);
        let opens = [Kind::OpenWindow, Kind::MapPeer, Kind::EnableBusMaster];
        assert_eq!(asked[..2], [kind, Kind::Close], "{asked:?}");
        assert_eq!(asked[asked.len() - 3..], opens, "{asked:?}");
        finish(lender, vmm, served);
    }
}

/// As if bus-master enable had never been set: the reply to an unmap guarantees that no DMA
/// reaches the memory.
#[test]
fn memory_is_not_taken_away_before_a_late_lender_has_closed() {
    let (_dir, lender, served) = late(Kind::EnableBusMaster);
    let mut vmm = served.client(DMA);
    let _ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert!(!enable(&mut vmm));
    assert_eq!(served.state(), "closing");
    vmm.post(DMA_UNMAP, &unmap(0, SMALL), &[]);
    let while_it_may = Timespec::try_from(Duration::from_millis(200)).unwrap();
    let mut fds = [PollFd::new(&vmm.socket, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&while_it_may)), Ok(0));
    lender.answer.send(()).unwrap();
    vmm.reply().unwrap();
    let asked = from(&lender.asked, Kind::EnableBusMaster);
    // Closed once to undo the enable, and once for the unmap.
    assert_eq!(asked, [Kind::EnableBusMaster, Kind::Close, Kind::Close]);
    let status = served.status();
    assert_eq!(
        (status.state, status.bytes_pinned),
        (BorrowState::Leased, 0)
    );
    finish(lender, vmm, served);
}

/// An unmap cannot wait for ever: the lease is then terminated.
#[test]
fn memory_that_a_lender_never_gives_up_costs_the_lease() {
    let (_dir, lender, served) = late(Kind::EnableBusMaster);
    let mut vmm = served.client(DMA);
    let _ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert!(!enable(&mut vmm));
    vmm.unmap(0, SMALL).unwrap();
    assert_eq!(served.state(), "lost");
    lender.answer.send(()).unwrap();
    finish(lender, vmm, served);
}

#[test]
fn a_bus_master_clear_answered_late_keeps_the_lease() {
    let (_dir, lender, served) = late(Kind::Close);
    let mut vmm = served.client(DMA);
    let _ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    set_command(&mut vmm, MEMORY);
    assert_eq!(command(&mut vmm), MEMORY);
    let status = served.status();
    assert_eq!(
        (status.state, status.bytes_pinned),
        (BorrowState::Closing, SMALL)
    );
    lender.answer.send(()).unwrap();
    assert!(enable(&mut vmm));
    let asked = from(&lender.asked, Kind::Close);
    assert_eq!(asked[..3], [Kind::Close, Kind::Close, Kind::OpenWindow]);
    finish(lender, vmm, served);
}

#[test]
fn a_reset_answered_late_keeps_the_lease() {
    let (_dir, lender, served) = late(Kind::Reset);
    let mut vmm = served.client(DMA);
    let _ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert_eq!(vmm.reset(), Err(Errno::TIMEDOUT));
    assert_eq!(served.state(), "closing");
    lender.answer.send(()).unwrap();
    vmm.reset().unwrap();
    assert_eq!(served.state(), "leased");
    assert!(enable(&mut vmm));
    finish(lender, vmm, served);
}

#[test]
fn interrupts_set_up_late_keep_the_device_ready() {
    let (_dir, lender, served) = late(Kind::SetIrqs);
    let mut vmm = served.client(DMA);
    let _ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    let event = Event::new();
    let set = |vmm: &mut Vmm| vmm.set_irqs(2, DATA_EVENTFD | TRIGGER, 0, 1, &[&event]);
    assert_eq!(set(&mut vmm), Err(Errno::TIMEDOUT));
    assert_eq!(served.state(), "ready");
    lender.answer.send(()).unwrap();
    set(&mut vmm).unwrap();
    assert_eq!(served.state(), "ready");
    finish(lender, vmm, served);
}

/// A late reply to a borrow must not hide the device from the guest until the VM is reset.
#[test]
fn a_borrow_answered_late_is_asked_for_again() {
    let (_dir, lender, served) = late(Kind::Borrow);
    let mut vmm = served.client(DMA);
    assert_eq!(vmm.reset(), Err(Errno::TIMEDOUT));
    assert_eq!(served.state(), "described");
    assert_ne!(read_u32(&mut vmm, crate::guest::CONFIG, 0), !0);
    lender.answer.send(()).unwrap();
    finish(lender, vmm, served);
}

/// Many backends that pin concurrently on few CPUs: some may time out, and none treats that
/// as a lost lender. The pages that are resident by then need not be populated the next
/// time.
#[test]
fn twenty_guests_at_once_lose_no_device() {
    const GUESTS: usize = 20;
    const RAM: u64 = 64 << 20;
    let name = |n: usize| format!("dma{n}");
    let host = Host::lending(Default::default(), |_| {
        (0..GUESTS).map(|n| dma_test(&name(n))).collect()
    });
    let guest = &|n: usize| {
        let device = name(n);
        let served = Served::start(farside_backend::Config {
            open_timeout: Duration::from_millis(500),
            message_timeout: Duration::ZERO,
            lost_after: Duration::from_secs(300),
            ..host.config(&format!("vm{n}"), &[&device])
        });
        let mut vmm = served.client(&device);
        let ram = Ram::new(RAM);
        vmm.map(0, RAM, ram.fd(0)).unwrap();
        until("the device is leased", || vmm.reset().is_ok());
        until("the device is ready", || {
            let ready = enable(&mut vmm);
            assert_ne!(served.state(), "lost", "{}", served.last_error());
            ready
        });
        assert_eq!(served.state(), "ready");
        assert!(!fill(&mut vmm, RAM - 0x1000, 0x1000, 7).faulted());
        ram.assert_filled(RAM - 0x1000, 0x1000, 7);
    };
    std::thread::scope(|scope| {
        for n in 0..GUESTS {
            scope.spawn(move || guest(n));
        }
    });
}
