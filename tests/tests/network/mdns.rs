//! Lenders that are found on a LAN.

use std::fs;

use anyhow::{Result, ensure};
use farside_tests::SHORT;

use crate::{cuts::check_medium, stage::Stage};

pub fn lenders_on_a_lan_are_found_where_that_is_turned_on(stage: &mut Stage) -> Result<()> {
    stage.use_tls()?;
    for host in [&stage.near, &stage.far] {
        host.ip(&["route", "add", "224.0.0.0/4", "dev", "wire"])?;
    }
    fs::write(stage.far.path("etc/host.toml"), "mdns = true\n")?;
    let lender = stage.lend_also("disk0.img", &["--name", "rack1-b"])?;
    let address = stage.address();
    stage
        .daemon(lender)
        .wait_log(&format!("lender rack1-b is announced at {address}"), SHORT)?;
    // It is off.
    let (said, ok) = stage.near.output("devices")?;
    ensure!(!said.contains("disk0") && !ok, "{said}");
    // An answer may be lost, as any datagram.
    fs::write(stage.near.path("etc/host.toml"), "mdns = true\n")?;
    let said = stage.wait("the lender is found", |stage| {
        let (said, ok) = stage.near.output("devices")?;
        Ok((said.contains("disk0") && ok).then_some(said))
    })?;
    ensure!(
        said.contains("rack1-b") && said.contains("network"),
        "{said}"
    );
    // So does the status find it.
    let said = stage.near.farside(&["status"])?;
    ensure!(said.contains("rack1-b") && said.contains("disk0"), "{said}");
    // A VM that names no lender borrows there.
    let args = ["serve", "--vm", "web1", "--device", "disk0"];
    let backend = stage.near.start("the backend", &args)?;
    backend.wait_log("served at", SHORT)?;
    let io = stage.boot("web1")?.step("io 8M")?;
    check_medium(stage, "disk0.img", &io);
    // A lender that ends says so.
    stage.end_vmm();
    stage.daemon(lender).terminate()?;
    stage.daemon(lender).wait_exit(SHORT)?;
    let (said, ok) = stage.near.output("devices")?;
    ensure!(ok && !said.contains("disk0"), "{said}");
    drop(backend);
    Ok(())
}
