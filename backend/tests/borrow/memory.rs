//! Guest memory that is mapped and unmapped while the device may access it, and memory that
//! a device must not access.

use std::os::fd::AsFd;

use farside_devices::dma_test::{Command, fault_code};
use farside_fabric::{FaultReason, NtbLimits};
use rustix::{fs::ftruncate, io::Errno};

use crate::{
    guest::{
        Job, MEMORY, PAGE, Ram, SMALL, command, enable, fill, place_bars, run, set_command, small,
    },
    host::{DMA, Host, Served, assert_closed, assert_open, dma_test},
    vmm::Vmm,
};

const MIB: u64 = 1 << 20;

fn ready(host: &Host) -> (Served, Vmm, Ram) {
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    (served, vmm, ram)
}

#[test]
fn copies_and_checksums_go_through_both_windows() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = Ram::new(8 * MIB);
    vmm.map(0, 4 * MIB, ram.fd(0)).unwrap();
    vmm.map(4 << 30, 4 * MIB, ram.fd(4 * MIB)).unwrap();
    vmm.reset().unwrap();
    place_bars(&mut vmm, 0xe000_0000);
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, 8 * MIB, 2);

    let data: Vec<u8> = (0..0x2_3456u32).map(|n| (n * 31) as u8).collect();
    ram.write(0x1234, &data);
    let job = Job {
        src: 0x1234,
        dst: (4 << 30) + 0x777,
        length: data.len() as u32,
        ..Job::default()
    };
    let ended = run(&mut vmm, Command::Copy, job);
    assert!(!ended.faulted());
    assert_eq!(ended.moved as usize, data.len());
    assert!(ram.read(4 * MIB + 0x777, data.len()) == data);
    let job = Job {
        src: job.dst,
        ..job
    };
    let checksum = run(&mut vmm, Command::Checksum, job).result;
    assert_eq!(checksum, crc32c(&data));
}

/// CRC-32C, bit by bit.
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 * (crc & 1))
        })
    })
}

#[test]
fn what_is_outside_guest_ram_is_not_reached() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = Ram::new(4 * MIB);
    // A hole at 640 KiB, a ROM below 4 GiB, nothing else.
    vmm.map(0, 0xa_0000, ram.fd(0)).unwrap();
    vmm.map(MIB, 3 * MIB, ram.fd(MIB)).unwrap();
    vmm.map(0xfffc_0000, 0x4_0000, None).unwrap();
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, 3 * MIB + 0xa_0000, 1);

    let hole = FaultReason::BorrowerDomain;
    let outside = FaultReason::LenderDomain;
    let wrong = [
        (0xa_0000, hole),
        (0xf_f000, hole),
        (4 * MIB, outside),
        (0xfffc_0000, outside),
        (4 << 30, outside),
        (1 << 40, outside),
        (!0 - 0xfff, outside),
    ];
    for (dst, reason) in wrong {
        let ended = fill(&mut vmm, dst, 0x1000, 0xee);
        assert!(ended.faulted(), "{dst:#x}");
        assert_eq!(ended.fault_iova, dst);
        assert_eq!(ended.fault_info, fault_code(reason) | 1 << 8, "{dst:#x}");
        assert_eq!(ended.moved, 0);
    }
    // Across an edge: only up to it.
    let ended = fill(&mut vmm, 0x9_f000, 0x2000, 0xee);
    assert!(ended.faulted());
    assert_eq!((ended.fault_iova, ended.moved), (0xa_0000, 0x1000));
    ram.assert_filled(0, 0x9_f000, 0);
    ram.assert_filled(0x9_f000, 0x1000, 0xee);
    ram.assert_filled(0xa_0000, (4 * MIB - 0xa_0000) as usize, 0);
    let faults = host.lender_status(DMA).faults;
    assert_eq!(faults.total, 8);
    assert_eq!(faults.recent[0].fault.iova.get(), 0xa_0000);
}

