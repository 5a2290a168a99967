//! A borrower that violates the protocol. It harms at most its own lease.

use std::os::fd::AsFd;

use farside_devices::dma_test::{self, reg};
use farside_fabric::{Iova, NtbLimits, PeerAddress};
use farside_lender_protocol::{ErrorKind, MAX_FDS, Request, Transport, registers::Access};

use crate::peer::{DEADLINE, DEVICE, Running, ask, memory, read, until, write};

const MIB: u64 = 1 << 20;
const FAR: u64 = 64 << 30;

fn map_peer(peer_address: u64, len: u64, offset: u64) -> Request {
    Request::MapPeer {
        peer_address: PeerAddress::new(peer_address),
        len,
        offset,
        writable: true,
    }
}

fn window(iova: u64, peer_address: u64, len: u64) -> Request {
    Request::OpenWindow {
        iova: Iova::new(iova),
        peer_address: PeerAddress::new(peer_address),
        len,
    }
}

#[test]
fn mappings_that_make_no_sense_are_refused() {
    let lender = Running::new();
    let (mut peer, _registers) = lender.borrow(DEVICE, "a");
    let ram = memory(4 * MIB);
    let ram = ram.as_fd();
    peer.call(map_peer(FAR, MIB, 0), &[ram]).unwrap();
    let usage = lender.status(DEVICE).usage;
    assert_eq!(usage.bytes_mapped, MIB);
    let wrong = [
        map_peer(0, 0, 0),
        map_peer(0, u64::MAX, 0),
        map_peer(u64::MAX - 4095, 4096, 0),
        map_peer(u64::MAX - 4095, 8192, 0),
        map_peer(1, 4096, 0),
        map_peer(0, 4097, 0),
        map_peer(0, 4096, 1),
        map_peer(0, 8 * MIB, 0),
        map_peer(0, 4096, 4 * MIB),
        map_peer(0, 4096, u64::MAX - 4095),
        map_peer(0, 1 << 62, 0),
        // Overlapping the existing mapping, at either end, inside and around.
        map_peer(FAR, MIB, 0),
        map_peer(FAR - 4096, 8192, 0),
        map_peer(FAR + MIB - 4096, 8192, 0),
        map_peer(FAR + 4096, 4096, 0),
        map_peer(FAR - MIB, 3 * MIB, 0),
    ];
    for request in wrong {
        let what = format!("{request:?}");
        let error = peer.call(request, &[ram]).expect_err(&what);
        assert_eq!(error.kind, ErrorKind::Invalid, "{what}: {error}");
    }
    let no_ntb = Request::ReachBar {
        iova: Iova::new(0),
        exported: PeerAddress::new(FAR),
        len: 4096,
    };
    let kind = peer.refused(no_ntb, &[], &["not across an NTB"]);
    assert_eq!(kind, ErrorKind::Invalid);
    let kind = peer.refused(map_peer(0, 4096, 0), &[], &["without a descriptor"]);
    assert_eq!(kind, ErrorKind::Invalid);
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    peer.call(map_peer(0, 4096, 0), &[pipe.as_fd()])
        .unwrap_err();
    // Unmaps that would split a mapping, or find none.
    for (peer_address, len) in [
        (FAR, 4096),
        (FAR + 4096, MIB),
        (0, MIB),
        (FAR, 0),
        (FAR, u64::MAX),
    ] {
        let peer_address = PeerAddress::new(peer_address);
        peer.call(Request::UnmapPeer { peer_address, len }, &[])
            .unwrap_err();
    }
    assert_eq!(lender.status(DEVICE).usage, usage);
}

