//! The devices of one VM share its pinned RAM and its windows.

use std::{fs, os::unix::fs::MetadataExt};

use farside_devices::dma_test::Command;
use farside_fabric::NtbLimits;

use crate::{
    guest::{Job, MEMORY, Ram, SMALL, enable, fill, run, set_command},
    host::{DEADLINE, DMA, Host, Served, assert_closed, assert_open, dma_test, until},
    lender_loss::{Kind, Mute, Muted},
    vmm::Vmm,
};

const OTHER: &str = "dma1";
const MIB: u64 = 1 << 20;

/// A lender of two devices, with LUT entries for one set of the windows of a VM.
fn host() -> Host {
    let limits = NtbLimits {
        bar_size: SMALL,
        lut_entries: 4,
        ..NtbLimits::default()
    };
    Host::lending(limits, |_| vec![dma_test(DMA), dma_test(OTHER)])
}

/// A client that has mapped `ram`, in two pieces as a PC's RAM is, and reset the device.
fn client(served: &Served, device: &str, ram: &Ram) -> Vmm {
    let mut vmm = served.client(device);
    for (start, end) in [(0, 0xa_0000), (MIB, SMALL)] {
        vmm.map(start, end - start, ram.fd(start)).unwrap();
    }
    vmm.reset().unwrap();
    vmm
}

const PINNED: u64 = SMALL - MIB + 0xa_0000;

/// Bytes of `ram` that this process, in which the backend is, has mapped locked.
fn locked(ram: &Ram) -> u64 {
    let inode = ram.file.metadata().unwrap().ino().to_string();
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut bytes, mut size) = (0, None);
    for line in smaps.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            [range, _, _, _, found, ..] if range.contains('-') => {
                let (start, end) = range.split_once('-').unwrap();
                let [start, end] = [start, end].map(|it| u64::from_str_radix(it, 16).unwrap());
                size = (found == inode).then_some(end - start);
            }
            ["VmFlags:", ref flags @ ..] if flags.contains(&"lo") => {
                bytes += size.unwrap_or(0);
            }
            _ => {}
        }
    }
    bytes
}

#[test]
fn ram_is_pinned_and_windows_are_open_once_for_two_devices() {
    let host = host();
    let served = Served::start(host.config("a", &[DMA, OTHER]));
    let ram = Ram::new(SMALL);
    let mut first = client(&served, DMA, &ram);
    let mut second = client(&served, OTHER, &ram);
    // At the same time, as the drivers of a guest with several CPUs do.
    std::thread::scope(|scope| {
        for vmm in [&mut first, &mut second] {
            scope.spawn(move || assert!(enable(vmm)));
        }
    });
    let devices = served.full_status().devices;
    for device in &devices {
        assert_eq!(device.bytes_pinned, PINNED, "{device:?}");
        assert_eq!((device.dma_windows, device.lut_entries), (1, 4));
    }
    // Nothing where the memlock limit forbids it.
    assert_eq!(locked(&ram), devices[0].bytes_locked);
    for (vmm, byte) in [(&mut first, 1), (&mut second, 2)] {
        assert!(!fill(vmm, MIB, 0x1000, byte).faulted());
        ram.assert_filled(MIB, 0x1000, byte);
    }
}

