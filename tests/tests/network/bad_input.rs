//! Networks, lenders and borrowers that are not as they should be.

use std::{fs, time::Duration};

use anyhow::{Result, ensure};
use farside_tests::SHORT;

use crate::{
    cuts::check_medium,
    stage::{IMAGE, Stage},
};

pub fn a_small_mtu_carries_a_drive(stage: &mut Stage) -> Result<()> {
    stage.use_tls()?;
    for host in [&stage.near, &stage.far] {
        host.ip(&["link", "set", "wire", "mtu", "1280"])?;
    }
    stage.lend("disk0.img")?;
    stage.serve("web1", 60)?;
    let io = stage.boot("web1")?.step("io 8M")?;
    check_medium(stage, "disk0.img", &io);
    Ok(())
}

/// What `farside serve` says.
fn refusal(stage: &Stage, lender: &str) -> Result<String> {
    let args = [
        "serve", "--vm", "web1", "--device", "disk0", "--lender", lender,
    ];
    let mut backend = stage.near.start("a backend", &args)?;
    let ended = backend.wait_exit(SHORT)?;
    ensure!(!ended.success(), "it serves: {}", backend.log());
    Ok(backend.log())
}

pub fn a_lender_that_cannot_be_used_is_an_error_in_words(stage: &mut Stage) -> Result<()> {
    stage.use_tls()?;
    let tls = stage.address();
    let said = refusal(stage, &tls)?;
    ensure!(said.contains("(is `farside lend` running?)"), "{said}");

    stage.lend("disk0.img")?;
    let plain = tls.replace("tls:", "tcp:");
    let said = refusal(stage, &plain)?;
    ensure!(said.contains("tls:HOST:PORT"), "{said}");
    // The certificate has another name.
    stage
        .near
        .ip(&["address", "add", "10.99.0.9/24", "dev", "wire"])?;
    stage
        .far
        .ip(&["address", "add", "10.99.0.3/24", "dev", "wire"])?;
    let other = tls.replace("10.99.0.2", "10.99.0.3");
    let said = refusal(stage, &other)?;
    ensure!(said.contains("cannot reach the lender"), "{said}");
    // This host has no certificates.
    let rules = stage.near.path("etc/pki");
    let kept = stage.near.path("etc/pki-kept");
    fs::rename(&rules, &kept)?;
    let said = refusal(stage, &tls)?;
    ensure!(
        said.contains("make certificates with `farside pki`"),
        "{said}"
    );
    fs::rename(&kept, &rules)?;
    // And all is well with what is right.
    stage.serve("web1", 60)?;
    let io = stage.boot("web1")?.step("io 1M")?;
    check_medium(stage, "disk0.img", &io);
    Ok(())
}

/// Its operations wait in its own worker, and in its own connection.
pub fn a_borrower_that_stops_reading_slows_nobody_else(stage: &mut Stage) -> Result<()> {
    let file = fs::File::create(stage.far.path("disk1.img"))?;
    file.set_len(IMAGE)?;
    stage.lend_also("disk0.img", &["--nvme", "disk1=/mnt/disk1.img"])?;
    let stopped = stage.serve("web1", 60)?;
    stage.boot("web1")?.step("io 1M")?;
    stage.vmm()?.begin("io 24M 8M")?;
    stage.daemon(stopped).stop()?;
    let mut other = stage.other_vm("web2", "disk1")?;
    let io = other.step("io 16M")?;
    check_medium(stage, "disk1.img", &io);
    let listed = stage.far.farside(&["devices"])?;
    ensure!(
        listed.contains("VM web1") && listed.contains("VM web2"),
        "{listed}"
    );
    // It does not end by itself while it is stopped.
    stage.daemon(stopped).kill()
}

/// What a VM writes fills the socket to it, and waits. Its own lease goes on with another worker.
pub fn a_lender_that_stops_reading_slows_nobody_else(stage: &mut Stage) -> Result<()> {
    let file = fs::File::create(stage.far.path("disk1.img"))?;
    file.set_len(IMAGE)?;
    let lender = stage.lend_also("disk0.img", &["--nvme", "disk1=/mnt/disk1.img"])?;
    stage.serve("web1", 60)?;
    stage.boot("web1")?.step("io 1M")?;
    let lender = stage.daemon(lender).pid().to_string();
    let worker = ["-P", &lender, "-f", "disk0 web1"];
    let worker = stage.far.run("pgrep", &worker)?;
    stage.far.run("kill", &["-STOP", worker.trim()])?;
    stage.vmm()?.begin("io 24M 8M")?;
    let mut other = stage.other_vm("web2", "disk1")?;
    let io = other.step("io 16M")?;
    check_medium(stage, "disk1.img", &io);
    ensure!(
        stage.vmm()?.answer(Duration::ZERO)?.is_none(),
        "I/O without a lender"
    );
    let io = stage.vmm()?.succeeded()?;
    check_medium(stage, "disk0.img", &io);
    Ok(())
}

pub fn the_lenders_of_a_file_are_known(stage: &mut Stage) -> Result<()> {
    stage.lend("disk0.img")?;
    let other = "tcp:10.99.0.2:7411";
    let list = format!("lenders = [\"{}\", \"{other}\"]\n", stage.address());
    fs::write(stage.near.path("etc/host.toml"), list)?;
    let devices = |stage: &Stage| stage.near.output("devices");
    // One does not answer, which hides nothing.
    let (said, ok) = devices(stage)?;
    ensure!(said.contains("network    model"), "{said}");
    ensure!(said.contains(other) && !ok, "{said}");
    // A VM that names no lender finds its device there, once both answer.
    stage.lend_at(other, "disk1=/mnt/disk1.img")?;
    let (said, ok) = devices(stage)?;
    ensure!(said.contains("disk1") && ok, "{said}");
    let backend = ["serve", "--vm", "web1", "--device", "disk1"];
    let mut backend = stage.near.start("a backend", &backend)?;
    backend.wait_log("served at", SHORT)?;
    backend.kill()?;
    // The same id at both.
    stage.lend_at("tcp:10.99.0.2:7412", "disk0=/mnt/disk2.img")?;
    let list = format!(
        "lenders = [\"{}\", \"tcp:10.99.0.2:7412\"]\n",
        stage.address()
    );
    fs::write(stage.near.path("etc/host.toml"), list)?;
    let (said, ok) = devices(stage)?;
    let names_both = said.contains(&stage.address()) && said.contains("tcp:10.99.0.2:7412");
    ensure!(
        said.contains("is at two lenders") && names_both && !ok,
        "{said}"
    );
    Ok(())
}
