//! The results of one run of a job, and of a pair of runs.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    Better, Spread, Target, Unit,
    fio::{Outcome, Work},
    job::Job,
};

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// I/O operations a second.
    pub iops: f64,
    /// Bytes a second.
    pub bandwidth: f64,
    /// Latency from before submission to completion, nanoseconds.
    pub p50: f64,
    /// Latency from before submission to completion, nanoseconds.
    pub p99: f64,
    /// Latency from before submission to completion, nanoseconds.
    pub p999: f64,
    /// Nanoseconds that the guest's CPUs were busy for one I/O.
    pub guest_cpu: Option<f64>,
    /// Nanoseconds of host CPU time for one I/O, of QEMU and all processes that serve the disk;
    /// unknown from within a guest.
    pub host_cpu: Option<f64>,
}

impl Measurement {
    /// Combines fio's results with the CPU time meanwhile. `host_cpu` covers the same time as
    /// `work`.
    pub fn new(job: &Job, outcome: &Outcome, work: &Work, host_cpu: Option<Duration>) -> Self {
        let each = |cpu| Some(work.cpu_per_io(cpu, job.block)? * 1e9);
        Self {
            iops: outcome.iops,
            bandwidth: outcome.bandwidth,
            p50: outcome.p50,
            p99: outcome.p99,
            p999: outcome.p999,
            guest_cpu: each(work.cpu),
            host_cpu: host_cpu.and_then(each),
        }
    }
}

/// Two runs, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// On the borrowed disk.
    pub borrowed: Measurement,
    /// On the one it is compared with.
    pub beside: Measurement,
}

/// A job on both disks, as often as it ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Written")]
pub struct JobResult {
    /// The job's name.
    pub job: String,
    /// Of a disk that another host has.
    #[serde(flatten)]
    pub network: Option<Network>,
    /// Of a physical device.
    #[serde(flatten)]
    pub passthrough: Option<Passthrough>,
    /// In the order they were made.
    pub pairs: Vec<Pair>,
}

/// How a job reached the disk of another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The hosts are network namespaces, or VMs.
    pub hosts: Hosts,
    /// Round-trip time that was added, microseconds.
    pub delay_us: u32,
    /// What farside is compared with.
    pub peer: String,
    /// Whether farside's connection has TLS. The peer's has none: the ratio is what TLS costs.
    pub tls: bool,
}

/// A physical device that a guest has in turns: borrowed, and by plain `vfio-pci`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Passthrough {
    /// Its name in QEMU.
    pub device: String,
    /// Interrupts for one I/O, borrowed over plain.
    pub interrupts_ratio: f64,
    /// Accesses to the borrowed device's BARs that trapped while the job ran, all repeats together.
    pub trapped_accesses_after_start: u64,
}

impl Passthrough {
    /// What the borrowed device is compared with.
    pub const BESIDE: &str = "vfio-pci";
}

/// What the hosts of a comparison over a network are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hosts {
    /// Network namespaces of one machine, and a polling driver in the guest's place.
    Namespaces,
    /// VMs with kernels of their own, one of which has a guest.
    Vms,
}

/// A [`JobResult`] in a file: for programs that plot, with the medians of the
/// ratios, borrowed over beside.
#[derive(Serialize)]
struct Written {
    name: String,
    #[serde(flatten)]
    network: Option<Network>,
    #[serde(flatten)]
    passthrough: Option<Passthrough>,
    /// Number of pairs.
    repeats: usize,
    iops_ratio: Option<f64>,
    bandwidth_ratio: Option<f64>,
    p99_ratio: Option<f64>,
    /// None where the host's CPU time is unknown.
    host_cpu_ratio: Option<f64>,
    job: String,
    pairs: Vec<Pair>,
}

impl From<JobResult> for Written {
    fn from(result: JobResult) -> Self {
        let [iops, bandwidth, _, p99, _, _, host_cpu] =
            METRICS.map(|metric| result.ratio(&metric).map(|ratio| ratio.median));
        Self {
            name: result.job.clone(),
            network: result.network,
            passthrough: result.passthrough,
            repeats: result.pairs.len(),
            iops_ratio: iops,
            bandwidth_ratio: bandwidth,
            p99_ratio: p99,
            host_cpu_ratio: host_cpu,
            job: result.job,
            pairs: result.pairs,
        }
    }
}

