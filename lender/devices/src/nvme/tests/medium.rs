//! Media that fail while in use: real file systems and block devices.

use std::{
    fs::File,
    io::{Write, stdout},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::Command,
};

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

use super::world::{DATA, Driver, IMAGE, OK, Sqe};
use crate::{
    Device,
    block::ImageError,
    nvme::{Config, ConfigError, Nvme, status::Status},
};

const CAPACITY_EXCEEDED: (u16, u16) = (0, 0x81);
const WRITE_FAULT: (u16, u16) = (2, 0x80);
const UNRECOVERED_READ: (u16, u16) = (2, 0x81);

const WRITE: u8 = 1;
const READ: u8 = 2;

/// Id of the event request that each test opens.
const EVENT: u16 = 50;

/// A driver that has enabled events for all critical warnings.
fn driver(configure: impl FnOnce(&mut Config)) -> Driver {
    let mut driver = Driver::ready_with(configure);
    assert_eq!(driver.set_feature(0x0b, 0xff).status, OK);
    driver.submit_as(0, Sqe::new(0x0c), EVENT);
    driver
}

/// Reads or writes 4 KiB at byte `at`; returns the status.
fn transfer(driver: &mut Driver, opcode: u8, at: u64) -> (u16, u16) {
    let sqe = Sqe::new(opcode).nsid(1).prp(DATA, 0);
    driver.io(sqe.blocks(at / 512, 8)).status
}

#[track_caller]
fn expect_problem(driver: &Driver, part: &str) {
    let problem = driver.nvme.problem().unwrap_or_default();
    assert!(problem.contains(part), "{problem:?} has no {part:?}");
}

/// The event's information and, after it, the health log.
fn event_and_health(driver: &mut Driver) -> (u32, Vec<u8>) {
    let event = driver.wait(0);
    assert_eq!((event.id, event.status), (EVENT, OK));
    assert_eq!(event.result & 0xff_00ff, 0x02_0001, "health, log page 2");
    (event.result >> 8 & 0xff, driver.log(2, 512))
}

fn u64_at(log: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(log[at..at + 8].try_into().unwrap())
}

/// Reports why a test that needs root or loop devices cannot run here. For
/// `cargo xtask test`: libtest captures `eprintln!`.
fn skipped(test: &str, why: &dyn std::fmt::Display) {
    let test = format_args!("nvme::tests::medium::{test}");
    writeln!(stdout().lock(), "skipped: {test}: {why}").unwrap();
}

/// A detached file system of 1 MiB, released with its descriptor.
fn small_file_system() -> rustix::io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "size", "1M")?;
    fsconfig_create(&context)?;
    fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )
}

#[test]
fn a_full_file_system_is_told_to_operator_and_guest_once() {
    let system = match small_file_system() {
        Ok(system) => system,
        Err(errno) => {
            let test = "a_full_file_system_is_told_to_operator_and_guest_once";
            return skipped(test, &format_args!("cannot create a tmpfs: {errno}"));
        }
    };
    let path = PathBuf::from(format!("/proc/self/fd/{}/disk.img", system.as_raw_fd()));
    File::create(&path).unwrap().set_len(IMAGE).unwrap();
    let mut driver = driver(|config| config.image = path);
    assert_eq!(driver.nvme.problem(), None);
    let full = (0..IMAGE)
        .step_by(4096)
        .find(|at| match transfer(&mut driver, WRITE, *at) {
            OK => false,
            CAPACITY_EXCEEDED => true,
            other => panic!("{other:?}"),
        });
    let full = full.unwrap();
    expect_problem(&driver, "no space left on its file system");
    let (information, health) = event_and_health(&mut driver);
    assert_eq!(information, 2, "spare below threshold");
    assert_eq!((health[0], health[3]), (1, 0), "no spare");
    assert_eq!((u64_at(&health, 160), u64_at(&health, 176)), (1, 1));
    let errors = driver.log(1, 64);
    let status = u16::from_le_bytes([errors[12], errors[13]]) >> 1;
    assert_eq!(status, Status::CAPACITY_EXCEEDED.bits());
    assert_eq!(u64_at(&errors, 16), full / 512, "LBA");
    // Writes to allocated blocks succeed, and do not end the failure.
    driver.submit_as(0, Sqe::new(0x0c), EVENT);
    let before = driver.nvme.problem().unwrap().to_owned();
    for _ in 0..4 {
        assert_eq!(transfer(&mut driver, WRITE, 0), OK);
        assert_eq!(transfer(&mut driver, WRITE, full), CAPACITY_EXCEEDED);
        assert_eq!(driver.nvme.problem(), Some(&*before));
    }
    assert!(driver.take(0).is_none(), "one event");
    assert_eq!(driver.stat("media_errors"), 5);
}

