//! The client against the server of the crate `vfio_user`.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::PathBuf,
    thread::JoinHandle,
};

use farside_irq_relay::{
    Action, IrqCounts, IrqData, IrqEventFd, IrqIndex, IrqRange, IrqTarget, SetIrqs,
};
use farside_vfio_user_client::{Client, ClientError, NoMemory, SparseArea};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vfio_bindings::bindings::vfio::{
    VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ,
    VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info, vfio_region_sparse_mmap_area,
};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion};

const PAGE: u64 = 4096;

#[derive(Default)]
struct Device {
    bar: Vec<u8>,
    mapped: Vec<(u64, u64, u64, bool)>,
    /// Index, start, count, descriptors.
    irqs: Vec<(u32, u32, u32, usize)>,
    resets: u32,
}

impl ServerBackend for Device {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if region != 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        data.copy_from_slice(&self.bar[offset as usize..][..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.bar[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn dma_map(
        &mut self,
        _: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> io::Result<()> {
        self.mapped.push((address, size, offset, fd.is_some()));
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        self.mapped.retain(|of| (of.0, of.1) != (address, size));
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        self.resets += 1;
        Ok(())
    }

    fn set_irqs(
        &mut self,
        index: u32,
        _flags: u32,
        start: u32,
        count: u32,
        fds: Vec<File>,
    ) -> io::Result<()> {
        self.irqs.push((index, start, count, fds.len()));
        Ok(())
    }
}

struct Running {
    _dir: tempfile::TempDir,
    path: PathBuf,
    thread: JoinHandle<Device>,
    _bar: OwnedFd,
}

fn serve() -> Running {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device");
    let bar = memfd_create("bar", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&bar, 2 * PAGE).unwrap();
    let rights = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    let regions = (0..9).map(|index| {
        let (size, flags, mmap_fd, sparse_areas) = match index {
            0 => {
                let area = vfio_region_sparse_mmap_area {
                    offset: PAGE,
                    size: PAGE,
                };
                let flags = VFIO_REGION_INFO_FLAG_MMAP | VFIO_REGION_INFO_FLAG_CAPS;
                let areas = vec![vfio_user::SparseArea { area }];
                (2 * PAGE, rights | flags, Some(bar.as_raw_fd()), areas)
            }
            7 => (256, rights, None, Vec::new()),
            _ => (0, 0, None, Vec::new()),
        };
        ServerRegion {
            region_info: vfio_region_info {
                argsz: size_of::<vfio_region_info>() as u32,
                flags,
                index,
                size,
                ..Default::default()
            },
            sparse_areas,
            mmap_fd,
        }
    });
    let irqs = (0..5).map(|index| IrqInfo {
        index,
        flags: 1,
        count: if index == 2 { 4 } else { 0 },
    });
    let server = Server::new(&path, true, irqs.collect(), regions.collect()).unwrap();
    let thread = std::thread::spawn(move || {
        let mut device = Device {
            bar: vec![7; 2 * PAGE as usize],
            ..Device::default()
        };
        server.run(&mut device).unwrap();
        device
    });
    Running {
        _dir: dir,
        path,
        thread,
        _bar: bar,
    }
}

#[test]
fn a_device_is_described_and_used() {
    let running = serve();
    let mut client = Client::connect(&running.path).unwrap();
    assert_eq!(client.device_info().unwrap().regions, 9);
    let bar = client.region_info(0).unwrap();
    assert_eq!(bar.size, 2 * PAGE);
    assert!(bar.file.is_some());
    let area = SparseArea {
        offset: PAGE,
        size: PAGE,
    };
    assert_eq!(bar.areas, Some(vec![area]));
    assert_eq!(client.region_info(7).unwrap().size, 256);
    assert_eq!(client.irq_count(2).unwrap(), 4);
    let mut data = [0; 4];
    let memory = &mut NoMemory;
    client.region_read(0, 8, &mut data, memory).unwrap();
    assert_eq!(data, [7; 4]);
    client.region_write(0, 8, &[1, 2, 3, 4], memory).unwrap();
    client.region_read(0, 8, &mut data, memory).unwrap();
    assert_eq!(data, [1, 2, 3, 4]);
    let refused = client.region_read(1, 0, &mut data, memory).unwrap_err();
    assert!(matches!(refused, ClientError::Refused { .. }), "{refused}");

    let ram = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
    ram.set_len(4 * PAGE).unwrap();
    client.dma_map(0, PAGE, (&ram, 2 * PAGE), true).unwrap();
    client.dma_map(1 << 32, PAGE, (&ram, 0), false).unwrap();
    client.dma_unmap(0, PAGE).unwrap();

    let counts = IrqCounts::new().with_msix(4).unwrap();
    let range = IrqRange::new(&counts, IrqIndex::Msix as u32, 0, 4).unwrap();
    let eventfd = || Some(IrqTarget::EventFd(IrqEventFd::new().unwrap()));
    let targets = vec![eventfd(), eventfd(), None, eventfd()];
    let request = SetIrqs::new(range, Action::Trigger, IrqData::Targets(targets)).unwrap();
    client.set_irqs(&request).unwrap();
    client.reset(memory).unwrap();

    drop(client);
    let device = running.thread.join().unwrap();
    assert_eq!(device.mapped, [(1 << 32, PAGE, 0, true)]);
    assert_eq!(device.resets, 1);
    // One descriptor a message is what this server takes.
    let expected = [(2, 0, 1, 1), (2, 1, 1, 1), (2, 2, 1, 0), (2, 3, 1, 1)];
    assert_eq!(device.irqs, expected);
}
