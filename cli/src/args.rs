//! The command line.

mod disk;

use std::path::PathBuf;

use clap::{ArgGroup, Args as ClapArgs, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use farside_daemon::{DeviceId, LenderName, NameError, VmName};
use farside_host_pci::Filter;
use farside_lender::config::{Borrower, Mac};
use farside_lender_protocol::Address;
use farside_pci::Bdf;
use farside_vm_config::{HostConfig, LoadError, parse_memory};

use crate::{
    bench::Bench,
    bind::Bind,
    doctor::Doctor,
    hook::Hook,
    hotplug::{Attach, Detach},
    libvirt::Libvirt,
    migrate::Migrate,
    migration::Migration,
    ntb::Ntb,
    pki::Pki,
    plan::Plan,
    revoke::Revoke,
    run::{Start, Stop},
    units::Units,
    upgrade::Upgrade,
    values::MachineArg,
    vm_flags::VmFlags,
    volume::Volume,
};

use disk::{Disk, parse_disk};

/// Use a PCIe device of another host in a VM.
///
/// A lender (`farside lend`) owns devices. For each VM a backend (`farside
/// serve`) borrows them and serves them to QEMU over vfio-user. Neither QEMU
/// nor the guest is changed.
#[derive(Debug, Parser)]
#[command(
    name = "farside",
    version,
    max_term_width = 100,
    after_help = "\
Start with:
  farside lend --nvme disk0=disk0.img          lend an NVMe device backed by an image file
  farside serve --vm demo --device disk0       serve it to the VM `demo`
  farside qemu --vm demo --run -- DISK.qcow2   start QEMU with it

Log lines go to standard error; FARSIDE_LOG=debug (or warn, error) changes how many."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Lend(Lend),
    Bind(Bind),
    /// Serve one lease: started by `lend`
    #[command(hide = true)]
    LeaseWorker {
        /// The device, for `ps`
        device: DeviceId,
        /// The VM, for `ps`
        vm: VmName,
    },
    /// Keep leases while their lender is started anew: started by `lend`
    #[command(hide = true)]
    LeaseKeeper,
    /// Do what a backend may not do any more: started by `serve`
    #[command(hide = true)]
    ServeHelper {
        /// The VM, for `ps`
        vm: VmName,
    },
    Devices(Devices),
    Volume(Volume),
    Serve(Serve),
    Qemu(Box<Qemu>),
    Libvirt(Box<Libvirt>),
    Start(Start),
    Stop(Stop),
    Attach(Attach),
    Detach(Detach),
    Revoke(Revoke),
    Migrate(Migrate),
    Migration(Migration),
    Status(Status),
    Doctor(Doctor),
    Bench(Bench),
    #[command(hide = true)]
    Hook(Hook),
    Units(Units),
    Upgrade(Upgrade),
    Plan(Box<Plan>),
    Ntb(Ntb),
    Pki(Pki),
    /// Print a completion script for a shell
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Write man pages
    Man {
        /// Output directory; created if missing.
        #[arg(default_value = "man")]
        directory: PathBuf,
    },
}

