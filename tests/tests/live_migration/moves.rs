//! Undisturbed live migrations.

use anyhow::{Context, Result, ensure};
use farside_tests::{
    SHORT,
    two_hosts::{Stage, VM},
};
use libtest_mimic::Completion;

use crate::{arrived, checksum, counter::Counter, fill, live, root_image, start};

/// Prints the device's address in the guest.
const ADDRESS: &str = "readlink -f /sys/class/nvme/nvme0/device";

pub fn a_running_guest_goes_there_and_back(stage: &Stage) -> Result<Completion> {
    let _lender = stage.lend()?;
    let mut guest = start(stage)?;
    let address = guest.exec_ok(ADDRESS, SHORT)?;
    let sum = fill(&guest)?;
    let mut counter = Counter::start(&guest)?;
    let mut last_generation = 0;
    for (from, to) in [("a", "b"), ("b", "a")] {
        let checked = stage.ok(from, &[&live(to)[..], &["--check"]].concat())?;
        ensure!(checked.contains("nothing stops"), "{checked}");
        let (moved, said) = stage.begin(from, &live(to))?.end(stage)?;
        ensure!(moved, "from {from} to {to}: {said}");
        for words in ["runs on", "stood still for", "without its devices for"] {
            let line = said.lines().find(|line| line.contains(words));
            eprintln!("{}", line.with_context(|| format!("no {words:?}: {said}"))?);
        }
        guest = arrived(stage)?;
        ensure!(stage.running()? == [to], "{:?}", stage.running());
        counter.goes_on(&guest)?;
        ensure!(checksum(&guest)? == sum, "the disk has other data");
        let now = guest.exec_ok(ADDRESS, SHORT)?;
        ensure!(now == address, "the disk was at {address}, and is at {now}");
        let (holder, generation) = stage.holder()?.context("nobody has the disk")?;
        ensure!(
            holder == VM && generation > last_generation,
            "{holder} {generation}"
        );
        last_generation = generation;
        stage.refused(from, &["start", VM], &["has moved to", to])?;
    }
    let count = counter.stop(&guest, &root_image(stage))?;
    eprintln!("the guest counted to {count}");
    Ok(Completion::Completed)
}
