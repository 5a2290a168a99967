//! What a backend on the device's own host is refused.

use anyhow::Result;

use crate::{
    host::{HERE, Host},
    stage::DRIVE,
};

pub fn guest_ram_that_a_device_cannot_reach_is_told_before_the_vm_starts(
    host: &Host,
) -> Result<()> {
    let lender = host.lend(HERE, &format!("--vfio disk0={DRIVE}"))?;
    let serve = |memory| format!("serve --vm a --device disk0 --memory {memory}");
    // An emulated VT-d translates 39 or 48 bits.
    let words = [
        "disk0",
        DRIVE,
        "0x1000000000000..=0xffffffffffffffff is not usable",
        "keep guest RAM out",
    ];
    host.refuses("RAM beyond the address width", HERE, &serve("300T"), &words)?;
    host.verdict()?;
    let backend = host.serve(HERE, "a", "disk0", "--memory 256M")?;
    backend.stop()?;
    lender.stop()
}
