//! Developer chores: `cargo xtask demo`, `test`, `soak`, `fuzz`, `miri`, `interleavings`, `deny`, `cluster`, `bench`,
//! `deb`, `tidy`.
//!
//! Each command does all of its own set-up: it builds the product, and the test bed
//! ([`farside_testbed`]) provides QEMU, a guest kernel and a guest userland.
//!
//! - [`demo`]: the main use case once, from the empty image to the proof;
//! - [`cluster`]: physical devices, lent in VMs that play hosts;
//! - [`bench`]: the borrowed device compared with QEMU's own, in one guest;
//! - [`test`]: every test, and a list of those that were not run;
//! - [`soak`]: randomised tests, for a given time;
//! - [`nightly`]: fuzz targets and Miri, which need the nightly toolchain;
//! - [`checks`]: loom and cargo-deny;
//! - [`deb`]: the Debian package;
//! - [`tidy`]: checks that neither rustfmt nor clippy makes;
//! - [`scene`]: the processes of demo and bench: a lender, a backend, a VM.

#![deny(unsafe_code)]

mod args;
mod bench;
mod cargo;
mod checks;
mod child;
mod cluster;
mod cpu;
mod deb;
mod demo;
mod interrupt;
#[cfg(test)]
mod json;
mod nightly;
mod scene;
mod soak;
mod status;
mod test;
mod text;
mod tidy;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser};

use args::{Args, Verb};

/// The exit status that shells expect of a process ended by SIGINT.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::new().filter_or("FARSIDE_LOG", "warn"))
        .format_target(false)
        .init();
    match run(args) {
        Ok(code) => code,
        Err(_) if interrupt::happened() => {
            eprintln!("interrupted; everything that was started has ended");
            ExitCode::from(INTERRUPTED)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<ExitCode> {
    match args.verb {
        None => Args::command().print_help()?,
        Some(Verb::Demo(demo)) => return demo::run(&demo),
        Some(Verb::Test(test)) => return test::run(&test.cargo_args),
        Some(Verb::Soak(soak)) => return soak::run(&soak),
        Some(Verb::Fuzz(fuzz)) => return nightly::fuzz(&fuzz),
        Some(Verb::Miri) => return nightly::miri(),
        Some(Verb::Interleavings) => return checks::interleavings(),
        Some(Verb::Deny) => return checks::deny(),
        Some(Verb::Cluster(cluster)) => return cluster::run(&cluster),
        Some(Verb::Bench(bench)) => bench::run(&bench)?,
        Some(Verb::Deb(deb)) => deb::run(&deb)?,
        Some(Verb::Tidy) => return tidy::run(),
        Some(Verb::Wire(wire)) => bench::wire::run(&wire)?,
    }
    Ok(ExitCode::SUCCESS)
}
