//! A client that shares more memory than its VM has.

use std::os::unix::fs::MetadataExt;

use farside_backend::Config;
use farside_fabric::NtbLimits;

use crate::{
    guest::{Ram, SMALL, enable, fill, small},
    host::{DMA, Host, Served, assert_closed, assert_open, dma_test},
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const OTHER: &str = "dma1";

#[test]
fn sparse_files_larger_than_the_vms_memory_are_not_populated() {
    let host = Host::lending(NtbLimits::default(), |_| {
        vec![dma_test(DMA), dma_test(OTHER)]
    });
    let served = Served::start(Config {
        memory: Some(64 * MIB),
        ..host.config("a", &[DMA, OTHER])
    });
    let mut vmm = served.client(DMA);
    let sparse = Ram::new(4 * GIB);
    vmm.map(0, 2 * GIB, sparse.fd(0)).unwrap();
    vmm.map(4 * GIB, 2 * GIB, sparse.fd(2 * GIB)).unwrap();
    vmm.reset().unwrap();
    assert!(!enable(&mut vmm));
    let error = served.last_error();
    for word in ["4 GiB", "64 MiB", "512 MiB"] {
        assert!(error.contains(word), "no {word:?} in {error}");
    }
    assert_closed(&host, &served, DMA, "leased");

    // A file that is small enough, and another one that comes while the device runs.
    vmm.unmap(0, 2 * GIB).unwrap();
    vmm.unmap(4 * GIB, 2 * GIB).unwrap();
    let ram = small(&mut vmm);
    assert!(enable(&mut vmm));
    vmm.map(4 * GIB, 2 * MIB, sparse.fd(0)).unwrap_err();
    assert_eq!(served.status().bytes_unreachable, 2 * MIB);
    assert!(fill(&mut vmm, 4 * GIB, 0x1000, 1).faulted());
    assert!(!fill(&mut vmm, 0, 0x1000, 1).faulted());
    vmm.unmap(4 * GIB, 2 * MIB).unwrap();
    assert_open(&host, &served, DMA, SMALL, 1);

    // The files of all devices of the VM count, each once.
    let mut other = served.client(OTHER);
    other.map(0, SMALL, ram.fd(0)).unwrap();
    other.reset().unwrap();
    assert!(enable(&mut other));
    let second = Ram::new(576 * MIB);
    other.map(4 * GIB, 2 * MIB, second.fd(0)).unwrap_err();
    assert!(fill(&mut other, 4 * GIB, 0x1000, 1).faulted());
    assert_eq!(second.file.metadata().unwrap().blocks(), 0);
    assert_eq!(sparse.file.metadata().unwrap().blocks(), 0);
}

/// Without a configured size, QEMU's is not known.
#[test]
fn a_vm_of_unknown_size_has_no_limit() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = Ram::new(2 * GIB);
    vmm.map(0, SMALL, ram.fd(0)).unwrap();
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
}