#[test]
fn memory_that_comes_while_open_is_reached() {
    let host = Host::new();
    let (served, mut vmm, _low) = ready(&host);
    // Beyond every window: adds one. Then into the hole inside it.
    let high = Ram::new(4 * MIB);
    let at = 8 << 30;
    assert!(fill(&mut vmm, at, 0x1000, 1).faulted());
    vmm.map(at, MIB, high.fd(0)).unwrap();
    assert_open(&host, &served, DMA, SMALL + MIB, 2);
    assert!(!fill(&mut vmm, at, 0x1000, 1).faulted());
    high.assert_filled(0, 0x1000, 1);
    // Another part of the same file is within that window.
    assert!(fill(&mut vmm, at + 2 * MIB, 0x1000, 1).faulted());
    vmm.map(at + 2 * MIB, MIB, high.fd(2 * MIB)).unwrap();
    assert_open(&host, &served, DMA, SMALL + 2 * MIB, 2);
    vmm.unmap(at, MIB).unwrap();
    assert_open(&host, &served, DMA, SMALL + MIB, 2);
    assert!(fill(&mut vmm, at, 0x1000, 2).faulted());
    high.assert_filled(0, 0x1000, 1);
    assert!(!fill(&mut vmm, at + 2 * MIB, 0x1000, 2).faulted());
    high.assert_filled(2 * MIB, 0x1000, 2);
    // Firmware does this below 1 MiB frequently.
    vmm.unmap(0, SMALL).unwrap();
    assert_open(&host, &served, DMA, MIB, 1);
    vmm.unmap(at + 2 * MIB, MIB).unwrap();
    assert_open(&host, &served, DMA, 0, 0);
}

#[test]
fn a_hole_in_a_window_is_filled_and_opened_again() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = Ram::new(SMALL);
    for (start, end) in [(0, 0xa_0000), (0x10_0000, SMALL)] {
        vmm.map(start, end - start, ram.fd(start)).unwrap();
    }
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    let without = SMALL - 0x6_0000;
    assert_open(&host, &served, DMA, without, 1);
    for _ in 0..3 {
        assert!(fill(&mut vmm, 0xa_0000, 0x1000, 9).faulted());
        vmm.map(0xa_0000, 0x6_0000, ram.fd(0xa_0000)).unwrap();
        assert_open(&host, &served, DMA, SMALL, 1);
        // From one mapping through the next into a third.
        assert!(!fill(&mut vmm, 0x9_f000, 0x6_2000, 9).faulted());
        ram.assert_filled(0x9_f000, 0x6_2000, 9);
        vmm.unmap(0xa_0000, 0x6_0000).unwrap();
        assert_open(&host, &served, DMA, without, 1);
    }
}

/// Firmware moves the end of low RAM when it reserves memory for itself.
#[test]
fn a_mapping_over_the_edge_of_a_window_gets_one_more() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = Ram::new(4 * MIB);
    vmm.map(0, MIB, ram.fd(0)).unwrap();
    vmm.map(MIB, MIB, ram.fd(MIB)).unwrap();
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, 2 * MIB, 1);
    vmm.unmap(MIB, MIB).unwrap();
    vmm.map(MIB, 3 * MIB, ram.fd(MIB)).unwrap();
    assert_open(&host, &served, DMA, 4 * MIB, 2);
    assert!(!fill(&mut vmm, 2 * MIB - PAGE, 2 * PAGE as u32, 3).faulted());
    ram.assert_filled(2 * MIB - PAGE, 2 * PAGE as usize, 3);
    vmm.unmap(MIB, 3 * MIB).unwrap();
    assert_open(&host, &served, DMA, MIB, 1);
    assert!(fill(&mut vmm, 2 * MIB - PAGE, 2 * PAGE as u32, 4).faulted());
    assert!(fill(&mut vmm, 2 * MIB, PAGE as u32, 4).faulted());
    ram.assert_filled(2 * MIB - PAGE, 2 * PAGE as usize, 3);
}

#[test]
fn unmapping_everything_leaves_nothing() {
    let host = Host::new();
    let (served, mut vmm, ram) = ready(&host);
    vmm.unmap_all().unwrap();
    assert_open(&host, &served, DMA, 0, 0);
    assert!(fill(&mut vmm, 0, 0x1000, 1).faulted());
    ram.assert_filled(0, SMALL as usize, 0);
    assert_eq!(vmm.unmap(0, SMALL), Err(Errno::NOENT));
}

