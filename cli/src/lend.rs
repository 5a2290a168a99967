//! `farside lend`.

use std::{os::fd::AsFd, path::Path};

use anyhow::{Context, bail, ensure};
use farside_daemon::{Activated, DeviceId, cgroup, close_inherited, paths, ready};
use farside_fabric::{Size, VmShare};
use farside_lender::{
    Lender,
    config::{Config, DeviceConfig, NtbConfig, Program, RomConfig, Source, VfioConfig, VfsConfig},
    run_keeper, run_worker,
};
use farside_lender_protocol::{Address, Client, ResizedDevice};
use farside_vm_config::HostConfig;
use toml::{Table, Value};

use crate::{args::Lend, signals};

pub(crate) fn run(args: Lend) -> anyhow::Result<()> {
    if args.add || !args.remove.is_empty() || !args.resize.is_empty() {
        return change(&args);
    }
    let activated = Activated::from_env()?;
    let mut config = match &args.config {
        Some(path) => Config::load(path)?,
        None => Config::default(),
    };
    for table in named(&args)? {
        config.device.push(Value::Table(table).try_into()?);
    }
    if let Some(name) = args.name {
        config.name = name;
    }
    if let Some(socket) = args.socket {
        config.socket = socket;
    }
    if let Some(volumes) = args.volumes {
        config.volumes = Some(std::path::absolute(volumes)?);
    }
    config.listen.extend(args.listen);
    config.listen_plain |= args.listen_plain;
    if let Some(announce) = args.announce {
        config.announce = Some(announce);
    }
    config.discovery = HostConfig::read()?.discovery();
    if let Some(poll_us) = args.poll_us {
        config.poll_us = poll_us;
    }
    let borrowers: Vec<_> = args.borrowers.into_iter().map(|(_, rule)| rule).collect();
    let vfio = args.vfio.into_iter().map(|(id, function)| DeviceConfig {
        id,
        source: Source::Vfio(VfioConfig {
            function,
            force: args.force,
            allow_dirty: args.allow_dirty,
            rom: RomConfig::default(),
        }),
        borrowers: borrowers.clone(),
    });
    config.device.extend(vfio);
    if let Some(function) = args.ntb {
        let per_vm = config.ntb.map_or(VmShare::ALL, |ntb| ntb.per_vm);
        config.ntb = Some(NtbConfig { function, per_vm });
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
        keeper: Some("lease-keeper".into()),
        cgroup: delegated(config.worker_memory_max)?,
    });
    let lender = Lender::start_activated(config, activated)?;
    signals::raise_on_signal(&lender.stop_handle(), signals::stopping)
        .and_then(|()| signals::exit_on_upgrade())
        .context("cannot wait for signals")?;
    let addresses: Vec<String> = lender.addresses().iter().map(Address::to_string).collect();
    ready(&format!("lending at {}", addresses.join(", ")));
    lender.run()?;
    Ok(())
}

/// `farside lease-worker`: serves a lease that comes through standard input.
pub(crate) fn worker() -> anyhow::Result<()> {
    close_inherited()?;
    signals::ignore()?;
    Ok(run_worker(std::io::stdin().as_fd().try_clone_to_owned()?)?)
}

/// `farside lease-keeper`: keeps what the next lender needs to go on with the leases of this one.
pub(crate) fn keeper() -> anyhow::Result<()> {
    close_inherited()?;
    signals::ignore()?;
    Ok(run_keeper(std::io::stdin().as_fd().try_clone_to_owned()?)?)
}

/// Adds devices to a running lender, removes or resizes them.
fn change(args: &Lend) -> anyhow::Result<()> {
    let socket = args.socket.clone().unwrap_or_else(paths::lender_socket);
    let mut client = Client::connect(&socket.into(), None)?;
    for device in &args.remove {
        client.remove_device(device)?;
        println!("{device} is no longer lent");
    }
    for device in &args.resize {
        resize(&mut client, device)?;
    }
    if !args.add {
        return Ok(());
    }
    for table in added(args)? {
        let id = table.get("id").and_then(Value::as_str).unwrap_or_default();
        let id = id.to_owned();
        client.add_device(table.to_string())?;
        println!("{id} is lent until the lender stops; for good, add it to lender.toml");
    }
    Ok(())
}

