//! `cargo xtask soak`: what depends on chance, again and again for a given time.
//!
//! A change needs a few migrations and kills, and each property some hundred cases;
//! `cargo xtask test` runs those. This runs many, with a new seed in each round, and
//! prints the command that repeats a round.

use std::{
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{args::Soak, child::die_with_us};

/// Tests that are run in turn.
const ROUNDS: [Round; 4] = [
    Round {
        arguments: "--test migration",
        variables: &[("FARSIDE_MIGRATIONS", "50"), ("FARSIDE_KILLS", "20")],
        seed: "FARSIDE_SEED",
    },
    Round {
        arguments: "-p farside-config-space -p farside-devices -p farside-fabric \
                    -p farside-guest-layout -p farside-irq-relay -p farside-lender-protocol \
                    -p farside-ntb-server -p farside-pci -p farside-planner \
                    -p farside-qemu-configs",
        variables: &[],
        seed: "PROPTEST_RNG_SEED",
    },
    Round {
        arguments: "--test guests -- hotplug loss::",
        variables: &[],
        seed: "FARSIDE_SEED",
    },
    Round {
        arguments: "--test guests -- crowd:: --include-ignored",
        variables: &[],
        seed: "FARSIDE_SEED",
    },
];

struct Round {
    /// Of `cargo xtask test`.
    arguments: &'static str,
    variables: &'static [(&'static str, &'static str)],
    /// The variable that what is random begins with.
    seed: &'static str,
}

/// Runs rounds until the time is over, which ends the last of them, or one fails.
pub(crate) fn run(args: &Soak) -> Result<ExitCode> {
    let began = Instant::now();
    let limit = Duration::from_secs(args.minutes * 60);
    let program = std::env::current_exe().context("finding xtask's own program")?;
    for (n, round) in ROUNDS.iter().cycle().enumerate() {
        if began.elapsed() >= limit {
            println!(
                "{n} rounds in {:.0} s, none failed",
                began.elapsed().as_secs_f64()
            );
            break;
        }
        let seed = seed()?;
        println!("== round {n}: {}", round.shown(seed));
        let mut command = Command::new(&program);
        command
            .arg("test")
            .arg("--no-fail-fast")
            .args(round.arguments.split_whitespace())
            .env(round.seed, seed.to_string())
            .envs(round.variables.iter().copied());
        die_with_us(&mut command);
        let status = command.status().context("running cargo xtask test")?;
        if !status.success() {
            println!("round {n} failed ({status}); again: {}", round.shown(seed));
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Round {
    /// The command that runs it.
    fn shown(&self, seed: u64) -> String {
        let mut text = format!("{}={seed} ", self.seed);
        for (name, value) in self.variables {
            text += &format!("{name}={value} ");
        }
        let arguments: Vec<&str> = self.arguments.split_whitespace().collect();
        text + "cargo xtask test " + &arguments.join(" ")
    }
}

fn seed() -> Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .context("getrandom")?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_shown_as_one_types_it() {
        let shown = ROUNDS[0].shown(7);
        let expected = "FARSIDE_SEED=7 FARSIDE_MIGRATIONS=50 FARSIDE_KILLS=20 cargo xtask test --test migration";
        assert_eq!(shown, expected);
    }
}
