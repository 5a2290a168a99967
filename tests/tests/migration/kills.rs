//! A process is killed at a random step, and the migration is resumed. The seed is printed;
//! `FARSIDE_SEED` repeats a run.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use farside_testbed::Vm;
use farside_tests::{Daemon, SHORT, from_env};
use libtest_mimic::Completion;

use crate::stage::{Chain, HOSTS, Ledger, Migration, Stage, VM, kill, kill_at_once};

/// Number of kills, unless `FARSIDE_KILLS` is set.
const KILLS: usize = 4;

/// The steps at which a process is killed, as the journal names them.
const STEPS: [&str; 7] = [
    "prepare",
    "shut-down",
    "return",
    "hand-over",
    "install",
    "start",
    "finish",
];

/// Polling interval of the journal.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Attempts of an operation that may conflict with a process that is still ending.
const ATTEMPTS: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Coordinator,
    Agent,
    Backend,
    Lender,
    Qemu,
}

const VICTIMS: [Victim; 5] = [
    Victim::Coordinator,
    Victim::Agent,
    Victim::Backend,
    Victim::Lender,
    Victim::Qemu,
];

/// Pseudo-random numbers (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number from 0 to `end`, exclusive.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }
}

/// The random seed: printed, so that a run can be repeated.
pub fn seed() -> Result<u64> {
    let seed = match from_env("FARSIDE_SEED")? {
        Some(seed) => seed,
        None => std::time::SystemTime::UNIX_EPOCH.elapsed()?.as_nanos() as u64,
    };
    eprintln!("FARSIDE_SEED={seed}");
    Ok(seed)
}

pub fn a_migration_survives_the_death_of_anything(stage: &Stage) -> Result<Completion> {
    let seed = seed()?;
    let kills = from_env("FARSIDE_KILLS")?.unwrap_or(KILLS as u64);
    let mut random = Random::new(seed);
    let mut lender = stage.lend()?;
    stage.ok("a", &["start", VM])?;
    let mut guest = stage.guest()?;
    let mut chain = Chain::default();
    let mut ledger = Ledger::default();
    let mut from = "a";
    for n in 0..kills {
        let to = if from == "a" { "b" } else { "a" };
        chain.grow(&guest)?;
        let victim = VICTIMS[random.below(VICTIMS.len())];
        let step = STEPS[random.below(STEPS.len())];
        let back = random.below(2) == 1;
        let what = format!(
            "kill {n} (seed {seed}): {victim:?} while {step}, from {from} to {to}, then {}",
            if back { "back" } else { "on" }
        );
        eprintln!("{what}");
        let begin = Instant::now();
        stage.note(format!("== {what}"));
        let mut round = || -> Result<(&'static str, Option<Vm>)> {
            let migration = begin_until(stage, from, to, step)?;
            strike(
                stage,
                victim,
                (from, to),
                &migration,
                &mut lender,
                &mut ledger,
            )?;
            // Its success depends on the timing.
            migration.end(stage)?;
            settle(stage, from, back)?;
            let at = one_home(stage)?;
            let guest = revive(stage, at, victim, &guest)?;
            Ok((at, guest))
        };
        let (at, now) = round().with_context(|| what.clone())?;
        guest = now.unwrap_or(guest);
        chain.verify(&guest).with_context(|| what.clone())?;
        ensure!(stage.running()? == [at], "{what}: {:?}", stage.running());
        let holder = stage.holder()?;
        ensure!(
            holder.as_ref().is_some_and(|(holder, _)| holder == VM),
            "{what}: {holder:?}"
        );
        let leases = ledger.audit(&lender).with_context(|| what.clone())?;
        let backends = stage.backends(at)?;
        // It connects for the backend.
        let helpers = stage.processes(at, &["serve-helper"])?;
        let holder = leases.holder.map(u32::cast_signed);
        ensure!(
            backends.len() == 3 * helpers.len() && helpers == Vec::from_iter(holder),
            "{what}: {backends:?}, {helpers:?}, {leases:?}"
        );
        eprintln!("  it is on {at} now ({:.1?})", begin.elapsed());
        from = at;
    }
    Ok(Completion::Completed)
}