/// One column of the tables.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// For people, and stable.
    pub name: &'static str,
    /// Of the figures.
    pub unit: Unit,
    /// When they are better.
    pub better: Better,
    /// The target of the ratio, borrowed over beside.
    pub target: Option<Target>,
    of: fn(&Measurement) -> Option<f64>,
}

const fn metric(
    name: &'static str,
    unit: Unit,
    better: Better,
    target: Option<Target>,
    of: fn(&Measurement) -> Option<f64>,
) -> Metric {
    Metric {
        name,
        unit,
        better,
        target,
        of,
    }
}

const AT_LEAST: Option<Target> = Some(Target::AtLeast(1.0));
const AT_MOST: Option<Target> = Some(Target::AtMost(1.0));

/// The metrics of a job. Wanted are at least as many IOPS and bytes as the disk
/// beside has, and at most its p99.
pub const METRICS: [Metric; 7] = [
    metric("IOPS", Unit::PerSecond, Better::More, AT_LEAST, |m| {
        Some(m.iops)
    }),
    metric(
        "bandwidth",
        Unit::BytesPerSecond,
        Better::More,
        AT_LEAST,
        |m| Some(m.bandwidth),
    ),
    metric("p50", Unit::Nanoseconds, Better::Less, None, |m| {
        Some(m.p50)
    }),
    metric("p99", Unit::Nanoseconds, Better::Less, AT_MOST, |m| {
        Some(m.p99)
    }),
    metric("p99.9", Unit::Nanoseconds, Better::Less, None, |m| {
        Some(m.p999)
    }),
    metric("guest CPU", Unit::Nanoseconds, Better::Less, None, |m| {
        m.guest_cpu
    }),
    metric("host CPU", Unit::Nanoseconds, Better::Less, None, |m| {
        m.host_cpu
    }),
];

impl JobResult {
    /// The job's name, unique in the results.
    pub fn label(&self) -> String {
        if let Some(Passthrough { device, .. }) = &self.passthrough {
            return format!("{}, {device}", self.job);
        }
        let Some(network) = &self.network else {
            return self.job.clone();
        };
        let Network {
            hosts,
            delay_us,
            peer,
            tls,
        } = network;
        let tls = if *tls { ", TLS" } else { "" };
        let vms = match hosts {
            Hosts::Namespaces => "",
            Hosts::Vms => ", VMs",
        };
        format!("{}, {delay_us} µs{tls} over {peer}{vms}", self.job)
    }

    /// The target of a metric's ratio. What TLS costs has none.
    pub fn target(&self, metric: &Metric) -> Option<Target> {
        let tls = self.network.as_ref().is_some_and(|network| network.tls);
        metric.target.filter(|_| !tls)
    }

    /// A metric of the borrowed disk, one figure a repeat.
    pub fn borrowed(&self, metric: &Metric) -> Vec<f64> {
        let of = |pair: &Pair| (metric.of)(&pair.borrowed);
        self.pairs.iter().filter_map(of).collect()
    }

    /// A metric of the disk beside.
    pub fn beside(&self, metric: &Metric) -> Vec<f64> {
        let of = |pair: &Pair| (metric.of)(&pair.beside);
        self.pairs.iter().filter_map(of).collect()
    }

    /// A metric, borrowed over beside, one ratio a pair.
    pub fn ratios(&self, metric: &Metric) -> Vec<f64> {
        let of = |pair: &Pair| Some((metric.of)(&pair.borrowed)? / (metric.of)(&pair.beside)?);
        self.pairs.iter().filter_map(of).collect()
    }

