//! `farside volume`.

use std::{
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use farside_backend_api::{VolumeEntry, VolumeList};
use farside_bench::text_table;
use farside_daemon::{DeviceId, paths, user_name};
use farside_fabric::{Size, parse_size};
use farside_lender::{
    config::{Borrower, Config, Limits},
    volumes::{self, LockedVolumes, Volumes},
};
use farside_lender_protocol::{CallError, Client, DeviceEntry};
use rustix::{process::geteuid, thread};
use toml::{Table, Value};

use crate::{args::parse_borrower, lend, terminal::Plain};

/// Create, list, grow and delete volumes: disks that a lender keeps as files
///
/// A volume is a sparse file in the lender's directory of volumes (`volumes` in lender.toml, --volumes), and a device of the
/// lender, for as long as it exists. Only the lender's own user, and root, who acts as that user here, can change
/// volumes, on the lender's host. Without a running lender, they are lent when it starts.
#[derive(Debug, ClapArgs)]
pub(crate) struct Volume {
    #[command(subcommand)]
    verb: Verb,
    /// The lender's configuration [default: lender.toml in /etc/farside].
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// The lender's directory of volumes [default: that of its configuration].
    #[arg(long, value_name = "DIR", global = true)]
    directory: Option<PathBuf>,
    /// The lender's socket [default: that of its configuration, else lender.sock in the runtime directory].
    #[arg(long, value_name = "PATH", global = true)]
    socket: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Create(Create),
    /// List the volumes, and who has borrowed them
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Have a volume grow, also while a VM has borrowed it, which sees that at once
    Resize {
        /// Id of the volume.
        #[arg(value_name = "VOLUME")]
        id: DeviceId,
        /// Its new size, as in 40G.
        #[arg(value_parser = parse_size)]
        size: u64,
    },
    /// Delete a volume with its data, which no VM has borrowed
    Delete {
        /// Id of the volume.
        #[arg(value_name = "VOLUME")]
        id: DeviceId,
    },
}

/// Create a volume, which reads as zeroes, and lend it
#[derive(Debug, ClapArgs)]
struct Create {
    /// Id of the volume and of the device.
    #[arg(value_name = "VOLUME")]
    id: DeviceId,
    /// Its size, as in 20G. Space is taken up as data is written.
    #[arg(value_parser = parse_size)]
    size: u64,
    /// The device model.
    #[arg(long, value_enum, default_value_t = Model::Nvme)]
    model: Model,
    /// Most operations per second.
    #[arg(long, value_name = "N")]
    iops: Option<u32>,
    /// Most bytes per second, as in 200M.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    bandwidth: Option<u64>,
    /// Who may borrow it, beside the lender's user and root, as for `farside lend`; may be given more than once.
    #[arg(
        long = "borrower",
        value_name = "user=NAME[,vm=VM][,claim]|host=NAME[,vm=VM][,claim]|network",
        value_parser = parse_borrower
    )]
    borrowers: Vec<(String, Borrower)>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Model {
    Nvme,
    VirtioBlk,
}

impl Model {
    fn name(self) -> &'static str {
        match self {
            Self::Nvme => "nvme",
            Self::VirtioBlk => "virtio-blk",
        }
    }
}

pub(crate) fn run(args: &Volume) -> anyhow::Result<()> {
    let (directory, socket) = places(args)?;
    act_as_owner(&directory)?;
    let volumes = Volumes::new(directory);
    // Before the lock: with socket activation, this starts the lender, which reads all volumes.
    let mut lender = connect(&socket)?;
    match &args.verb {
        Verb::Create(create) => {
            let locked = volumes.lock()?;
            create.run(&locked, lender.as_mut())
        }
        Verb::List { json } => list(&volumes, lender.as_mut(), *json),
        Verb::Resize { id, size } => {
            volumes.lock()?.grow(id, *size)?;
            if let Some(lender) = &mut lender
                && is_lent(lender, id)?
            {
                lend::resize(lender, id)?;
            } else {
                println!("{id} has {}", Size(*size));
            }
            Ok(())
        }
        Verb::Delete { id } => {
            let locked = volumes.lock()?;
            locked.check_exists(id)?;
            if let Some(lender) = &mut lender
                && is_lent(lender, id)?
            {
                lender.remove_device(id)?;
            }
            locked.delete(id)?;
            println!("{id} is deleted");
            Ok(())
        }
    }
}

/// The directory of volumes, and the lender's socket.
fn places(args: &Volume) -> anyhow::Result<(PathBuf, PathBuf)> {
    let file = args.config.clone();
    let file = file.unwrap_or_else(|| paths::config_dir().join("lender.toml"));
    let config = match args.config.is_some() || file.exists() {
        true => Config::load(&file)?,
        false => Config::default(),
    };
    let directory = args.directory.clone().or(config.volumes);
    let directory = directory.with_context(|| {
        format!(
            "{} names no directory of volumes: add `volumes = \"/var/lib/farside/volumes\"` and restart the lender, or give --directory",
            file.display()
        )
    })?;
    let socket = args.socket.clone().unwrap_or(config.socket);
    Ok((directory, socket))
}

