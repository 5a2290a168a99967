//! Refusals of an NTB and its two hosts. Here both are one host with both ports, separated
//! by two runtime directories.

use anyhow::{Result, ensure};

use crate::{
    host::{BORROWER, HERE, Host, LENDER},
    stage::{DRIVE, LARGE, PORT_A, PORT_B, SMALL},
};

/// The lender's address for the borrower.
const TCP: &str = "tcp:127.0.0.1:4000";

pub fn what_no_ntb_can_do_is_told_before_the_vm_starts(host: &Host) -> Result<()> {
    let serve = "serve --vm a --device disk0";
    let words = [DRIVE, "no NTB endpoint", "lspci"];
    let no_ntb = format!("{serve} --ntb {DRIVE}");
    host.refuses("--ntb names no NTB", HERE, &no_ntb, &words)?;
    let no_ntb = format!("lend --vfio disk0={DRIVE} --ntb {DRIVE}");
    host.refuses("--ntb of a lender names no NTB", HERE, &no_ntb, &words)?;
    let alone = format!("{serve} --ntb {PORT_A} --lender {TCP}");
    let words = [PORT_A, "link down after 10 s", "--ntb"];
    host.refuses("nobody at the other port", BORROWER, &alone, &words)?;

    let lend = format!("--listen {TCP} --borrower network --vfio disk0={DRIVE}");
    let lender = host.lend(LENDER, &lend)?;
    let there = format!("{serve} --lender {TCP} --memory 64M");
    let words = ["disk0", TCP, "another host", "--ntb BDF"];
    host.refuses(
        "a lender of another host, and no NTB",
        BORROWER,
        &there,
        &words,
    )?;
    lender.stop()?;
    // The other port is in use by a lender that lends another device.
    let port = host.lend(HERE, &format!("--ntb {PORT_B} --dma-test t"))?;
    let lender = {
        let again = format!("lend --listen {TCP} --vfio disk0={DRIVE} --ntb {PORT_B}");
        let words = [PORT_B, "in use"];
        host.refuses("a port that another process has", LENDER, &again, &words)?;
        host.lend(LENDER, &lend)
    };
    let lender = match lender {
        Ok(lender) => lender,
        Err(error) => return Err(error.context("a lender without an NTB")),
    };
    let words = ["no NTB", "--ntb"];
    let across = format!("{there} --ntb {PORT_A}");
    host.refuses("a lender without an NTB", BORROWER, &across, &words)?;
    lender.stop()?;
    port.stop()?;

    let lender = host.lend(LENDER, &format!("{lend} --ntb {PORT_B}"))?;
    let large = format!("{serve} --lender {TCP} --ntb {PORT_A} --memory 256M");
    let words = ["256 MiB", "128 MiB", "fits"];
    host.refuses("a window too small for the guest", BORROWER, &large, &words)?;
    host.verdict()?;
    let args = format!("--lender {TCP} --ntb {PORT_A} --memory 64M");
    let backend = host.serve(BORROWER, "a", "disk0", &args)?;
    // No I/O: one VMM is at both sides of this NTB, and cannot answer its own DMA commands.
    backend.stop()?;
    lender.stop()?;
    ensure!(host.driver(DRIVE)? == "nvme");
    Ok(())
}

pub fn ports_that_do_not_fit_together_are_told_so(host: &Host) -> Result<()> {
    let lend = format!("--listen {TCP} --borrower network --vfio disk0={DRIVE} --ntb {LARGE}");
    let lender = host.lend(LENDER, &lend)?;
    let serve = format!("serve --vm a --device disk0 --lender {TCP} --ntb {SMALL} --memory 32M");
    let words = [SMALL, "64 MiB", "128 MiB", "same size"];
    host.refuses("windows that differ", BORROWER, &serve, &words)?;
    lender.stop()?;
    host.verdict()
}