#[test]
fn the_release_of_one_device_leaves_the_other_its_memory() {
    let host = host();
    let served = Served::start(host.config("a", &[DMA, OTHER]));
    let ram = Ram::new(SMALL);
    let mut first = client(&served, DMA, &ram);
    let mut second = client(&served, OTHER, &ram);
    assert!(enable(&mut first) && enable(&mut second));
    let once = locked(&ram);

    set_command(&mut first, MEMORY);
    assert_closed(&host, &served, DMA, "leased");
    assert_eq!(locked(&ram), once);
    assert!(!fill(&mut second, MIB, 0x1000, 1).faulted());
    assert!(fill(&mut first, MIB, 0x1000, 2).faulted());
    ram.assert_filled(MIB, 0x1000, 1);

    // It finds everything again; then its client is gone without a word.
    assert!(enable(&mut first));
    assert_open(&host, &served, DMA, PINNED, 1);
    drop(first);
    until("the device is returned", || {
        host.lender_status(DMA).entry.borrowed_by.is_none()
    });
    assert_eq!(locked(&ram), once);
    let job = Job {
        src: MIB,
        dst: 2 * MIB,
        length: 0x1000,
        ..Job::default()
    };
    assert!(!run(&mut second, Command::Copy, job).faulted());
    ram.assert_filled(2 * MIB, 0x1000, 1);

    // Each device unmaps for itself.
    second.unmap(MIB, SMALL - MIB).unwrap();
    assert!(fill(&mut second, MIB, 0x1000, 3).faulted());
    set_command(&mut second, MEMORY);
    assert_eq!(locked(&ram), 0);
}

#[test]
fn an_unmap_takes_memory_from_its_device_although_another_maps_it() {
    let host = host();
    let served = Served::start(host.config("a", &[DMA, OTHER]));
    let ram = Ram::new(SMALL);
    let mut first = client(&served, DMA, &ram);
    let mut second = client(&served, OTHER, &ram);
    assert!(enable(&mut first) && enable(&mut second));
    first.unmap(0, 0xa_0000).unwrap();
    assert!(fill(&mut first, 0, 0x1000, 1).faulted());
    assert!(!fill(&mut second, 0, 0x1000, 2).faulted());
    ram.assert_filled(0, 0x1000, 2);
    // Other memory at the same addresses, as behind a vIOMMU.
    let private = Ram::new(SMALL);
    first.map(0, 0xa_0000, private.fd(0)).unwrap();
    assert!(!fill(&mut first, 0, 0x1000, 3).faulted());
    private.assert_filled(0, 0x1000, 3);
    ram.assert_filled(0, 0x1000, 2);
}

/// The bus-master enable of one device is held by its lender. That of another device of the VM, which
/// pins the same RAM, is not.
#[test]
fn a_lender_that_stalls_holds_up_no_other_device_of_the_vm() {
    let host = Host::lending(NtbLimits::default(), |_| vec![dma_test(OTHER)]);
    let socket = host.directory("stalls.sock");
    let stalls = Muted::start(socket.clone(), Mute::Until(Kind::OpenWindow));
    let mut served = Served::start(farside_backend::Config {
        lenders: vec![host.lender(), socket.into()],
        discovery: None,
        // The stalled enable fails after that.
        open_timeout: DEADLINE,
        ..host.config("a", &[DMA, OTHER])
    });
    let ram = Ram::new(SMALL);
    let mut first = client(&served, DMA, &ram);
    let mut second = client(&served, OTHER, &ram);
    std::thread::scope(|scope| {
        let stalled = scope.spawn(|| enable(&mut first));
        while stalls.asked.recv_timeout(DEADLINE).unwrap() != Kind::OpenWindow {}
        assert!(enable(&mut second));
        assert!(!fill(&mut second, MIB, 0x1000, 1).faulted());
        stalls.answer.send(()).unwrap();
        assert!(stalled.join().unwrap(), "it waited for the other's lender");
    });
    ram.assert_filled(MIB, 0x1000, 1);
    drop(first);
    let leave = stalls.hung_up.recv_timeout(DEADLINE).unwrap();
    leave.send(()).unwrap();
    served.stop();
    stalls.thread.join().unwrap();
}

#[test]
fn devices_of_two_vms_share_nothing() {
    let host = host();
    let ram = Ram::new(SMALL);
    let served = Served::start(host.config("a", &[DMA]));
    let mut first = client(&served, DMA, &ram);
    assert!(enable(&mut first));
    let other = Served::start(host.config("b", &[OTHER]));
    let mut second = client(&other, OTHER, &ram);
    assert!(!enable(&mut second));
    let error = other.last_error();
    assert!(error.contains("of 4, 0 are free"), "{error}");
    set_command(&mut first, MEMORY);
    assert!(enable(&mut second));
}
