//! What an NTB and its two hosts refuse. Both are one host here, which has both
//! ports: two lenders' folders keep them apart.

use anyhow::Result;

use crate::{
    host::{BORROWER, Host, LENDER},
    stage::{DRIVE, LARGE, SMALL},
};

/// Where the lender is for the borrower.
const TCP: &str = "tcp:127.0.0.1:4000";

pub fn ports_that_do_not_fit_together_are_told_so(host: &Host) -> Result<()> {
    let lend = format!("--listen {TCP} --vfio disk0={DRIVE} --ntb {LARGE}");
    let lender = host.lend(LENDER, &lend)?;
    let serve = format!("serve --vm a --device disk0 --lender {TCP} --ntb {SMALL} --memory 32M");
    let words = [SMALL, "64 MiB", "128 MiB", "same size"];
    host.refuses("windows that differ", BORROWER, &serve, &words)?;
    lender.stop()?;
    host.verdict()
}
