//! The scripted VMM with a lender and a backend of software devices: compares its results
//! with the device's counters and the image.

#[allow(dead_code, reason = "the backend's tests need more of it")]
#[path = "../../../backend/tests/borrow/host.rs"]
mod host;
#[path = "soft/program.rs"]
mod program;

use std::time::Duration;

use farside_backend::Interrupts;
use farside_fabric::NtbLimits;
use farside_lender_protocol::DeviceStatus;
use farside_scripted_vmm::{
    checks,
    device::Device,
    machine::Machine,
    nvme::Controller,
    pattern::{Checksum, Pattern},
    pci,
    ram::{HIGH, Layout, Ram},
    report::{Answer, Found, Report},
    session::{Options, Session},
    vectors::Vectors,
};
use host::{DISK, DMA, Host, Served, assert_closed, assert_open, dma_test, until};

const MIB: u64 = 1 << 20;

/// 32 MiB of RAM, half of it high.
fn options(served: &Served, device: &str) -> Options {
    Options {
        socket: served.socket(device),
        layout: Layout::new(32 * MIB, Some(16 * MIB), false).unwrap(),
        vectors: None,
        queues: 2,
        namespace: 1,
        seed: 7,
        patience: Duration::ZERO,
        timeout: host::DEADLINE,
    }
}

fn connect(served: &Served, device: &str) -> Session {
    Session::connect(options(served, device)).unwrap()
}

/// Performs a step that must succeed.
#[track_caller]
fn run(session: &mut Session, step: &str) -> Option<Found> {
    let answer = session.run(step);
    assert!(answer.ok, "{answer:?}");
    answer.found
}

#[track_caller]
fn finish(session: Session) -> Report {
    let report = session.finish().unwrap();
    assert!(report.ok, "{report:?}");
    report
}

/// An NVMe image, and a host that lends it.
fn host_with_image() -> (Host, std::path::PathBuf) {
    let host = Host::with_disk();
    let image = host.directory(&format!("{DISK}.img"));
    assert_eq!(std::fs::metadata(&image).unwrap().len(), host::DISK_SIZE);
    (host, image)
}

fn fired(status: &DeviceStatus) -> Vec<(u32, u64)> {
    let fired = status.interrupts.iter();
    fired
        .map(|count| (u32::from(count.vector), count.fired))
        .collect()
}

/// Waits for interrupts in flight.
#[track_caller]
fn assert_all_interrupts_arrive(session: &mut Session, host: &Host) -> u64 {
    let expected = fired(&host.lender_status(DISK));
    let mut found = Vec::new();
    until("all interrupts arrive", || {
        if let Some(Found::Interrupts(counted)) = run(session, "irqs") {
            found = counted.vectors.into_iter().collect();
        }
        found.len() >= expected.len()
            && found
                .iter()
                .zip(&expected)
                .all(|(found, fired)| found >= fired)
    });
    assert_eq!(found, expected, "vector and count");
    found.iter().map(|(_, count)| count).sum()
}

fn written_data_is_on_the_image_and_comes_back(interrupts: Interrupts) {
    let (host, image) = host_with_image();
    let served = Served::start(farside_backend::Config {
        interrupts,
        ..host.config("a", &[DISK])
    });
    let mut session = connect(&served, DISK);
    assert_closed(&host, &served, DISK, "described");
    run(&mut session, "io 3M 1M");
    assert_open(&host, &served, DISK, 32 * MIB, 2);
    run(&mut session, "interrupts 9");
    let sum = assert_all_interrupts_arrive(&mut session, &host);
    // Identify and queues; 6 MiB in pieces of one; a flush; the reads.
    let transfers = 2 * 3 + 1 + 9;
    assert!(sum > transfers, "{sum} interrupts");

    let report = finish(session);
    assert_eq!(report.guest_ram_bytes, 32 * MIB);
    assert_eq!(report.checksum_ok, Some(true));
    assert_eq!(report.msix_guest.sum, sum);
    assert_eq!(report.early_interrupts, 0);
    assert!(report.bme_us.is_some_and(|us| us > 0));
    assert_eq!(report.rogue_bytes_written, None);
    let implied = report.steps.iter().filter(|step| step.implied);
    let implied: Vec<_> = implied.map(|step| step.step.as_str()).collect();
    assert_eq!(implied, ["map", "reset", "place", "bme", "driver"]);

    let bytes = std::fs::read(image).unwrap();
    let mut expected = vec![0; (3 * MIB) as usize];
    Pattern::new(7).fill(&mut expected);
    let mib = MIB as usize;
    assert!(bytes[mib..4 * mib] == expected, "the image has other bytes");
    assert!(bytes[..mib].iter().all(|byte| *byte == 0));
    assert!(bytes[4 * mib..].iter().all(|byte| *byte == 0));
    let mut checksum = Checksum::default();
    checksum.update(&expected);
    let io = report.steps.iter().find_map(|step| match &step.found {
        Some(Found::Io(io)) => Some(io),
        _ => None,
    });
    assert_eq!(io.unwrap().sha256_read, checksum.finish());
    until("the device is returned", || served.state() == "described");
}

