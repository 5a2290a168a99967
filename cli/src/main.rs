//! `farside`: the one program that a user types.
//!
//! Parses arguments and assembles the parts; each verb is a module.

#![forbid(unsafe_code)]

mod args;
mod devices;
mod lend;
mod ntb;
mod plan;
mod qemu;
mod ram;
mod serve;
mod signals;
mod status;
mod text;
mod vm_file;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Args, Verb};

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::new().filter_or("FARSIDE_LOG", "info"))
        .format_target(false)
        // It logs what it also returns, or what we look at ourselves.
        .filter_module("vfio_ioctls", log::LevelFilter::Off)
        .init();
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut said = error.to_string();
            for cause in error.chain().skip(1) {
                let cause = cause.to_string();
                // Some messages end with their cause already.
                if !said.contains(&cause) {
                    eprintln!("  caused by: {cause}");
                    said = cause;
                }
            }
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    match args.verb {
        Verb::Lend(lend) => lend::run(lend),
        Verb::Devices(devices) => devices::run(&devices),
        Verb::Serve(serve) => serve::run(serve),
        Verb::Qemu(qemu) => qemu::run(qemu),
        Verb::Status(status) => status::run(&status),
        Verb::Plan(plan) => plan::run(&plan),
        Verb::Ntb(ntb) => ntb::run(&ntb),
        Verb::Completions { shell } => {
            clap_complete::generate(
                shell,
                &mut Args::command(),
                "farside",
                &mut std::io::stdout(),
            );
            Ok(())
        }
        Verb::Man { folder } => {
            std::fs::create_dir_all(&folder)?;
            clap_mangen::generate_to(Args::command(), &folder)?;
            println!("man pages written to {}", folder.display());
            Ok(())
        }
    }
}
