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
    /// The VM's backend.
    Backend,
}

impl Victim {
    /// In the order in which they are killed.
    pub(super) const ALL: [Self; 3] = [Self::Worker, Self::Lender, Self::Backend];
}

/// Kills the worker, the lender and the backend in turns, until `is_done`.
pub(super) fn kill(
    scene: &mut Scene,
    progress: &Progress,
    is_done: impl Fn() -> bool,
) -> Result<Kills> {
    let task = progress.spinner("Killing what serves the disk");
    let mut kills: Kills = Victim::ALL.map(|victim| (victim, 0)).into();
    for victim in Victim::ALL.into_iter().cycle() {
        let sleeps = BETWEEN.div_duration_f64(LOOK_AGAIN) as u32;
        let done = (0..sleeps).any(|_| {
            thread::sleep(LOOK_AGAIN);
            is_done()
        });
        if done {
            break;
        }
        let before = restarts(scene)?;
        match victim {
            Victim::Worker => {
                for worker in scene.workers() {
                    kill_process(worker, Signal::KILL).context("killing the worker")?;
                }
            }
            Victim::Lender => scene.replace_lender()?,
            Victim::Backend => {
                for backend in scene.kept_backend() {
                    kill_process(backend, Signal::KILL).context("killing the backend")?;
                }
            }
        }
        *kills.entry(victim).or_default() += 1;
        let count: u64 = kills.values().sum();
        task.detail(&format!("{count} processes"));
        scene.wait_for("the disk is served again", |scene| {
            // Until the next backend has its sockets, there is no status of it.
            let Ok(now) = restarts(scene) else {
                return Ok(false);
            };
            let goes_on = match victim {
                Victim::Worker => now.of_lease > before.of_lease,
                // It adopts the worker.
                Victim::Lender => true,
                Victim::Backend => now.of_backend > before.of_backend,
            };
            Ok(goes_on && now.is_served)
        })?;
    }
    task.done();
    Ok(kills)
}

/// What the status says.
struct Restarts {
    of_backend: u64,
    /// How often the lease has gone on since.
    of_lease: u64,
    is_served: bool,
}

fn restarts(scene: &Scene) -> Result<Restarts> {
    let connection = scene.borrow()?.connection;
    let connection = connection.context("the backend's status has no connection")?;
    Ok(Restarts {
        of_backend: scene.restarts()?,
        of_lease: connection.restarts,
        is_served: connection.state == ConnectionState::Connected,
    })
}
