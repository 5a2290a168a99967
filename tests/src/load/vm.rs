//! The VM, and its disk.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use farside_scripted_vmm::{
    device::Device,
    machine::Machine,
    nvme::{Controller, DRIVER_RAM, Doorbells, Polled},
    pci,
    ram::{Layout, PAGE, Ram},
    vectors::Vectors,
    virtio,
};

use super::{Random, TIMEOUT};
use crate::{Cluster, Daemon, MIB};

/// Pages of the disk that are used, and commands of a batch.
const PAGES: u64 = 2048;
const BATCH: u64 = 56;

/// A model, and how the VM drives it.
#[derive(Clone, Copy, Debug)]
pub enum Disk {
    /// An NVMe model.
    Nvme(Doorbells),
    /// A virtio-blk model.
    VirtioBlk {
        /// Whether the VM negotiates `VIRTIO_F_EVENT_IDX`.
        event_idx: bool,
    },
    /// The NVMe device of another vfio-user server, which is another farside.
    OfServer(Doorbells),
}

/// What is lent as a disk, by its path: an image, or a server's socket.
pub struct Medium {
    path: PathBuf,
    _server: Option<(Cluster, [Daemon; 2])>,
}

impl Disk {
    /// Makes what is lent.
    pub fn medium(self, cluster: &Cluster) -> Result<Medium> {
        const BYTES: u64 = 16 * MIB;
        if !matches!(self, Self::OfServer(_)) {
            let path = cluster.image("disk0", BYTES)?;
            return Ok(Medium {
                path,
                _server: None,
            });
        }
        let inner = cluster.another()?;
        let (lender, _) = inner.lend_disk(BYTES)?;
        let backend = inner.serve("inner", &["disk0"]).start()?;
        Ok(Medium {
            path: inner.directory().join("vm/inner/disk0.sock"),
            _server: Some((inner, [backend, lender])),
        })
    }

    /// Starts a lender of the disk, `disk0`.
    pub fn lend(self, cluster: &Cluster, medium: &Medium) -> Result<Daemon> {
        let disk = format!("disk0={}", medium.path.display());
        let source = match self {
            Self::Nvme(_) => "--nvme",
            Self::VirtioBlk { .. } => "--virtio-blk",
            Self::OfServer(_) => "--vfio-user",
        };
        cluster.lend(&[source, &disk])
    }
}

enum Driver {
    /// The controller, and its queue.
    Nvme(Box<(Controller, Polled)>),
    VirtioBlk(virtio::Disk),
}

/// What is done to a page, with data at this address.
#[derive(Clone, Copy)]
enum Op {
    Read(u64, u64),
    Write(u64, u64),
    Zero(u64),
    Flush,
}

const SECTORS: u64 = PAGE / 512;

impl Op {
    /// Its NVMe command, of blocks of 512 bytes.
    fn command(&self) -> [u8; 64] {
        let (opcode, page, address) = match *self {
            Self::Flush => (0, 0, 0),
            Self::Write(page, address) => (1, page, address),
            Self::Read(page, address) => (2, page, address),
            Self::Zero(page) => (8, page, 0),
        };
        let mut entry = [0; 64];
        entry[0] = opcode;
        entry[4] = 1;
        entry[24..32].copy_from_slice(&u64::to_le_bytes(address));
        entry[40..48].copy_from_slice(&(page * SECTORS).to_le_bytes());
        entry[48] = SECTORS as u8 - 1;
        entry
    }

    fn request(&self) -> virtio::Request {
        let bytes = PAGE as u32;
        match *self {
            Self::Flush => virtio::Request::Flush,
            Self::Write(page, address) => virtio::Request::Write {
                sector: page * SECTORS,
                address,
                bytes,
            },
            Self::Read(page, address) => virtio::Request::Read {
                sector: page * SECTORS,
                address,
                bytes,
            },
            Self::Zero(page) => virtio::Request::Zero {
                sector: page * SECTORS,
                sectors: SECTORS as u32,
            },
        }
    }
}

/// A VM and its disk.
pub struct Vm {
    machine: Machine,
    driver: Driver,
    /// The number in each page, which fills it.
    expected: Vec<u64>,
    written: u64,
    /// When batches began and ended.
    batches: Vec<(Instant, Instant)>,
}

fn buffer(n: u64) -> u64 {
    DRIVER_RAM.end + n * PAGE
}

