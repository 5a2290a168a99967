//! One run of fio in the guest, and its CPU time on the host.
//!
//! Host CPU time is taken from the start of the job to its end, without fio's own start and
//! end: at each, fio runs a command that writes the guest's counters into a pipe on which
//! the host waits.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farside_bench::{
    Measurement,
    fio::{self, Hooks, Sample, Timing},
    job::Job,
};
use farside_testbed::Guest;

/// Time that fio and the guest may take beyond the requested run time.
const SLACK: Duration = Duration::from_secs(300);

/// Parameters of a measurement.
pub(super) struct Run<'a> {
    pub(super) vm: &'a Guest,
    /// Name of the block device in the guest.
    pub(super) drive: &'a str,
    /// CPU time so far of all that the host has for the guest.
    pub(super) cpu: &'a dyn Fn() -> Result<Duration>,
    pub(super) timing: Timing,
    /// The file in the guest that has the data, if not its RAM.
    pub(super) memory: Option<&'a str>,
}

impl Run<'_> {
    /// Runs fio once.
    pub(super) fn measure(&self, job: &Job) -> Result<Measurement> {
        let Self { vm, timing, .. } = self;
        let timeout = Duration::from_secs((timing.seconds + timing.ramp).into()) + SLACK;
        vm.exec_ok(
            "rm -rf /run/bench; mkdir /run/bench; mkfifo /run/bench/begin /run/bench/end",
            timeout,
        )?;
        let begin = vm.exec_start("cat /run/bench/begin", timeout)?;
        let end = vm.exec_start("cat /run/bench/end", timeout)?;
        let fio = vm.exec_start(&self.command(job)?, timeout)?;

        let begin = begin.wait()?.stdout;
        let cpu_before = (self.cpu)()?;
        let end = end.wait()?.stdout;
        let cpu = (self.cpu)()? - cpu_before;

        let fio = fio.wait()?;
        ensure!(fio.success(), "fio failed: {fio}");
        let outcome = fio::read_output(&fio.stdout)?;
        let work = Sample::parse(&end)?.since(&Sample::parse(&begin)?);
        ensure!(work.bytes > 0, "the disk did no I/O: {fio}");
        Ok(Measurement::new(job, &outcome, &work, Some(cpu)))
    }

    /// The guest's shell command. If fio fails before its job begins, the pipes are opened
    /// and closed, so that no reader blocks.
    fn command(&self, job: &Job) -> Result<String> {
        let sample = fio::sample_command(self.drive);
        let hook = |pipe: &str| format!("{sample} | tee /run/bench/{pipe}");
        let hooks = Hooks {
            begin: hook("begin"),
            end: hook("end"),
        };
        let mut arguments = fio::arguments(job, self.drive, self.timing, &hooks);
        arguments.extend(self.memory.map(|file| format!("--mem=mmapshared:{file}")));
        let arguments = shlex::try_join(arguments.iter().map(String::as_str))
            .context("quoting fio's arguments")?;
        Ok(format!(
            "cd /run/bench; fio {arguments}; code=$?; : <>begin; : <>end; exit $code"
        ))
    }
}
