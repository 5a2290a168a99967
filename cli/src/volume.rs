//! `farside volume`.

use std::{
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use farside_backend_api::{VolumeEntry, VolumeList};
use farside_bench::text_table;
use farside_daemon::{DeviceId, paths, user_name};
use farside_error_chain::Chain;
use farside_fabric::{Size, parse_size};
use farside_lender::{
    config::{Borrower, Config, Limits},
    volumes::{self, LockedVolumes, Volumes},
};
use farside_lender_protocol::{CallError, Client, DeviceEntry, ErrorKind};
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
    let volumes = Volumes::new(directory)?;
    match &args.verb {
        Verb::Create(create) => {
            let (locked, lender) = lock(&volumes, &socket)?;
            create.run(&locked, lender)
        }
        Verb::List { json } => list(&volumes, lender_of(&volumes, &socket)?, *json),
        Verb::Resize { id, size } => {
            let (locked, lender) = lock(&volumes, &socket)?;
            resize(&locked, lender, id, *size)
        }
        Verb::Delete { id } => {
            let (locked, lender) = lock(&volumes, &socket)?;
            delete(&locked, lender, id)
        }
    }
}

/// Locks the volumes; with the lender, if one runs, which has read them as they are.
fn lock(volumes: &Volumes, socket: &Path) -> anyhow::Result<(LockedVolumes, Option<Client>)> {
    // With socket activation, this starts the lender, which takes the lock meanwhile.
    drop(connect(socket)?);
    let locked = volumes.lock()?;
    Ok((locked, lender_of(volumes, socket)?))
}

/// The lender at this socket, if one runs, which must be the one that lends these volumes.
fn lender_of(volumes: &Volumes, socket: &Path) -> anyhow::Result<Option<Client>> {
    let lender = connect(socket)?;
    match volumes.socket()? {
        Some(theirs) if lender.is_some() && theirs != socket => bail!(
            "these volumes are those of the lender at {}, and not of that at {}: give --directory and --socket of one lender",
            theirs.display(),
            socket.display()
        ),
        _ => Ok(lender),
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
    let directory = match &args.directory {
        Some(directory) => Some(std::path::absolute(directory)?),
        None => config.volumes,
    };
    let directory = directory.with_context(|| {
        format!(
            "{} names no directory of volumes: add `volumes = {:?}` and restart the lender, or give --directory",
            file.display(),
            paths::state_dir().join("volumes")
        )
    })?;
    let socket = args.socket.clone().unwrap_or(config.socket);
    Ok((directory, std::path::absolute(socket)?))
}

/// Root takes on the rights of the directory's owner, the lender's user: what it does there, that user can do, and
/// nothing that the user has put there leads root elsewhere.
fn act_as_owner(directory: &Path) -> anyhow::Result<()> {
    let (uid, gid) = paths::owners(directory).with_context(|| {
        format!(
            "cannot open {}, the directory of volumes, which the lender makes when it starts",
            directory.display()
        )
    })?;
    if !geteuid().is_root() {
        return Ok(());
    }
    // Another user could lead root to any directory by a link, and make it act as its owner.
    let real = directory.canonicalize()?;
    if real != directory {
        bail!(
            "the path {} contains `..` or a symbolic link: root uses a directory of volumes by its own path, here {}",
            directory.display(),
            real.display()
        );
    }
    const OTHERS_WRITE: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    for above in directory.ancestors().skip(1) {
        let metadata = above.metadata()?;
        let is_open = metadata.mode() & (OTHERS_WRITE | STICKY) == OTHERS_WRITE;
        if is_open || ![0, uid].contains(&metadata.uid()) {
            bail!(
                "users other than {} could replace {}, the directory of volumes, because of owner or mode of {}: choose another, or run this command as {}",
                user_name(uid),
                directory.display(),
                above.display(),
                user_name(uid)
            );
        }
    }
    if uid == 0 {
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

/// The lender, if it lends this volume, and not a device of that id in lender.toml: it has locked the image, then.
fn lends(
    lender: Option<Client>,
    volumes: &LockedVolumes,
    id: &DeviceId,
) -> anyhow::Result<Option<Client>> {
    let in_use = volumes.is_in_use(id)?;
    let Some(mut lender) = lender else {
        return Ok(None);
    };
    Ok((in_use && is_lent(&mut lender, id)?).then_some(lender))
}

fn resize(
    volumes: &LockedVolumes,
    lender: Option<Client>,
    id: &DeviceId,
    size: u64,
) -> anyhow::Result<()> {
    let lender = lends(lender, volumes, id)?;
    volumes.grow(id, size)?;
    match lender {
        Some(mut lender) => lend::resize(&mut lender, id).with_context(|| {
            format!("{id} has grown, and its lender does not know: repeat the command")
        }),
        None => {
            println!("{id} has {}", Size(size));
            Ok(())
        }
    }
}

fn delete(volumes: &LockedVolumes, lender: Option<Client>, id: &DeviceId) -> anyhow::Result<()> {
    volumes.check_deletable(id)?;
    let Some(mut lender) = lends(lender, volumes, id)? else {
        volumes.delete(id)?;
        println!("{id} is deleted");
        return Ok(());
    };
    match lender.remove_device(id) {
        // A command that was killed has begun that.
        Err(CallError::Refused(refused)) if refused.kind == ErrorKind::UnknownDevice => {}
        removed => removed?,
    }
    volumes
        .delete(id)
        .with_context(|| format!("{id} is no longer lent, and not deleted: repeat the command"))?;
    println!("{id} is deleted");
    Ok(())
}

impl Create {
    fn run(&self, volumes: &LockedVolumes, lender: Option<Client>) -> anyhow::Result<()> {
        let id = &self.id;
        let Some(mut lender) = lender else {
            volumes.create(id, self.size, self.table()?)?;
            println!("{id} is created; no lender runs: it is lent when one starts");
            return Ok(());
        };
        if is_lent(&mut lender, id)? {
            bail!("the lender has a device {id}: choose another id");
        }
        let volume = volumes.create(id, self.size, self.table()?)?;
        match lender.add_device(volume.table.to_string()) {
            Ok(()) => {
                println!("{id} is created and lent: {}", Size(self.size));
                Ok(())
            }
            Err(CallError::Refused(refused)) => {
                if let Err(error) = volumes.delete(id) {
                    log::warn!("{}", Chain(&error));
                }
                Err(refused.into())
            }
            Err(error) => Err(error).with_context(|| {
                format!("{id} is created, and may not be lent: `farside volume list` shows that; repeat the command")
            }),
        }
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

fn list(volumes: &Volumes, lender: Option<Client>, json: bool) -> anyhow::Result<()> {
    let runs = lender.is_some();
    let devices = lender.map_or(Ok(Vec::new()), |mut lender| lender.devices())?;
    let (volumes, errors) = volumes.list()?;
    let entries: Vec<VolumeEntry> = volumes
        .into_iter()
        .map(|volume| entry(volume, &devices))
        .collect();
    if json {
        let document = VolumeList::new(entries);
        println!("{}", serde_json::to_string_pretty(&document)?);
    } else {
        print_table(entries, runs);
    }
    let errors: Vec<_> = errors
        .iter()
        .map(|(_, error)| Chain(error).to_string())
        .collect();
    match errors.is_empty() {
        true => Ok(()),
        false => bail!("{}", errors.join("\n")),
    }
}

fn print_table(entries: Vec<VolumeEntry>, runs: bool) {
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
