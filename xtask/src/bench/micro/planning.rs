//! Finding guest RAM by probing, and planning windows for it. Both are pure, so they are
//! measured as the libraries that the backend and `farside plan` use. The ratio to the
//! smallest guest shows that neither grows with the guest's size.

use std::{hint::black_box, slice, time::Instant};

use anyhow::{Context, Result, ensure};
use farside_bench::{Section, Series};
use farside_fabric::NtbLimits;
use farside_guest_layout::{PlanRules, ProbeLimits, RangeSet, plan, probe};
use farside_planner::{AddressRules, Guest, plan_ntb};

use super::{
    figures::{against, series},
    round_trip::micros,
};

/// Guests, GiB of RAM.
const SIZES: [u64; 4] = [1, 4, 16, 1024];
/// Repetitions in a turn: one is too short for a clock.
const TIMES: u32 = 200;

/// Measures in turns.
pub(super) fn measure(turns: u32) -> Result<Section> {
    let guests: Vec<_> = SIZES.iter().map(|gib| Guest::new(gib << 30)).collect();
    let mut all = compare("probe and plan", &guests, turns, |guest| {
        let mut ram: RangeSet = guest.layout().ranges().collect();
        let began = Instant::now();
        for _ in 0..TIMES {
            let layout = probe(black_box(&mut ram), &ProbeLimits::default())?;
            let windows = plan(&layout, &PlanRules::default());
            ensure!(windows.ram_bytes() == ram.bytes(), "RAM was missed");
        }
        Ok(micros(began.elapsed()) / f64::from(TIMES))
    })?;
    let (limits, rules) = (NtbLimits::default(), AddressRules::default());
    all.extend(compare("farside plan", &guests, turns, |guest| {
        let began = Instant::now();
        for _ in 0..TIMES {
            black_box(plan_ntb(
                black_box(slice::from_ref(guest)),
                &limits,
                &rules,
            )?);
        }
        Ok(micros(began.elapsed()) / f64::from(TIMES))
    })?);
    Ok(Section {
        name: "planning".into(),
        title: "Probing and planning".into(),
        about: format!(
            "Finding all RAM of a PC's guest by asking whether ranges are RAM, and planning DMA \
             windows for it, as the backend does at bus-master enable; and what `farside plan` \
             does for such a guest. By the libraries, {TIMES} times a turn. Each guest beside the \
             smallest, which has no high memory and so one window less: beyond that, neither \
             grows with RAM."
        ),
        series: all,
    })
}

/// Compares each guest with the first.
fn compare(
    what: &str,
    guests: &[Guest],
    turns: u32,
    mut once: impl FnMut(&Guest) -> Result<f64>,
) -> Result<Vec<Series>> {
    let mut figures = Vec::new();
    for _ in 0..turns {
        let turn: Result<Vec<f64>> = guests.iter().map(&mut once).collect();
        figures.push(turn?);
    }
    let (smallest, others) = SIZES.split_first().context("no guests")?;
    let of = |n: usize| figures.iter().map(move |turn| turn[n]);
    let smallest = format!("{what}, {smallest} GiB");
    let mut all = vec![series(&smallest, of(0))];
    for (n, gib) in (1..).zip(others) {
        let larger = series(format!("{what}, {gib} GiB"), of(n));
        all.push(against(larger, &smallest));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_guest_is_planned() {
        let series = measure(1).unwrap().series;
        assert_eq!(series.len(), 2 * SIZES.len());
        let beside = series.iter().filter(|series| series.against.is_some());
        assert_eq!(beside.count(), series.len() - 2);
    }
}