#[test]
fn windows_that_make_no_sense_or_do_not_fit_are_refused() {
    let limits = NtbLimits {
        bar_size: 16 * MIB,
        lut_entries: 16,
        ..NtbLimits::default()
    };
    let lender = Running::with(2, limits);
    let (mut peer, _registers) = lender.borrow(DEVICE, "a");
    peer.call(window(0, FAR, 4 * MIB), &[]).unwrap();
    let usage = lender.status(DEVICE).usage;
    for request in [
        window(MIB, 2 * FAR, MIB),
        window(0, 2 * FAR, 0),
        window(1, 2 * FAR, MIB),
        window(u64::MAX - 4095, 0, 8192),
        window(8 * MIB, u64::MAX - 4095, 8192),
    ] {
        let what = format!("{request:?}");
        let error = peer.call(request, &[]).expect_err(&what);
        assert_eq!(error.kind, ErrorKind::Invalid, "{what}: {error}");
    }
    let kind = peer.refused(window(8 * MIB, FAR, 13 * MIB), &[], &["13", "12", "16"]);
    assert_eq!(kind, ErrorKind::Limit);
    let kind = peer.refused(window(8 * MIB, FAR, 1 << 62), &[], &["LUT entries"]);
    assert_eq!(kind, ErrorKind::Limit);
    let kind = peer.refused(window(8 * MIB, FAR + 4096, MIB), &[], &["alignment"]);
    assert_eq!(kind, ErrorKind::Limit);
    let iova = Iova::new(MIB);
    peer.call(Request::CloseWindow { iova }, &[]).unwrap_err();
    assert_eq!(lender.status(DEVICE).usage, usage);
    // The adapter is shared: resources of one lease are unavailable to others until it
    // ends.
    let (mut other, _other_registers) = lender.borrow("dma1", "b");
    let kind = other.refused(window(0, FAR, 13 * MIB), &[], &["12 are free"]);
    assert_eq!(kind, ErrorKind::Limit);
    drop(peer);
    lender.wait_until_free(DEVICE);
    other.call(window(0, FAR, 16 * MIB), &[]).unwrap();
}

#[test]
fn mappings_are_bounded() {
    let lender = Running::new();
    let (mut peer, _registers) = lender.borrow(DEVICE, "a");
    let ram = memory(4096);
    let mut mapped = 0;
    let error = loop {
        match peer.call(map_peer(mapped * 4096, 4096, 0), &[ram.as_fd()]) {
            Ok(_) => mapped += 1,
            Err(error) => break error,
        }
        assert!(
            mapped <= farside_fabric::MAX_MAPPINGS as u64,
            "no end of mappings"
        );
    };
    assert_eq!(error.kind, ErrorKind::Limit);
    assert!(error.message.contains(&mapped.to_string()), "{error}");
    peer.call(Request::Close, &[]).unwrap();
    peer.call(map_peer(0, 4096, 0), &[ram.as_fd()]).unwrap();
}

#[test]
fn requests_that_have_no_place_in_a_lease_are_refused() {
    let lender = Running::new();
    let (mut peer, _registers) = lender.borrow(DEVICE, "a");
    let device = || DEVICE.parse().unwrap();
    for request in [
        Request::Hello {
            version: 1,
            vm: None,
        },
        Request::Devices { after: None },
        Request::Limits,
        Request::LimitsInUse,
        Request::Describe { device: device() },
        Request::Borrow {
            device: device(),
            transport: Transport::SharedMemory,
            fence: None,
        },
    ] {
        assert_eq!(
            peer.refused(request, &[], &["no place within a lease"]),
            ErrorKind::Invalid
        );
    }
    assert_eq!(lender.holder(DEVICE).as_deref(), Some("a"));
}

#[test]
fn register_accesses_that_make_no_sense_read_as_all_ones() {
    let lender = Running::new();
    let (_peer, mut registers) = lender.borrow(DEVICE, "a");
    let wrong = [
        (1, 0, 4),
        (6, 0, 4),
        (255, 0, 4),
        (0, 0x1000, 4),
        (0, 0xffe, 4),
        (0, 1, 2),
        (0, 0, 0),
        (0, 0, 3),
        (0, 0, 9),
        (0, 0, 255),
        (0, u64::MAX, 1),
        (0, u64::MAX - 7, 8),
    ];
    for (bar, offset, len) in wrong {
        write(&mut registers, bar, offset, len, 0);
        assert_eq!(
            read(&mut registers, bar, offset, len),
            u64::MAX,
            "{bar} {offset:#x} {len}"
        );
    }
    let id = read(&mut registers, 0, reg::ID, 4);
    assert_eq!(id as u32, dma_test::ID);
}

