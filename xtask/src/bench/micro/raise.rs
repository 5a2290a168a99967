//! From a guest's store to a device register to the resulting interrupt, through the same
//! processes as in use: a message to the backend, one to the lender, whose device raises a
//! vector.
//!
//! Direct and relayed interrupts alternate, each with a separate backend that borrows the
//! device in turn. The rest of the path is the same.

use std::{path::Path, time::Instant};

use anyhow::{Context, Result, ensure};
use farside_bench::Series;
use farside_devices::dma_test::{Command, reg};
use farside_scripted_vmm::{device::Device, vectors::Vectors};

use super::{
    figures::{against, series},
    round_trip::micros,
    stage::{Stage, boot},
};
use crate::scene::SHORT;

/// Interrupts per turn.
const INTERRUPTS: usize = 1_000;

/// Measures in turns.
pub(super) fn measure(program: &Path, turns: u32) -> Result<Vec<Series>> {
    let mut stage = Stage::start(program)?;
    let direct = stage.serve("direct", &["--interrupts", "direct"])?;
    let relayed = stage.serve("relayed", &["--interrupts", "relayed"])?;
    let mut pairs = Vec::new();
    for turn in 0..=turns {
        let pair = [&direct, &relayed].map(|socket| median(socket));
        let [direct, relayed] = pair;
        let pair = (direct?, relayed?);
        if turn > 0 {
            pairs.push(pair);
        }
    }
    let relayed = series(
        "write to interrupt, relayed",
        pairs.iter().map(|pair| pair.1),
    );
    let direct = series(
        "write to interrupt, direct",
        pairs.iter().map(|pair| pair.0),
    );
    Ok(vec![against(direct, &relayed.name), relayed])
}

/// Borrows the device, raises interrupts, returns the device.
fn median(socket: &Path) -> Result<f64> {
    let mut device: Device = boot(socket)?;
    let mut vectors = Vectors::new(1)?;
    device.enable_vectors(&vectors)?;
    device.store(0, reg::VECTOR, 0)?;
    let mut times = Vec::with_capacity(INTERRUPTS);
    for _ in 0..INTERRUPTS {
        let start = Instant::now();
        device.store(0, reg::COMMAND, Command::Raise as u32)?;
        let came = vectors.wait(0, start + SHORT)?;
        times.push(start.elapsed());
        ensure!(came == 1, "{came} interrupts for one within {SHORT:?}");
    }
    times.sort_unstable();
    device.close();
    let median = times.get(times.len() / 2).context("no interrupt")?;
    Ok(micros(*median))
}