/// Lend devices: the daemon of a lending host
///
/// Lends devices until it is stopped (Ctrl-C, SIGTERM); then revokes all leases. At SIGUSR1 it leaves
/// those of VMs on this host to the next lender at the same --socket. With --add, --remove or --resize, changes the devices of a lender that runs, until it stops: lender.toml stays as it is.
#[derive(Debug, ClapArgs)]
#[command(group(ArgGroup::new("device").args(["nvme", "virtio_blk", "virtio_net", "dma_test", "vfio", "vfio_user"]).multiple(true)))]
pub(crate) struct Lend {
    /// Configuration file (TOML); flags add to it.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Name of this lender [default: the host name].
    #[arg(long)]
    pub(crate) name: Option<LenderName>,
    /// Socket for backends of this host [default: lender.sock in the runtime
    /// directory].
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Address to listen at for backends of other hosts, tls:HOST:PORT (see `farside
    /// pki`), or tcp:HOST:PORT without encryption; may be given more than once.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Vec<Address>,
    /// Address at which other hosts reach this lender, tls:HOST:PORT, for etcd and mDNS [default: the
    /// first tls: address of --listen].
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) announce: Option<Address>,
    /// Listen at tcp: addresses that other hosts can reach: a network that carries
    /// nothing else.
    #[arg(long)]
    pub(crate) listen_plain: bool,
    /// Lend an emulated NVMe device backed by an image file or block device.
    /// At most N operations and SIZE bytes per second, as in disk0=disk0.img,iops=5000,bandwidth=200M. With cmb=SIZE, the
    /// controller has a memory buffer, which it and the VM's other devices can transfer data to and from (peer to peer).
    /// With shared=FILE, devices whose image and FILE are the same share one namespace, with reservations, which FILE holds:
    /// for cluster file systems.
    /// With mapped-doorbells, drivers start commands without a trap, and the controller looks for them: for SPDK's driver.
    #[arg(long, value_name = "ID=IMAGE[,read-only][,iops=N][,bandwidth=SIZE][,cmb=SIZE][,shared=FILE][,mapped-doorbells]", value_parser = parse_disk)]
    pub(crate) nvme: Vec<Disk>,
    /// Lend a virtio-blk device backed by an image file or block device.
    /// Options as for --nvme, but for cmb, shared and mapped-doorbells.
    #[arg(long, value_name = "ID=IMAGE[,…]", value_parser = parse_disk)]
    pub(crate) virtio_blk: Vec<Disk>,
    /// Lend a virtio-net device on a tap interface of this host, as in nic0=tap0,mac=52:54:00:12:34:56.
    /// With queues=N, it has N queue pairs.
    #[arg(long, value_name = "ID=TAP[,mac=ADDRESS][,queues=N]", value_parser = parse_nic)]
    pub(crate) virtio_net: Vec<Nic>,
    /// Lend a DMA test device.
    #[arg(long, value_name = "ID")]
    pub(crate) dma_test: Vec<DeviceId>,
    /// Lend a PCI function of this host by address, `vendor=…,device=…`, `class=…`,
    /// or `vfs-of:BDF`.
    #[arg(long, value_name = "ID=FUNCTION", value_parser = parse_function)]
    pub(crate) vfio: Vec<(DeviceId, Filter)>,
    /// Lend the device of another vfio-user server of this host, by its socket.
    #[arg(long, value_name = "ID=SOCKET", value_parser = parse_server)]
    pub(crate) vfio_user: Vec<(DeviceId, PathBuf)>,
    /// This host's NTB endpoint, through which physical devices are lent to the
    /// peer host, too.
    #[arg(long, value_name = "BDF")]
    pub(crate) ntb: Option<Bdf>,
    /// Create N virtual functions of a physical function first. Those of an NVMe controller get
    /// queues and interrupts, and are set online.
    #[arg(long, value_name = "BDF=N", value_parser = parse_vfs)]
    pub(crate) vfs: Vec<(Bdf, u32)>,
    /// Directory of this lender's volumes, which `farside volume` creates and deletes while the lender runs; made if it is
    /// missing.
    #[arg(long, value_name = "DIR")]
    pub(crate) volumes: Option<PathBuf>,
    /// Who may borrow the devices given by flags, beside this user and root; may be given
    /// more than once. host: the name in the host's certificate. claim: it may take over
    /// the devices of a lost host. `network`: every peer that can connect to a port
    /// without TLS.
    #[arg(
        long = "borrower",
        value_name = "user=NAME[,vm=VM][,claim]|host=NAME[,vm=VM][,claim]|network",
        requires = "device",
        value_parser = parse_borrower
    )]
    pub(crate) borrowers: Vec<(String, Borrower)>,
    /// Lend functions even if this host uses them: mounted disks, network
    /// interfaces that are up.
    #[arg(long)]
    pub(crate) force: bool,
    /// Lend functions without a reset to one VM after another, with the state of
    /// the previous one.
    #[arg(long)]
    pub(crate) allow_dirty: bool,
    /// Maximum busy-poll time before a device thread blocks, in microseconds (0
    /// disables polling).
    #[arg(long, value_name = "US")]
    pub(crate) poll_us: Option<u64>,
    /// Add the devices given by flags, and the `[[device]]` tables of --config, to the lender that
    /// runs at --socket. Only root and its own user can.
    #[arg(long, conflicts_with_all = ["name", "listen", "announce", "ntb", "vfs", "volumes", "poll_us"])]
    pub(crate) add: bool,
    /// Remove a device that is not lent from the lender that runs at --socket; may be given more
    /// than once.
    #[arg(
        long,
        value_name = "ID",
        conflicts_with_all = ["add", "config", "device", "name", "listen", "announce", "ntb", "vfs", "volumes", "poll_us"]
    )]
    pub(crate) remove: Vec<DeviceId>,
    /// Have a disk grow to the size that its image or block device has now, at the lender that runs at --socket; may be given
    /// more than once. The VM that has borrowed it sees that at once. So do those of other devices of the same image.
    #[arg(
        long,
        value_name = "ID",
        conflicts_with_all = ["add", "remove", "config", "device", "name", "listen", "announce", "ntb", "vfs", "volumes", "poll_us"]
    )]
    pub(crate) resize: Vec<DeviceId>,
}

