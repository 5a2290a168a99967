//! How long it takes to find the RAM of a 4 TiB guest.

use std::time::Instant;

use farside_guest_layout::{Gpa, GpaRange, PlanRules, ProbeLimits, RangeSet, plan, probe};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const RUNS: u32 = 10_000;
    let mut map = [(0, 640 << 10), (1 << 20, 2 << 30), (4 << 30, 4 << 40)]
        .into_iter()
        .map(|(start, end)| GpaRange::between(Gpa::new(start), Gpa::new(end)))
        .collect::<Result<RangeSet, _>>()?;
    let start = Instant::now();
    let mut probes = 0;
    for _ in 0..RUNS {
        let layout = probe(&mut map, &ProbeLimits::default())?;
        probes = layout.probes;
        std::hint::black_box(plan(&layout, &PlanRules::default()));
    }
    println!("{probes} probes, {:?} a run", start.elapsed() / RUNS);
    Ok(())
}
