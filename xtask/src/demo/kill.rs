//! `--kill`: the processes that serve the disk are killed while the guest uses it.

use std::{collections::BTreeMap, thread, time::Duration};

use anyhow::{Context, Result};
use farside_backend_api::ConnectionState;
use farside_testbed::Progress;
use rustix::process::{Signal, kill_process};

use crate::scene::Scene;

/// From the moment that the disk is served again until the next process is killed.
const BETWEEN: Duration = Duration::from_millis(700);

/// Interval of looking whether the guest is done.
const LOOK_AGAIN: Duration = Duration::from_millis(25);

/// How often each was killed.
pub(super) type Kills = BTreeMap<Victim, u64>;

/// A process to kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Victim {
    /// The worker of the lease.
    Worker,
    /// The lender's own process; another is started.
    Lender,
}

/// Kills the worker and the lender in turns, until `is_done`.
pub(super) fn kill(
    scene: &mut Scene,
    progress: &Progress,
    is_done: impl Fn() -> bool,
) -> Result<Kills> {
    let task = progress.spinner("Killing what serves the disk");
    let mut kills = Kills::from([(Victim::Worker, 0), (Victim::Lender, 0)]);
    for victim in [Victim::Worker, Victim::Lender].into_iter().cycle() {
        let sleeps = BETWEEN.div_duration_f64(LOOK_AGAIN) as u32;
        let done = (0..sleeps).any(|_| {
            thread::sleep(LOOK_AGAIN);
            is_done()
        });
        if done {
            break;
        }
        let before = restarts(scene)?.0;
        match victim {
            Victim::Worker => {
                for worker in scene.workers() {
                    kill_process(worker, Signal::KILL).context("killing the worker")?;
                }
            }
            Victim::Lender => scene.replace_lender()?,
        }
        *kills.entry(victim).or_default() += 1;
        let count: u64 = kills.values().sum();
        task.detail(&format!("{count} processes"));
        scene.wait_for("the disk is served again", |scene| {
            let (restarts, is_served) = restarts(scene)?;
            Ok(restarts > before && is_served)
        })?;
    }
    task.done();
    Ok(kills)
}

/// How often the lease has gone on, and whether the disk is served.
fn restarts(scene: &Scene) -> Result<(u64, bool)> {
    let connection = scene.borrow()?.connection;
    let connection = connection.context("the backend's status has no connection")?;
    let is_served = connection.state == ConnectionState::Connected;
    Ok((connection.restarts, is_served))
}
