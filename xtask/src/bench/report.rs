//! The figures, for people and as JSON.

use std::{path::PathBuf, time::Duration};

use console::style;
use serde_json::{Value, json};

use super::{job::Job, measure::Measurement, ratio::Spread};
use crate::text::{micros, table};

/// Under what circumstances was measured.
#[derive(Debug, Default)]
pub(super) struct About {
    pub(super) qemu: String,
    pub(super) accel: String,
    pub(super) kernel: String,
    pub(super) own_aio: String,
    pub(super) images: PathBuf,
    pub(super) repeats: u32,
    pub(super) seconds: u32,
    pub(super) wall: Duration,
}

/// A job and its measurements: (borrowed, QEMU's own), in the order they were
/// made.
#[derive(Debug)]
pub(super) struct Compared {
    pub(super) job: Job,
    pub(super) pairs: Vec<(Measurement, Measurement)>,
}

/// Picks one figure of a measurement.
type Figure = fn(&Measurement) -> f64;

const FIGURES: [(&str, Figure); 5] = [
    ("IOPS", |m| m.iops),
    ("bandwidth", |m| m.bandwidth),
    ("p50", |m| m.p50),
    ("p99", |m| m.p99),
    ("host CPU", |m| m.host_cpu),
];

/// Borrowed over own, of the measurements made next to each other.
fn ratio(pairs: &[(Measurement, Measurement)], figure: Figure) -> Spread {
    Spread::of(
        pairs
            .iter()
            .map(|(borrowed, own)| figure(borrowed) / figure(own)),
    )
}

/// What is wanted: at least as many IOPS and bytes, at most the same p99.
fn meets_goal(pairs: &[(Measurement, Measurement)]) -> bool {
    ratio(pairs, |m| m.iops).median >= 1.0
        && ratio(pairs, |m| m.bandwidth).median >= 1.0
        && ratio(pairs, |m| m.p99).median <= 1.0
}

/// A job's outcome in a line, as soon as it is known.
pub(super) fn line(job: &Job, pairs: &[(Measurement, Measurement)]) -> String {
    format!(
        "{}: IOPS {}, p99 {}, host CPU {}",
        job.name,
        ratio(pairs, |m| m.iops),
        ratio(pairs, |m| m.p99),
        ratio(pairs, |m| m.host_cpu)
    )
}