/// Starts a migration, and waits until that step has begun or the migration has ended.
pub fn begin_until(stage: &Stage, from: &str, to: &str, step: &str) -> Result<Migration> {
    let begun = |text: &str| -> bool {
        let file: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
        let steps = file["migration"]["begun"].as_array();
        let ours = file["migration"]["role"] == "source";
        ours && steps.into_iter().flatten().any(|begun| begun[0] == step)
    };
    let before = stage.journal(from);
    let mut migration = stage.begin(from, &["migrate", VM, "--to", to])?;
    let deadline = Instant::now() + crate::stage::MIGRATION;
    while migration.is_running()? {
        let text = stage.journal(from);
        if text != before && begun(&text) {
            break;
        }
        ensure!(Instant::now() < deadline, "it does not come to {step}");
        std::thread::sleep(LOOK_AGAIN);
    }
    Ok(migration)
}

/// Kills the victim.
fn strike(
    stage: &Stage,
    victim: Victim,
    (from, to): (&str, &str),
    migration: &Migration,
    lender: &mut Daemon,
    ledger: &mut Ledger,
) -> Result<()> {
    let any = |words: &[&str]| -> Result<Vec<i32>> {
        let mut found = stage.processes(from, words)?;
        found.extend(stage.processes(to, words)?);
        Ok(found)
    };
    match victim {
        Victim::Coordinator => kill(migration.pid()),
        Victim::Agent => any(&["migration agent"])?.into_iter().for_each(kill),
        Victim::Backend => {
            let mut all = stage.backends(from)?;
            all.extend(stage.backends(to)?);
            kill_at_once(&all);
        }
        Victim::Qemu => HOSTS.iter().try_for_each(|host| -> Result<()> {
            stage.qemus(host)?.into_iter().for_each(kill);
            Ok(())
        })?,
        Victim::Lender => {
            for pid in stage.processes("c", &["lend"])? {
                kill(pid);
            }
            lender.wait_exit(SHORT)?;
            ledger.killed(lender);
            *lender = stage.lend()?;
        }
    }
    Ok(())
}

/// Repeats `farside migration resume` until nothing is left to do.
pub fn settle(stage: &Stage, from: &str, back: bool) -> Result<()> {
    let mut args = vec!["migration", "resume", VM];
    if back {
        args.push("--back");
    }
    let mut last = String::new();
    for _ in 0..ATTEMPTS {
        let ended = stage.run(from, &args)?;
        if ended.status.success() || ended.stderr.contains("no migration of VM") {
            return Ok(());
        }
        if ended.stderr.contains("has arrived") {
            args.retain(|arg| *arg != "--back");
        }
        last = ended.stderr;
    }
    bail!("`farside migration resume` does not come to an end: {last}")
}

/// The only host that has the VM; the other refuses to start it.
pub fn one_home(stage: &Stage) -> Result<&'static str> {
    let described = |host: &str| stage.path(host, &format!("etc/vm/{VM}.toml")).exists();
    let homes: Vec<_> = HOSTS.into_iter().filter(|host| described(host)).collect();
    let [home] = homes[..] else {
        bail!("the VM is described at {homes:?}");
    };
    let running = stage.running()?;
    ensure!(
        running.is_empty() || running == [home],
        "it runs on {running:?}, and belongs to {home}"
    );
    let other = if home == "a" { "b" } else { "a" };
    let refused = stage.run(other, &["start", VM])?;
    ensure!(!refused.status.success(), "{other} starts it too");
    Ok(home)
}

/// The guest of a moved VM; `None` if it is still the former one. If QEMU, backend or
/// lender was killed, the VM must be started anew, as it would be without any migration.
fn revive(stage: &Stage, home: &'static str, victim: Victim, before: &Vm) -> Result<Option<Vm>> {
    if matches!(victim, Victim::Coordinator | Victim::Agent) {
        let running = stage.qemus(home)?;
        ensure!(running.len() == 1, "it does not run: {running:?}");
        if running == [before.pid().cast_signed()] {
            return Ok(None);
        }
    } else {
        stage.ok(home, &["stop", VM, "--limit", "0", "--force"])?;
        stage.ok(home, &["start", VM])?;
    }
    stage.guest().map(Some)
}