/// Root takes on the rights of the directory's owner, the lender's user: what it does there, that user can do, and
/// nothing that the user has put there leads root elsewhere.
fn act_as_owner(directory: &Path) -> anyhow::Result<()> {
    let cannot = || {
        format!(
            "cannot open {}, the directory of volumes, which the lender makes when it starts",
            directory.display()
        )
    };
    let (uid, gid) = paths::owners(directory).with_context(cannot)?;
    if !geteuid().is_root() || uid == 0 {
        return Ok(());
    }
    let (user, group) = (thread::Uid::from_raw(uid), thread::Gid::from_raw(gid));
    // This process has one thread.
    thread::set_thread_groups(&[])
        .and_then(|()| thread::set_thread_res_gid(group, group, group))
        .and_then(|()| thread::set_thread_res_uid(user, user, user))
        .with_context(|| format!("cannot act as user {}", user_name(uid)))
}

/// The lender at this socket, if one runs.
fn connect(socket: &Path) -> anyhow::Result<Option<Client>> {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    match Client::connect(&socket.to_owned().into(), None) {
        Ok(client) => Ok(Some(client)),
        Err(CallError::Unreachable { source, .. })
            if [NotFound, ConnectionRefused].contains(&source.kind()) =>
        {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

fn is_lent(lender: &mut Client, id: &DeviceId) -> anyhow::Result<bool> {
    Ok(lender.devices()?.iter().any(|entry| entry.id == *id))
}

impl Create {
    fn run(&self, volumes: &LockedVolumes<'_>, lender: Option<&mut Client>) -> anyhow::Result<()> {
        let id = &self.id;
        let Some(lender) = lender else {
            volumes.create(id, self.size, self.table()?)?;
            println!("{id} is created; no lender runs: it is lent when one starts");
            return Ok(());
        };
        if volumes.check_exists(id).is_err() && is_lent(lender, id)? {
            bail!("the lender has a device {id} that is no volume: choose another id");
        }
        let volume = volumes.create(id, self.size, self.table()?)?;
        if let Err(error) = lender.add_device(volume.table.to_string()) {
            // A lender that has just started has read it by itself.
            if !is_lent(lender, id)? {
                volumes.delete(id)?;
                return Err(error.into());
            }
        }
        println!("{id} is created and lent: {}", Size(self.size));
        Ok(())
    }

    /// Its `[[device]]` table, without id and image.
    fn table(&self) -> anyhow::Result<Table> {
        let limits = Limits {
            iops: self.iops,
            bandwidth: self.bandwidth,
        };
        let options = Table::from_iter([("limits".to_owned(), Value::try_from(limits)?)]);
        let model = Table::from_iter([(self.model.name().to_owned(), Value::Table(options))]);
        let rules = self.borrowers.iter().map(|(rule, _)| rule.clone().into());
        Ok(Table::from_iter([
            ("model".to_owned(), Value::Table(model)),
            ("borrowers".to_owned(), Value::Array(rules.collect())),
        ]))
    }
}

fn list(volumes: &Volumes, lender: Option<&mut Client>, json: bool) -> anyhow::Result<()> {
    let runs = lender.is_some();
    let devices = lender.map_or(Ok(Vec::new()), |lender| lender.devices())?;
    let entries: Vec<VolumeEntry> = volumes
        .list()?
        .into_iter()
        .map(|volume| entry(volume, &devices))
        .collect();
    if json {
        let document = VolumeList::new(entries);
        println!("{}", serde_json::to_string_pretty(&document)?);
        return Ok(());
    }
    let rows: Vec<Vec<String>> = entries
        .into_iter()
        .map(|volume| {
            let used_by = match (volume.lent, volume.borrowed_by) {
                (_, Some(vm)) => format!("VM {vm}"),
                (true, None) => "-".into(),
                (false, None) if runs => "not lent".into(),
                (false, None) => "no lender runs".into(),
            };
            let sizes = [volume.size_bytes, volume.used_bytes];
            let [size, used] = sizes.map(|bytes| Size(bytes).to_string());
            vec![volume.id.to_string(), volume.model, size, used, used_by]
        })
        .collect();
    let table = text_table(&["VOLUME", "MODEL", "SIZE", "USED", "USED BY"], &rows);
    print!("{}", Plain(table));
    Ok(())
}

fn entry(volume: volumes::Volume, devices: &[DeviceEntry]) -> VolumeEntry {
    let device = devices.iter().find(|device| device.id == volume.id);
    let borrowed_by = device.and_then(|device| device.borrowed_by.as_ref());
    VolumeEntry {
        model: volume.model.name().to_owned(),
        size_bytes: volume.size,
        used_bytes: volume.used,
        lent: device.is_some(),
        borrowed_by: borrowed_by.map(|by| by.vm.clone()),
        id: volume.id,
    }
}
