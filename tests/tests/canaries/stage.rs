//! The lender, the hostile VM and its neighbour.

use std::{ops::Range, os::unix::fs::FileExt, path::PathBuf};

use farside_devices::dma_test::{Command, MAX_LENGTH, reg, status};
use farside_scripted_vmm::{
    device::Device,
    machine::Machine,
    nvme::{Controller, DRIVER_RAM, Doorbells, Polled},
    pci,
    ram::{Block, HIGH, Layout, PAGE, Ram},
    vectors::Vectors,
};
use farside_tests::{Cluster, Daemon, MIB};

use crate::{TIMEOUT, canary::Canary, random::Random};

/// Memory of the NVMe driver for lists.
const LISTS: Range<u64> = DRIVER_RAM.end - 0x7_0000..DRIVER_RAM.end;

/// Where the RAM is mapped that is a small part of another file.
const SPARE_GPA: u64 = HIGH + 64 * MIB;

/// Number of operations.
#[derive(Debug, Default)]
pub struct Done {
    pub succeeded: u64,
    pub refused: u64,
}

pub struct Stage {
    random: Random,
    /// The VM's NVMe device and RAM.
    disk: Machine,
    _controller: Controller,
    queue: Polled,
    /// Its DMA test device.
    dma: Device,
    spare: Ram,
    mapped: Vec<Block>,
    canaries: Vec<Canary>,
    /// High RAM, while it is unmapped.
    unmapped: Option<Canary>,
    done: Done,
    neighbour: Neighbour,
    image: PathBuf,
    // Ended last.
    _backends: [Daemon; 2],
    _lender: Daemon,
    _cluster: Cluster,
}

/// A VM with the same lender, whose device may master the bus.
struct Neighbour {
    ram: Ram,
    device: Device,
}

/// Connects to a device, and enables it with these blocks of RAM.
fn enable(cluster: &Cluster, vm: &str, device: &str, ram: &[(&Ram, Block)]) -> Device {
    let socket = cluster.directory().join(format!("vm/{vm}/{device}.sock"));
    let mut device = Device::connect(&socket, TIMEOUT).unwrap();
    for (ram, block) in ram {
        device.map(ram, *block).unwrap();
    }
    device.reset().unwrap();
    pci::place_bars(&mut device).unwrap();
    pci::set_command(&mut device, pci::MEMORY | pci::BUS_MASTER).unwrap();
    let command = pci::command(&mut device).unwrap();
    assert_ne!(command & pci::BUS_MASTER, 0, "{}", cluster.story());
    device
}

/// What the file has beside its blocks.
fn gaps(ram: &Ram) -> Vec<Range<u64>> {
    let mut blocks = ram.layout().blocks();
    blocks.sort_by_key(|block| block.offset);
    let mut from = 0;
    let mut gaps = Vec::new();
    for block in blocks {
        gaps.push(from..block.offset);
        from = block.offset + block.len;
    }
    gaps.push(from..ram.layout().file_len());
    gaps
}

fn high(ram: &Ram) -> Block {
    ram.layout().blocks()[1]
}

impl Stage {
    pub fn new(seed: u64) -> Self {
        let cluster = Cluster::new().unwrap();
        let image = cluster.image("disk0", 16 * MIB).unwrap();
        let drive = format!("disk0={}", image.display());
        let devices = ["--nvme", &drive, "--dma-test", "dma0", "--dma-test", "dma1"];
        let lender = cluster.lend(&devices).unwrap();
        let hostile = cluster.serve("a", &["disk0", "dma0"]).start().unwrap();
        let victim = cluster.serve("b", &["dma1"]).start().unwrap();

        let layout = Layout::new(6 * MIB, Some(4 * MIB), false).unwrap();
        let ram = Ram::new(layout.with_gaps(MIB)).unwrap();
        let layout = Layout::new(16 * PAGE, None, false).unwrap();
        let spare = Ram::new(layout.with_gaps(64 * PAGE)).unwrap();
        let mut spare_block = spare.layout().blocks()[0];
        spare_block.gpa = SPARE_GPA;
        let mut blocks: Vec<_> = ram.layout().blocks();
        let mut parts: Vec<_> = blocks.iter().map(|block| (&ram, *block)).collect();
        parts.push((&spare, spare_block));
        blocks.push(spare_block);
        let dma = enable(&cluster, "a", "dma0", &parts);
        let device = enable(&cluster, "a", "disk0", &parts);

        let theirs = Ram::new(Layout::new(4 * MIB, Some(2 * MIB), false).unwrap()).unwrap();
        let own: Vec<_> = theirs.layout().blocks();
        let own: Vec<_> = own.into_iter().map(|block| (&theirs, block)).collect();
        let neighbour = enable(&cluster, "b", "dma1", &own);

        let canaries = vec![
            Canary::new("beside the VM's RAM", ram.file(), gaps(&ram)),
            Canary::new("beside the spare RAM", spare.file(), gaps(&spare)),
            Canary::new(
                "in the neighbour's RAM",
                theirs.file(),
                std::iter::once(0..theirs.layout().file_len()).collect(),
            ),
        ];
        let vectors = Vectors::new(device.vectors()).unwrap();
        let mut disk = Machine {
            ram,
            device,
            vectors,
            timeout: TIMEOUT,
            early_interrupts: 0,
        };
        disk.device.enable_vectors(&disk.vectors).unwrap();
        pci::enable_msix(&mut disk.device, true).unwrap();
        let mut controller = Controller::bring_up(&mut disk, 1, 1).unwrap();
        let queue = controller.polled(&mut disk, Doorbells::Registers).unwrap();
        Self {
            random: Random::new(seed),
            disk,
            _controller: controller,
            queue,
            dma,
            spare,
            mapped: blocks,
            canaries,
            unmapped: None,
            done: Done::default(),
            neighbour: Neighbour {
                ram: theirs,
                device: neighbour,
            },
            image,
            _backends: [hostile, victim],
            _lender: lender,
            _cluster: cluster,
        }
    }