/// Has a disk grow to the size of its medium.
pub(crate) fn resize(client: &mut Client, device: &DeviceId) -> anyhow::Result<()> {
    let (resized, more) = client.resize_device(device)?;
    for ResizedDevice { device, from, to } in resized {
        match from == to {
            true => println!("{device} has {}, as before", Size(to)),
            false => println!("{device} has {} (was {})", Size(to), Size(from)),
        }
    }
    if more > 0 {
        println!("so have {more} other devices, which the lender's log names");
    }
    Ok(())
}

/// The `[[device]]` tables of the devices to add.
fn added(args: &Lend) -> anyhow::Result<Vec<Table>> {
    if let Some((id, _)) = args.vfio.first() {
        bail!(
            "device {id}: functions of this host cannot be added to a running lender; add it to lender.toml and restart the lender"
        );
    }
    let mut tables = args.config.as_deref().map_or(Ok(Vec::new()), tables_of)?;
    tables.extend(named(args)?);
    ensure!(
        !tables.is_empty(),
        "no device to add: give at least one (--nvme ID=IMAGE, or --config FILE with `[[device]]`)"
    );
    Ok(tables)
}

/// The `[[device]]` tables of the devices that options name, without functions of this host.
fn named(args: &Lend) -> anyhow::Result<Vec<Table>> {
    let mut tables = Vec::new();
    let nvme = args.nvme.iter().map(|disk| ("nvme", disk));
    let virtio_blk = args.virtio_blk.iter().map(|disk| ("virtio-blk", disk));
    for (kind, disk) in nvme.chain(virtio_blk) {
        let mut options = Table::new();
        options.insert("image".into(), absolute(&disk.image)?);
        options.insert("read-only".into(), disk.read_only.into());
        options.insert("limits".into(), Value::try_from(disk.limits)?);
        if let Some(bytes) = disk.cmb {
            options.insert("cmb".into(), i64::try_from(bytes)?.into());
        }
        if let Some(file) = &disk.shared {
            options.insert("shared".into(), absolute(file)?);
        }
        if disk.mapped_doorbells {
            options.insert("mapped-doorbells".into(), true.into());
        }
        tables.push(model(&disk.id, kind, options, args));
    }
    for nic in &args.virtio_net {
        let mut options = Table::from_iter([("tap".to_owned(), nic.tap.clone().into())]);
        if let Some(mac) = nic.mac {
            options.insert("mac".into(), mac.to_string().into());
        }
        if let Some(queues) = nic.queues {
            options.insert("queues".into(), i64::from(queues).into());
        }
        tables.push(model(&nic.id, "virtio-net", options, args));
    }
    for id in &args.dma_test {
        tables.push(model(id, "dma-test", Table::new(), args));
    }
    for (id, socket) in &args.vfio_user {
        let server = Table::from_iter([("socket".to_owned(), absolute(socket)?)]);
        tables.push(table(id, "vfio-user", server, args));
    }
    Ok(tables)
}

/// A path as the lender sees it, whose working directory is another.
fn absolute(path: &Path) -> anyhow::Result<Value> {
    let path = std::path::absolute(path)?.into_os_string().into_string();
    path.map(Value::String)
        .map_err(|path| anyhow::anyhow!("the path is not UTF-8: {path:?}"))
}

fn model(id: &DeviceId, model: &str, options: Table, args: &Lend) -> Table {
    let model = Table::from_iter([(model.to_owned(), Value::Table(options))]);
    table(id, "model", model, args)
}

fn table(id: &DeviceId, source: &str, options: Table, args: &Lend) -> Table {
    let rules = args.borrowers.iter().map(|(rule, _)| rule.clone().into());
    Table::from_iter([
        ("id".to_owned(), Value::String(id.to_string())),
        (source.to_owned(), Value::Table(options)),
        ("borrowers".to_owned(), Value::Array(rules.collect())),
    ])
}

fn tables_of(path: &Path) -> anyhow::Result<Vec<Table>> {
    // For its errors, which name lines.
    Config::load(path)?;
    let text = std::fs::read_to_string(path)?;
    let mut file: Table = toml::from_str(&text)?;
    let devices = file.remove("device").unwrap_or(Value::Array(Vec::new()));
    Ok(devices.try_into()?)
}