#[test]
fn written_data_is_on_the_image_and_comes_back_direct() {
    written_data_is_on_the_image_and_comes_back(Interrupts::Direct);
}

#[test]
fn written_data_is_on_the_image_and_comes_back_relayed() {
    written_data_is_on_the_image_and_comes_back(Interrupts::Relayed);
}

#[test]
fn dma_outside_ram_changes_nothing_and_is_a_fault() {
    let (host, image) = host_with_image();
    std::fs::write(&image, vec![0xc3; host::DISK_SIZE as usize]).unwrap();
    let served = host.serve(DISK);
    let mut session = connect(&served, DISK);
    run(&mut session, "driver");
    let places = ["hole", "above", "0xfee00000", "0x7f0000000000 64K"];
    for (count, place) in (1..).zip(places) {
        let found = run(&mut session, &format!("rogue {place}"));
        let Some(Found::Rogue(rogue)) = found else {
            panic!("{found:?}");
        };
        assert!(rogue.completed, "{rogue:?}");
        // This model reports the error; other controllers may not.
        assert_ne!(rogue.status, Some(0), "{rogue:?}");
        let faults = host.lender_status(DISK).faults;
        assert!(faults.total >= count, "{faults:?}");
    }
    // The controller still works.
    run(&mut session, "io 1M");
    let report = finish(session);
    assert_eq!(report.rogue.len(), 4);
    assert_eq!(report.rogue[0].address, 16 * MIB);
    assert_eq!(report.rogue[1].address, HIGH + 16 * MIB);
    assert_eq!(report.rogue_bytes_written, Some(0));
}

/// Unmapped RAM is as unreachable as any other address.
#[test]
fn dma_to_unmapped_ram_changes_nothing() {
    let (host, _) = host_with_image();
    let served = host.serve(DISK);
    let mut session = connect(&served, DISK);
    run(&mut session, "driver");
    assert_open(&host, &served, DISK, 32 * MIB, 2);
    assert_eq!(
        run(&mut session, "unmap high"),
        Some(Found::Mapped(16 * MIB))
    );
    assert_open(&host, &served, DISK, 16 * MIB, 1);
    run(&mut session, "rogue 0x100000000 64K");
    assert_eq!(run(&mut session, "map"), Some(Found::Mapped(32 * MIB)));
    assert_open(&host, &served, DISK, 32 * MIB, 2);
    run(&mut session, "io 1M");
    let report = finish(session);
    assert_eq!(report.rogue_bytes_written, Some(0));
}

/// An enabled controller, without a session's checks.
fn by_hand(served: &Served) -> (Machine, Controller) {
    let options = options(served, DISK);
    let device = Device::connect(&options.socket, options.patience).unwrap();
    let mut machine = Machine {
        ram: Ram::new(options.layout).unwrap(),
        vectors: Vectors::new(device.vectors()).unwrap(),
        device,
        timeout: options.timeout,
        early_interrupts: 0,
    };
    let device = &mut machine.device;
    for block in options.layout.blocks() {
        device.map(&machine.ram, block).unwrap();
    }
    device.reset().unwrap();
    pci::place_bars(device).unwrap();
    device.enable_vectors(&machine.vectors).unwrap();
    pci::enable_msix(device, true).unwrap();
    pci::set_command(device, pci::MEMORY | pci::BUS_MASTER).unwrap();
    let drive = Controller::bring_up(&mut machine, 1, 1).unwrap();
    (machine, drive)
}

/// Verifies that the check can fail.
#[test]
fn dma_to_ram_would_be_noticed() {
    let (host, image) = host_with_image();
    std::fs::write(&image, vec![0xc3; host::DISK_SIZE as usize]).unwrap();
    let served = host.serve(DISK);
    let (mut machine, mut drive) = by_hand(&served);
    let last = HIGH + 16 * MIB - 0x2000;
    let found = checks::rogue(&mut machine, &mut drive, last, 0x2000).unwrap();
    assert_eq!(found.status, Some(0));
    assert_eq!(found.ram_bytes_changed, 0x2000);
}

