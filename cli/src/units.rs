//! `farside units`: the sockets of a VM's devices, as drop-ins of its socket unit.
//!
//! `farside@VM.socket` is instantiated from a template, which contains the VM's name but not its
//! devices. Those are in the VM configuration: systemd's generator (`systemd.generator(7)`) queries
//! them at boot and at each `daemon-reload`, so that unit and description agree.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};
use clap::Args as ClapArgs;
use farside_daemon::{GroupName, VmName, paths};
use farside_vm_config::{VmConfig, places};

/// Print drop-ins for the systemd socket units of VMs: the devices' sockets
///
/// The drop-ins have a line for each device. The package's systemd generator runs this; use it
/// to check a VM configuration, or without the package.
#[derive(Debug, ClapArgs)]
pub(crate) struct Units {
    /// VMs [default: all that are configured].
    #[arg(value_name = "VM")]
    vms: Vec<String>,
    /// Write the drop-ins below this directory instead of printing them.
    #[arg(long, value_name = "DIRECTORY")]
    to: Option<PathBuf>,
}

/// Name of a drop-in's file.
const DROP_IN: &str = "10-farside-devices.conf";

pub(crate) fn run(args: &Units) -> anyhow::Result<()> {
    let vms = match args.vms.as_slice() {
        [] => described(&places::config_dir().join("vm"))?,
        some => some.to_vec(),
    };
    let mut failed = Vec::new();
    for vm in &vms {
        if let Err(error) = make(vm, args.to.as_deref()) {
            // One bad description leaves the other VMs theirs.
            log::error!("VM {vm}: {error:#}");
            failed.push(vm.as_str());
        }
    }
    ensure!(
        failed.is_empty(),
        "no drop-in for {}: see above",
        failed.join(", ")
    );
    Ok(())
}

/// The names of the VMs configured in `directory`.
fn described(directory: &Path) -> anyhow::Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", directory.display()));
        }
    };
    let mut vms = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
            && let Some(vm) = path.file_stem().and_then(|stem| stem.to_str())
        {
            vms.push(vm.to_owned());
        }
    }
    vms.sort();
    Ok(vms)
}

fn make(vm: &str, to: Option<&Path>) -> anyhow::Result<()> {
    let vm = vm.parse()?;
    put(&vm, &drop_in(&vm)?, to)
}

fn drop_in(vm: &VmName) -> anyhow::Result<String> {
    let config = VmConfig::of_vm(vm)?;
    let mut text = format!(
        "# The devices of VM {vm}, by `farside units` from {}\n[Socket]\n",
        places::description(vm).display()
    );
    for device in config.device_ids() {
        let socket = paths::device_socket(vm, &device);
        // Names have no character that systemd reads as more than itself.
        writeln!(text, "ListenStream={}", escaped(&socket)?)?;
    }
    if let Some(group) = &config.socket_group {
        let group: GroupName = group.parse()?;
        writeln!(text, "SocketGroup={group}\nSocketMode=0660")?;
    }
    Ok(text)
}

/// A path as a value in a unit.
fn escaped(path: &Path) -> anyhow::Result<String> {
    let text = path
        .to_str()
        .context("the runtime directory is not UTF-8")?;
    ensure!(
        path.is_absolute() && !text.contains(['\n', '\\', '"']),
        "the runtime directory of {text:?} has characters that a unit file does not allow: set another one in FARSIDE_RUNTIME_DIR"
    );
    Ok(text.replace('%', "%%"))
}

fn put(vm: &VmName, text: &str, to: Option<&Path>) -> anyhow::Result<()> {
    let name = Path::new(&format!("farside@{vm}.socket.d")).join(DROP_IN);
    let Some(to) = to else {
        println!("# /etc/systemd/system/{}\n{text}", name.display());
        return Ok(());
    };
    let path = to.join(name);
    let directory = path.parent().unwrap_or(to);
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(&path, text))
        .with_context(|| format!("cannot write {}", path.display()))
}
