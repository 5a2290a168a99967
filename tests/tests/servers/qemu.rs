//! QEMU as a vfio-user server (`x-vfio-user-server`), which Debian's QEMU is built without: the test runs where
//! `FARSIDE_QEMU_SERVER` names a `qemu-system-x86_64` that was configured with `--enable-vfio-user-server`.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_tests::{Cluster, Daemon, MIB, SHORT};
use libtest_mimic::{Completion, Failed};

use super::{run_with, used_by_two_vms};

const PROGRAM: &str = "FARSIDE_QEMU_SERVER";

pub fn a_controller_of_another_qemu_is_lent() -> Result<Completion, Failed> {
    let what = "a qemu-system-x86_64 with x-vfio-user-server";
    run_with(PROGRAM, what, lend)
}

fn lend(cluster: &Cluster, program: &Path) -> Result<()> {
    let socket = cluster.directory().join("nvme.sock");
    let image = cluster.image("disk", 64 * MIB)?;
    let mut server = serve(program, &socket, &image)?;
    // It ends its server with the first client.
    let again = |server: &mut Daemon| {
        server.kill()?;
        *server = serve(program, &socket, &image)?;
        Ok(())
    };
    let used = used_by_two_vms(cluster, &socket, "QEMU NVMe", &mut server, again);
    used.with_context(|| format!("the serving QEMU: {}", server.log()))
}

/// QEMU with an NVMe controller at the socket.
fn serve(program: &Path, socket: &Path, image: &Path) -> Result<Daemon> {
    let mut command = Command::new(program);
    command.args(["-nodefaults", "-display", "none"]);
    command.args(["-machine", "x-remote,vfio-user=on,auto-shutdown=off"]);
    let drive = format!("if=none,id=disk,format=raw,file={}", image.display());
    command.args(["-drive", &drive]);
    command.args(["-device", "nvme,id=nvme,drive=disk,serial=disk0"]);
    command.arg("-object").arg(format!(
        "x-vfio-user-server,id=server,type=unix,device=nvme,path={}",
        socket.display()
    ));
    let mut server = Daemon::start("the serving QEMU", command)?;
    let deadline = Instant::now() + SHORT;
    while !socket.exists() {
        let is_late = Instant::now() > deadline;
        ensure!(server.is_running()? && !is_late, "{}", server.log());
        // It has no other sign of readiness that is as simple.
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(server)
}
