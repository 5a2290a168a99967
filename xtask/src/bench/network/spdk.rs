//! SPDK's NVMe/TCP target, and its `spdk_nvme_perf` as the initiator.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use farside_bench::{
    Measurement,
    job::{Job, Pattern},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::{
    cpus,
    hosts::{FAR, Hosts},
};
use crate::{child::Child, cpu, interrupt};

const PORT: &str = "4420";
const SUBSYSTEM: &str = "nqn.2016-06.io.spdk:farside";

/// Memory of each process, MiB. Not huge pages: TCP needs none.
const MEMORY: [&str; 3] = ["--no-huge", "-s", "512"];

/// Longer than `spdk_nvme_perf` takes to begin, and shorter than it runs.
const START: Duration = Duration::from_millis(800);

/// SPDK's programs, from a build in `directory`.
pub(super) struct Programs {
    target: PathBuf,
    perf: PathBuf,
}

impl Programs {
    pub(super) fn of(directory: &Path) -> Result<Self> {
        let program = |name: &str| {
            let path = directory.join("build/bin").join(name);
            ensure!(
                path.is_file(),
                "there is no {}: --spdk names SPDK's directory, after ./configure and make",
                path.display()
            );
            Ok(path)
        };
        Ok(Self {
            target: program("nvmf_tgt")?,
            perf: program("spdk_nvme_perf")?,
        })
    }
}

/// The target, which is stopped between measurements: it polls all the time.
pub(super) struct Spdk<'a> {
    programs: &'a Programs,
    hosts: &'a Hosts,
    target: Child,
    /// CPUs of the near host and of the far one.
    cpus: [usize; 2],
}

impl<'a> Spdk<'a> {
    /// Starts the target on the far host, with `image` as an aio bdev: it is the better of SPDK's for a
    /// file in memory.
    pub(super) fn start(programs: &'a Programs, hosts: &'a Hosts, image: &Path) -> Result<Self> {
        let cpus = cpus()?;
        let call = |method: &str, params| json!({"method": method, "params": params});
        let listener = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": FAR, "trsvcid": PORT});
        let config = json!({"subsystems": [
            {"subsystem": "bdev", "config": [call(
                "bdev_aio_create",
                json!({"name": "disk0", "filename": image, "block_size": 512}),
            )]},
            {"subsystem": "nvmf", "config": [
                call("nvmf_create_transport", json!({"trtype": "TCP"})),
                call("nvmf_create_subsystem", json!({"nqn": SUBSYSTEM, "allow_any_host": true})),
                call("nvmf_subsystem_add_ns",
                     json!({"nqn": SUBSYSTEM, "namespace": {"bdev_name": "disk0"}})),
                call("nvmf_subsystem_add_listener",
                     json!({"nqn": SUBSYSTEM, "listen_address": listener})),
            ]},
        ]});
        let path = hosts.far.path("spdk.json");
        fs::write(&path, config.to_string()).with_context(|| path.display().to_string())?;
        let mut target = hosts.far.command(&programs.target);
        target.args(MEMORY).arg("-c").arg(&path);
        target.args(["-m", &mask(cpus[1])]);
        target.arg("-r").arg(hosts.far.path("spdk.sock"));
        let target = hosts.far.start("nvmf_tgt", target, "Target Listening on")?;
        let spdk = Self {
            programs,
            hosts,
            target,
            cpus,
        };
        spdk.signal(Signal::STOP)?;
        Ok(spdk)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.target.pid())?).context("no process id")?;
        kill_process(pid, signal).context("signalling nvmf_tgt")
    }

    pub(super) fn measure(&self, job: &Job, seconds: u32) -> Result<Measurement> {
        self.signal(Signal::CONT)?;
        let measured = self.run(job, seconds);
        self.signal(Signal::STOP)?;
        measured
    }

    fn run(&self, job: &Job, seconds: u32) -> Result<Measurement> {
        let pattern = match job.pattern {
            Pattern::RandomRead => "randread",
            Pattern::RandomWrite => "randwrite",
            Pattern::SequentialRead => "read",
            Pattern::SequentialWrite => "write",
            Pattern::Mixed => "randrw",
        };
        let near = &self.hosts.near;
        let mut perf = near.command(&self.programs.perf);
        perf.args(MEMORY)
            .args(["-q", &job.depth.to_string(), "-o", &job.block.to_string()])
            .args(["-w", pattern, "-t", &seconds.to_string(), "-L"])
            .args(["-c", &mask(self.cpus[0])])
            .arg("-r")
            .arg(format!(
                "trtype:TCP adrfam:IPv4 traddr:{FAR} trsvcid:{PORT} subnqn:{SUBSYSTEM}"
            ));
        let log = near.path("spdk_nvme_perf.log");
        let perf = Child::spawn("spdk_nvme_perf", perf, &log)?;
        // Both poll: a part of the time shows what all of it costs. It prints nothing before its end.
        let pids = [self.target.pid(), perf.pid()];
        let sampled = Duration::from_secs(seconds.into()) / 2;
        std::thread::sleep(START);
        let before = cpu::time(&pids)?;
        std::thread::sleep(sampled);
        let cpu = cpu::time(&pids)? - before;
        interrupt::check()?;
        let printed = perf.wait(Duration::from_secs(u64::from(seconds) + 60))?;
        let mut measurement = parse(&printed)
            .with_context(|| format!("reading what spdk_nvme_perf printed:\n{printed}"))?;
        let each = cpu.as_nanos() as f64 / sampled.as_secs_f64() / measurement.iops;
        measurement.host_cpu = Some(each);
        Ok(measurement)
    }

    /// Ends the target.
    pub(super) fn stop(self) -> Result<()> {
        self.signal(Signal::CONT)?;
        self.target.stop(crate::scene::SHORT)
    }
}

