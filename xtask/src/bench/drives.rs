//! Both disks in turns: borrowed, own, borrowed, own; fio's jobs, and one transfer at a
//! time of many sizes.

use anyhow::{Context, Result};
use farside_bench::{
    Axis, Better, Data, JobResult, METRICS, Pair, Point, Section, Series, Target, Unit,
    fio::Timing,
    job::{Job, Pattern, sweep},
};
use farside_testbed::{Progress, Vm};

use super::{guest::Drives, measure::Run};
use crate::{cpu, interrupt};

/// fio's ramp time, seconds.
const RAMP: u32 = 1;
/// Translates the guest's code and fills caches.
const WARM_UP: Timing = Timing {
    ramp: 0,
    seconds: 1,
};

/// Both disks and their guest.
pub(super) struct Both<'a> {
    pub(super) vm: &'a Vm,
    pub(super) drives: &'a Drives,
    /// The processes whose CPU time is measured on the host.
    pub(super) pids: &'a [u32],
    pub(super) repeats: u32,
    /// Whether jobs first run unmeasured: QEMU has then translated the code, and the images
    /// are in the page cache.
    pub(super) warm_up: bool,
    pub(super) progress: &'a Progress,
}

impl Both<'_> {
    /// Runs a job on one disk and on the other.
    fn pair(&self, job: &Job, timing: Timing) -> Result<Pair> {
        let measure = |drive| {
            interrupt::check()?;
            let run = Run {
                vm: self.vm,
                drive,
                cpu: &|| cpu::time(self.pids),
                timing,
                memory: None,
            };
            run.measure(job)
                .with_context(|| format!("{} on {drive}", job.name))
        };
        Ok(Pair {
            borrowed: measure(&self.drives.borrowed)?,
            beside: measure(&self.drives.own)?,
        })
    }

    /// Runs jobs.
    pub(super) fn jobs(&self, jobs: &[&Job], seconds: u32) -> Result<Vec<JobResult>> {
        let first = u32::from(!self.warm_up);
        let each = u64::from(self.repeats + 1 - first);
        let task = self.progress.bar("Measuring", jobs.len() as u64 * each);
        let mut results = Vec::new();
        for (at, job) in jobs.iter().enumerate() {
            let mut pairs = Vec::new();
            for repeat in first..=self.repeats {
                let timing = match repeat {
                    0 => WARM_UP,
                    _ => Timing {
                        ramp: if self.warm_up { RAMP } else { 0 },
                        seconds,
                    },
                };
                task.detail(&format!("{}, {repeat} of {}", job.name, self.repeats));
                let pair = self.pair(job, timing)?;
                if repeat > 0 {
                    pairs.push(pair);
                }
                task.set(at as u64 * each + u64::from(repeat - first) + 1);
            }
            let result = JobResult {
                job: job.name.to_string(),
                network: None,
                passthrough: None,
                pairs,
            };
            self.progress.note(&line(&result));
            results.push(result);
        }
        task.done();
        Ok(results)
    }

    /// One transfer at a time, 4 KiB to 128 MiB, each size `step` times the preceding one,
    /// `repeats` times each.
    pub(super) fn sweep(&self, step: u64, repeats: u32) -> Result<Section> {
        let patterns = [
            ("read", Pattern::SequentialRead),
            ("write", Pattern::SequentialWrite),
        ];
        let mut series = Vec::new();
        for (what, pattern) in patterns {
            let jobs = sweep(pattern, step);
            let total = jobs.len() as u64 * u64::from(repeats);
            let task = self.progress.bar(format!("Sweeping, {what}"), total);
            let (mut borrowed, mut own) = (Vec::new(), Vec::new());
            if self.warm_up {
                self.pair(&jobs[0], WARM_UP)?;
            }
            for job in &jobs {
                let pairs: Vec<Pair> = (0..repeats)
                    .map(|repeat| {
                        let done = borrowed.len() as u64 * u64::from(repeats);
                        task.set(done + u64::from(repeat));
                        task.detail(&job.name);
                        self.pair(job, WARM_UP)
                    })
                    .collect::<Result<_>>()?;
                let point = |of: fn(&Pair) -> f64| Point {
                    x: job.block as f64,
                    y: pairs.iter().map(of).collect(),
                };
                borrowed.push(point(|pair| pair.borrowed.bandwidth));
                own.push(point(|pair| pair.beside.bandwidth));
            }
            task.done();
            let own_name = format!("{what}, {}", super::OWN);
            series.push(bandwidth(
                &format!("{what}, {}", super::BORROWED),
                borrowed,
                Some(&own_name),
            ));
            series.push(bandwidth(&own_name, own, None));
        }
        Ok(Section {
            name: "sweep".into(),
            title: "Bandwidth over transfer size".into(),
            about: "fio reads or writes the disk from its beginning to its end, one request of \
                    the given size at a time, for a second, on both disks in turns. Small \
                    transfers show what a request costs, large ones what a byte costs. The \
                    guest's kernel cuts what exceeds the disk's largest transfer into several \
                    commands."
                .into(),
            series,
        })
    }
}

fn bandwidth(name: &str, points: Vec<Point>, against: Option<&str>) -> Series {
    Series {
        name: name.to_owned(),
        unit: Unit::BytesPerSecond,
        better: Better::More,
        data: Data::Points {
            over: Axis {
                name: "transfer size".into(),
                unit: Unit::Bytes,
            },
            points,
        },
        against: against.map(str::to_owned),
        target: against.map(|_| Target::AtLeast(1.0)),
    }
}

/// One line about a completed job.
pub(super) fn line(job: &JobResult) -> String {
    let ratios = METRICS.iter().filter_map(|metric| {
        let ratio = job.ratio(metric)?;
        Some(format!("{} {ratio}", metric.name))
    });
    format!("{}: {}", job.label(), ratios.collect::<Vec<_>>().join(", "))
}
