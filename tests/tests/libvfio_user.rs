//! A vfio-user server that is not farside's is lent: a sample of libvfio-user, `gpio-pci-idio-16`. Debian has no package
//! of it: the test runs where `FARSIDE_LIBVFIO_USER_GPIO` names its binary.

use std::{ffi::OsString, path::Path, process::Command, time::Duration};

use anyhow::{Result, bail, ensure};
use farside_scripted_vmm::{
    device::{CONFIG, Device},
    pci,
    ram::{Layout, Ram},
    vectors::Vectors,
};
use farside_tests::{Cluster, Daemon, MIB, Weight, told, trial};
use libtest_mimic::{Arguments, Completion, Failed};
use rustix::process::{Signal, kill_process};

const PROGRAM: &str = "FARSIDE_LIBVFIO_USER_GPIO";

const TIMEOUT: Duration = Duration::from_secs(20);

/// Input pins 0 to 7: one for each that was set a multiple of three times.
const INPUTS: u64 = 1;

fn main() {
    env_logger::init();
    let name = "a_device_of_libvfio_user_is_lent";
    let trial = trial(name, Weight::Guests, run);
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}

fn run() -> Result<Completion, Failed> {
    let Some(program) = std::env::var_os(PROGRAM) else {
        return Ok(Completion::ignored_with(format!(
            "{PROGRAM} does not name the binary of libvfio-user's gpio-pci-idio-16"
        )));
    };
    let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
    told(|| test(&cluster, program), || cluster.story())?;
    Ok(Completion::Completed)
}

fn test(cluster: &Cluster, program: OsString) -> Result<()> {
    let socket = cluster.directory().join("gpio.sock");
    let mut command = Command::new(program);
    command.arg("-v").arg(&socket);
    let mut server = Daemon::start("gpio", command)?;
    while !socket.exists() {
        ensure!(server.is_running()?, "{}", server.log());
        std::thread::yield_now();
    }
    let argument = format!("gpio0={}", socket.display());
    let lender = cluster.lend(&["--vfio-user", &argument])?;
    let backend = cluster.serve("a", &["gpio0"]).start()?;
    let socket = cluster.directory().join("vm/a/gpio0.sock");

    let (mut device, _ram) = connect(&socket)?;
    let mut ids = [0; 4];
    device.read(CONFIG, 0, &mut ids)?;
    ensure!(ids == [0x4f, 0x49, 0xc8, 0x0d], "{ids:x?}");
    let before = inputs(&mut device)?;
    device.write(2, 0, &[1])?;
    device.write(2, 0, &[2])?;
    device.write(2, 0, &[2])?;
    let after = inputs(&mut device)?;
    ensure!((before, after) == (0xff, 0xfc), "{before:#x}, {after:#x}");
    drop(device);
    cluster.wait_free("gpio0")?;

    // The next lease has a connection of its own. The sample has no reset of its own: its pins are as they were.
    let (mut device, _ram) = connect(&socket)?;
    let after = inputs(&mut device)?;
    ensure!(after == 0xfc, "{after:#x}");

    // The next worker goes on with the connection, and with the device as it is.
    for round in 1..=5 {
        let [worker] = lender.workers()[..] else {
            bail!("not one worker");
        };
        kill_process(worker, Signal::KILL)?;
        let after = inputs(&mut device)?;
        ensure!(after == 0xfc, "round {round}: {after:#x}");
    }
    let status = cluster.status()?;
    let connection = &status.borrow("a", "gpio0")?.connection;
    ensure!(
        connection.as_ref().is_some_and(|it| it.restarts == 5),
        "{connection:?}"
    );

    server.kill()?;
    let deadline = std::time::Instant::now() + TIMEOUT;
    while inputs(&mut device)? != 0xff {
        ensure!(std::time::Instant::now() < deadline, "{}", backend.log());
    }
    Ok(())
}

/// A VM with the device, which may do DMA.
fn connect(socket: &Path) -> Result<(Device, Ram)> {
    let mut device = Device::connect(socket, TIMEOUT)?;
    let ram = Ram::new(Layout::new(64 * MIB, None, false)?)?;
    for block in ram.layout().blocks() {
        device.map(&ram, block)?;
    }
    device.reset()?;
    pci::place_bars(&mut device)?;
    device.enable_intx(&Vectors::new(1)?)?;
    // Its BAR is I/O space.
    let enable = pci::IO | pci::BUS_MASTER;
    pci::set_command(&mut device, enable)?;
    let command = pci::command(&mut device)?;
    ensure!(command & enable == enable, "{command:#x}");
    Ok((device, ram))
}

fn inputs(device: &mut Device) -> Result<u8> {
    let mut pins = [0];
    device.read(2, INPUTS, &mut pins)?;
    Ok(pins[0])
}