#[test]
fn guest_ram_that_is_not_shared_keeps_the_device_from_dma() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    vmm.map(0, 64 * MIB, None).unwrap();
    vmm.reset().unwrap();
    assert!(!enable(&mut vmm));
    assert_eq!(command(&mut vmm), MEMORY);
    assert_closed(&host, &served, DMA, "leased");
    assert!(served.last_error().contains("memory-backend-memfd"));
    // A VM with the option, and the same backend.
    vmm.unmap(0, 64 * MIB).unwrap();
    let _ram = small(&mut vmm);
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, SMALL, 1);
    assert_eq!(served.status().last_error, None);
    // A BAR of another device at 4 GiB, whole and up to its MSI-X table, is not RAM.
    for len in [16 * MIB, 0x3000] {
        vmm.map(4 << 30, len, None).unwrap();
        assert_open(&host, &served, DMA, SMALL, 1);
        vmm.unmap(4 << 30, len).unwrap();
    }
    // More RAM, hot-plugged, of a size that no BAR can have.
    vmm.map(4 << 30, 3 * MIB, None).unwrap_err();
    assert_closed(&host, &served, DMA, "leased");
    assert!(served.last_error().contains("not shared"));
}

#[test]
fn a_refused_mapping_keeps_the_device_from_dma() {
    let host = Host::new();
    let (served, mut vmm, ram) = ready(&host);
    // QEMU prints the error and continues: the guest has that memory.
    let short = Ram::new(MIB);
    let error = vmm.map(4 << 30, 2 * MIB, short.fd(0));
    assert_eq!(error, Err(Errno::INVAL));
    assert_closed(&host, &served, DMA, "leased");
    assert!(served.last_error().contains("0x100000000"));
    assert!(fill(&mut vmm, 0, 0x1000, 1).faulted());
    set_command(&mut vmm, MEMORY);
    assert!(!enable(&mut vmm));
    assert_closed(&host, &served, DMA, "leased");
    ram.assert_filled(0, SMALL as usize, 0);
    // The guest's memory is unplugged again.
    vmm.unmap(4 << 30, 2 * MIB).unwrap();
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, SMALL, 1);
    // An overlap is refused as well.
    let error = vmm.map(MIB, MIB, ram.fd(0));
    assert_eq!(error, Err(Errno::EXIST));
    assert_closed(&host, &served, DMA, "leased");
}

#[test]
fn what_is_no_memory_is_refused() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    for fd in [pipe.as_fd(), socket.as_fd()] {
        assert_eq!(vmm.map(0, PAGE, Some((fd, 0))), Err(Errno::INVAL));
    }
    vmm.reset().unwrap();
    assert!(!enable(&mut vmm));
}

#[test]
fn memory_that_shrinks_is_gone_and_nobody_dies() {
    let host = Host::new();
    let (served, mut vmm, ram) = ready(&host);
    ftruncate(&ram.file, MIB).unwrap();
    let ended = fill(&mut vmm, 2 * MIB, 0x1000, 1);
    // The first access detects it, the second is refused.
    let ended = match ended.faulted() {
        true => ended,
        false => fill(&mut vmm, 2 * MIB, 0x1000, 1),
    };
    assert!(ended.faulted());
    let gone = fault_code(FaultReason::MemoryGone) | 1 << 8;
    assert_eq!(ended.fault_info, gone);
    assert!(host.lender_status(DMA).faults.by_reason.memory_gone > 0);
    // Both processes continue, and everything can be closed.
    assert_open(&host, &served, DMA, SMALL, 1);
    set_command(&mut vmm, MEMORY);
    assert_closed(&host, &served, DMA, "leased");
    // It cannot be pinned now.
    assert!(!enable(&mut vmm));
    assert_closed(&host, &served, DMA, "leased");
    assert!(served.last_error().contains("shrunk") || served.last_error().contains("map"));
    ftruncate(&ram.file, SMALL).unwrap();
    assert!(enable(&mut vmm));
    assert!(!fill(&mut vmm, 2 * MIB, 0x1000, 1).faulted());
    ram.assert_filled(2 * MIB, 0x1000, 1);
}

