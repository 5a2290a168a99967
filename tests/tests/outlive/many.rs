//! Many VMs of one lender, which borrow and return their devices all the time while processes are killed.
//!
//! Run it as `cargo xtask soak --only many-vms`; `FARSIDE_SECONDS` is how long it lasts, an hour if it is not set. It prints
//! borrows and interrupts for each second, and what the lender uses at the start, in the middle and at the end.

use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_devices::dma_test::{Command, control, reg, status};
use farside_scripted_vmm::{
    device::Device,
    machine::Machine,
    nvme::{Controller, DRIVER_RAM, Opcode, Transfer},
    pci,
    ram::{Layout, PAGE, Ram},
    vectors::Vectors,
};
use farside_tests::{Cluster, Daemon, MIB, load::Random};
use rustix::{
    fs::OFlags,
    process::{Signal, kill_process},
};

use super::Story;

const DISKS: usize = 50;
const DMA_TESTERS: usize = 10;

/// Sixty VMs on two CPUs are slow, and a lender that ends is started again meanwhile.
const PATIENT: Duration = Duration::from_secs(60);

const RAM: u64 = 4 * MIB;

/// Vectors of a VM: those of a DMA test device would be more descriptors than a process may have.
const VECTORS: u32 = 8;

/// What has happened.
#[derive(Default)]
struct Counts {
    borrows: AtomicU64,
    interrupts: AtomicU64,
    resets: AtomicU64,
    bytes: AtomicU64,
    kills: AtomicU64,
    /// Lenders that were killed or started.
    lenders: AtomicU64,
    /// How often a device was lost: a DMA test device whose process was killed, or any that was borrowed while there was
    /// no lender.
    lost: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn connect(cluster: &Cluster, vm: &str, device: &str) -> Result<Machine> {
    let socket = cluster.directory().join(format!("vm/{vm}/{device}.sock"));
    let deadline = Instant::now() + PATIENT;
    let device = loop {
        // A client whose backend is killed before it is recorded is not served.
        match Device::connect(&socket, PATIENT) {
            Ok(device) => break device,
            Err(error) => ensure!(Instant::now() < deadline, "{error:#}"),
        }
    };
    Ok(Machine {
        vectors: Vectors::new(device.vectors().min(VECTORS))?,
        ram: Ram::new(Layout::new(RAM, None, false)?)?,
        device,
        timeout: PATIENT,
        early_interrupts: 0,
    })
}

fn interrupts(machine: &Machine) -> u64 {
    machine.vectors.counts().values().sum()
}

/// Resets the device and has it borrowed.
fn borrow(machine: &mut Machine, counts: &Counts) -> Result<()> {
    let device = &mut machine.device;
    device.reset()?;
    add(&counts.resets, 1);
    pci::place_bars(device)?;
    device.enable_vectors(&machine.vectors)?;
    pci::enable_msix(device, true)?;
    pci::set_command(device, pci::MEMORY | pci::BUS_MASTER)?;
    Ok(())
}

fn give_back(machine: &mut Machine, counts: &Counts) -> Result<()> {
    add(&counts.borrows, 1);
    let device = &mut machine.device;
    device.disable_vectors()?;
    pci::set_command(device, pci::MEMORY)
}

/// Borrows a disk, writes and reads, and returns it, some times.
fn use_disk(machine: &mut Machine, random: &mut Random, counts: &Counts) -> Result<()> {
    borrow(machine, counts)?;
    let mut controller = Controller::bring_up(machine, 1, 1)?;
    for _ in 0..1 + random.below(8) {
        let word = random.below(u64::MAX).to_le_bytes();
        let data = word.repeat(PAGE as usize / 8);
        let offset = random.below(MIB / PAGE) * PAGE;
        machine.ram.write(DRIVER_RAM.end, &data)?;
        for (opcode, address) in [
            (Opcode::Write, DRIVER_RAM.end),
            (Opcode::Read, DRIVER_RAM.end + PAGE),
        ] {
            let transfer = Transfer {
                opcode,
                offset,
                bytes: PAGE,
                address,
            };
            controller.transfer(machine, &transfer)?;
            add(&counts.bytes, PAGE);
        }
        let mut read = vec![0; data.len()];
        machine.ram.read(DRIVER_RAM.end + PAGE, &mut read)?;
        ensure!(read == data, "other data at {offset:#x}");
        if random.below(4) == 0 {
            controller.flush(machine)?;
        }
    }
    if random.below(2) == 0 {
        controller.shut_down(machine)?;
    }
    give_back(machine, counts)
}

/// Has a DMA test device fill RAM.
fn use_dma_tester(machine: &mut Machine, random: &mut Random, counts: &Counts) -> Result<()> {
    const VECTOR: u16 = 1;
    borrow(machine, counts)?;
    for _ in 0..1 + random.below(8) {
        let pattern = random.below(1 << 32) as u32;
        let length = (4 + random.below(16 << 10)) as u32 & !3;
        for (at, value) in [
            (reg::CONTROL, control::INTERRUPT_WHEN_DONE),
            (reg::VECTOR, VECTOR.into()),
            (reg::DST, DRIVER_RAM.end as u32),
            (reg::DST + 4, 0),
            (reg::LENGTH, length),
            (reg::PATTERN, pattern),
            (reg::COMMAND, Command::Fill as u32),
        ] {
            machine.device.store(0, at, value)?;
        }
        // Short: a device that was lost raises none.
        let until = Instant::now() + Duration::from_secs(10);
        let raised = machine.vectors.wait(VECTOR, until)?;
        ensure!(raised == 1, "{raised} interrupts");
        let state = machine.device.load(0, reg::STATUS)?;
        ensure!(state & status::FAULT == 0, "status {state:#x}");
        let mut data = vec![0; length as usize];
        machine.ram.read(DRIVER_RAM.end, &mut data)?;
        let is_filled = data.chunks(4).all(|word| word == pattern.to_le_bytes());
        ensure!(is_filled, "{length} bytes are not filled");
        add(&counts.bytes, length.into());
    }
    give_back(machine, counts)
}

/// Whether there was a lender all the time since `counts.lenders` was `before`.
fn had_lender(before: u64, counts: &Counts) -> bool {
    before.is_multiple_of(2) && before == get(&counts.lenders)
}

/// One life of a VM.
fn live(cluster: &Cluster, vm: &str, id: &str, random: &mut Random, counts: &Counts) -> Result<()> {
    let mut machine = connect(cluster, vm, id)?;
    let blocks = machine.ram.layout().blocks();
    for block in &blocks {
        machine.device.map(&machine.ram, *block)?;
    }
    let (is_disk, mut lost) = (id.starts_with("disk"), 0);
    for _ in 0..1 + random.below(4) {
        let (before, lenders) = (interrupts(&machine), get(&counts.lenders));
        let used = match is_disk {
            true => use_disk(&mut machine, random, counts),
            false => use_dma_tester(&mut machine, random, counts),
        };
        add(&counts.interrupts, interrupts(&machine) - before);
        match used {
            Ok(()) => {}
            // The reset of the next turn brings it back.
            Err(_) if lost < 3 && (!is_disk || !had_lender(lenders, counts)) => {
                lost += 1;
                add(&counts.lost, 1);
                // Else all turns may be over before the next lender is there.
                let until = Instant::now() + PATIENT;
                while !get(&counts.lenders).is_multiple_of(2) && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(10));
                }
                machine.vectors = Vectors::new(machine.vectors.len())?;
            }
            Err(error) => return Err(error),
        }
    }
    for block in &blocks {
        machine.device.unmap(*block)?;
    }
    machine.device.close();
    Ok(())
}

