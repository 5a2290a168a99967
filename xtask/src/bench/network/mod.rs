//! A disk that is borrowed over a network beside NVMe over TCP, with a wire of some delays.

mod borrowed;
mod hosts;
mod spdk;
mod vms;
pub(crate) mod wire;

use std::time::Duration;

use anyhow::{Context, Result};
use farside_bench::{JobResult, Measurement, Network, Pair, job::Job};
use farside_testbed::lacks_root;

use super::{Parameters, drives::line};
use crate::{cpu, interrupt};
use borrowed::Borrowed;
use hosts::Hosts;
use spdk::Spdk;
pub(super) use vms::in_vms;

/// Time of an unmeasured run before the others.
const WARM_UP: Duration = Duration::from_millis(500);

/// Delays without `--delay`, microseconds.
const DELAYS: [u32; 4] = [0, 50, 200, 2000];
const QUICK_DELAYS: [u32; 2] = [0, 200];

/// What farside is compared with.
const SPDK: &str = "SPDK";
const PLAIN: &str = "farside without TLS";

/// One side of a comparison.
type Side<'a> = &'a mut dyn FnMut(&Job, u32) -> Result<Measurement>;

impl Parameters<'_> {
    fn delays(&self) -> Vec<u32> {
        match (self.args.delays.as_slice(), self.args.quick) {
            ([], true) => QUICK_DELAYS.into(),
            ([], false) => DELAYS.into(),
            (delays, _) => delays.to_vec(),
        }
    }

    /// Runs `job` on both sides in turns.
    fn compare(
        &self,
        job: &Job,
        network: Network,
        borrowed: Side<'_>,
        beside: Side<'_>,
    ) -> Result<JobResult> {
        let mut pairs = Vec::new();
        for _ in 0..self.settings.repeats {
            interrupt::check()?;
            pairs.push(Pair {
                borrowed: borrowed(job, self.settings.seconds)?,
                beside: beside(job, self.settings.seconds)?,
            });
        }
        let result = JobResult {
            job: job.name.to_string(),
            network: Some(network),
            passthrough: None,
            pairs,
        };
        self.progress.note(&line(&result));
        Ok(result)
    }
}

/// The CPU of the near host and that of the far one: each has one, which everything on it shares.
fn cpus() -> Result<[usize; 2]> {
    let cpus = cpu::available()?;
    let &[far, near, ..] = cpus.as_slice() else {
        anyhow::bail!(
            "a comparison over a network needs 2 CPUs, one for each host, and this process may use \
             {cpus:?}: leave it out, or change the affinity (taskset)"
        );
    };
    Ok([near, far])
}

/// All jobs with all delays, between network namespaces.
pub(super) fn in_namespaces(parameters: &Parameters<'_>) -> Result<Vec<JobResult>> {
    if let Some(reason) = lacks_root() {
        parameters.progress.note(&format!(
            "skipped: hosts that are network namespaces: {reason}"
        ));
        return Ok(Vec::new());
    }
    let programs = match &parameters.args.spdk {
        Some(directory) => Some(spdk::Programs::of(directory)?),
        None => {
            parameters.progress.note(
                "skipped: SPDK's NVMe over TCP, between network namespaces: --spdk DIRECTORY names a build",
            );
            None
        }
    };
    let mut results = Vec::new();
    for delay_us in parameters.delays() {
        let hosts = Hosts::new(parameters.testbed, delay_us)?;
        let task = parameters
            .progress
            .spinner(format!("Measuring over a network, {delay_us} µs"));
        let measured = with_delay(parameters, &hosts, programs.as_ref(), delay_us);
        results.extend(measured.with_context(|| format!("over {delay_us} µs"))?);
        task.done();
    }
    Ok(results)
}

fn with_delay(
    parameters: &Parameters<'_>,
    hosts: &Hosts,
    programs: Option<&spdk::Programs>,
    delay_us: u32,
) -> Result<Vec<JobResult>> {
    let Parameters {
        program, images, ..
    } = parameters;
    let network = |peer: &str, tls| Network {
        hosts: farside_bench::Hosts::Namespaces,
        delay_us,
        peer: peer.to_owned(),
        tls,
    };
    let spdk = programs.map(|programs| Spdk::start(programs, hosts, &images.own));
    let spdk = spdk.transpose()?;
    let mut plain = Borrowed::start(program, hosts, &images.borrowed, false)?;
    // The same image would be lent twice.
    let mut sealed = Borrowed::start(program, hosts, &images.own, true)?;
    let mut results = Vec::new();
    let mut measure = || -> Result<()> {
        for job in parameters.jobs() {
            let seconds = |seconds: u32| Duration::from_secs(seconds.into());
            plain.measure(job, WARM_UP)?;
            if let Some(spdk) = &spdk {
                results.push(parameters.compare(
                    job,
                    network(SPDK, false),
                    &mut |job, time| plain.measure(job, seconds(time)),
                    &mut |job, time| spdk.measure(job, time),
                )?);
            }
            sealed.measure(job, WARM_UP)?;
            results.push(parameters.compare(
                job,
                network(PLAIN, true),
                &mut |job, time| sealed.measure(job, seconds(time)),
                &mut |job, time| plain.measure(job, seconds(time)),
            )?);
        }
        Ok(())
    };
    measure().map_err(|error| {
        let words = plain.last_words() + &sealed.last_words();
        error.context(format!("the bench failed{words}"))
    })?;
    plain.stop()?;
    sealed.stop()?;
    spdk.map(Spdk::stop).transpose()?;
    Ok(results)
}