#[test]
fn a_truncated_image_is_told_to_operator_and_guest() {
    let mut driver = driver(|_| {});
    let image = File::options().write(true).open(&driver.image).unwrap();
    image.set_len(IMAGE / 2).unwrap();
    assert_eq!(transfer(&mut driver, READ, 0), OK);
    assert_eq!(transfer(&mut driver, READ, IMAGE / 2), UNRECOVERED_READ);
    expect_problem(&driver, "shrunk from 16777216 to 8388608 bytes");
    let (information, health) = event_and_health(&mut driver);
    assert_eq!(information, 0, "reliability");
    assert_eq!((health[0], health[3]), (1 << 2, 100));
    assert_eq!((u64_at(&health, 160), u64_at(&health, 176)), (1, 1));
}

/// A loop device, detached when dropped.
struct Loop {
    device: PathBuf,
    file: tempfile::NamedTempFile,
}

impl Loop {
    /// `None`, with a report, if this host or user has no loop devices.
    fn attach(test: &str, options: &[&str]) -> Option<Self> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(IMAGE).unwrap();
        let mut command = Command::new("losetup");
        command.args(options).args(["--find", "--show"]);
        match command.arg(file.path()).output() {
            Ok(output) if output.status.success() => {
                let device = String::from_utf8(output.stdout).unwrap();
                let device = Self {
                    device: device.trim().into(),
                    file,
                };
                if options.is_empty() {
                    // The read-only flag of the previous user survives the detach.
                    run("blockdev", "--setrw", &device.device);
                }
                Some(device)
            }
            refused => {
                skipped(test, &format_args!("no loop device: {refused:?}"));
                None
            }
        }
    }
}

#[track_caller]
fn run(command: &str, option: &str, device: &Path) {
    let status = Command::new(command).arg(option).arg(device).status();
    assert!(status.unwrap().success(), "{command} {option}");
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("-d").arg(&self.device).status();
        if !std::thread::panicking() {
            assert!(detached.unwrap().success());
        }
    }
}

#[test]
fn a_block_device_that_shrinks_or_becomes_read_only_is_told_to_operator_and_guest() {
    let test = "a_block_device_that_shrinks_or_becomes_read_only_is_told_to_operator_and_guest";
    let Some(device) = Loop::attach(test, &[]) else {
        return;
    };
    let mut driver = driver(|config| config.image = device.device.clone());
    assert_eq!(transfer(&mut driver, WRITE, IMAGE / 2), OK);
    let flush = driver.io(Sqe::new(0).nsid(1));
    assert_eq!(flush.status, OK);
    device.file.as_file().set_len(IMAGE / 2).unwrap();
    run("losetup", "-c", &device.device);
    assert_eq!(transfer(&mut driver, READ, IMAGE / 2), UNRECOVERED_READ);
    // For a block device the kernel's ENOSPC means past the end.
    let written = transfer(&mut driver, WRITE, IMAGE / 2);
    assert_eq!(written, CAPACITY_EXCEEDED);
    expect_problem(&driver, "shrunk from 16777216 to 8388608 bytes");
    let (information, health) = event_and_health(&mut driver);
    assert_eq!((information, health[0]), (0, 1 << 2), "reliability");

    driver.submit_as(0, Sqe::new(0x0c), EVENT);
    run("blockdev", "--setro", &device.device);
    assert_eq!(transfer(&mut driver, WRITE, 0), WRITE_FAULT);
    expect_problem(&driver, "it has become read-only");
    let (information, health) = event_and_health(&mut driver);
    assert_eq!((information, health[0]), (0, 1 << 2 | 1 << 3), "read-only");
    assert_eq!(u64_at(&health, 160), 3, "media errors");
    drop(driver);
}

#[test]
fn a_block_device_that_grows_is_used_to_its_end() {
    let Some(device) = Loop::attach("a_block_device_that_grows_is_used_to_its_end", &[]) else {
        return;
    };
    let mut driver = driver(|config| config.image = device.device.clone());
    assert_eq!(driver.lent.grow(512).unwrap(), IMAGE, "as before");
    device.file.as_file().set_len(2 * IMAGE).unwrap();
    run("losetup", "-c", &device.device);
    assert_eq!(driver.lent.grow(512).unwrap(), IMAGE);
    assert_eq!(driver.lent.size, 2 * IMAGE);
    let resized = driver.with(|nvme, _| nvme.resize(2 * IMAGE));
    assert_eq!(resized, Ok(()));
    for opcode in [WRITE, READ] {
        assert_eq!(transfer(&mut driver, opcode, 2 * IMAGE - 4096), OK);
    }
    drop(driver);
}

#[test]
fn a_block_device_that_is_read_only_is_not_lent_for_writing() {
    let test = "a_block_device_that_is_read_only_is_not_lent_for_writing";
    let Some(device) = Loop::attach(test, &["--read-only"]) else {
        return;
    };
    let mut config = Config::new(&device.device);
    match Nvme::open("disk0", &config) {
        Err(ConfigError::Image(error @ ImageError::WriteProtected { .. })) => {
            let text = error.to_string();
            assert!(text.contains("read-only = true"), "{text}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("opened for writing"),
    }
    config.read_only = true;
    Nvme::open("disk0", &config).unwrap();
}