#[test]
fn an_address_in_ram_is_not_taken_for_rogue() {
    let (host, _) = host_with_image();
    let served = host.serve(DISK);
    let mut session = connect(&served, DISK);
    let answer = session.run("rogue 0x100000");
    let error = answer.error.expect("it is RAM");
    assert!(error.contains("is not outside RAM"), "{error}");
    assert!(!session.finish().unwrap().ok);
}

#[test]
fn nothing_happens_before_bus_master_enable_and_after_unbind() {
    let (host, _) = host_with_image();
    let served = host.serve(DISK);
    let mut session = connect(&served, DISK);
    run(&mut session, "place");
    assert_closed(&host, &served, DISK, "leased");
    let found = run(&mut session, "before-bme 100");
    let Some(Found::BeforeBme(before)) = found else {
        panic!("{found:?}");
    };
    assert!(before.waited_ms >= 100);
    assert_closed(&host, &served, DISK, "leased");
    let faults = host.lender_status(DISK).faults;
    assert_eq!(faults.total, faults.by_reason.bus_master_disabled);

    run(&mut session, "io 1M");
    assert_open(&host, &served, DISK, 32 * MIB, 2);
    let found = run(&mut session, "unbind");
    let Some(Found::Unbound(unbound)) = found else {
        panic!("{found:?}");
    };
    assert_eq!(unbound.shut_down, Some(true));
    assert_closed(&host, &served, DISK, "leased");

    // The driver is bound again.
    run(&mut session, "io 1M 8M");
    assert_open(&host, &served, DISK, 32 * MIB, 2);
    let report = finish(session);
    assert_eq!(report.before_bme, Some(before));
    assert_eq!(report.checksum_ok, Some(true));
}

#[test]
fn a_reset_and_another_vmm_start_over() {
    let (host, _) = host_with_image();
    let served = host.serve(DISK);
    let mut session = connect(&served, DISK);
    run(&mut session, "io 1M");
    run(&mut session, "reset");
    assert_closed(&host, &served, DISK, "leased");
    run(&mut session, "io 1M 1M");
    let generation = served.status().generation;
    run(&mut session, "reconnect");
    run(&mut session, "io 1M 2M");
    for _ in 0..10 {
        // While the device is being returned.
        run(&mut session, "reconnect");
    }
    run(&mut session, "io 1M 3M");
    assert_open(&host, &served, DISK, 32 * MIB, 2);
    assert!(served.status().generation > generation);
    let report = finish(session);
    assert_eq!(report.checksum_ok, Some(true));
    assert_eq!(report.early_interrupts, 0);
}

#[test]
fn memory_of_a_bar_is_reached_without_a_message() {
    let host = Host::lending(NtbLimits::default(), |_| vec![dma_test(DMA)]);
    let served = host.serve(DMA);
    let mut session = Session::connect(Options {
        vectors: Some(16),
        ..options(&served, DMA)
    })
    .unwrap();
    let found = run(&mut session, "latency 100");
    let Some(Found::RoundTrips(times)) = found else {
        panic!("{found:?}");
    };
    assert_eq!((times.config_read.n, times.bar_read.n), (100, 100));
    assert!(times.bar_read.p50_us <= times.bar_read.p99_us);
    assert!(times.mapped_read.is_some_and(|time| time.n == 100));
    let answer: Answer = session.run("driver");
    let error = answer.error.expect("it is no drive");
    assert!(error.contains("class"), "{error}");
    let report = session.finish().unwrap();
    assert!(!report.ok);
    assert_eq!(report.mapped_accesses, 100);
    let bars: Vec<_> = report
        .areas
        .iter()
        .map(|area| (area.bar, area.mapped))
        .collect();
    assert!(
        bars.contains(&(0, false)) && bars.contains(&(2, true)),
        "{bars:?}"
    );
    drop(served);
}

/// The time-out of a missing answer is the configured one.
#[test]
fn a_drive_without_memory_completes_nothing() {
    let host = Host::with_disk();
    let served = host.serve(DISK);
    let (mut machine, mut drive) = by_hand(&served);
    for block in machine.ram.layout().blocks() {
        machine.device.unmap(block).unwrap();
    }
    assert_open(&host, &served, DISK, 0, 0);
    machine.timeout = Duration::from_millis(100);
    let error = drive.flush(&mut machine).unwrap_err().to_string();
    assert!(error.contains("no completion within 100ms"), "{error}");
}