/// The descriptors that a process has opened. What it inherits from this one, whose VMMs have memory of BARs that is passed
/// on, has no `O_CLOEXEC`.
fn opened(pid: u32) -> Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // It may be closed meanwhile.
        let info = fs::read_to_string(entry?.path()).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
        count += usize::from(flags.is_some_and(|it| it & OFlags::CLOEXEC.bits() != 0));
    }
    Ok(count)
}

/// Of a process: bytes of memory that are its own, and descriptors.
#[derive(Clone, Copy, Debug)]
struct Use {
    resident: u64,
    descriptors: usize,
}

impl Use {
    fn of(pid: u32) -> Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find(|line| line.starts_with("RssAnon:"));
        let mut words = line.context("no RssAnon")?.split_whitespace();
        let kib: u64 = words.nth(1).context("no number")?.parse()?;
        Ok(Self {
            resident: kib << 10,
            descriptors: opened(pid)?,
        })
    }
}

fn lend_all(cluster: &Cluster) -> Daemon {
    let mut args = Vec::new();
    for n in 0..DISKS {
        let image = cluster.directory().join(format!("disk{n}.img"));
        args.extend(["--nvme".into(), format!("disk{n}={}", image.display())]);
    }
    for n in 0..DMA_TESTERS {
        args.extend(["--dma-test".into(), format!("dma{n}")]);
    }
    // An adapter with room for all devices at once.
    let fabric = "[fabric]\nrequester-entries = 256\nlut-entries = 4096\n";
    let config = cluster.file("lender.toml", fabric).unwrap();
    args.extend(["--config".into(), config.display().to_string()]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    cluster.lend(&args).unwrap()
}

/// Waits until no device has a lease.
fn all_free(cluster: &Cluster, ids: &[String]) {
    cluster
        .wait_status("end of all leases", PATIENT, |status| {
            for id in ids {
                let lent = status.lent(id)?;
                if lent.borrowed_by.is_some() || !lent.is_closed() {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })
        .unwrap();
}

/// What lender and backends use without a lease.
fn idle_use(lender: &Daemon, keepers: &[Daemon]) -> (Use, usize, usize) {
    // A worker that has returned its device ends soon.
    let deadline = Instant::now() + PATIENT;
    while !lender.workers().is_empty() {
        assert!(
            Instant::now() < deadline,
            "{} workers",
            lender.workers().len()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let descriptors = |daemon: &Daemon| Use::of(daemon.pid()).unwrap().descriptors;
    let most = keepers.iter().map(descriptors).max();
    let all = keepers.iter().map(descriptors).sum();
    (Use::of(lender.pid()).unwrap(), most.unwrap_or(0), all)
}

#[test]
#[ignore = "takes an hour, or FARSIDE_SECONDS; run by cargo xtask soak"]
fn sixty_vms_borrow_and_return_while_processes_are_killed() {
    let seconds = std::env::var("FARSIDE_SECONDS");
    let seconds = seconds.map_or(3600, |it| it.parse().expect("a number in FARSIDE_SECONDS"));
    let time = Duration::from_secs(seconds);
    let cluster = Cluster::in_memory().unwrap();
    let _story = Story(&cluster);
    let disks = (0..DISKS).map(|n| format!("disk{n}"));
    let ids: Vec<_> = disks
        .chain((0..DMA_TESTERS).map(|n| format!("dma{n}")))
        .collect();
    for id in ids.iter().filter(|id| id.starts_with("disk")) {
        cluster.image(id, MIB).unwrap();
    }
    let mut lender = lend_all(&cluster);
    let vms: Vec<_> = (0..ids.len()).map(|n| format!("vm{n}")).collect();
    let serve = |(vm, id): (&String, &String)| {
        let serve = cluster.serve(vm, &[id]).args(&["--keeper"]);
        serve.start().unwrap()
    };
    let keepers: Vec<Daemon> = vms.iter().zip(&ids).map(serve).collect();
    let mut random = Random::from_environment();
    let counts = Counts::default();
    println!("{} backends serve", keepers.len());
    // Each has run once.
    for (vm, id) in vms.iter().zip(&ids) {
        live(&cluster, vm, id, &mut random, &counts).unwrap();
    }
    all_free(&cluster, &ids);
    let first = idle_use(&lender, &keepers);
    println!("without leases: {first:?}");
    let counts = Counts::default();
    let began = Instant::now();
    let over = AtomicBool::new(false);
    let mut samples = Vec::new();
    std::thread::scope(|scope| {
        let mut lives = Vec::new();
        for (vm, id) in vms.iter().zip(&ids) {
            let mut random = random.fork();
            let (cluster, counts, over) = (&cluster, &counts, &over);
            lives.push(scope.spawn(move || {
                while !over.load(Ordering::Acquire) {
                    live(cluster, vm, id, &mut random, counts)
                        .with_context(|| format!("{vm}, {id}"))?;
                }
                anyhow::Ok(())
            }));
        }
        let mut next_sample = Duration::ZERO;
        let mut lenders = 0;
        while began.elapsed() < time && !lives.iter().any(|life| life.is_finished()) {
            let pause = 100_000 + random.below(1_500_000);
            std::thread::sleep(Duration::from_micros(pause));
            let killed = match random.below(8) {
                0..4 => {
                    let workers = lender.workers();
                    let at = random.below(workers.len().max(1) as u64) as usize;
                    workers.get(at).copied()
                }
                4..7 => {
                    let keeper = &keepers[random.below(keepers.len() as u64) as usize];
                    keeper.children().first().copied()
                }
                // In the first third: after that, one lender is to use no more and no more.
                _ if began.elapsed() < time / 3 && lenders < 8 => {
                    lenders += 1;
                    add(&counts.kills, 1);
                    add(&counts.lenders, 1);
                    lender.kill().unwrap();
                    lender = lend_all(&cluster);
                    add(&counts.lenders, 1);
                    None
                }
                _ => None,
            };
            if let Some(pid) = killed {
                // It may have ended.
                add(
                    &counts.kills,
                    u64::from(kill_process(pid, Signal::KILL).is_ok()),
                );
            }
            if began.elapsed() >= next_sample {
                next_sample += time / 12;
                let using = Use::of(lender.pid()).unwrap();
                println!(
                    "{:4} s: {} borrows, {} interrupts, {} kills; lender {} KiB, {} descriptors",
                    began.elapsed().as_secs(),
                    get(&counts.borrows),
                    get(&counts.interrupts),
                    get(&counts.kills),
                    using.resident >> 10,
                    using.descriptors
                );
                samples.push((began.elapsed(), using));
            }
        }
        over.store(true, Ordering::Release);
        for life in lives {
            life.join().unwrap().unwrap();
        }
    });
    let took = began.elapsed().as_secs_f64();
    all_free(&cluster, &ids);
    let last = idle_use(&lender, &keepers);
    println!(
        "{took:.0} s: {:.1} borrows/s, {:.1} interrupts/s, {} resets, {} MiB, {} kills, {} times a device was lost",
        get(&counts.borrows) as f64 / took,
        get(&counts.interrupts) as f64 / took,
        get(&counts.resets),
        get(&counts.bytes) / MIB,
        get(&counts.kills),
        get(&counts.lost)
    );
    println!(
        "without leases: before {first:?}, after {last:?} (lender, most of a keeper, all keepers)"
    );
    let after = |part: u32| {
        let late = samples.iter().filter(|(at, _)| *at >= time * part / 12);
        late.map(|(_, using)| using.resident).take(3).max()
    };
    if let (Some(middle), Some(end)) = (after(5), after(9)) {
        println!(
            "lender: {} KiB in the middle, {} KiB at the end",
            middle >> 10,
            end >> 10
        );
        assert!(end <= middle + middle / 4 + MIB, "memory grows");
    }
    assert!(
        last.0.descriptors <= first.0.descriptors,
        "lender: descriptors leak"
    );
    assert!(last.2 <= first.2, "backends: descriptors leak");
}

/// A DMA test device does not outlive its worker, or its backend. The VM does, and its reset brings the device back.
#[test]
fn a_dma_test_device_that_is_lost_comes_back_with_a_reset() {
    let cluster = Cluster::in_memory().unwrap();
    let _story = Story(&cluster);
    let lender = cluster.lend(&["--dma-test", "dma0"]).unwrap();
    let serve = cluster.serve("a", &["dma0"]).args(&["--keeper"]);
    let keeper = serve.start().unwrap();
    let mut random = Random::from_environment();
    let counts = Counts::default();
    let mut machine = connect(&cluster, "a", "dma0").unwrap();
    for block in machine.ram.layout().blocks() {
        machine.device.map(&machine.ram, block).unwrap();
    }
    for kill in 0..4 {
        borrow(&mut machine, &counts).unwrap();
        let ready = machine.device.load(0, reg::ID).unwrap();
        let victim = match kill % 2 {
            0 => {
                let workers = lender.workers();
                assert_eq!(workers.len(), 1);
                workers[0]
            }
            _ => keeper.backend().unwrap(),
        };
        kill_process(victim, Signal::KILL).unwrap();
        let deadline = Instant::now() + PATIENT;
        while machine.device.load(0, reg::ID).unwrap() == ready {
            assert!(Instant::now() < deadline, "the device is not lost");
            std::thread::sleep(Duration::from_millis(5));
        }
        machine.vectors = Vectors::new(machine.vectors.len()).unwrap();
        use_dma_tester(&mut machine, &mut random, &counts).unwrap();
    }
    machine.device.close();
    cluster.wait_free("dma0").unwrap();
}
