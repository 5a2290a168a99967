//! Small measurements of single things, each beside what it is to be compared
//! with, in turns and in the same run.
//!
//! - [`round_trip`]: a read of configuration space and of a BAR, beside
//!   libvfio-user's sample server;
//! - [`relay`]: from a device that raises an interrupt to who waits for it,
//!   beside a bare eventfd; [`raise`]: the same through processes, from the
//!   guest's store on;
//! - [`attach`]: giving a running backend a device, and taking it away;
//! - [`planning`]: finding the guest's RAM and planning windows for it;
//! - [`ready`]: what the guest's bus-master enable takes, beside locking the
//!   same memory.
//!
//! The machine that measures has other things to do as well, so no figure is
//! taken alone: what is compared takes turns, short ones, and what counts is the
//! median of the turns' ratios.

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

/// What to measure with, and how often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Micro<'a> {
    /// The product.
    pub(super) program: &'a Path,
    /// libvfio-user's sample server `gpio-pci-idio-16`, or one like it.
    pub(super) libvfio_user: Option<&'a Path>,
    /// Turns of what takes no time to speak of.
    pub(super) turns: u32,
    /// Turns of what locks much memory.
    pub(super) slow_turns: u32,
    /// The most that is locked, GiB.
    pub(super) largest_gib: u64,
}

/// Measures all.
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
