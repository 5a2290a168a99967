//! The agent in a test guest. As process 1 it sets the guest up and starts itself again as
//! `serve`, which handles the host's requests over the virtio-serial port. `guest-agent
//! mmio …` performs single register accesses for shell scripts, `guest-agent ping-pong …`
//! measures a device's latency.

#![deny(unsafe_code)]

mod exec;
mod files;
mod init;
#[expect(unsafe_code, reason = "registers are reached through pointers")]
mod mapping;
mod pages;
mod pci;
mod ping_pong;
mod power_button;
mod serve;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use farside_guest_agent::{BarAddress, Width};

const USAGE: &str = "usage: guest-agent serve
       guest-agent mmio read  BDF BAR OFFSET WIDTH
       guest-agent mmio write BDF BAR OFFSET WIDTH VALUE
       guest-agent mmio fill  BDF BAR OFFSET WIDTH VALUE COUNT
       guest-agent ping-pong BDF poll|interrupt WARM-UP ROUNDS
WIDTH is 1, 2, 4 or 8 bytes; numbers may be 0x…";

fn main() -> ExitCode {
    let result = if std::process::id() == 1 {
        init::run()
    } else {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        command(&args)
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guest-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn command(args: &[&str]) -> Result<()> {
    match args {
        ["serve"] => serve::run(),
        ["mmio", "read", bdf, bar, offset, width] => {
            let value = pci::mmio_read(&bar_address(bdf, bar, offset)?, parse_width(width)?)?;
            println!("{value:#x}");
            Ok(())
        }
        ["mmio", "write", bdf, bar, offset, width, value] => pci::mmio_fill(
            &bar_address(bdf, bar, offset)?,
            parse_width(width)?,
            number(value)?,
            1,
        ),
        ["mmio", "fill", bdf, bar, offset, width, value, count] => pci::mmio_fill(
            &bar_address(bdf, bar, offset)?,
            parse_width(width)?,
            number(value)?,
            number(count)?,
        ),
        ["ping-pong", bdf, wait, warm_up, rounds] => {
            ping_pong::run(bdf, wait, number(warm_up)?, number(rounds)?)
        }
        _ => bail!("{USAGE}"),
    }
}

fn bar_address(bdf: &str, bar: &str, offset: &str) -> Result<BarAddress> {
    Ok(BarAddress {
        bdf: bdf.to_owned(),
        bar: u8::try_from(number(bar)?).context("BAR is 0 to 5")?,
        offset: number(offset)?,
    })
}

fn parse_width(text: &str) -> Result<Width> {
    Width::from_bytes(number(text)?)
        .with_context(|| format!("width {text}: must be 1, 2, 4 or 8 bytes"))
}

fn number(text: &str) -> Result<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    }
    .with_context(|| format!("`{text}` is not a number"))
}
