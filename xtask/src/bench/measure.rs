//! One run of fio in the guest, and what it cost the host.
//!
//! Host CPU time is taken from the moment the job starts to the moment it ends,
//! without fio's own start and end: fio runs a command at each, which writes the
//! drive's counters into a pipe that the host waits at.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farside_testbed::Vm;
use serde::Deserialize;

use super::job::Job;
use crate::cpu;

/// Before each run, unmeasured by fio: the queue fills, caches settle. Seconds.
const RAMP: u32 = 1;
/// What fio and guest may take beside that.
const SLACK: Duration = Duration::from_secs(120);

/// How to measure.
pub(super) struct Run<'a> {
    pub(super) vm: &'a Vm,
    /// Name of the block device in the guest.
    pub(super) drive: &'a str,
    /// The processes that do the work on the host.
    pub(super) pids: &'a [u32],
    pub(super) seconds: u32,
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Measurement {
    pub(super) iops: f64,
    /// Bytes a second.
    pub(super) bandwidth: f64,
    /// Completion latency, nanoseconds.
    pub(super) p50: f64,
    pub(super) p99: f64,
    /// CPU seconds of all processes on the host for one I/O.
    pub(super) host_cpu: f64,
}

impl Run<'_> {
    /// Runs fio once.
    pub(super) fn measure(&self, job: &Job) -> Result<Measurement> {
        let Self { vm, drive, .. } = self;
        let timeout = Duration::from_secs((self.seconds + RAMP).into()) + SLACK;
        vm.exec_ok(
            "rm -rf /run/bench; mkdir /run/bench; mkfifo /run/bench/begin /run/bench/end",
            timeout,
        )?;
        let begin = vm.exec_start("cat /run/bench/begin", timeout)?;
        let end = vm.exec_start("cat /run/bench/end", timeout)?;
        let fio = vm.exec_start(&self.command(job), timeout)?;

        let begin = begin.wait()?.stdout;
        let cpu_before = cpu::time(self.pids)?;
        let end = end.wait()?.stdout;
        let cpu = cpu::time(self.pids)? - cpu_before;

        let fio = fio.wait()?;
        ensure!(fio.success(), "fio failed: {fio}");
        let mut measurement = read_fio(&fio.stdout, job.writes())?;
        let moved = |stat: &str| {
            bytes_moved(stat, job.writes())
                .with_context(|| format!("malformed statistics of {drive}: {stat:?}"))
        };
        let ios = (moved(&end)? - moved(&begin)?) as f64 / job.block as f64;
        ensure!(ios > 0.0, "fio did no I/O: {fio}");
        measurement.host_cpu = cpu.as_secs_f64() / ios;
        Ok(measurement)
    }

    /// The guest's shell command. When fio fails before its job begins, the
    /// pipes are opened and closed, so that nobody waits at them.
    fn command(&self, job: &Job) -> String {
        let Job {
            rw, block, depth, ..
        } = job;
        let Self { drive, seconds, .. } = self;
        let hook = |pipe: &str| format!("cat /sys/block/{drive}/stat | tee /run/bench/{pipe}");
        format!(
            "cd /run/bench; fio --name=job --filename=/dev/{drive} --rw={rw} --bs={block} \
             --iodepth={depth} --direct=1 --ioengine=io_uring --thread --norandommap \
             --time_based --ramp_time={RAMP} --runtime={seconds} \
             --exec_prerun='{}' --exec_postrun='{}' --output-format=json; \
             code=$?; : <>begin; : <>end; exit $code",
            hook("begin"),
            hook("end"),
        )
    }
}

/// Bytes read or written so far, from `/sys/block/NAME/stat`.
fn bytes_moved(stat: &str, written: bool) -> Option<u64> {
    // Sectors of 512 bytes, whatever the drive's own are.
    let field = if written { 6 } else { 2 };
    let sectors: u64 = stat.split_whitespace().nth(field)?.parse().ok()?;
    Some(sectors * 512)
}

/// fio's JSON, with whatever it says before.
fn read_fio(output: &str, writes: bool) -> Result<Measurement> {
    #[derive(Deserialize)]
    struct Output {
        jobs: [Job; 1],
    }
    #[derive(Deserialize)]
    struct Job {
        error: i32,
        read: Direction,
        write: Direction,
    }
    #[derive(Deserialize)]
    struct Direction {
        total_ios: u64,
        iops: f64,
        bw_bytes: f64,
        clat_ns: Latency,
    }
    #[derive(Deserialize)]
    struct Latency {
        percentile: Option<Percentiles>,
    }
    #[derive(Deserialize)]
    struct Percentiles {
        #[serde(rename = "50.000000")]
        p50: f64,
        #[serde(rename = "99.000000")]
        p99: f64,
    }
    let context = || format!("reading fio's output: {output}");
    // Lines about its hooks come first, on the same stream.
    let json = output.find("{\n").map_or(output, |start| &output[start..]);
    let mut documents = serde_json::Deserializer::from_str(json).into_iter::<Output>();
    let output = documents
        .next()
        .with_context(context)?
        .with_context(context)?;
    let [job] = output.jobs;
    ensure!(job.error == 0, "fio reports error {}", job.error);
    let direction = if writes { job.write } else { job.read };
    ensure!(direction.total_ios > 0, "fio measured no I/O");
    let percentile = direction.clat_ns.percentile;
    let percentile = percentile.context("fio reports no percentiles")?;
    Ok(Measurement {
        iops: direction.iops,
        bandwidth: direction.bw_bytes,
        p50: percentile.p50,
        p99: percentile.p99,
        host_cpu: 0.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(error: i32, percentile: &str) -> String {
        format!(
            r#"job : Saving output of prerun in job.prerun.txt
{{
  "fio version" : "fio-3.39",
  "jobs" : [ {{ "jobname" : "job", "error" : {error},
    "read" : {{ "total_ios" : 0, "iops" : 0.0, "bw_bytes" : 0, "clat_ns" : {{ "N" : 0 }} }},
    "write" : {{ "total_ios" : 40, "iops" : 10.5, "bw_bytes" : 43008,
      "clat_ns" : {{ "N" : 40 {percentile} }} }} }} ]
}}
job : Saving output of postrun in job.postrun.txt
"#
        )
    }
    const PERCENTILE: &str = r#", "percentile": {"50.000000": 100, "99.000000": 900}"#;

    #[test]
    fn fio_output_is_read_among_other_lines() {
        let measurement = read_fio(&output(0, PERCENTILE), true).unwrap();
        assert_eq!((measurement.iops, measurement.bandwidth), (10.5, 43008.0));
        assert_eq!((measurement.p50, measurement.p99), (100.0, 900.0));
    }

    #[test]
    fn a_run_that_measured_nothing_is_an_error() {
        let error = |output: &str, writes| format!("{:#}", read_fio(output, writes).unwrap_err());
        assert!(error(&output(5, PERCENTILE), true).contains("error 5"));
        assert!(error(&output(0, PERCENTILE), false).contains("no I/O"));
        assert!(error(&output(0, ""), true).contains("no percentiles"));
        assert!(error("fio: no such device", true).contains("no such device"));
    }

    #[test]
    fn the_drives_counters_are_in_sectors() {
        let stat = "  10 1 80 5 20 2 160 7 0 3 12 0 0 0 0 1 1\n";
        assert_eq!(bytes_moved(stat, false), Some(80 * 512));
        assert_eq!(bytes_moved(stat, true), Some(160 * 512));
        assert_eq!(bytes_moved("", true), None);
    }
}
