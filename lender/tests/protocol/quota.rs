//! A borrower that maps more memory than a lender can. The other leases go on.

use std::{
    fs::File,
    os::{fd::AsFd, unix::fs::FileExt},
};

use farside_devices::dma_test::{Command, reg};
use farside_fabric::{NtbLimits, PeerAddress};
use farside_lender_protocol::{
    Channel, Client, ErrorKind, LimitUse, RemoteError, Reply, Request, Resource,
};

use crate::peer::{Peer, Running, memory, read, until, write};

const PAGE: u64 = 4096;
const TIB: u64 = 1 << 40;

/// Maps the first page of `file`.
fn map(peer: &mut Peer, number: u64, file: &File) -> Result<(), RemoteError> {
    let request = Request::MapPeer {
        peer_address: PeerAddress::new(number * PAGE),
        len: PAGE,
        offset: 0,
        writable: true,
    };
    peer.call(request, &[file.as_fd()]).map(|_| ())
}

/// Maps a new file of `bytes` each time, until refused. Returns how many were mapped.
fn map_until_refused(peer: &mut Peer, bytes: u64) -> (u64, RemoteError) {
    let most = 65_530;
    for number in 0..most {
        if let Err(error) = map(peer, number, &memory(bytes)) {
            return (number, error);
        }
    }
    panic!("{most} files of {bytes} bytes, and no refusal");
}

/// DMA reaches the RAM of a lease, also after a reset.
fn works(peer: &mut Peer, registers: &mut Channel) {
    for value in [0x1111_1111, 0x2222_2222] {
        peer.call(Request::Reset, &[]).unwrap();
        let ram = memory(PAGE);
        peer.open(&ram, 0, TIB, PAGE);
        write(registers, 0, reg::DST, 8, 0);
        write(registers, 0, reg::LENGTH, 4, PAGE);
        write(registers, 0, reg::PATTERN, 4, value);
        write(registers, 0, reg::COMMAND, 4, Command::Fill as u64);
        until("the fill is done", || {
            read(registers, 0, reg::MOVED, 4) as u32 == PAGE as u32
        });
        let mut found = [0; 4];
        ram.read_exact_at(&mut found, PAGE - 4).unwrap();
        assert_eq!(u64::from(u32::from_le_bytes(found)), value);
    }
}

#[test]
fn a_lease_cannot_take_the_address_space_of_the_lender() {
    const DEVICES: u64 = 2;
    let lender = Running::with(DEVICES as usize, NtbLimits::default());
    let (mut evil, _registers) = lender.borrow("dma0", "evil");
    // 128 TiB are the address space of a process.
    let error = map(&mut evil, 0, &memory(128 * TIB)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Limit);
    let (mapped, error) = map_until_refused(&mut evil, 8 * TIB);
    assert_eq!(mapped, 64 / DEVICES / 8);
    assert_eq!(error.kind, ErrorKind::Limit);
    for word in ["8 TiB", "32 TiB of 32 TiB"] {
        assert!(error.message.contains(word), "no {word:?} in {error}");
    }
    // A connection is a thread, which needs address space, too.
    let (mut peer, mut registers) = lender.borrow("dma1", "victim");
    works(&mut peer, &mut registers);
    // Nor do the files of an ended lease count for the next.
    evil.call(Request::Return, &[]).unwrap();
    let (mut peer, mut registers) = lender.borrow("dma0", "next");
    map(&mut peer, 0, &memory(32 * TIB)).unwrap();
    works(&mut peer, &mut registers);
}

fn used(limits: &[LimitUse], resource: Resource) -> (u64, u64) {
    let found = limits.iter().find(|one| one.resource == resource);
    let found = found.unwrap_or_else(|| panic!("no {resource:?} in {limits:?}"));
    (found.used, found.limit)
}

