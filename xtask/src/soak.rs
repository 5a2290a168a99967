//! `cargo xtask soak`: randomised tests, repeated for a given time.
//!
//! A change needs a few migrations and kills, and some hundred cases of each property;
//! `cargo xtask test` runs those. This runs many, with a new seed in each round, and prints
//! the command that repeats a round.

use std::{
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farside_testbed::die_with_us;

use crate::args::Soak;

/// Chores to run in turn. A test binary accepts one filter.
const ROUNDS: [Round; 17] = [
    Round {
        name: "migration",
        arguments: "test --no-fail-fast --test migration",
        variables: &[("FARSIDE_MIGRATIONS", "50"), ("FARSIDE_KILLS", "20")],
        seed: Some("FARSIDE_SEED"),
    },
    Round {
        name: "properties",
        arguments: "test --no-fail-fast -p farside-config-space -p farside-devices -p farside-fabric \
                    -p farside-guest-layout -p farside-host-pci -p farside-irq-relay \
                    -p farside-lender-protocol -p farside-ntb -p farside-ntb-server \
                    -p farside-pci -p farside-planner -p farside-qemu-configs -p farside-vfio",
        variables: &[],
        seed: Some("PROPTEST_RNG_SEED"),
    },
    Round {
        name: "simulation",
        arguments: "test --no-fail-fast -p farside-fuzz --test simulation",
        variables: &[("FARSIDE_SIMULATIONS", "2000")],
        seed: Some("FARSIDE_SEED"),
    },
    Round {
        name: "fuzz",
        arguments: "fuzz",
        variables: &[],
        seed: None,
    },
    Round {
        name: "miri",
        arguments: "miri",
        variables: &[],
        seed: None,
    },
    Round {
        name: "hotplug",
        arguments: "test --no-fail-fast --test guests -- hotplug",
        variables: &[("FARSIDE_HOTPLUGS", "10")],
        seed: None,
    },
    Round {
        name: "loss",
        arguments: "test --no-fail-fast --test guests -- loss::",
        variables: &[],
        seed: None,
    },
    Round {
        name: "crowd",
        arguments: "test --no-fail-fast --test guests -- crowd:: --include-ignored",
        variables: &[],
        seed: None,
    },
    Round {
        name: "canaries",
        arguments: "test --no-fail-fast --test canaries -- million --include-ignored",
        variables: &[],
        seed: Some("FARSIDE_SEED"),
    },
    Round {
        name: "outlive",
        arguments: "test --no-fail-fast --test outlive -- --nocapture",
        variables: &[("FARSIDE_KILLS", "1000")],
        seed: Some("FARSIDE_SEED"),
    },
    Round {
        name: "outlive-guests",
        arguments: "test --no-fail-fast --test guests -- outlive:: --nocapture",
        variables: &[("FARSIDE_KILLS", "1000")],
        seed: None,
    },
    Round {
        name: "functions",
        arguments: "test --no-fail-fast --test hardware_refusals -- does_not_stop_its_function",
        variables: &[("FARSIDE_KILLS", "1000")],
        seed: None,
    },
    Round {
        name: "cuts",
        arguments: "test --no-fail-fast --test network -- cuts::io_goes_on --nocapture",
        variables: &[("FARSIDE_KILLS", "1000")],
        seed: Some("FARSIDE_SEED"),
    },
    Round {
        name: "interleavings",
        arguments: "interleavings",
        variables: &[],
        seed: None,
    },
    Round {
        name: "deny",
        arguments: "deny",
        variables: &[],
        seed: None,
    },
    Round {
        name: "many-vms",
        arguments: "test --no-fail-fast --test outlive -- sixty_vms --include-ignored --nocapture",
        variables: &[],
        seed: Some("FARSIDE_SEED"),
    },
    Round {
        name: "one-guest",
        arguments: "test --no-fail-fast --test guests -- half_an_hour --include-ignored --nocapture",
        variables: &[],
        seed: None,
    },
];

struct Round {
    /// For `--only`.
    name: &'static str,
    /// Arguments of `cargo xtask`.
    arguments: &'static str,
    variables: &'static [(&'static str, &'static str)],
    /// The environment variable of the random seed; `None` if only timing is random.
    seed: Option<&'static str>,
}

impl Round {
    /// The environment of a run of it.
    fn environment(&self, seed: u64) -> Vec<(&'static str, String)> {
        let seed = self.seed.map(|name| (name, seed.to_string()));
        let variables = self.variables.iter();
        let variables = variables.map(|(name, value)| (*name, (*value).to_owned()));
        seed.into_iter().chain(variables).collect()
    }

    /// The command that runs it.
    fn shown(&self, seed: u64) -> String {
        let environment = self.environment(seed).into_iter();
        let words = environment
            .map(|(name, value)| format!("{name}={value}"))
            .chain(["cargo xtask".to_owned()])
            .chain(self.arguments.split_whitespace().map(str::to_owned));
        words.collect::<Vec<_>>().join(" ")
    }
}

/// Runs rounds until the time is over, which ends the last of them, or until one fails.
pub(crate) fn run(args: &Soak) -> Result<ExitCode> {
    let began = Instant::now();
    let minutes = args.minutes.unwrap_or(60);
    let limit = Duration::from_secs(minutes * 60);
    let program = std::env::current_exe().context("finding xtask's own program")?;
    let names: Vec<_> = ROUNDS.iter().map(|round| round.name).collect();
    let chosen = |round: &&Round| args.only.as_deref().is_none_or(|name| name == round.name);
    let rounds: Vec<_> = ROUNDS.iter().filter(chosen).collect();
    ensure!(
        !rounds.is_empty(),
        "no round {:?}: there are {}",
        args.only.as_deref().unwrap_or_default(),
        names.join(", ")
    );
    for (n, round) in rounds.into_iter().cycle().enumerate() {
        if began.elapsed() >= limit {
            println!(
                "{n} rounds in {:.0} s, none failed",
                began.elapsed().as_secs_f64()
            );
            break;
        }
        let seed = getrandom::u64().context("no random seed")?;
        println!("== round {n}: {}", round.shown(seed));
        let mut command = Command::new(&program);
        command
            .args(round.arguments.split_whitespace())
            .envs(round.environment(seed));
        if args.only.is_some()
            && let Some(minutes) = args.minutes
        {
            // Of rounds that last for a given time.
            command.env("FARSIDE_SECONDS", (minutes * 60).to_string());
        }
        die_with_us(&mut command);
        let status = command.status().context("running cargo xtask")?;
        if !status.success() {
            println!("round {n} failed ({status}); again: {}", round.shown(seed));
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// libtest-mimic refuses a second filter, so the round would always fail.
    #[test]
    fn a_round_has_one_filter() {
        for round in &ROUNDS {
            let harness = round
                .arguments
                .split_once(" -- ")
                .map_or("", |(_, rest)| rest);
            let filters = harness
                .split_whitespace()
                .filter(|word| !word.starts_with('-'));
            assert!(filters.count() <= 1, "{}", round.arguments);
        }
    }

    #[test]
    fn a_round_is_shown_as_one_types_it() {
        let shown = ROUNDS[0].shown(7);
        let expected = "FARSIDE_SEED=7 FARSIDE_MIGRATIONS=50 FARSIDE_KILLS=20 cargo xtask test --no-fail-fast --test migration";
        assert_eq!(shown, expected);
        assert_eq!(
            ROUNDS[6].shown(7),
            "cargo xtask test --no-fail-fast --test guests -- loss::"
        );
    }
}