    /// Takes high RAM from both devices; from then on it is a canary.
    pub fn unmap_high(&mut self) {
        let block = high(&self.disk.ram);
        self.dma.unmap(block).unwrap();
        self.disk.device.unmap(block).unwrap();
        self.mapped.retain(|mapped| *mapped != block);
        let range = block.offset..block.offset + block.len;
        let file = self.disk.ram.file();
        self.unmapped = Some(Canary::new("in unmapped RAM", file, vec![range]));
    }

    /// Gives it back.
    pub fn map_high(&mut self) {
        if self.unmapped.take().is_none() {
            return;
        }
        let block = high(&self.disk.ram);
        let zeros = vec![0; block.len as usize];
        self.disk.ram.write(block.gpa, &zeros).unwrap();
        self.map(block);
    }

    fn map(&mut self, block: Block) {
        self.dma.map(&self.disk.ram, block).unwrap();
        self.disk.device.map(&self.disk.ram, block).unwrap();
        self.mapped.push(block);
    }

    fn gpas(&self) -> Vec<Range<u64>> {
        self.mapped.iter().map(Block::gpas).collect()
    }

    /// Whether all of a range is mapped; blocks do not touch.
    fn is_mapped(&self, address: u64, len: u64) -> bool {
        let end = address.saturating_add(len);
        let mut blocks = self.mapped.iter().map(Block::gpas);
        blocks.any(|gpas| gpas.start <= address && end <= gpas.end)
    }

    /// `count` random commands, all in flight at once, with random lists.
    pub fn nvme_commands(&mut self, count: u64) {
        let (gpas, random) = (self.gpas(), &mut self.random);
        for page in LISTS.step_by(PAGE as usize) {
            let mut list = [0; PAGE as usize];
            let sgl = random.below(2) == 0;
            for entry in list.chunks_mut(16) {
                if sgl {
                    entry.copy_from_slice(&random.sgl(&gpas, LISTS));
                } else {
                    entry[..8].copy_from_slice(&random.prp(&gpas).to_le_bytes());
                    entry[8..].copy_from_slice(&random.prp(&gpas).to_le_bytes());
                }
            }
            self.disk.ram.write(page, &list).unwrap();
        }
        let entries: Vec<_> = (0..count).map(|_| random.nvme(&gpas, LISTS)).collect();
        let succeeded = self.queue.run_raw(&mut self.disk, &entries).unwrap() as u64;
        self.done.succeeded += succeeded;
        self.done.refused += count - succeeded;
    }

