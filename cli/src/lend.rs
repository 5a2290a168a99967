//! `farside lend`.

use std::{os::fd::AsFd, sync::Arc};

use anyhow::Context;
use farside_daemon::{Activated, ready};
use farside_lender::{
    Lender,
    config::{Config, DeviceConfig, Model, NtbConfig, Program, Source, VfioConfig, VfsConfig},
    run_worker,
};
use farside_lender_protocol::Address;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::{args::Lend, signals};

pub(crate) fn run(args: Lend) -> anyhow::Result<()> {
    let activated = Activated::from_env()?;
    let mut config = match &args.config {
        Some(path) => Config::load(path)?,
        None => Config::default(),
    };
    if let Some(name) = args.name {
        config.name = name;
    }
    if let Some(socket) = args.socket {
        config.socket = socket;
    }
    config.listen.extend(args.listen);
    if let Some(poll_us) = args.poll_us {
        config.poll_us = poll_us;
    }
    let nvme = args.nvme.into_iter().map(|nvme| DeviceConfig {
        id: nvme.id,
        source: Model::nvme(nvme.image, nvme.read_only).into(),
        borrowers: args.borrowers.clone(),
    });
    let dma_test = args.dma_test.into_iter().map(|id| DeviceConfig {
        id,
        source: Model::dma_test().into(),
        borrowers: args.borrowers.clone(),
    });
    let vfio = args.vfio.into_iter().map(|(id, function)| DeviceConfig {
        id,
        source: Source::Vfio(VfioConfig {
            function,
            force: args.force,
            allow_dirty: args.allow_dirty,
        }),
        borrowers: args.borrowers.clone(),
    });
    config.device.extend(nvme.chain(dma_test).chain(vfio));
    if let Some(function) = args.ntb {
        config.ntb = Some(NtbConfig { function });
    }
    let vfs = args.vfs.into_iter();
    config
        .vfs
        .extend(vfs.map(|(of, count)| VfsConfig { of, count }));

    config.state.get_or_insert_with(|| {
        farside_vm_config::places::state_dir().join(format!("lender-{}.json", config.name))
    });
    config.worker = Some(Program {
        // This program, also after its file was replaced by a later version.
        path: "/proc/self/exe".into(),
        args: vec!["lease-worker".into()],
    });
    let lender = Lender::start_activated(config, activated)?;
    signals::raise_on_signal(&lender.stop_handle(), signals::stopping)
        .context("cannot wait for signals")?;
    let addresses: Vec<String> = lender.addresses().iter().map(Address::to_string).collect();
    ready(&format!("lending at {}", addresses.join(", ")));
    lender.run()?;
    Ok(())
}

/// `farside lease-worker`: serves a lease that comes through standard input.
pub(crate) fn worker() -> anyhow::Result<()> {
    // The service manager sends these to the lender and its workers alike: the lender then ends the
    // lease in order.
    let ignored = Arc::default();
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&ignored))?;
    }
    Ok(run_worker(std::io::stdin().as_fd().try_clone_to_owned()?)?)
}