/// Addresses of lenders.
#[derive(Debug, ClapArgs)]
pub(crate) struct Lenders {
    /// Address of a lender: its socket's path, tls:HOST:PORT, or tcp:HOST:PORT without
    /// encryption; may be given more than once [default: those of
    /// /etc/farside/host.toml and those that it has found, or this host's].
    #[arg(long = "lender", value_name = "ADDRESS")]
    pub(crate) lenders: Vec<Address>,
}

impl Lenders {
    /// Those named, or those that this host's file lists: where one is meant.
    pub(crate) fn addresses(&self) -> Result<Vec<Address>, LoadError> {
        match self.lenders.as_slice() {
            [] => Ok(HostConfig::read()?.lenders()),
            some => Ok(some.to_vec()),
        }
    }

    /// Those named, or all that this host knows, whichever way: and in the second list those that may
    /// have ended.
    pub(crate) fn known(&self) -> Result<(Vec<Address>, Vec<Address>), LoadError> {
        if !self.lenders.is_empty() {
            return Ok((self.lenders.clone(), Vec::new()));
        }
        let host = HostConfig::read()?;
        let mut now = host.lenders();
        let found = host.discovery().map(|discovery| discovery.lenders());
        let found = found.unwrap_or_default();
        now.extend(found.now);
        Ok((now, found.before))
    }
}