/// As when the lender is out of descriptors, which a guest's vectors can cause.
#[test]
fn a_request_whose_descriptors_are_lost_is_refused_and_the_lease_stays() {
    let lender = Running::new();
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    let file = memory(4096);
    peer.send_raw(&[0; 8], &[file.as_fd(); MAX_FDS + 8]);
    let error = peer.reply().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Limit);
    assert!(error.message.contains("LimitNOFILE"), "{error}");
    let id = read(&mut registers, 0, reg::ID, 4);
    assert_eq!(id as u32, dma_test::ID);
    peer.call(Request::Reset, &[]).unwrap();
}

#[test]
fn garbage_under_a_lease_ends_it() {
    let lender = Running::new();
    let (mut peer, _registers) = lender.borrow(DEVICE, "a");
    peer.send_raw(&[0xff; 40], &[]);
    peer.expect_closed();
    lender.wait_until_free(DEVICE);

    let (mut peer, registers) = lender.borrow(DEVICE, "a");
    let socket = registers.into_socket();
    rustix::io::write(&socket, &[0xff; 20]).unwrap();
    peer.expect_closed();
    lender.wait_until_free(DEVICE);
}

/// A guest rings doorbells as fast as it can; the device thread still performs its other
/// tasks.
#[test]
fn a_flood_of_register_writes_starves_nobody() {
    let mut lender = Running::new();
    let (mut peer, mut registers) = lender.borrow(DEVICE, "a");
    let flood = std::thread::spawn(move || {
        let access = Access::Write {
            bar: 0,
            offset: reg::SCRATCH,
            len: 4,
            value: 1,
        };
        // Until the lender closes the channel.
        while registers.send(&access, &[], DEADLINE).is_ok() {}
    });
    for _ in 0..20 {
        assert_eq!(lender.holder(DEVICE).as_deref(), Some("a"));
        peer.call(Request::Reset, &[]).unwrap();
    }
    lender.stop();
    flood.join().unwrap();
}

/// A borrower that sends requests and does not read loses its own lease only.
#[test]
fn a_borrower_that_does_not_read_is_given_up() {
    let lender = Running::with(2, NtbLimits::default());
    let (_peer, mut registers) = lender.borrow(DEVICE, "a");
    let (_other_peer, mut other) = lender.borrow("dma1", "b");
    let access = Access::Read {
        bar: 0,
        offset: 0,
        len: 4,
    };
    until("the lender closes the channel", || {
        assert_eq!(read(&mut other, 0, reg::ID, 4) as u32, dma_test::ID);
        registers.try_send(&access, &[]).is_err()
    });
    lender.wait_until_free(DEVICE);
    assert_eq!(lender.holder("dma1").as_deref(), Some("b"));
}

/// A software model has no configuration space at the lender; a function's is tested where it is.
#[test]
fn configuration_accesses_that_are_not_the_borrowers_are_refused() {
    let lender = Running::new();
    let (_peer, mut registers) = lender.borrow(DEVICE, "a");
    for (offset, len) in [
        (0, 4),
        (4, 2),
        (0x10, 4),
        (0xfffe, 4),
        (0xffff, 1),
        (0x1000, 1),
        (1, 2),
        (0, 0),
        (0, 3),
        (0, 8),
        (0, 255),
    ] {
        let value = ask(&mut registers, Access::ConfigRead { offset, len });
        assert_eq!(value, u64::from(u32::MAX), "{offset:#x}, {len}");
        let value = u32::MAX;
        let write = Access::ConfigWrite { offset, len, value };
        assert_eq!(ask(&mut registers, write), 0, "{offset:#x}, {len}");
    }
    // The lease goes on.
    write(&mut registers, 0, reg::SCRATCH, 4, 5);
    // The bytes behind a short read are all ones.
    assert_eq!(read(&mut registers, 0, reg::SCRATCH, 4) as u32, 5);
}