#[test]
fn what_is_used_of_each_limit_is_shown() {
    let lender = Running::with(2, NtbLimits::default());
    let lut_entries = NtbLimits::default().lut_entries.into();
    assert_eq!(lender.status("dma0").limits, []);
    let (mut peer, _registers) = lender.borrow("dma0", "a");
    let ram = memory(4 * PAGE);
    peer.open(&ram, 0, TIB, 2 * PAGE);
    map(&mut peer, 0, &ram).unwrap();
    map(&mut peer, 1, &memory(PAGE)).unwrap();
    let of_lease = lender.status("dma0").limits;
    for (resource, expected) in [
        (Resource::MemoryFiles, 2),
        (Resource::MemoryBytes, 5 * PAGE),
        (Resource::Mappings, 3),
        (Resource::Windows, 1),
        (Resource::LutEntries, 1),
        (Resource::Eventfds, 0),
    ] {
        let (used, limit) = used(&of_lease, resource);
        assert_eq!(used, expected, "{resource:?}");
        assert!(used < limit, "{resource:?}");
    }
    assert_eq!(used(&of_lease, Resource::MemoryBytes).1, 32 * TIB);
    assert_eq!(used(&of_lease, Resource::LutEntries).1, lut_entries);
    let status = Request::Status {
        device: "dma0".parse().unwrap(),
    };
    match peer.call(status, &[]) {
        // As the borrower has it.
        Ok(Reply::Status(status)) => assert_eq!(status.limits, of_lease),
        other => panic!("{other:?}"),
    }

    let mut tool = Client::connect(&lender.socket().into(), None).unwrap();
    let of_lender = tool.limits_in_use().unwrap();
    let devices = NtbLimits::default().max_devices().into();
    assert_eq!(used(&of_lender, Resource::RequesterEntries), (1, devices));
    assert_eq!(used(&of_lender, Resource::LutEntries), (1, lut_entries));
    assert_eq!(used(&of_lender, Resource::Devices).0, 2);
    let (peers, limit) = used(&of_lender, Resource::Peers);
    assert!((1..limit).contains(&peers), "{of_lender:?}");
    // Others are not told how busy the lender is.
    let mut other = Client::connect(&lender.addresses[1], None).unwrap();
    assert_eq!(other.limits_in_use().unwrap(), []);
}

/// Else the shares of all leases would exceed what a process can map.
#[test]
fn a_device_is_added_only_if_no_lease_exceeds_its_smaller_share() {
    let lender = Running::new();
    let (mut peer, _registers) = lender.borrow("dma0", "a");
    for number in 0..5 {
        map(&mut peer, number, &memory(8 * TIB)).unwrap();
    }
    let add = || {
        let table = "id = \"dma1\"\nmodel.dma-test = {}".to_owned();
        let mut client = Client::connect(&lender.socket().into(), None).unwrap();
        client.add_device(table)
    };
    let error = add().unwrap_err().to_string();
    assert!(error.contains("more memory than its share"), "{error}");
    map(&mut peer, 5, &memory(8 * TIB)).unwrap();
    peer.call(Request::Return, &[]).unwrap();
    add().unwrap();
    let (mut peer, _registers) = lender.borrow("dma1", "a");
    let (mapped, _) = map_until_refused(&mut peer, 8 * TIB);
    assert_eq!(mapped, 4);
}

#[test]
fn leases_cannot_take_all_mappings_of_the_lender() {
    const DEVICES: usize = 16;
    let lender = Running::with(DEVICES, NtbLimits::default());
    let mut leases: Vec<_> = (1..DEVICES)
        .map(|n| lender.borrow(&format!("dma{n}"), "evil"))
        .collect();
    let mut all = 0;
    for (evil, _) in &mut leases {
        let (mapped, error) = map_until_refused(evil, PAGE);
        assert_eq!(error.kind, ErrorKind::Limit);
        let limit = format!("limit of {mapped} memory files");
        assert!(error.message.contains(&limit), "{error}");
        assert!(mapped >= 256, "too few for a guest: {mapped}");
        all += mapped;
        // Parts of a file that is mapped already cost none.
        let ram = memory(2 * PAGE);
        map(evil, 1 << 30, &ram).unwrap_err();
        let release = Request::UnmapPeer {
            peer_address: PeerAddress::new(0),
            len: PAGE,
        };
        evil.call(release, &[]).unwrap();
        (0..100).for_each(|n| map(evil, (1 << 30) + n, &ram).unwrap());
    }
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let limit: u64 = limit.trim().parse().unwrap();
    assert!(all <= limit / 4, "{all} of {limit}");
    let (mut peer, mut registers) = lender.borrow("dma0", "victim");
    works(&mut peer, &mut registers);
}