/// Both tables.
pub(super) fn text(about: &About, compared: &[Compared]) -> String {
    let mut text = format!(
        "\n{}\n\n",
        style("Borrowed drive over QEMU's own nvme device").bold()
    );
    let mut header = vec!["job".to_owned()];
    header.extend(FIGURES.iter().map(|(name, _)| (*name).to_owned()));
    header.push("goal".to_owned());
    let mut ratios = vec![header];
    for Compared { job, pairs } in compared {
        let mut row = vec![job.name.to_owned()];
        row.extend(
            FIGURES
                .iter()
                .map(|(_, figure)| ratio(pairs, *figure).to_string()),
        );
        row.push(if meets_goal(pairs) { "met" } else { "missed" }.to_owned());
        ratios.push(row);
    }
    text += &table(&ratios);
    text += &format!(
        "\nRatios are median (least–most) of {} pairs of runs of {} s, in turns. More is better \
         for IOPS and\nbandwidth, less for latency (fio's completion latency) and host CPU: user \
         and system time of QEMU,\nbackend and lender together for each I/O done. The goal is \
         IOPS and bandwidth of at least 1.00 and\np99 of at most 1.00.\n\n",
        about.repeats, about.seconds
    );

    let mut absolute = vec![
        [
            "job",
            "drive",
            "IOPS",
            "MiB/s",
            "p50",
            "p99",
            "host CPU per I/O",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for Compared { job, pairs } in compared {
        type Side = fn(&(Measurement, Measurement)) -> &Measurement;
        let sides: [(&str, Side); 2] = [("borrowed", |pair| &pair.0), ("own", |pair| &pair.1)];
        for (name, side) in sides {
            let median =
                |figure: Figure| Spread::of(pairs.iter().map(|pair| figure(side(pair)))).median;
            absolute.push(vec![
                job.name.to_owned(),
                name.to_owned(),
                format!("{:.0}", median(|m| m.iops)),
                format!("{:.1}", median(|m| m.bandwidth) / f64::from(1 << 20)),
                micros(median(|m| m.p50) / 1e3),
                micros(median(|m| m.p99) / 1e3),
                micros(median(|m| m.host_cpu) * 1e6),
            ]);
        }
    }
    for row in table(&absolute).lines() {
        text += &format!("{}\n", style(row).dim());
    }
    text += &format!(
        "\n{}, {}, guest Linux {} with 2 processors, images in {}, QEMU's own with \
         cache=writeback,aio={}; {:.0} s in all.\n",
        about.qemu,
        about.accel,
        about.kernel,
        about.images.display(),
        about.own_aio,
        about.wall.as_secs_f64()
    );
    text
}

/// The machine-readable form. Names stay; more may come.
pub(super) fn json(about: &About, compared: &[Compared]) -> Value {
    let jobs: Vec<Value> = compared.iter().map(job_json).collect();
    json!({
        "jobs": jobs,
        "qemu": about.qemu,
        "accel": about.accel.to_lowercase(),
        "kernel": about.kernel,
        "seconds": about.seconds,
        "wall_s": about.wall.as_secs_f64(),
    })
}

fn job_json(Compared { job, pairs }: &Compared) -> Value {
    let spread = |figure| {
        let Spread { median, min, max } = ratio(pairs, figure);
        json!({ "median": median, "min": min, "max": max })
    };
    let side = |m: &Measurement| {
        json!({
            "iops": m.iops,
            "bandwidth_bytes_s": m.bandwidth,
            "p50_ns": m.p50,
            "p99_ns": m.p99,
            "host_cpu_s_per_io": m.host_cpu,
        })
    };
    json!({
        "name": job.name,
        "iops_ratio": ratio(pairs, |m| m.iops).median,
        "bandwidth_ratio": ratio(pairs, |m| m.bandwidth).median,
        "p50_ratio": ratio(pairs, |m| m.p50).median,
        "p99_ratio": ratio(pairs, |m| m.p99).median,
        "host_cpu_ratio": ratio(pairs, |m| m.host_cpu).median,
        "repeats": pairs.len(),
        "goal_met": meets_goal(pairs),
        "spread": {
            "iops": spread(|m| m.iops),
            "bandwidth": spread(|m| m.bandwidth),
            "p50": spread(|m| m.p50),
            "p99": spread(|m| m.p99),
            "host_cpu": spread(|m| m.host_cpu),
        },
        "borrowed": pairs.iter().map(|pair| side(&pair.0)).collect::<Vec<_>>(),
        "own": pairs.iter().map(|pair| side(&pair.1)).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::job::JOBS;

    fn measurement(scale: f64) -> Measurement {
        Measurement {
            iops: 1000.0 * scale,
            bandwidth: 4_096_000.0 * scale,
            p50: 100_000.0,
            p99: 200_000.0 / scale,
            host_cpu: 0.000_02,
        }
    }

    /// The first job, borrowed at `scales` of the own's speed.
    fn compared(scales: &[f64]) -> Vec<Compared> {
        let pairs = scales
            .iter()
            .map(|scale| (measurement(*scale), measurement(1.0)))
            .collect();
        vec![Compared {
            job: JOBS[0],
            pairs,
        }]
    }

    fn shown(compared: &[Compared]) -> String {
        let text = text(&About::default(), compared);
        console::strip_ansi_codes(&text).into_owned()
    }

    #[test]
    fn ratios_are_borrowed_over_own() {
        let text = shown(&compared(&[2.0, 1.0, 4.0]));
        let row = text
            .lines()
            .find(|line| line.starts_with("randread-4k-qd1"));
        let row = row.unwrap();
        assert!(row.contains("2.00 (1.00–4.00)"), "{row}");
        assert!(row.contains("0.50 (0.25–1.00)"), "{row}");
        assert!(row.ends_with("met"), "{row}");
        let own = text
            .lines()
            .find(|line| line.split_whitespace().nth(1) == Some("own"));
        let own: Vec<&str> = own.unwrap().split_whitespace().skip(2).collect();
        assert_eq!(own, ["1000", "3.9", "100", "µs", "200", "µs", "20.0", "µs"]);
    }

    #[test]
    fn a_slower_drive_misses_the_goal() {
        assert!(shown(&compared(&[0.5])).contains("missed"));
        assert!(!meets_goal(&compared(&[0.99])[0].pairs));
        assert!(meets_goal(&compared(&[1.0])[0].pairs));
    }

    #[test]
    fn the_json_has_its_fixed_names() {
        let json = json(&About::default(), &compared(&[2.0, 4.0]));
        let job = &json["jobs"][0];
        assert_eq!(job["name"], "randread-4k-qd1");
        assert_eq!(job["iops_ratio"], 3.0);
        assert_eq!(job["bandwidth_ratio"], 3.0);
        assert_eq!(job["p99_ratio"], 0.375);
        assert_eq!(job["host_cpu_ratio"], 1.0);
        assert_eq!(job["repeats"], 2);
    }
}
