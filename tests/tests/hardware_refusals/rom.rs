//! Expansion ROMs.

use anyhow::{Context, Result, ensure};
use farside_tests::SHORT;

use crate::{
    host::{HERE, Host},
    scripted::Scripted,
    stage::{CARD, DRIVE, rom_image},
};

const ROM: u32 = 6;
const CONFIG: u32 = 7;

pub fn a_guest_sees_the_rom_of_its_function_or_the_configured_one(host: &Host) -> Result<()> {
    let own = rom_image();
    let mut other = own.clone();
    other[2040..].copy_from_slice(b"of file!");
    other.resize(5000, 0xff);
    let octal: String = other.iter().map(|byte| format!("\\{byte:03o}")).collect();
    host.exec_ok(&format!("printf '{octal}' >/tmp/other.rom"), SHORT)?;
    for (more, rom) in [
        ("", &own[..]),
        ("rom = \"/tmp/other.rom\"", &other),
        ("rom = false", &[]),
    ] {
        config(host, DRIVE, more)?;
        let lender = host.lend(HERE, "--config /tmp/rom.toml")?;
        let backend = host.serve(HERE, "a", "x", "")?;
        let mut vmm = Scripted::start(host, HERE, "a", "x")?;
        vmm.step(&format!("poke {CONFIG} 0x30 0xfffff800"))?;
        let size = peek(&mut vmm, CONFIG, 0x30)?.wrapping_neg();
        let wanted = match rom.len() {
            0 => 0,
            len => len.next_power_of_two(),
        };
        ensure!(
            size as usize == wanted,
            "{more}: {size} bytes, not {wanted}"
        );
        for at in [0, 0x1c, 2040, 2044].into_iter().filter(|_| wanted != 0) {
            let value = peek(&mut vmm, ROM, at as u64)?;
            let found = value.to_le_bytes();
            ensure!(found == rom[at..at + 4], "{more}: {at:#x} is {value:#010x}");
        }
        vmm.quit()?;
        backend.stop()?;
        lender.stop()?;
    }
    Ok(())
}

pub fn a_file_that_is_no_rom_is_refused(host: &Host) -> Result<()> {
    let lend = "lend --config /tmp/rom.toml";
    config(host, CARD, "rom = \"/tmp/rom.toml\"")?;
    let words = ["/tmp/rom.toml", "not an expansion ROM", "rom = false"];
    host.refuses("a ROM that is none", HERE, lend, &words)?;
    config(host, CARD, "rom = \"/tmp/none\"")?;
    let words = ["/tmp/none", "No such file"];
    host.refuses("a ROM that is missing", HERE, lend, &words)?;
    host.verdict()
}

fn config(host: &Host, function: &str, more: &str) -> Result<()> {
    let text = format!(
        "name = \"rack1\"\n[[device]]\nid = \"x\"\n[device.vfio]\nfunction = \"{function}\"\n{more}\n"
    );
    let write = format!("printf '%s' '{text}' >/tmp/rom.toml");
    host.exec_ok(&write, SHORT).map(drop)
}

fn peek(vmm: &mut Scripted<'_>, region: u32, offset: u64) -> Result<u32> {
    let answer = vmm.step(&format!("peek {region} {offset}"))?;
    let value = answer["value"].as_u64();
    let value = value.with_context(|| format!("peek found {answer}"))?;
    Ok(value.try_into()?)
}