/// The control group that the service manager has delegated. Workers do without, unless their memory is
/// to be limited.
fn delegated(memory_max: Option<u64>) -> anyhow::Result<Option<cgroup::Delegated>> {
    match (cgroup::Delegated::take(memory_max), memory_max) {
        (Ok(Some(delegated)), _) => Ok(Some(delegated)),
        (Ok(None), None) => Ok(None),
        (Err(error), None) => {
            log::warn!(
                "workers have no control groups of their own: the delegated one cannot be used: {error}"
            );
            Ok(None)
        }
        (Ok(None), Some(_)) => bail!(
            "cannot enforce worker-memory-max: the service manager has delegated no control group to this lender; start it as a service with `Delegate=memory`, or remove the key"
        ),
        (Err(error), Some(_)) => Err(error).context(
            "cannot enforce worker-memory-max: start the lender as a service with `Delegate=memory`, or remove the key",
        ),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use farside_lender::config::Model;

    use super::*;
    use crate::args::{Args, Verb};

    fn tables(args: &[&str]) -> anyhow::Result<Vec<DeviceConfig>> {
        let args = Args::try_parse_from([&["farside", "lend", "--add"], args].concat())?;
        let Verb::Lend(args) = args.verb else {
            unreachable!()
        };
        let tables = added(&args)?.into_iter();
        let parsed = tables.map(|table| Ok(toml::from_str(&table.to_string())?));
        parsed.collect()
    }

    #[test]
    fn an_added_device_is_a_table_of_the_configuration() {
        let devices = tables(&[
            "--nvme",
            "disk1=a \"b\".img,read-only,iops=500,cmb=64M",
            "--virtio-blk",
            "disk2=b.img",
            "--virtio-net",
            "nic1=tap1,mac=52:54:00:12:34:56,queues=2",
            "--dma-test",
            "dma1",
            "--borrower",
            "user=root",
        ]);
        let devices = devices.unwrap();
        let ids: Vec<_> = devices.iter().map(|device| device.id.as_str()).collect();
        assert_eq!(ids, ["disk1", "disk2", "nic1", "dma1"]);
        assert!(devices.iter().all(|device| device.borrowers.len() == 1));
        match &devices[0].source {
            Source::Model(Model::Nvme(nvme)) => {
                assert!(nvme.read_only);
                assert_eq!((nvme.limits.iops, nvme.cmb), (Some(500), Some(64 << 20)));
                assert!(nvme.image.is_absolute() && nvme.image.ends_with("a \"b\".img"));
            }
            other => panic!("{other:?}"),
        }
        match &devices[1].source {
            Source::Model(Model::VirtioBlk(disk)) => {
                assert!(!disk.read_only && disk.image.is_absolute());
            }
            other => panic!("{other:?}"),
        }
        match &devices[2].source {
            Source::Model(Model::VirtioNet(nic)) => {
                assert_eq!((nic.tap.as_str(), nic.queues), ("tap1", 2));
                let mac = nic.mac.map(|mac| mac.to_string());
                assert_eq!(mac.as_deref(), Some("52:54:00:12:34:56"));
            }
            other => panic!("{other:?}"),
        }
        for bad in [
            "nic1",
            "nic1=tap1,mac=1",
            "nic1=tap1,queues=x",
            "nic1=tap1,mtu=1",
        ] {
            assert!(tables(&["--virtio-net", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn tables_of_a_file_are_added_as_they_are() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "name = \"x\"\n[[device]]\nid = \"dma1\"\nmodel.dma-test = {}\n";
        std::fs::write(file.path(), text).unwrap();
        let devices = tables(&["--config", file.path().to_str().unwrap()]).unwrap();
        assert_eq!(devices[0].id, "dma1");
    }

    #[test]
    fn functions_and_options_of_a_start_are_refused() {
        let fault = |args: &[&str]| tables(args).unwrap_err().to_string();
        let function = fault(&["--vfio", "fn0=0000:03:00.0"]);
        assert!(function.contains("restart the lender"), "{function}");
        assert!(fault(&["--name", "x"]).contains("cannot be used with"));
        assert!(fault(&["--remove", "x"]).contains("cannot be used with"));
        assert!(fault(&["--resize", "x"]).contains("cannot be used with"));
        assert!(fault(&[]).contains("no device to add"));
    }
}