    /// A random command of the DMA test device, whose result is compared with the mappings.
    pub fn dma_command(&mut self) {
        let commands = [
            Command::Copy,
            Command::Fill,
            Command::Checksum,
            Command::Read,
            Command::Write,
        ];
        let command = self.random.one_of(&commands);
        let len = match command {
            Command::Read | Command::Write => 1 << self.random.below(4),
            _ => self.random.length(),
        };
        let gpas = self.gpas();
        let source = self.random.address(&gpas, len.into());
        let target = self.random.address(&gpas, len.into());
        let found = self.command(command, source, target, len);
        let used = match command {
            Command::Copy => vec![source, target],
            Command::Checksum | Command::Read => vec![source],
            _ => vec![target],
        };
        let len = u64::from(len);
        let invalid = len == 0
            || len > MAX_LENGTH.into()
            || used.iter().any(|at| at.checked_add(len - 1).is_none());
        let mapped = used.iter().all(|at| self.is_mapped(*at, len));
        let expected = match (invalid, mapped) {
            (true, _) => status::REJECTED,
            (false, true) => status::DONE,
            (false, false) => status::DONE | status::FAULT,
        };
        assert_eq!(
            found, expected,
            "{command:?} of {len:#x} bytes, {source:#x} to {target:#x}; mapped are {gpas:#x?}"
        );
        match found {
            status::DONE => self.done.succeeded += 1,
            _ => self.done.refused += 1,
        }
    }

    /// Has the DMA test device do a command. Returns its status.
    fn command(&mut self, command: Command, source: u64, target: u64, len: u32) -> u32 {
        let pattern = self.random.next() << 32;
        let doorbell = u64::from(command as u32) << 32;
        for (at, value) in [
            // With CONTROL, which becomes 0.
            (reg::STATUS, u64::from(u32::MAX)),
            (reg::SRC, source),
            (reg::DST, target),
            // With PATTERN.
            (reg::LENGTH, pattern | u64::from(len)),
            // With VECTOR.
            (reg::VECTOR, doorbell),
        ] {
            self.dma.write(0, at, &value.to_le_bytes()).unwrap();
        }
        let deadline = std::time::Instant::now() + TIMEOUT;
        loop {
            let status = self.dma.load(0, reg::STATUS).unwrap();
            if status & status::BUSY == 0 {
                return status;
            }
            assert!(
                std::time::Instant::now() < deadline,
                "{command:?} of {len:#x} bytes, {source:#x} to {target:#x}, does not end"
            );
        }
    }

    /// Checks that no canary was changed, or copied to RAM or to the medium.
    pub fn check(&self) -> Result<(), String> {
        let canaries = || self.canaries.iter().chain(&self.unmapped);
        canaries().try_for_each(Canary::check)?;
        for block in &self.mapped {
            let file = match block.gpa {
                SPARE_GPA => self.spare.file(),
                _ => self.disk.ram.file(),
            };
            let mut memory = vec![0; block.len as usize];
            file.read_exact_at(&mut memory, block.offset).unwrap();
            let what = format!("the VM's RAM from {:#x} on", block.gpa);
            canaries().try_for_each(|canary| canary.check_unread(&what, &memory))?;
        }
        let image = std::fs::read(&self.image).unwrap();
        canaries().try_for_each(|canary| canary.check_unread("the medium", &image))
    }

    /// Checks that the devices of both VMs still work.
    pub fn finish(mut self) -> Done {
        self.check().unwrap();
        let target = DRIVER_RAM.end;
        let found = self.command(Command::Fill, 0, target, PAGE as u32);
        assert_eq!(found, status::DONE);
        let mut identity = [0; 4];
        let neighbour = &mut self.neighbour;
        neighbour.device.read(0, reg::ID, &mut identity).unwrap();
        assert_eq!(&identity, b"FSDT");
        let command = pci::command(&mut neighbour.device).unwrap();
        assert_ne!(command & pci::BUS_MASTER, 0);
        let len = neighbour.ram.layout().total();
        let checksum = u64::from(Command::Checksum as u32) << 32;
        for (at, value) in [
            (reg::SRC, 0),
            (reg::LENGTH, len / 2),
            (reg::VECTOR, checksum),
        ] {
            neighbour.device.write(0, at, &value.to_le_bytes()).unwrap();
        }
        let deadline = std::time::Instant::now() + TIMEOUT;
        while neighbour.device.load(0, reg::STATUS).unwrap() != status::DONE {
            assert!(std::time::Instant::now() < deadline, "the neighbour's DMA");
        }
        self.done
    }

    /// Maps a page of the canary beside the spare RAM. Returns its address.
    fn map_canary(&mut self) -> u64 {
        let block = Block {
            gpa: SPARE_GPA + 2 * MIB,
            len: PAGE,
            offset: 0,
        };
        self.dma.map(&self.spare, block).unwrap();
        block.gpa
    }

    pub fn map_canary_and_write(&mut self) {
        let canary = self.map_canary();
        let found = self.command(Command::Fill, 0, canary + 8, 1);
        assert_eq!(found, status::DONE);
    }

    pub fn map_canary_and_read(&mut self) {
        let canary = self.map_canary();
        let found = self.command(Command::Copy, canary + 3, DRIVER_RAM.end + 1, 15);
        assert_eq!(found, status::DONE);
    }
}