impl Vm {
    /// VM `a` of the backend with this runtime directory. Its disk is taken to be empty.
    ///
    /// # Errors
    /// When the disk cannot be used.
    pub fn at(directory: &Path, disk: Disk) -> Result<Self> {
        let socket = directory.join("vm/a/disk0.sock");
        let mut device = Device::connect(&socket, TIMEOUT)?;
        let ram = Ram::new(Layout::new(64 * MIB, None, false)?)?;
        for block in ram.layout().blocks() {
            device.map(&ram, block)?;
        }
        device.reset()?;
        pci::place_bars(&mut device)?;
        pci::set_command(&mut device, pci::MEMORY | pci::BUS_MASTER)?;
        let vectors = Vectors::new(device.vectors())?;
        let mut machine = Machine {
            ram,
            device,
            vectors,
            timeout: TIMEOUT,
            early_interrupts: 0,
        };
        machine.device.enable_vectors(&machine.vectors)?;
        pci::enable_msix(&mut machine.device, true)?;
        let driver = match disk {
            Disk::Nvme(doorbells) | Disk::OfServer(doorbells) => {
                let mut controller = Controller::bring_up(&mut machine, 1, 1)?;
                let queue = controller.polled(&mut machine, doorbells)?;
                Driver::Nvme(Box::new((controller, queue)))
            }
            Disk::VirtioBlk { event_idx } => {
                Driver::VirtioBlk(virtio::Disk::bring_up(&mut machine, event_idx)?)
            }
        };
        Ok(Self {
            machine,
            driver,
            expected: vec![0; PAGES as usize],
            written: 0,
            batches: Vec::new(),
        })
    }

    /// Zeroes the disk, which a VM before may have written.
    ///
    /// # Errors
    /// When a command fails.
    pub fn clear(&mut self) -> Result<()> {
        let pages: Vec<_> = (0..PAGES).map(Op::Zero).collect();
        pages
            .chunks(BATCH as usize)
            .try_for_each(|ops| self.run(ops))
    }

    fn run(&mut self, ops: &[Op]) -> Result<()> {
        let machine = &mut self.machine;
        let (began, succeeded);
        match &mut self.driver {
            Driver::Nvme(driver) => {
                let entries: Vec<_> = ops.iter().map(Op::command).collect();
                began = Instant::now();
                succeeded = driver.1.run_raw(machine, &entries);
            }
            Driver::VirtioBlk(disk) => {
                let requests: Vec<_> = ops.iter().map(Op::request).collect();
                began = Instant::now();
                succeeded = disk.run(machine, &requests);
            }
        }
        self.batches.push((began, Instant::now()));
        let succeeded = succeeded?;
        ensure!(
            succeeded == ops.len(),
            "{} of {} commands failed",
            ops.len() - succeeded,
            ops.len()
        );
        Ok(())
    }

    /// Changes some pages, and reads some.
    ///
    /// # Errors
    /// When a command fails, or data is wrong.
    pub fn round(&mut self, random: &mut Random) -> Result<()> {
        let first = random.below(PAGES);
        let mut ops = Vec::new();
        for n in 0..BATCH {
            // Each page once: two writes of a page in flight have no order.
            let page = (first + n * 37) % PAGES;
            self.written += 1;
            match random.below(8) {
                0 => {
                    self.expected[page as usize] = 0;
                    ops.push(Op::Zero(page));
                }
                1 => ops.push(Op::Flush),
                _ => {
                    self.expected[page as usize] = self.written;
                    let data = self.written.to_le_bytes().repeat(PAGE as usize / 8);
                    self.machine.ram.write(buffer(n), &data)?;
                    ops.push(Op::Write(page, buffer(n)));
                }
            }
        }
        self.run(&ops)?;
        self.read((0..BATCH).map(|n| (first + n * 37) % PAGES).collect())
    }

    fn read(&mut self, pages: Vec<u64>) -> Result<()> {
        let mut ops = Vec::new();
        for (n, page) in (0..).zip(&pages) {
            self.machine.ram.write(buffer(n), &[0xa5; 512])?;
            ops.push(Op::Read(*page, buffer(n)));
        }
        self.run(&ops)?;
        for (n, page) in (0..).zip(pages) {
            let mut data = vec![0; PAGE as usize];
            self.machine.ram.read(buffer(n), &mut data)?;
            let expected = self.expected[page as usize].to_le_bytes();
            let is_right = data.chunks(8).all(|part| part == expected);
            ensure!(
                is_right,
                "page {page} has {:?}, and not {expected:?}",
                &data[..8]
            );
        }
        Ok(())
    }

    /// Everything, at the end.
    ///
    /// # Errors
    /// When a command fails, or data is wrong.
    pub fn check(&mut self) -> Result<()> {
        (0..PAGES)
            .step_by(32)
            .try_for_each(|first| self.read((first..first + 32).collect()))
    }

    /// The longest batch in each of these spans of time.
    pub fn longest(&self, spans: &[(Instant, Instant)]) -> Vec<Duration> {
        let of = |(from, to): &(Instant, Instant)| {
            let within = self.batches.iter().filter(|it| it.1 > *from && it.0 < *to);
            within.map(|(began, end)| *end - *began).max()
        };
        spans.iter().filter_map(of).collect()
    }

    /// How long the commands in flight at each kill took from then on.
    pub fn pauses(&self, kills: &[Instant]) -> Vec<Duration> {
        let of = |kill: &Instant| {
            let batch = self.batches.iter().find(|(_, end)| end > kill)?;
            Some(batch.1 - *kill)
        };
        kills.iter().filter_map(of).collect()
    }
}
