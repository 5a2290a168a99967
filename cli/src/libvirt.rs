//! `farside libvirt`.

use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use clap::{ArgGroup, Args as ClapArgs};
use farside_daemon::paths::device_socket;
use farside_lender_protocol::Address;
use farside_qemu_configs::{
    Accel, Borrowed, BorrowedDevice, DomainOptions, add_devices, check_domain, read_domain,
    remove_all, remove_devices,
};
use farside_vm_config::VmConfig;

use crate::vm_flags::{VmFlags, check_boot, name_of};

/// Where libvirt may run QEMU by KVM.
const KVM: &str = "/dev/kvm";

/// Print a VM's libvirt domain, or add its devices to an existing one
///
/// Prints a libvirt domain for a VM, from its configuration and flags. --edit,
/// --remove and --check take the XML of an existing domain, as `virsh dumpxml
/// --inactive NAME` prints it; `-` is standard input.
#[derive(Debug, ClapArgs)]
#[command(group(ArgGroup::new("work").args(["edit", "remove", "check"])))]
pub(crate) struct Libvirt {
    /// Add the VM's devices to this domain, and keep everything else byte for byte.
    #[arg(long, value_name = "DOMAIN.XML")]
    edit: Option<PathBuf>,
    /// Remove the devices from this domain: those of --device, or all.
    #[arg(long, value_name = "DOMAIN.XML")]
    remove: Option<PathBuf>,
    /// Check that this domain can use borrowed devices.
    #[arg(long, value_name = "DOMAIN.XML")]
    check: Option<PathBuf>,
    /// Change the file, atomically, instead of printing the result.
    #[arg(long, requires = "work", conflicts_with = "check")]
    in_place: bool,
    /// Address of a lender: its socket's path, or tls:HOST:PORT; may be given more
    /// than once [default: the VM configuration's, else this host's].
    #[arg(long = "lender", value_name = "ADDRESS")]
    lenders: Vec<Address>,
    /// Divide vCPUs and RAM of a new domain among this number of NUMA cells.
    #[arg(
        long,
        value_name = "CELLS",
        default_value_t = 0,
        conflicts_with = "work"
    )]
    numa: u32,
    /// Give a new domain an emulated VT-d. The guest must leave borrowed devices
    /// untranslated (Linux: iommu=pt).
    #[arg(long, conflicts_with = "work")]
    iommu: bool,
    #[command(flatten)]
    vm: VmFlags,
}

pub(crate) fn run(args: Libvirt) -> anyhow::Result<()> {
    if let Some(file) = &args.check {
        return check(file);
    }
    let mut config = args.vm.describe()?;
    if !args.lenders.is_empty() {
        config.lenders.clone_from(&args.lenders);
    }
    match (&args.edit, &args.remove) {
        (Some(file), _) => change(file, args.in_place, |xml| edit(xml, &config)),
        (None, Some(file)) => change(file, args.in_place, |xml| {
            match args.vm.devices.as_slice() {
                [] => remove_all(xml).map_err(Into::into),
                ids => remove_devices(xml, ids, &borrowed(&config)).map_err(Into::into),
            }
        }),
        (None, None) => {
            print!("{}", generate(&args, config)?);
            Ok(())
        }
    }
}

fn generate(args: &Libvirt, mut config: VmConfig) -> anyhow::Result<String> {
    let name = name_of(&config)?;
    check_boot(&name, &config)?;
    let emulator = config.qemu.take();
    if let Some(program) = &emulator {
        ensure!(
            program.is_absolute(),
            "libvirt requires the absolute path of the QEMU binary, not {}",
            program.display()
        );
    }
    let mut vm = config.to_vm(&name);
    if vm.accel == Accel::Auto && !Path::new(KVM).exists() {
        // libvirt does not try one after the other.
        vm.accel = Accel::Tcg;
    }
    let options = DomainOptions {
        emulator,
        lenders: config.lenders.iter().map(Address::to_string).collect(),
        numa_cells: args.numa,
        iommu: args.iommu,
    };
    Ok(vm.libvirt_domain(&options)?)
}

fn edit(xml: &str, config: &VmConfig) -> anyhow::Result<String> {
    let edited = add_devices(xml, &borrowed(config))?;
    let Some(domain) = read_domain(&edited)? else {
        bail!("no devices given: use --device ID, or a VM configuration with --config FILE");
    };
    if let Some(name) = &config.name {
        ensure!(
            *name == domain.name,
            "the domain is {}, not {name}: use the domain name as the VM name",
            domain.name
        );
    }
    Ok(edited)
}

fn borrowed(config: &VmConfig) -> Borrowed<'static> {
    let devices = config.devices.iter().map(|device| BorrowedDevice {
        id: device.id.clone(),
        port: device.port,
        function: device.function,
        bootindex: (config.boot.as_ref() == Some(&device.id)).then_some(0),
    });
    Borrowed {
        devices: devices.collect(),
        lenders: config.lenders.iter().map(Address::to_string).collect(),
        spare_ports: config.spare_ports,
        socket: &device_socket,
    }
}

fn check(file: &Path) -> anyhow::Result<()> {
    let xml = read(file)?;
    let name = file.display();
    let problems = check_domain(&xml, &device_socket).with_context(|| format!("{name}"))?;
    for problem in &problems {
        println!("{name}: {problem}");
    }
    match problems.len() {
        0 => {}
        1 => bail!("{name}: 1 problem"),
        n => bail!("{name}: {n} problems"),
    }
    match read_domain(&xml)? {
        Some(domain) => {
            let ids: Vec<_> = domain.devices.iter().map(|d| d.id.as_str()).collect();
            println!(
                "{name}: domain {} borrows {}: good",
                domain.name,
                ids.join(", ")
            );
        }
        None => println!("{name}: guest RAM is shared; the domain borrows no devices"),
    }
    Ok(())
}

fn change(
    file: &Path,
    in_place: bool,
    change: impl FnOnce(&str) -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    let xml = read(file)?;
    let changed = change(&xml).with_context(|| file.display().to_string())?;
    if !in_place {
        std::io::stdout().write_all(changed.as_bytes())?;
        return Ok(());
    }
    ensure!(
        file != Path::new("-"),
        "standard input cannot be changed in place"
    );
    if changed == xml {
        return Ok(());
    }
    replace(file, &changed).with_context(|| format!("cannot change {}", file.display()))
}

fn read(file: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    if file == Path::new("-") {
        std::io::stdin().read_to_end(&mut bytes)?;
    } else {
        bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = good.iter().filter(|byte| **byte == b'\n').count() + 1;
        let column = good.iter().rev().take_while(|byte| **byte != b'\n').count() + 1;
        anyhow::anyhow!(
            "{}: line {line}, column {column}: this is not UTF-8",
            file.display()
        )
    })
}

/// Replaces a file by a new one with the same mode and owner.
fn replace(file: &Path, text: &str) -> anyhow::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};
    // A link stays one.
    let file = fs::canonicalize(file)?;
    let directory = file.parent().context("it has no directory")?;
    let was = fs::metadata(&file)?;
    let mut new = tempfile::NamedTempFile::new_in(directory)?;
    new.write_all(text.as_bytes())?;
    new.as_file().set_permissions(was.permissions())?;
    fchown(new.as_file(), Some(was.uid()), Some(was.gid()))?;
    new.as_file().sync_all()?;
    new.persist(&file)?;
    Ok(())
}
