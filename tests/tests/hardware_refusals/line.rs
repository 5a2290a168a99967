//! INTx state that only the function has.

use anyhow::{Context, Result, ensure};
use farside_tests::SHORT;

use crate::{
    host::{HERE, Host},
    scripted::Scripted,
    stage::NO_RESET,
};

/// Interrupt Status, of command and status read as one.
const PENDING: u64 = 1 << 19;

/// QEMU's `edu` device asserts INTx for a value written to 0x60, until the same value is
/// written to 0x64.
pub fn interrupt_status_is_that_of_the_function(host: &Host) -> Result<()> {
    let lender = host.lend(HERE, &format!("--vfio odd={NO_RESET} --allow-dirty"))?;
    let backend = host.serve(HERE, "a", "odd", "")?;
    let mut vmm = Scripted::start(host, HERE, "a", "odd")?;
    vmm.step("intx")?;
    let command = format!("$(od -An -tu2 -j4 -N2 /sys/bus/pci/devices/{NO_RESET}/config)");
    let masked = format!("[ $(({command} & 1024)) != 0 ]");
    host.exec_ok(&format!("! {masked}"), SHORT)?;
    ensure!(!is_pending(&mut vmm)?, "before the interrupt");
    vmm.step("poke 0 0x60 1")?;
    // The kernel has handled it, and masked the line by INTx disable.
    host.wait_for(&masked)?;
    ensure!(is_pending(&mut vmm)?, "with the interrupt");
    vmm.step("poke 0 0x64 1")?;
    ensure!(!is_pending(&mut vmm)?, "after its acknowledgement");
    vmm.quit()?;
    backend.stop()?;
    lender.stop()
}

fn is_pending(vmm: &mut Scripted<'_>) -> Result<bool> {
    let answer = vmm.step("peek 7 4")?;
    let value = answer["value"].as_u64();
    let value = value.with_context(|| format!("peek found {answer}"))?;
    Ok(value & PENDING != 0)
}
