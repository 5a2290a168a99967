//! `farside units`: drop-ins for systemd's units, from the configurations of VMs and lender.
//!
//! `farside@VM.socket` is instantiated from a template, which contains the VM's name but not its
//! devices. Those are in the VM configuration: systemd's generator (`systemd.generator(7)`) queries
//! them at boot and at each `daemon-reload`, so that unit and description agree.
//!
//! The packaged services have no network. Those whose configuration has TCP addresses get it here.

use std::{
    fmt::Write as _,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};
use clap::Args as ClapArgs;
use farside_daemon::{GroupName, VmName, paths};
use farside_discovery::Discovery;
use farside_lender_protocol::Address;
use farside_vm_config::{HostConfig, VmConfig, places};

/// Print drop-ins for the systemd units of VMs and of the lender
///
/// A VM's socket unit gets a line for each device, and services get network access where
/// the configuration has TCP addresses. The package's systemd generator runs this; use it
/// to check a VM configuration, or without the package.
#[derive(Debug, ClapArgs)]
pub(crate) struct Units {
    /// VMs [default: all that are configured, and the lender].
    #[arg(value_name = "VM")]
    vms: Vec<String>,
    /// Write the drop-ins below this directory instead of printing them.
    #[arg(long, value_name = "DIRECTORY")]
    to: Option<PathBuf>,
}

/// No address: all are allowed.
const ANY: &str = "any";

/// Names of the drop-ins' files.
const DEVICES: &str = "10-farside-devices.conf";
const NETWORK: &str = "10-farside-network.conf";

pub(crate) fn run(args: &Units) -> anyhow::Result<()> {
    let to = args.to.as_deref();
    let mut failed = Vec::new();
    let mut tried = |what: String, result: anyhow::Result<()>| {
        if let Err(error) = result {
            // An invalid configuration does not affect the other units.
            log::error!("{what}: {error:#}");
            failed.push(what);
        }
    };
    let vms = match args.vms.as_slice() {
        [] => {
            tried("the lender".to_owned(), of_lender(to));
            described(&places::config_dir().join("vm"))?
        }
        some => some.to_vec(),
    };
    for vm in &vms {
        tried(format!("VM {vm}"), of_vm(vm, to));
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
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
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

fn of_lender(to: Option<&Path>) -> anyhow::Result<()> {
    let file = places::config_dir().join("lender.toml");
    let text = match fs::read_to_string(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read.with_context(|| format!("cannot read {}", file.display()))?,
    };
    // Not `Config`: users that borrowers name cannot be looked up this early at boot.
    let config: toml::Table = text
        .parse()
        .with_context(|| format!("cannot parse {}", file.display()))?;
    let listens = config.get("listen").and_then(toml::Value::as_array);
    let listens = listens.is_some_and(|addresses| !addresses.is_empty());
    let discovery = HostConfig::read()?.discovery();
    if listens || discovery.is_some() {
        let access = network(&file, &[], discovery.as_ref());
        put("farside-lender.service", NETWORK, &access, to)?;
    }
    Ok(())
}

fn of_vm(vm: &str, to: Option<&Path>) -> anyhow::Result<()> {
    let vm: VmName = vm.parse()?;
    let config = VmConfig::of_vm(&vm)?;
    let file = places::description(&vm);
    let devices = devices(&vm, &config, &file)?;
    put(&format!("farside@{vm}.socket"), DEVICES, &devices, to)?;
    let lenders = config.lenders();
    let mut hosts: Vec<&str> = lenders.iter().filter_map(host).collect();
    if config.discovery.is_some() {
        // The addresses of lenders that are found are not known here.
        hosts.push(ANY);
    }
    if !hosts.is_empty() {
        let unit = format!("farside@{vm}.service");
        let access = network(&file, &hosts, config.discovery.as_ref());
        put(&unit, NETWORK, &access, to)?;
    }
    Ok(())
}

fn host(address: &Address) -> Option<&str> {
    match address {
        Address::Tcp { host, .. } | Address::Tls { host, .. } => Some(host),
        Address::Unix(_) => None,
    }
}

fn devices(vm: &VmName, config: &VmConfig, file: &Path) -> anyhow::Result<String> {
    let mut text = format!(
        "# The devices of VM {vm}, by `farside units` from {}\n[Socket]\n",
        file.display()
    );
    for device in config.device_ids() {
        let socket = paths::device_socket(vm, &device);
        // Names have no character that systemd reads as more than itself.
        writeln!(text, "ListenStream={}", escaped(&socket)?)?;
    }
    if let Some(group) = &config.socket_group {
        let group: GroupName = group.parse()?;
        let directory = paths::vm_dir(vm);
        // Sockets that the backend creates there, for attached devices, inherit the group (setgid).
        writeln!(
            text,
            "SocketGroup={group}\nSocketMode=0660\nSupplementaryGroups={group}\n\
             ExecStartPre=/usr/bin/install -d -m 2710 -g {group} {}",
            escaped(&directory)?
        )?;
    }
    Ok(text)
}

/// Access to the network; to `hosts` alone if all of them are addresses.
fn network(file: &Path, hosts: &[&str], discovery: Option<&Discovery>) -> String {
    let addresses: Option<Vec<String>> = hosts
        .iter()
        .map(|host| host.parse::<IpAddr>().ok().map(|ip| ip.to_string()))
        .collect();
    let allowed = match addresses {
        Some(addresses) if !addresses.is_empty() => addresses.join(" "),
        // The addresses of a name are not known here, nor those of a lender's borrowers.
        _ => "any".to_owned(),
    };
    // mDNS lists the host's interfaces.
    let netlink = match discovery.is_some_and(|discovery| discovery.mdns) {
        true => " AF_NETLINK",
        false => "",
    };
    format!(
        "# Network access, by `farside units` from {}\n[Service]\nPrivateNetwork=no\n\
         RestrictAddressFamilies=AF_INET AF_INET6{netlink}\nIPAddressAllow={allowed}\n",
        file.display()
    )
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

fn put(unit: &str, drop_in: &str, text: &str, to: Option<&Path>) -> anyhow::Result<()> {
    let name = Path::new(&format!("{unit}.d")).join(drop_in);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_reaches_the_addresses_of_its_lenders_alone() {
        let allowed = |hosts: &[&str]| {
            let text = network(Path::new("/etc/farside/vm/web1.toml"), hosts, None);
            let line = text.lines().find_map(|l| l.strip_prefix("IPAddressAllow="));
            line.map(str::to_owned)
        };
        for (hosts, expected) in [
            (&["10.0.0.2", "fd00::2"][..], "10.0.0.2 fd00::2"),
            (&["10.0.0.2", "rack1-b"], "any"),
            (&["fe80::1%eth0"], "any"),
            (&["10.0.0.2", ANY], "any"),
            (&[], "any"),
        ] {
            assert_eq!(allowed(hosts).as_deref(), Some(expected), "{hosts:?}");
        }
    }

    #[test]
    fn mdns_lists_interfaces() {
        for (mdns, families) in [
            (false, "AF_INET AF_INET6\n"),
            (true, "AF_INET6 AF_NETLINK\n"),
        ] {
            let discovery = Discovery {
                etcd: None,
                mdns,
                pki: PathBuf::new(),
                cache: PathBuf::new(),
            };
            let text = network(Path::new("/x"), &[ANY], Some(&discovery));
            assert!(text.contains(families), "{text}");
        }
    }
}