#[test]
fn memory_that_may_not_be_written_is_not() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = Ram::new(2 * MIB);
    ram.fill(MIB, 0x1000, 5);
    vmm.map(0, MIB, ram.fd(0)).unwrap();
    let mut payload = crate::vmm::words(&[32, 1]);
    for value in [MIB, MIB, MIB] {
        payload.extend(value.to_le_bytes());
    }
    vmm.call(crate::vmm::DMA_MAP, &payload, &[ram.file.as_fd()])
        .unwrap();
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, 2 * MIB, 1);
    let ended = fill(&mut vmm, MIB, 0x1000, 1);
    assert_eq!(
        ended.fault_info,
        fault_code(FaultReason::Permission) | 1 << 8
    );
    ram.assert_filled(MIB, 0x1000, 5);
    let job = Job {
        src: MIB,
        dst: 0,
        length: 0x1000,
        ..Job::default()
    };
    assert!(!run(&mut vmm, Command::Copy, job).faulted());
    ram.assert_filled(0, 0x1000, 5);
}

#[test]
fn a_guest_too_large_for_the_windows_is_refused_by_the_limits_name() {
    let limits = NtbLimits {
        bar_size: 8 * MIB,
        lut_entries: 8,
        ..NtbLimits::default()
    };
    let host = Host::lending(limits, |_| vec![dma_test(DMA)]);
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = Ram::new(16 * MIB);
    vmm.map(0, 16 * MIB, ram.fd(0)).unwrap();
    vmm.reset().unwrap();
    assert!(!enable(&mut vmm));
    assert_closed(&host, &served, DMA, "leased");
    let error = served.last_error();
    assert!(error.contains("LUT entries"), "{error}");
    assert!(error.contains("bar-size"), "{error}");
    // RAM that fits is mapped; only the additional RAM is unreachable.
    vmm.unmap(0, 16 * MIB).unwrap();
    vmm.map(0, 6 * MIB, ram.fd(0)).unwrap();
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, 6 * MIB, 1);
    assert_eq!(served.status().lut_entries, 6);
    assert_eq!(
        vmm.map(4 << 30, 4 * MIB, ram.fd(6 * MIB)),
        Err(Errno::NOSPC)
    );
    assert_open(&host, &served, DMA, 6 * MIB, 1);
    assert_eq!(served.status().bytes_unreachable, 4 * MIB);
    assert!(served.last_error().contains("LUT entries"));
    assert!(fill(&mut vmm, 4 << 30, 0x1000, 1).faulted());
    assert!(!fill(&mut vmm, 5 * MIB, 0x1000, 1).faulted());
    ram.assert_filled(6 * MIB, 4 * MIB as usize, 0);
    // A smaller part fits.
    vmm.unmap(4 << 30, 4 * MIB).unwrap();
    assert_eq!(served.status().bytes_unreachable, 0);
    vmm.map(4 << 30, 2 * MIB, ram.fd(6 * MIB)).unwrap();
    assert_open(&host, &served, DMA, 8 * MIB, 2);
    assert!(!fill(&mut vmm, 4 << 30, 0x1000, 1).faulted());
}

/// A block of virtio-mem, as QEMU maps it.
const BLOCK: u64 = 2 * MIB;

/// QEMU maps the blocks that the guest plugs of a virtio-mem device one by one, in any
/// order, and unmaps many blocks at once.
#[test]
fn blocks_of_a_memory_device_share_a_window() {
    const BLOCKS: u64 = 512;
    const AT: u64 = 5 << 30;
    let host = Host::new();
    let (served, mut vmm, _low) = ready(&host);
    let lut_entries = served.status().lut_entries;
    let region = Ram::new(BLOCKS * BLOCK);
    // Every plugged block once, neighbours far apart in time; a third stays unplugged.
    let order: Vec<u64> = (0..BLOCKS).map(|n| n * 7 % BLOCKS).collect();
    let (plugged, left_out): (Vec<u64>, Vec<u64>) = order.iter().partition(|n| *n % 3 != 0);
    for n in &plugged {
        let at = n * BLOCK;
        vmm.map(AT + at, BLOCK, region.fd(at)).unwrap();
    }
    let bytes = plugged.len() as u64 * BLOCK;
    assert_open(&host, &served, DMA, SMALL + bytes, 2);
    // 1 GiB in segments of 128 MiB.
    assert_eq!(served.status().lut_entries, lut_entries + 8);
    for n in plugged.iter().take(20) {
        assert!(!fill(&mut vmm, AT + n * BLOCK, 0x1000, 1).faulted(), "{n}");
    }
    for n in left_out.iter().take(20) {
        assert!(fill(&mut vmm, AT + n * BLOCK, 0x1000, 1).faulted(), "{n}");
        region.assert_filled(n * BLOCK, 0x1000, 0);
    }
    // Some of them one by one, then the first half at once, then all.
    for n in plugged.iter().take(100) {
        vmm.unmap(AT + n * BLOCK, BLOCK).unwrap();
        assert!(fill(&mut vmm, AT + n * BLOCK, 0x1000, 2).faulted(), "{n}");
    }
    assert_open(&host, &served, DMA, SMALL + bytes - 100 * BLOCK, 2);
    vmm.unmap(AT, BLOCKS / 2 * BLOCK).unwrap();
    let upper = |n: &&u64| **n >= BLOCKS / 2;
    let left = plugged.iter().skip(100).filter(upper).count() as u64;
    assert_open(&host, &served, DMA, SMALL + left * BLOCK, 2);
    vmm.unmap(AT, BLOCKS * BLOCK).unwrap();
    assert_open(&host, &served, DMA, SMALL, 1);
    assert_eq!(served.status().lut_entries, lut_entries);
}

