//! fio's command line.

use crate::job::{Job, Pattern};

/// How long a run takes, seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Before the measurement: the queue fills, caches settle.
    pub ramp: u32,
    /// The measurement.
    pub seconds: u32,
}

/// Shell commands that fio runs at the beginning and at the end of the job. It
/// keeps their output in `job.prerun.txt` and `job.postrun.txt` in the current
/// directory.
#[derive(Clone, Debug)]
pub struct Hooks {
    /// Before the ramp.
    pub begin: String,
    /// After the last request.
    pub end: String,
}

/// Prints what [`Sample`](super::Sample) reads. `disk` is the name of a block
/// device, as in `/sys/class/block`.
pub fn sample_command(disk: &str) -> String {
    format!("cat /sys/class/block/{disk}/stat /proc/stat")
}

/// The arguments of one run of a job on `/dev/DISK`.
pub fn arguments(job: &Job, disk: &str, timing: Timing, hooks: &Hooks) -> Vec<String> {
    let Timing { ramp, seconds } = timing;
    let mut arguments = vec![
        "--name=job".to_owned(),
        format!("--filename=/dev/{disk}"),
        format!("--rw={}", job.pattern.fio()),
        format!("--bs={}", job.block),
        format!("--iodepth={}", job.depth),
        "--direct=1".to_owned(),
        "--ioengine=io_uring".to_owned(),
        "--thread".to_owned(),
        "--norandommap".to_owned(),
        "--time_based".to_owned(),
        format!("--ramp_time={ramp}"),
        format!("--runtime={seconds}"),
        format!("--exec_prerun={}", hooks.begin),
        format!("--exec_postrun={}", hooks.end),
        // All of a request's latency: a trapped doorbell is submission to fio, and
        // a device may do a part of its work there.
        "--lat_percentiles=1".to_owned(),
        "--clat_percentiles=0".to_owned(),
        "--percentile_list=50:99:99.9".to_owned(),
        "--output-format=json".to_owned(),
    ];
    if job.pattern == Pattern::Mixed {
        arguments.push("--rwmixread=70".to_owned());
        // One distribution of all requests.
        arguments.push("--unified_rw_reporting=mixed".to_owned());
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::JOBS;

    fn line(job: &Job) -> String {
        let hooks = Hooks {
            begin: sample_command("nvme0n1"),
            end: "true".into(),
        };
        let timing = Timing {
            ramp: 1,
            seconds: 4,
        };
        arguments(job, "nvme0n1", timing, &hooks).join("|")
    }

    #[test]
    fn a_job_becomes_arguments() {
        let line = line(&JOBS[1]);
        for wanted in [
            "--filename=/dev/nvme0n1|--rw=randread|--bs=4096|--iodepth=32|--direct=1",
            "--ramp_time=1|--runtime=4",
            "--exec_prerun=cat /sys/class/block/nvme0n1/stat /proc/stat|--exec_postrun=true",
        ] {
            assert!(line.contains(wanted), "{line}");
        }
        assert!(!line.contains("mix"), "{line}");
    }

    #[test]
    fn only_the_mixed_job_is_mixed() {
        for job in &JOBS {
            let mixed = line(job).contains("--rwmixread=70|--unified_rw_reporting=mixed");
            assert_eq!(mixed, job.name.starts_with("mixed"), "{}", job.name);
        }
    }
}
