//! `farside`: the one program that a user types.
//!
//! Parses arguments and assembles the parts; each verb is a module.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod bind;
mod devices;
mod doctor;
mod hook;
mod hotplug;
mod lend;
mod lenders;
mod libvirt;
mod logging;
mod migrate;
mod migration;
mod ntb;
mod pki;
mod plan;
mod qemu;
mod ram;
mod revoke;
mod run;
mod serve;
mod signals;
mod status;
mod terminal;
mod units;
mod upgrade;
mod values;
mod vm_flags;
mod volume;
mod waiting;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Args, Verb};
use terminal::Plain;

fn main() -> ExitCode {
    let args = Args::parse();
    match args.verb {
        Verb::LeaseWorker { .. } => logging::init_worker(),
        _ => logging::init(),
    }
    match dispatch(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

fn report(error: &anyhow::Error) {
    eprintln!("error: {}", Plain(error));
    for cause in error.chain().skip(1) {
        eprintln!("  caused by: {}", Plain(cause));
    }
}

fn dispatch(args: Args) -> anyhow::Result<()> {
    match args.verb {
        Verb::Lend(lend) => lend::run(lend),
        Verb::Bind(bind) => bind::run(&bind),
        Verb::LeaseWorker { .. } => lend::worker(),
        Verb::LeaseKeeper => lend::keeper(),
        Verb::Devices(devices) => devices::run(&devices),
        Verb::Volume(volume) => volume::run(&volume),
        Verb::Serve(serve) => serve::run(serve),
        Verb::ServeHelper { .. } => serve::helper(),
        Verb::Qemu(qemu) => qemu::run(*qemu),
        Verb::Libvirt(libvirt) => libvirt::run(*libvirt),
        Verb::Start(start) => run::start(&start),
        Verb::Stop(stop) => run::stop(&stop),
        Verb::Attach(attach) => hotplug::attach(&attach),
        Verb::Detach(detach) => hotplug::detach(&detach),
        Verb::Revoke(revoke) => revoke::run(&revoke),
        Verb::Migrate(migrate) => migrate::run(&migrate),
        Verb::Migration(migration) => migration::run(&migration),
        Verb::Status(status) => status::run(&status),
        Verb::Doctor(doctor) => doctor::run(&doctor),
        Verb::Bench(bench) => bench::run(&bench),
        Verb::Hook(hook) => hook::run(&hook),
        Verb::Units(units) => units::run(&units),
        Verb::Upgrade(upgrade) => upgrade::run(&upgrade),
        Verb::Plan(plan) => plan::run(&plan),
        Verb::Ntb(ntb) => ntb::run(&ntb),
        Verb::Pki(pki) => pki::run(pki),
        Verb::Completions { shell } => {
            clap_complete::generate(
                shell,
                &mut Args::command(),
                "farside",
                &mut std::io::stdout(),
            );
            Ok(())
        }
        Verb::Man { directory } => {
            std::fs::create_dir_all(&directory)?;
            clap_mangen::generate_to(Args::command(), &directory)?;
            println!("man pages written to {}", directory.display());
            Ok(())
        }
    }
}