fn mask(cpu: usize) -> String {
    format!("{:#x}", 1u64 << cpu)
}

/// The line `Total : IOPS MiB/s average min max`, and the percentiles of the latency summary, µs.
fn parse(printed: &str) -> Option<Measurement> {
    let total = printed.lines().find(|line| line.starts_with("Total "))?;
    let mut numbers = total.split_once(':')?.1.split_whitespace();
    let mut next = || numbers.next()?.parse::<f64>().ok();
    let (iops, mib) = (next()?, next()?);
    let quantile = |percent: &str| {
        let mut lines = printed.lines().map(str::trim_start);
        let line = lines.find_map(|line| line.strip_prefix(percent))?;
        let us = line.rsplit(':').next()?.trim().strip_suffix("us")?;
        Some(us.parse::<f64>().ok()? * 1e3)
    };
    Some(Measurement {
        iops,
        bandwidth: mib * f64::from(1 << 20),
        p50: quantile("50.00000% ")?,
        p99: quantile("99.00000% ")?,
        p999: quantile("99.90000% ")?,
        guest_cpu: None,
        host_cpu: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_is_read() {
        let printed = "Device Information : IOPS MiB/s\nTCP (addr:x) NSID 1 from core  1: 9.0 1.0\n\
            Total      :    9068.00      35.50     110.23      38.11   12147.63\n\n\
            Summary latency data for TCP (addr:x):\n  1.00000% :    38.661us\n \
            50.00000% :    49.110us\n 99.00000% :  4092.656us\n 99.90000% :  8131.814us\n";
        let measurement = parse(printed).unwrap();
        assert_eq!(measurement.iops, 9068.0);
        assert_eq!(measurement.bandwidth, 35.5 * 1024.0 * 1024.0);
        assert_eq!((measurement.p50, measurement.p999), (49_110.0, 8_131_814.0));
        assert!(parse("Total : 1").is_none());
    }

    #[test]
    fn a_build_that_is_not_there_is_named() {
        let error = Programs::of(Path::new("/nothing"))
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("/nothing/build/bin/nvmf_tgt"), "{error}");
    }
}
