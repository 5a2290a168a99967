//! Hosts that are VMs.

use std::time::Duration;

use anyhow::Result;
use farside_bench::fio::Sample;
use farside_testbed::HostVm;

use crate::scene::SHORT;

/// Time that all CPUs of a host were busy so far.
pub(super) fn busy(host: &HostVm) -> Result<Duration> {
    // As of a disk that does nothing.
    let sample = host.exec_ok("echo 0 0 0 0 0 0 0; cat /proc/stat", SHORT)?;
    let idle = "0 0 0 0 0 0 0\ncpu 0 0 0 0 0 0 0 0";
    Ok(Sample::parse(&sample)?.since(&Sample::parse(idle)?).cpu)
}
