//! From a register write in the guest until the device's response arrives.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farside_bench::{Better, Data, Quantiles, Section, Series, Unit};
use farside_testbed::{Accel, Progress, Vm};

use super::testers::{TESTERS, guest_bdf};
use crate::interrupt;

/// Unmeasured rounds at the start: QEMU has then translated the code.
const WARM_UP: u32 = 200;
/// Timeout of all rounds of one repeat.
const TIMEOUT: Duration = Duration::from_secs(300);

/// A device and the kind of response to wait for.
struct Way {
    name: String,
    bdf: String,
    wait: &'static str,
    against: Option<String>,
}

/// Plays `rounds` in each way, `repeats` times, in turns. KVM cannot deliver an interrupt
/// to memory, where the guest's process could see it: there it polls.
pub(super) fn measure(
    vm: &Vm,
    accel: Accel,
    rounds: u32,
    repeats: u32,
    progress: &Progress,
) -> Result<Section> {
    let [(_, direct), (_, relayed)] = TESTERS.map(|(name, slot)| (name, guest_bdf(slot)));
    let way = |name: &str, bdf: &str, wait, against: Option<&str>| Way {
        name: name.to_owned(),
        bdf: bdf.to_owned(),
        wait,
        against: against.map(str::to_owned),
    };
    const POLLING: &str = "polling memory";
    const DIRECT: &str = "interrupt, direct";
    let mut ways = vec![
        way(POLLING, &direct, "poll", None),
        way(DIRECT, &direct, "interrupt", Some(POLLING)),
        way("interrupt, relayed", &relayed, "interrupt", Some(DIRECT)),
    ];
    if accel == Accel::Kvm {
        ways.retain(|way| way.wait == "poll");
    }
    let task = progress.bar("Playing ping-pong", u64::from(repeats) * ways.len() as u64);
    let mut played: Vec<Vec<Quantiles>> = vec![Vec::new(); ways.len()];
    for repeat in 0..repeats {
        for (at, way) in ways.iter().enumerate() {
            interrupt::check()?;
            task.detail(&way.name);
            let Way { bdf, wait, .. } = way;
            let command = format!("guest-agent ping-pong {bdf} {wait} {WARM_UP} {rounds}");
            let output = vm.exec_ok(&command, TIMEOUT)?;
            played[at].push(quantiles(&output, rounds).with_context(|| way.name.clone())?);
            task.set(u64::from(repeat) * ways.len() as u64 + at as u64 + 1);
        }
    }
    task.done();
    let series = ways.into_iter().zip(played).map(|(way, runs)| Series {
        name: way.name,
        unit: Unit::Nanoseconds,
        better: Better::Less,
        data: Data::Quantiles(runs),
        against: way.against,
        target: None,
    });
    Ok(Section {
        name: "ping-pong".into(),
        title: "Ping-pong with a DMA test device".into(),
        about: format!(
            "A program in the guest writes a register of a borrowed DMA test device, which then \
             writes 8 bytes into the guest's memory by DMA; the time is from before the register \
             write until the program, which reads that memory all the time, sees the answer. \
             Polling: the answer is those 8 bytes. Interrupt: it is the message of the device's \
             MSI, whose address is in the same memory, so that it shows when QEMU delivers the \
             interrupt, without what the guest's kernel does with it. Direct: the lender's \
             device signals QEMU itself. Relayed: the lender tells the backend, which signals \
             QEMU. {rounds} rounds a repeat, after {WARM_UP} that do not count; the ways take \
             turns. A small command of this device is done before its register write \
             completes, so polling shows the trapped write alone, and what the others have more \
             is the interrupt."
        ),
        series: series.collect(),
    })
}

/// Quantiles of the guest's output: the nanoseconds of each round.
fn quantiles(output: &str, rounds: u32) -> Result<Quantiles> {
    let times = output.lines().map(|line| {
        line.parse::<f64>()
            .with_context(|| format!("the guest's time {line:?} is no number"))
    });
    let times = times.collect::<Result<Vec<f64>>>()?;
    ensure!(
        times.len() == rounds as usize,
        "the guest played {} rounds of {rounds}",
        times.len()
    );
    Quantiles::of(times).context("no rounds")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_counts() {
        let q = quantiles("300\n100\n200\n", 3).unwrap();
        assert_eq!((q.samples, q.min, q.p50, q.max), (3, 100.0, 200.0, 300.0));
        let error = |output: &str| quantiles(output, 2).unwrap_err().to_string();
        assert!(error("1\n").contains("1 rounds of 2"));
        assert!(error("1\nx\n").contains("\"x\""));
    }
}
