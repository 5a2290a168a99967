//! `farside lend`.

use anyhow::Context;
use farside_daemon::{Activated, ready};
use farside_lender::{
    Lender,
    config::{Config, DeviceConfig, Model, NtbConfig, Source, VfioConfig, VfsConfig},
};
use farside_lender_protocol::Address;

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
    let lender = Lender::start_activated(config, activated)?;
    signals::raise_on_signal(&lender.stop_handle(), signals::stopping)
        .context("cannot wait for signals")?;
    let addresses: Vec<String> = lender.addresses().iter().map(Address::to_string).collect();
    ready(&format!("lending at {}", addresses.join(", ")));
    lender.run()?;
    Ok(())
}