/// List the devices that can be borrowed, their lenders and users
#[derive(Debug, ClapArgs)]
pub(crate) struct Devices {
    #[command(flatten)]
    pub(crate) lenders: Lenders,
    /// Make a device unavailable: no VM can borrow it until --available. A VM that has it keeps
    /// it: see `farside revoke`. May be given more than once; only root and the lender's own user
    /// can.
    #[arg(long, value_name = "ID")]
    pub(crate) unavailable: Vec<DeviceId>,
    /// Make a device available again.
    #[arg(long, value_name = "ID")]
    pub(crate) available: Vec<DeviceId>,
    /// Then go on: print what lenders announce and withdraw in etcd, as it happens.
    #[arg(long, conflicts_with_all = ["json", "lenders", "unavailable", "available"])]
    pub(crate) watch: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Run the backend of a VM, which serves borrowed devices to QEMU
///
/// Serves devices to one VM until it is stopped (Ctrl-C, SIGTERM). A device is
/// borrowed when QEMU resets it as the VM boots, and returned when QEMU
/// disconnects; the VM can be restarted without restarting the backend.
#[derive(Debug, ClapArgs)]
pub(crate) struct Serve {
    /// Name of the VM.
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<VmName>,
    /// Id of a device to serve; may be given more than once.
    #[arg(long = "device", value_name = "ID")]
    pub(crate) devices: Vec<DeviceId>,
    /// VM configuration (TOML); flags add to it.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) lenders: Lenders,
    /// This host's NTB endpoint, through which physical devices of the peer host
    /// reach the VM [default with `ntb = true` in the VM's configuration: that of
    /// /etc/farside/host.toml]. Only one VM at a time can use it.
    #[arg(long, value_name = "BDF")]
    pub(crate) ntb: Option<Bdf>,
    /// Interrupt path to QEMU.
    #[arg(long, value_enum)]
    pub(crate) interrupts: Option<InterruptForm>,
    /// Behaviour if the memlock limit is too small for the guest's RAM.
    #[arg(long, value_enum)]
    pub(crate) pin: Option<Pin>,
    /// Guest RAM, such as 64G: the time limit for pinning is derived from it, and
    /// the lender checks before the VM boots that its devices can reach it
    /// [default: the limit fits QEMU's default x-msg-timeout].
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    pub(crate) memory: Option<u64>,
    /// Guest RAM with all that can be plugged in (QEMU's maxmem). No more is pinned
    /// [default: --memory; if neither is given, there is no limit].
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    pub(crate) max_memory: Option<u64>,
    /// Chipset, which determines the layout of that RAM [default: q35].
    #[arg(long, value_enum)]
    pub(crate) machine: Option<MachineArg>,
    /// Time after which a device that is not DMA-ready is reported as late,
    /// seconds. Pinning is given four fifths of QEMU's x-msg-timeout (5 s, or more
    /// with --memory), or this time if it is longer; then set QEMU's x-msg-timeout to
    /// five fourths of it, as `farside qemu` does [default: those four fifths].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) open_timeout: Option<u64>,
    /// Time for which a device waits for its lender, seconds: one that is borrowed over the
    /// network, when the connection is cut, or an NVMe model of this host, whose process has
    /// ended. Then it is lost; over the network the guest is asked to release it [default: 300].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) lost_after: Option<u64>,
    /// Start the backend in a process of its own, and again when it is killed: an NVMe model of
    /// this host goes on, and QEMU keeps its connection. Two processes, of which one may be
    /// killed, keep it. SIGUSR1 ends the first, and the next command with this option and this
    /// VM goes on with the backend.
    #[arg(long)]
    pub(crate) keeper: bool,
    /// After SIGTERM, wait so many seconds for a VMM to disconnect, then take the devices from
    /// it [default: as long as it takes, or until the next SIGTERM].
    #[arg(long, value_name = "SECONDS", requires = "keeper")]
    pub(crate) stop_within: Option<u64>,
    /// Group that may connect to the devices' sockets, for a QEMU that runs as
    /// another user: for example libvirt-qemu [default: only this user].
    #[arg(long, value_name = "GROUP")]
    pub(crate) socket_group: Option<String>,
    /// Names of the devices' sockets in the VM's directory.
    #[arg(long, value_enum)]
    pub(crate) layout: Option<Layout>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Layout {
    /// ID.sock [default].
    Plain,
    /// Also ID.spdk/cntrl, for clients of SPDK (traddr is the directory).
    Spdk,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum InterruptForm {
    /// The lender's device signals QEMU itself (on one machine).
    Direct,
    /// The lender sends a message to the backend, which signals QEMU.
    Relayed,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Pin {
    /// Refuse: the device does not get DMA.
    Require,
    /// Populate the memory without locking it (software fabric only).
    Prefer,
}

/// Print or start the QEMU command line of a VM
///
/// The VM's devices are those that its backend serves, unless given by --device.
#[derive(Debug, ClapArgs)]
pub(crate) struct Qemu {
    #[command(flatten)]
    pub(crate) vm: VmFlags,
    /// Output format.
    #[arg(long, value_enum, default_value = "shell", conflicts_with = "run")]
    pub(crate) form: QemuForm,
    /// Start QEMU instead of printing the command line.
    #[arg(long)]
    pub(crate) run: bool,
    /// Additional QEMU arguments: disks, networks, consoles.
    #[arg(last = true, value_name = "QEMU ARGUMENTS")]
    pub(crate) extra: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum QemuForm {
    /// The command line, for a shell.
    Shell,
    /// A file for -readconfig; options that it does not support are in a comment at
    /// its top.
    Readconfig,
    /// JSON: the arguments, and those of -object and -device (or of QMP) alone.
    Json,
}

/// Show leases, borrows, windows, pinned memory, interrupts, DMA faults
#[derive(Debug, ClapArgs)]
pub(crate) struct Status {
    /// Only this VM.
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<VmName>,
    #[command(flatten)]
    pub(crate) lenders: Lenders,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_function(text: &str) -> Result<(DeviceId, Filter), String> {
    match text.split_once('=') {
        Some((id, function)) if !id.is_empty() => {
            let function = function.parse::<Filter>();
            Ok((parse_id(id)?, function.map_err(|error| error.to_string())?))
        }
        _ => Err("give a device id and a function, as in disk0=0000:03:00.0".into()),
    }
}

/// A network device to lend.
#[derive(Clone, Debug)]
pub(crate) struct Nic {
    pub(crate) id: DeviceId,
    pub(crate) tap: String,
    pub(crate) mac: Option<Mac>,
    pub(crate) queues: Option<u16>,
}

fn parse_nic(text: &str) -> Result<Nic, String> {
    let Some((id, rest)) = text.split_once('=') else {
        return Err("give a device id and a tap interface, as in nic0=tap0".into());
    };
    let mut options = rest.split(',');
    let mut nic = Nic {
        id: parse_id(id)?,
        tap: options.next().unwrap_or_default().to_owned(),
        mac: None,
        queues: None,
    };
    for option in options {
        match option.split_once('=') {
            Some(("mac", mac)) => {
                let mac = mac.parse::<Mac>();
                nic.mac = Some(mac.map_err(|error| error.to_string())?);
            }
            Some(("queues", count)) => {
                let count = count
                    .parse()
                    .map_err(|_| format!("{option}: give a number"))?;
                nic.queues = Some(count);
            }
            _ => {
                return Err(format!(
                    "unknown option {option:?}: there are mac=ADDRESS and queues=N"
                ));
            }
        }
    }
    Ok(nic)
}

fn parse_server(text: &str) -> Result<(DeviceId, PathBuf), String> {
    match text.split_once('=') {
        Some((id, socket)) if !id.is_empty() && !socket.is_empty() => {
            Ok((parse_id(id)?, socket.into()))
        }
        _ => Err("give a device id and a socket, as in gpio0=/run/gpio/socket".into()),
    }
}

pub(crate) fn parse_borrower(text: &str) -> Result<(String, Borrower), String> {
    let borrower = text.parse::<Borrower>();
    let borrower = borrower.map_err(|error| error.to_string())?;
    Ok((text.to_owned(), borrower))
}

fn parse_id(text: &str) -> Result<DeviceId, String> {
    text.parse().map_err(|error: NameError| error.to_string())
}

fn parse_vfs(text: &str) -> Result<(Bdf, u32), String> {
    let wrong = || "give a function and a number, as in 0000:03:00.0=2".to_owned();
    let (of, count) = text.split_once('=').ok_or_else(wrong)?;
    let of = of.parse::<Bdf>().map_err(|error| error.to_string())?;
    Ok((of, count.parse().map_err(|_| wrong())?))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    /// A doc comment of a variant would replace that of its arguments.
    #[test]
    fn long_help_has_more_than_the_summary() {
        let mut farside = Args::command();
        farside.build();
        for verb in farside.get_subcommands() {
            assert!(verb.get_about().is_some(), "{}", verb.get_name());
        }
        for (path, text) in [
            (&["lend"][..], "then revokes all leases"),
            (&["serve"], "borrowed when QEMU resets it"),
            (&["attach"], "`virsh attach-device"),
            (&["detach"], "Unmount its file systems first"),
            (&["ntb"], "docs/ntb-model.md"),
            (&["pki"], "QEMU's tls-creds-x509"),
            (&["migration", "resume"], "on the destination host"),
        ] {
            let mut verb = &farside;
            for name in path {
                verb = verb.find_subcommand(name).expect(name);
            }
            let long = verb.get_long_about().map(ToString::to_string);
            let long = long.unwrap_or_default();
            assert!(long.contains(text), "no {text:?} in {path:?}: {long}");
        }
    }
}
