//! A test suite on borrowed disks.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use farside_testbed::{DebianRoot, Output};
use farside_tests::{
    BorrowState, Cluster, MIB,
    check::{Ending, Outcome},
    told,
};
use libtest_mimic::{Completion, Failed};

use crate::userland::{self, Userland};

/// A test suite, of which a copy is built.
pub struct Suite {
    /// Of the Debian root in the test bed's cache.
    pub name: &'static str,
    /// The environment variable that names the directory of a checkout.
    pub checkout: &'static str,
    /// Used by the tests besides Debian's minimal system, and to build their programs.
    pub packages: &'static [&'static str],
    /// The shell commands that build it, in the directory of the copy.
    pub build: &'static str,
    /// The size of each disk.
    pub len: u64,
    /// Parts of reasons for which a test may not run.
    pub reasons: &'static [&'static str],
}

impl Suite {
    /// Runs `test` in a guest with a borrowed NVMe model and a borrowed virtio-blk model, with the names of these block
    /// devices. Ignored without a checkout.
    pub fn run(
        &self,
        test: impl FnOnce(&Userland<'_>, [&str; 2]) -> Result<()>,
    ) -> Result<Completion, Failed> {
        let Some(checkout) = std::env::var_os(self.checkout) else {
            return Ok(Completion::ignored_with(format!(
                "{} does not name the directory of a checkout of {}",
                self.checkout, self.name
            )));
        };
        if let Some(why) = DebianRoot::missing() {
            return Ok(Completion::ignored_with(why));
        }
        let cluster = Cluster::new().map_err(|error| format!("{error:#}"))?;
        told(
            || self.run_in(&cluster, Path::new(&checkout), test),
            || cluster.story(),
        )?;
        Ok(Completion::Completed)
    }

    fn run_in(
        &self,
        cluster: &Cluster,
        checkout: &Path,
        test: impl FnOnce(&Userland<'_>, [&str; 2]) -> Result<()>,
    ) -> Result<()> {
        let userland = userland::make(cluster, self, checkout)?;
        let nvme = format!("nvme={}", cluster.image("nvme", self.len)?.display());
        let virtio = format!("virtio={}", cluster.image("virtio", self.len)?.display());
        let _lender = cluster.lend(&["--nvme", &nvme, "--virtio-blk", &virtio])?;
        let _backend = cluster.serve("a", &["nvme", "virtio"]).start()?;
        let guest = cluster.guest("a").cpus(2).memory(2048 * MIB);
        let guest = userland::attach(guest, &userland).boot()?;
        guest.wait_disk()?;
        let userland = Userland::mount(&guest)?;
        let virtio = userland.other_virtio_disk()?;
        test(&userland, ["nvme0n1", &virtio])?;

        // A worker that had crashed would have been replaced.
        for device in ["nvme", "virtio"] {
            let borrow = cluster.wait_state("a", device, BorrowState::Ready)?;
            let connection = borrow.connection.context("a connection to the lender")?;
            ensure!(connection.restarts == 0, "{device}: {connection:?}");
        }
        guest.power_off()
    }

    /// Logs how the tests ended, and fails if one did otherwise than the lists have it. `files` is the pattern of what a
    /// test leaves.
    pub fn judge(
        &self,
        userland: &Userland<'_>,
        outcomes: &[Outcome],
        output: &Output,
        files: impl Fn(&Outcome) -> String,
    ) -> Result<()> {
        for it in outcomes {
            let device = it.device.as_deref().unwrap_or("both disks");
            let details = it.details.join("; ");
            log::info!("{} on {device}: {:?} {details}", it.test, it.ending);
        }
        let wrong: Vec<String> = outcomes
            .iter()
            .filter(|it| !self.is_expected(it))
            .map(|it| {
                let show = format!("tail -n 60 {} && dmesg | tail -n 40", files(it));
                let left = userland.sh(&show);
                let left = left.unwrap_or_else(|error| format!("{error:#}"));
                format!("{it:#?}\n{left}")
            })
            .collect();
        ensure!(wrong.is_empty(), "{}\n{output}", wrong.join("\n"));
        Ok(())
    }

    fn is_expected(&self, outcome: &Outcome) -> bool {
        match outcome.ending {
            Ending::Passed => true,
            Ending::NotRun => {
                let mut reasons = outcome.details.iter();
                !outcome.details.is_empty()
                    && reasons.all(|reason| self.reasons.iter().any(|it| reason.contains(it)))
            }
            Ending::Failed | Ending::Missing => false,
        }
    }
}
