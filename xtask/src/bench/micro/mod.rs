//! Microbenchmarks, each with a reference measured in turns in the same run.
//!
//! - [`round_trip`]: a read of configuration space and of a BAR, against libvfio-user's
//!   sample server;
//! - [`relay`]: from a device's interrupt to the waiting thread, against a bare eventfd;
//!   [`raise`]: the same through processes, from the guest's store on;
//! - [`attach`]: attaching a device to a running backend, and detaching it;
//! - [`planning`]: finding the guest's RAM and planning windows for it;
//! - [`ready`]: the duration of the guest's bus-master enable, against locking the same
//!   memory.
//!
//! The machine may have other load, so no figure is measured alone: the compared operations
//! alternate in short turns, and the result is the median of the turns' ratios.

mod attach;
mod figures;
mod lock;
mod planning;
mod raise;
mod ready;
mod relay;
mod round_trip;
mod stage;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use farside_bench::Section;
use farside_testbed::Progress;

/// Parameters of the measurements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Micro<'a> {
    /// The `farside` binary.
    pub(super) program: &'a Path,
    /// libvfio-user's sample server `gpio-pci-idio-16`, or a compatible one.
    pub(super) libvfio_user: Option<&'a Path>,
    /// Turns of short measurements.
    pub(super) turns: u32,
    /// Turns of measurements that lock much memory.
    pub(super) slow_turns: u32,
    /// The most memory that is locked, GiB.
    pub(super) largest_gib: u64,
}

/// Runs all measurements.
pub(super) fn measure(micro: &Micro<'_>, progress: &Progress) -> Result<Vec<Section>> {
    let Micro {
        program,
        libvfio_user,
        turns,
        slow_turns,
        largest_gib,
    } = *micro;
    if let Some(path) = libvfio_user {
        ensure!(
            path.is_file(),
            "{} is no program: give --libvfio-user the path of libvfio-user's sample server \
             gpio-pci-idio-16",
            path.display()
        );
    }
    let task = progress.spinner("Reading registers");
    let reads = round_trip::measure(program, libvfio_user, turns).context("reading registers")?;
    task.done();
    let task = progress.spinner("Raising interrupts");
    let mut interrupts = relay::measure(turns).context("raising interrupts")?;
    let through = raise::measure(program, turns).context("raising interrupts by processes")?;
    interrupts.series.extend(through);
    task.done();
    let task = progress.spinner("Attaching and detaching");
    let attach = attach::measure(program, turns).context("attaching")?;
    task.done();
    let task = progress.spinner("Planning windows");
    let planning = planning::measure(turns).context("planning")?;
    task.done();
    let ready = ready::measure(program, slow_turns, largest_gib, progress)
        .context("enabling bus mastering")?;
    Ok(vec![reads, interrupts, attach, planning, ready])
}
