//! Device-specific quirks, with a server of the crate `vfio_user` that has the ids of a graphics adapter.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
};

use farside_pci::{Bar, BarKind, ConfigImage, regs::CAP_ID_MSI};
use farside_scripted_vmm::device::{CONFIG, Device};
use farside_tests::{Cluster, MIB};
use rustix::{
    fs::{MemfdFlags, memfd_create},
    process::{Signal, kill_process},
};
use vfio_bindings::bindings::vfio::{
    VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ,
    VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info, vfio_region_sparse_mmap_area,
};
use vfio_user::{
    DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion, SparseArea,
};

use crate::connect;

/// Where its BAR 0 shows configuration space, and how many bytes.
const MIRROR: u64 = 0x8_8000;
const MIRRORED: u64 = 4096;
/// Its MSI capability.
const MSI: usize = 0x68;

/// A register outside capabilities, by which drivers of newer devices acknowledge an interrupt.
const REARM: u64 = 0x704;
/// What the device has in its mirror where no test expects it.
const PATTERN: u8 = 0xa5;

/// A device whose memory is a file, with the writes that it was sent: region, offset, data.
struct Gpu {
    config: ConfigImage,
    memory: File,
    writes: Vec<(u32, u64, Vec<u8>)>,
}

impl Gpu {
    fn new() -> Self {
        let kind = BarKind::Memory32 {
            prefetchable: false,
        };
        let mut bars = [const { None }; 6];
        bars[0] = Some(Bar::new(MIB, kind));
        let mut config = ConfigImage::endpoint(0x10de, 0x1eb8, 0x03_00_00, &bars);
        config
            .add_capability(MSI, CAP_ID_MSI)
            .set_u16(MSI + 2, 0x80)
            .add_express(0x78, 1)
            // An extended capability, AER.
            .set_u32(0x100, 0x1 | 1 << 16);
        let memory = File::from(memfd_create("gpu", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MIB).unwrap();
        memory
            .write_all_at(&[PATTERN; MIRRORED as usize], MIRROR)
            .unwrap();
        Self {
            config,
            memory,
            writes: Vec::new(),
        }
    }

    fn server(&self, path: &Path) -> Server {
        let rights = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
        let regions = (0..9).map(|index| {
            let (size, flags, mmap_fd) = match index {
                0 => {
                    let flags = VFIO_REGION_INFO_FLAG_MMAP | VFIO_REGION_INFO_FLAG_CAPS;
                    (MIB, rights | flags, Some(self.memory.as_raw_fd()))
                }
                CONFIG => (4096, rights, None),
                _ => (0, 0, None),
            };
            // This server sends the file along with areas only.
            let area = vfio_region_sparse_mmap_area { offset: 0, size };
            let areas = mmap_fd.map(|_| SparseArea { area });
            let region_info = vfio_region_info {
                argsz: size_of::<vfio_region_info>() as u32,
                flags,
                index,
                size,
                ..Default::default()
            };
            ServerRegion {
                region_info,
                sparse_areas: areas.into_iter().collect(),
                mmap_fd,
            }
        });
        let irqs = (0..5).map(|index| IrqInfo {
            index,
            flags: 1,
            count: u32::from(index == 1),
        });
        Server::new(path, true, irqs.collect(), regions.collect()).unwrap()
    }
}

impl ServerBackend for Gpu {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if region == CONFIG {
            data.copy_from_slice(&self.config[offset as usize..][..data.len()]);
            return Ok(());
        }
        self.memory.read_exact_at(data, offset)
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.writes.push((region, offset, data.to_vec()));
        Ok(())
    }

    fn dma_map(
        &mut self,
        _: DmaMapFlags,
        _: u64,
        _: u64,
        _: u64,
        _: Option<File>,
    ) -> io::Result<()> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn set_irqs(&mut self, _: u32, _: u32, _: u32, _: u32, _: Vec<File>) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_graphics_adapter_shows_the_guests_configuration_space() {
    let cluster = Cluster::new().unwrap();
    let socket = cluster.directory().join("gpu.sock");
    let mut gpu = Gpu::new();
    let server = gpu.server(&socket);
    let server = std::thread::spawn(move || {
        server.run(&mut gpu).unwrap();
        gpu
    });
    let argument = format!("gpu0={}", socket.display());
    let lender = cluster.lend(&["--vfio-user", &argument]).unwrap();
    let backend = cluster
        .serve("a", &["gpu0"])
        .args(&["--keeper"])
        .start()
        .unwrap();
    let (mut device, ram) = connect(&cluster.directory().join("vm/a/gpu0.sock"));

    // The rest of the BAR is reached without a trap.
    let areas = device.areas().into_iter().filter(|area| area.mapped);
    let areas: Vec<_> = areas.map(|area| (area.offset, area.size)).collect();
    let rest = MIRROR + MIRRORED;
    assert_eq!(areas, [(0, MIRROR), (rest, MIB - rest)]);

    let through = |device: &mut Device, at: u64, len: usize| {
        let (mut config, mut bar) = (vec![0; len], vec![0; len]);
        device.read(CONFIG, at, &mut config).unwrap();
        device.read(0, MIRROR + at, &mut bar).unwrap();
        assert_eq!(bar, config, "{at:#x}");
        bar
    };
    for at in (0..0x100).step_by(4) {
        through(&mut device, at, 4);
    }
    assert_eq!(through(&mut device, 0, 4), [0xde, 0x10, 0xb8, 0x1e]);
    through(&mut device, 0x100, 4);
    let mut register = [0; 4];
    device.read(0, MIRROR + REARM, &mut register).unwrap();
    assert_eq!(register, [PATTERN; 4]);

    // A write is one to the guest's configuration space.
    device.write(0, MIRROR + 0x3c, &[0x5a]).unwrap();
    assert_eq!(through(&mut device, 0x3c, 1), [0x5a]);
    // The next backend finds it, too.
    device.write(0, MIRROR + 0x3c, &[0x5b]).unwrap();
    kill_process(backend.backend().unwrap(), Signal::KILL).unwrap();
    assert_eq!(through(&mut device, 0x3c, 1), [0x5b]);
    // These acknowledge an interrupt.
    device.write(0, MIRROR + MSI as u64, &[0xff]).unwrap();
    assert_eq!(through(&mut device, MSI as u64, 1), [CAP_ID_MSI]);
    device.write(0, MIRROR + REARM, &[0xff; 4]).unwrap();
    // A register beside it, which traps only because the VMM has it trap.
    device.write(0, rest, &[1, 2, 3, 4]).unwrap();
    // Writes are posted: a read after them has passed them.
    device.read(0, rest, &mut [0; 4]).unwrap();

    drop((device, ram));
    cluster.wait_free("gpu0").unwrap();
    drop((backend, lender));
    let writes = server.join().unwrap().writes;
    let (to_config, to_bar): (Vec<_>, Vec<_>) = writes.into_iter().partition(|it| it.0 == CONFIG);
    let expected = [
        (0, MIRROR + MSI as u64, vec![0xff]),
        (0, MIRROR + REARM, vec![0xff; 4]),
        (0, rest, vec![1, 2, 3, 4]),
    ];
    assert_eq!(to_bar, expected);
    // The lender's own: BARs, command and device control.
    let own = |offset: u64| [0x10, 0x04, 0x80].contains(&offset);
    assert!(to_config.iter().all(|it| own(it.1)), "{to_config:x?}");
}