/// A memory device larger than the NTB's BAR: as much of it as fits is reachable.
#[test]
fn a_memory_device_that_does_not_fit_is_reached_as_far_as_it_does() {
    const SEGMENT: u64 = 128 * MIB;
    const AT: u64 = 8 << 30;
    let limits = NtbLimits {
        bar_size: 8 * SEGMENT,
        lut_entries: 8,
        ..NtbLimits::default()
    };
    let host = Host::lending(limits, |_| vec![dma_test(DMA)]);
    let (served, mut vmm, _low) = ready(&host);
    let region = Ram::new(16 * SEGMENT);
    // Low RAM takes one entry; one block goes into each of the others.
    for n in 0..7 {
        vmm.map(AT + n * SEGMENT, BLOCK, region.fd(n * SEGMENT))
            .unwrap();
    }
    assert_open(&host, &served, DMA, SMALL + 7 * BLOCK, 8);
    for n in [7, 15] {
        let at = n * SEGMENT;
        assert_eq!(vmm.map(AT + at, BLOCK, region.fd(at)), Err(Errno::NOSPC));
        assert!(fill(&mut vmm, AT + at, 0x1000, 1).faulted());
    }
    assert_eq!(served.status().bytes_unreachable, 2 * BLOCK);
    // Open windows remain, and further blocks fit in their entries.
    vmm.map(AT + BLOCK, BLOCK, region.fd(BLOCK)).unwrap();
    assert_open(&host, &served, DMA, SMALL + 8 * BLOCK, 8);
    for n in 0..7 {
        assert!(
            !fill(&mut vmm, AT + n * SEGMENT, 0x1000, 1).faulted(),
            "{n}"
        );
    }
    assert!(!fill(&mut vmm, AT + BLOCK, 0x1000, 1).faulted());
    // QEMU unmaps it.
    vmm.unmap(AT + 7 * SEGMENT, 9 * SEGMENT).unwrap();
    assert_eq!(served.status().bytes_unreachable, 0);
}

#[test]
fn more_ram_than_the_host_has_is_refused_before_a_page_is_populated() {
    const TOO_MUCH: u64 = 1 << 44;
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = Ram::new(TOO_MUCH);
    vmm.map(0, SMALL, ram.fd(0)).unwrap();
    vmm.map(4 << 30, TOO_MUCH - SMALL, ram.fd(SMALL)).unwrap();
    vmm.reset().unwrap();
    assert!(!enable(&mut vmm));
    assert_closed(&host, &served, DMA, "leased");
    let error = served.last_error();
    assert!(error.contains("do not fit"), "{error}");
    assert_eq!(rustix::fs::fstat(&ram.file).unwrap().st_blocks, 0);
    // As before, but hot-plugged: open windows remain.
    vmm.unmap(4 << 30, TOO_MUCH - SMALL).unwrap();
    assert!(enable(&mut vmm));
    let more = Ram::new(TOO_MUCH);
    assert_eq!(vmm.map(4 << 30, TOO_MUCH, more.fd(0)), Err(Errno::IO));
    assert!(served.last_error().contains("do not fit"));
    assert_open(&host, &served, DMA, SMALL, 1);
    assert_eq!(rustix::fs::fstat(&more.file).unwrap().st_blocks, 0);
    assert!(!fill(&mut vmm, 0, 0x1000, 1).faulted());
}
