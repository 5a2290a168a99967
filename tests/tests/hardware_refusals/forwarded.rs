//! Configuration registers that are the function's: what its borrower reads comes from it, what its borrower writes
//! gets there, and nothing else does.

use anyhow::{Context, Result, ensure};
use farside_tests::SHORT;

use crate::{
    host::{HERE, Host},
    scripted::Scripted,
    stage::{CARD, PORT_A},
};

/// Configuration space of a vfio-user device.
const CONFIG: u32 = 7;

/// PCI Express of an NTB's port, which has all bits of device control, unlike QEMU's own devices.
const PORT_EXPRESS: u64 = 0x50;

const DEVICE_CONTROL: u64 = 0x08;
const LINK_CONTROL: u64 = 0x10;
const RELAXED_ORDERING: u16 = 1 << 4;
const PAYLOAD: u16 = 0b111 << 5;
const READ_REQUEST: u16 = 0b111 << 12;

pub fn device_control_is_the_functions_in_the_borrowers_bits(host: &Host) -> Result<()> {
    let at = PORT_EXPRESS + DEVICE_CONTROL;
    let before = register(host, PORT_A, at)?;
    let lender = host.lend(HERE, &format!("--vfio port={PORT_A}"))?;
    let backend = host.serve(HERE, "a", "port", "")?;
    let mut vmm = Scripted::start(host, HERE, "a", "port")?;
    vmm.step("reset")?;
    let theirs = register(host, PORT_A, at)?;
    ensure!(peek(&mut vmm, at)? as u16 & READ_REQUEST == theirs & READ_REQUEST);

    // 4096 bytes, without relaxed ordering, and a payload size and errors that are not the borrower's.
    let wanted = 0x5000 | PAYLOAD | 0x000f;
    vmm.step(&format!("poke {CONFIG} {at} {wanted}"))?;
    let found = register(host, PORT_A, at)?;
    let mine = READ_REQUEST | RELAXED_ORDERING;
    ensure!(found & mine == 0x5000, "the function has {found:#06x}");
    ensure!(
        found & !mine == theirs & !mine,
        "{theirs:#06x} became {found:#06x}"
    );
    let read = peek(&mut vmm, at)? as u16;
    ensure!(
        read & !0x0800 == wanted,
        "the borrower reads {read:#06x}, not {wanted:#06x}"
    );

    // A change that the borrower has not made.
    set_register(host, PORT_A, at, found | RELAXED_ORDERING)?;
    let read = peek(&mut vmm, at)? as u16;
    ensure!(
        read & RELAXED_ORDERING != 0,
        "the borrower reads {read:#06x}"
    );

    // Command and BARs are neither read nor written.
    let (command, bar) = (register(host, PORT_A, 4)?, register(host, PORT_A, 0x12)?);
    for (offset, value) in [(4, 0x0402), (0x10, u32::MAX), (0x44, 3)] {
        vmm.step(&format!("poke {CONFIG} {offset} {value}"))?;
    }
    ensure!(register(host, PORT_A, 0x12)? == bar);
    ensure!(register(host, PORT_A, 4)? & 0x3 == command & 0x3);
    ensure!(register(host, PORT_A, 0x44)? & 0x3 == 0, "D0");
    vmm.step(&format!("poke {CONFIG} 0x44 0"))?;

    // VFIO keeps a setting over a reset; the lender does not.
    vmm.step("reset")?;
    let found = register(host, PORT_A, at)?;
    ensure!(
        found == theirs,
        "{theirs:#06x} is {found:#06x} after a reset"
    );
    vmm.step(&format!("poke {CONFIG} {at} 0x0000"))?;
    ensure!(register(host, PORT_A, at)? & READ_REQUEST == 0);
    vmm.quit()?;
    backend.stop()?;
    lender.stop()?;
    let after = register(host, PORT_A, at)?;
    ensure!(
        before == after,
        "{before:#06x} is {after:#06x} after the lease"
    );
    Ok(())
}

pub fn link_status_and_device_specific_registers_are_the_functions(host: &Host) -> Result<()> {
    let lender = host.lend(HERE, &format!("--vfio card={CARD} --force"))?;
    let backend = host.serve(HERE, "a", "card", "")?;
    let mut vmm = Scripted::start(host, HERE, "a", "card")?;
    vmm.step("reset")?;
    let (express, end) = find_express(&mut vmm)?;
    let status = register(host, CARD, express + LINK_CONTROL + 2)?;
    let read = peek(&mut vmm, express + LINK_CONTROL)?;
    ensure!(
        status != 0 && (read >> 16) as u16 == status & 0x3fff,
        "{status:#06x}, {read:#010x}"
    );

    // Behind the last capability. In QEMU's devices that is storage.
    vmm.step(&format!("poke {CONFIG} {end} 0x12345678"))?;
    let halves = [register(host, CARD, end)?, register(host, CARD, end + 2)?];
    ensure!(halves == [0x5678, 0x1234], "{halves:04x?}");
    set_register(host, CARD, end, 0xabcd)?;
    let read = peek(&mut vmm, end)?;
    ensure!(read == 0x1234_abcd, "{read:#010x}");
    vmm.quit()?;
    backend.stop()?;
    lender.stop()
}

/// The place of the PCI Express capability, which must be the last one, and its end.
fn find_express(vmm: &mut Scripted<'_>) -> Result<(u64, u64)> {
    let mut at = u64::from(peek(vmm, 0x34)? & 0xfc);
    for _ in 0..48 {
        let header = peek(vmm, at)?;
        if header & 0xff == 0x10 {
            return Ok((at, at + 0x3c));
        }
        at = u64::from(header >> 8 & 0xfc);
    }
    anyhow::bail!("there is no PCI Express capability")
}

fn peek(vmm: &mut Scripted<'_>, offset: u64) -> Result<u32> {
    let answer = vmm.step(&format!("peek {CONFIG} {offset}"))?;
    let value = answer["value"].as_u64();
    Ok(value
        .with_context(|| format!("peek found {answer}"))?
        .try_into()?)
}

/// A 16-bit register, as the host's kernel reads it from the function.
fn register(host: &Host, bdf: &str, offset: u64) -> Result<u16> {
    let command = format!("od -An -tu2 -j{offset} -N2 /sys/bus/pci/devices/{bdf}/config");
    Ok(host.exec_ok(&command, SHORT)?.trim().parse()?)
}

fn set_register(host: &Host, bdf: &str, offset: u64, value: u16) -> Result<()> {
    let [low, high] = value.to_le_bytes();
    let command = format!(
        "printf '\\{low:03o}\\{high:03o}' |
        dd of=/sys/bus/pci/devices/{bdf}/config bs=2 seek={} count=1 conv=notrunc 2>/dev/null",
        offset / 2
    );
    host.exec_ok(&command, SHORT).map(drop)
}