    /// The spread of the [ratios](Self::ratios).
    pub fn ratio(&self, metric: &Metric) -> Option<Spread> {
        Spread::of(self.ratios(metric))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn measurement(scale: f64) -> Measurement {
        Measurement {
            iops: 1000.0 * scale,
            bandwidth: 4_096_000.0 * scale,
            p50: 100_000.0,
            p99: 200_000.0 / scale,
            p999: 400_000.0,
            guest_cpu: Some(20_000.0),
            host_cpu: Some(30_000.0),
        }
    }

    /// A job, borrowed at `scales` of the other's speed.
    pub(crate) fn job(name: &str, scales: &[f64]) -> JobResult {
        let pair = |scale: &f64| Pair {
            borrowed: measurement(*scale),
            beside: measurement(1.0),
        };
        JobResult {
            job: name.to_owned(),
            network: None,
            passthrough: None,
            pairs: scales.iter().map(pair).collect(),
        }
    }

    /// The same, over a network.
    pub(crate) fn network_job(name: &str, scales: &[f64], tls: bool) -> JobResult {
        JobResult {
            network: Some(Network {
                hosts: Hosts::Namespaces,
                delay_us: 50,
                peer: "SPDK".into(),
                tls,
            }),
            ..job(name, scales)
        }
    }

    #[test]
    fn a_job_over_a_network_is_written_with_its_way_and_read_again() {
        let job = network_job("j", &[2.0], true);
        assert_eq!(job.label(), "j, 50 µs, TLS over SPDK");
        let json = serde_json::to_value(&job).unwrap();
        let written = ["name", "hosts", "delay_us", "peer", "tls"].map(|key| json[key].clone());
        assert_eq!(
            serde_json::Value::from(written.to_vec()),
            serde_json::json!(["j", "namespaces", 50, "SPDK", true])
        );
        assert_eq!(serde_json::from_value::<JobResult>(json).unwrap(), job);
    }

    #[test]
    fn a_job_of_a_physical_device_is_written_with_its_counts_and_read_again() {
        let job = JobResult {
            passthrough: Some(Passthrough {
                device: "nvme".into(),
                interrupts_ratio: 1.5,
                trapped_accesses_after_start: 0,
            }),
            ..job("j", &[2.0])
        };
        assert_eq!(job.label(), "j, nvme");
        let json = serde_json::to_value(&job).unwrap();
        let keys = ["device", "interrupts_ratio", "trapped_accesses_after_start"];
        let written = keys.map(|key| json[key].clone());
        assert_eq!(
            serde_json::Value::from(written.to_vec()),
            serde_json::json!(["nvme", 1.5, 0])
        );
        assert_eq!(serde_json::from_value::<JobResult>(json).unwrap(), job);
    }

    #[test]
    fn what_tls_costs_has_no_target() {
        let targets = |tls| {
            let job = network_job("j", &[0.5], tls);
            METRICS.iter().filter_map(|m| job.target(m)).count()
        };
        assert_eq!((targets(false), targets(true)), (3, 0));
    }

    #[test]
    fn ratios_are_borrowed_over_beside_pair_by_pair() {
        let job = job("j", &[2.0, 1.0, 4.0]);
        let ratio = |name: &str| {
            let metric = METRICS.iter().find(|metric| metric.name == name).unwrap();
            job.ratio(metric).unwrap()
        };
        assert_eq!(ratio("IOPS").to_string(), "2.00 (1.00–4.00)");
        assert_eq!(ratio("p99").to_string(), "0.50 (0.25–1.00)");
        assert_eq!(ratio("guest CPU").median, 1.0);
    }

    #[test]
    fn a_file_has_each_jobs_ratios() {
        let mut job = job("j", &[2.0, 1.0, 4.0]);
        job.pairs[0].borrowed.host_cpu = Some(90_000.0);
        let mut file = serde_json::to_value(&job).unwrap();
        let pairs = file.as_object_mut().unwrap().remove("pairs").unwrap();
        assert_eq!(pairs.as_array().unwrap().len(), 3);
        let ratios = serde_json::json!({
            "name": "j", "job": "j", "repeats": 3,
            "iops_ratio": 2.0, "bandwidth_ratio": 2.0, "p99_ratio": 0.5, "host_cpu_ratio": 1.0,
        });
        assert_eq!(file, ratios);
    }

    #[test]
    fn what_is_unknown_has_no_ratio() {
        let mut job = job("j", &[2.0]);
        job.pairs[0].borrowed.host_cpu = None;
        assert_eq!(job.ratio(&METRICS[6]), None);
        assert!(job.borrowed(&METRICS[6]).is_empty());
    }

    #[test]
    fn processor_time_is_for_one_request() {
        let outcome = Outcome {
            ios: 1,
            iops: 1.0,
            bandwidth: 1.0,
            p50: 1.0,
            p99: 1.0,
            p999: 1.0,
        };
        let work = Work {
            bytes: 8192,
            cpu: Duration::from_millis(10),
        };
        let host = Some(Duration::from_millis(4));
        let m = Measurement::new(&crate::job::JOBS[0], &outcome, &work, host);
        assert_eq!((m.guest_cpu, m.host_cpu), (Some(5e6), Some(2e6)));
    }
}
