//! `farside upgrade`.

use std::{
    fmt::{self, Write},
    path::Path,
};

use anyhow::bail;
use clap::Args as ClapArgs;
use farside_backend_api::{
    BackendReport, DeviceReport,
    upgrade::{
        DeviceCheck, LeaseCheck, LenderCheck, Obstacle, Reads, UpgradeCheck, Versions, VmCheck,
    },
};
use farside_daemon::paths;
use farside_error_chain::Chain;
use farside_hand_over::{FARSIDE, Format, Unreadable};
use farside_keeper::RECORDS;
use farside_lender::{KeptLeases, LEASES, LeaseFormat, STATE_FORMAT, kept_leases};
use farside_lender_protocol::{Address, VERSION};
use farside_vm_config::HostConfig;

use crate::{status, terminal::Plain};

/// Check which devices of running VMs go on with this farside
///
/// Compares the versions of what the running lenders and backends of this host hand over with those
/// that this farside reads, and changes nothing. Installing farside restarts nothing: run this before the
/// lender is restarted. Fails (exit status 1) if a device would be lost, and prints the remedy.
#[derive(Debug, ClapArgs)]
pub(crate) struct Upgrade {
    /// Check, and change nothing.
    #[arg(long, required = true)]
    check: bool,
    /// Socket of a lender of this host; may be given more than once [default: those of
    /// /etc/farside/host.toml, and lender.sock in the runtime directory].
    #[arg(long = "socket", value_name = "PATH")]
    sockets: Vec<std::path::PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Upgrade) -> anyhow::Result<()> {
    let mut sockets = args.sockets.clone();
    if sockets.is_empty() {
        sockets.push(paths::lender_socket());
        let others = HostConfig::read()?.lenders().into_iter();
        sockets.extend(others.filter_map(|address| match address {
            Address::Unix(path) => Some(path),
            _ => None,
        }));
        sockets.sort();
        sockets.dedup();
    }
    let lenders = sockets.iter().map(|socket| lender(socket)).collect();
    let (mut vms, mut unread) = (Vec::new(), false);
    for vm in status::running_vms()? {
        match status::backend(&paths::status_socket(&vm)) {
            Ok(Some(report)) => vms.push(self::vm(&report)),
            // A directory that a killed backend left.
            Ok(None) => {}
            Err(error) => {
                log::warn!("VM {vm}: {error:#}");
                unread = true;
            }
        }
    }
    let check = UpgradeCheck::new(FARSIDE, reads(), lenders, vms);
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&check)?),
        false => print!("{}", Plain(text(&check))),
    }
    if !check.goes_on {
        bail!("with this farside, VMs would lose devices, or the lender would not start");
    }
    if unread {
        bail!(
            "the status of a backend cannot be read: run this as root, or as the user of the VMs"
        );
    }
    Ok(())
}

fn reads() -> Reads {
    let versions = |format: Format| Versions {
        oldest: format.oldest(),
        newest: format.version(),
    };
    Reads {
        leases: versions(LEASES),
        state: versions(STATE_FORMAT),
        records: versions(RECORDS),
        protocol: VERSION,
    }
}

/// The lender at `socket`, by what keeps its leases.
fn lender(socket: &Path) -> LenderCheck {
    let mut check = LenderCheck {
        socket: socket.to_owned(),
        farside: None,
        version: None,
        obstacle: None,
        leases: Vec::new(),
    };
    match kept_leases(socket) {
        Ok(None) => {}
        Ok(Some(kept)) => {
            check.obstacle = kept.check().err().map(|why| not_started(&why));
            let KeptLeases {
                version,
                farside,
                leases,
            } = kept;
            check.version = Some(version);
            check.farside = farside;
            check.leases = leases.unwrap_or_default().into_iter().map(lease).collect();
        }
        Err(error) => {
            check.obstacle = Some(Obstacle {
                what: Chain(&error).to_string(),
                remedy: "run this as root, or as the lender's user".into(),
            });
        }
    }
    check
}

fn lease(lease: LeaseFormat) -> LeaseCheck {
    let obstacle = lease.check().err().map(|why| not_started(&why));
    LeaseCheck {
        device: lease.device,
        vm: lease.vm,
        version: lease.version,
        worker_version: lease.worker,
        state_version: lease.state,
        obstacle,
    }
}

/// Of a lease that no lender of this farside takes over.
fn not_started(why: &Unreadable) -> Obstacle {
    Obstacle {
        what: why.to_string(),
        remedy: format!(
            "install {}, or stop the VM before the lender is restarted: with this farside it does not start while there is the lease",
            why.remedy()
        ),
    }
}

fn vm(report: &BackendReport) -> VmCheck {
    let devices = report.devices.iter();
    VmCheck {
        vm: report.vm.clone(),
        farside: report.farside.clone(),
        records_version: report.records_version,
        protocol_version: report.protocol_version,
        devices: devices.map(|it| device(report, it)).collect(),
    }
}

fn device(backend: &BackendReport, device: &DeviceReport) -> DeviceCheck {
    DeviceCheck {
        device: device.device.clone(),
        state_version: device.state_version,
        obstacle: obstacle(backend, device),
    }
}

/// Why the VM loses the device when the lender of this host, and the device's process, are those of this farside.
fn obstacle(backend: &BackendReport, device: &DeviceReport) -> Option<Obstacle> {
    if !matches!(device.lender, Address::Unix(_)) {
        return None;
    }
    if let Some(protocol) = backend.protocol_version.filter(|it| *it != VERSION) {
        return Some(Obstacle {
            what: format!(
                "its backend speaks version {protocol} of the lender protocol, and this farside ({FARSIDE}) version {VERSION}"
            ),
            remedy: "stop the VM before the lender is restarted, and start it again after that"
                .into(),
        });
    }
    let state = device.state_version?;
    let checked = STATE_FORMAT.check(state, None);
    checked.err().map(|why| Obstacle {
        what: why.to_string(),
        remedy: format!(
            "keep {}, or stop the VM before the lender is restarted",
            why.remedy()
        ),
    })
}

fn text(check: &UpgradeCheck) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, check);
    text
}

fn write(text: &mut String, check: &UpgradeCheck) -> fmt::Result {
    let Reads {
        leases,
        state,
        records,
        protocol,
    } = check.reads;
    let read = |it: Versions| match it.oldest == it.newest {
        true => it.newest.to_string(),
        false => format!("{} and {}", it.oldest, it.newest),
    };
    writeln!(
        text,
        "farside {} reads leases {}, states {}, records {}, and speaks lender protocol {protocol}",
        check.farside,
        read(leases),
        read(state),
        read(records)
    )?;
    for lender in &check.lenders {
        write!(text, "lender {}: ", lender.socket.display())?;
        match (&lender.obstacle, lender.version) {
            (Some(obstacle), _) => writeln!(text, "would not go on: {}", because(obstacle))?,
            (None, None) => writeln!(text, "goes on, without leases")?,
            (None, Some(version)) => {
                let by = by(lender.farside.as_deref());
                writeln!(text, "goes on (leases kept by {by}, version {version})")?;
            }
        }
        for lease in &lender.leases {
            let LeaseCheck { device, vm, .. } = lease;
            verdict(
                text,
                &format!("device {device} of VM {vm}"),
                lease.obstacle.as_ref(),
            )?;
        }
    }
    for vm in &check.vms {
        let by = by(vm.farside.as_deref());
        writeln!(text, "VM {}: its backend goes on as {by}", vm.vm)?;
        for device in &vm.devices {
            let what = format!("device {} of VM {}", device.device, vm.vm);
            verdict(text, &what, device.obstacle.as_ref())?;
        }
    }
    Ok(())
}

fn by(farside: Option<&str>) -> String {
    farside.map_or_else(
        || "an earlier farside".to_owned(),
        |it| format!("farside {it}"),
    )
}

fn verdict(text: &mut String, what: &str, obstacle: Option<&Obstacle>) -> fmt::Result {
    match obstacle {
        None => writeln!(text, "  {what}: goes on"),
        Some(obstacle) => writeln!(text, "  would lose {what}: {}", because(obstacle)),
    }
}

fn because(Obstacle { what, remedy }: &Obstacle) -> String {
    format!("{what}; remedy: {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend(lender: &str, protocol: u32, state: Option<u32>) -> BackendReport {
        let disk = "disk0".parse().expect("an id");
        let lender = lender.parse().expect("an address");
        let device = DeviceReport {
            state_version: state,
            ..DeviceReport::new(&disk, "NVMe", lender)
        };
        BackendReport {
            format: farside_backend_api::status::FORMAT,
            vm: "web1".parse().expect("a name"),
            pid: 1,
            problem: None,
            restarts: Some(0),
            keeper_restarts: Some(0),
            farside: Some("9.1.0".into()),
            records_version: Some(RECORDS.version()),
            protocol_version: Some(protocol),
            devices: vec![device],
        }
    }

    fn shown(lenders: Vec<LenderCheck>, backend: &BackendReport) -> (bool, String) {
        let check = UpgradeCheck::new(FARSIDE, reads(), lenders, vec![vm(backend)]);
        (check.goes_on, text(&check))
    }

    #[test]
    fn what_is_read_goes_on() {
        for state in [
            None,
            Some(STATE_FORMAT.oldest()),
            Some(STATE_FORMAT.version()),
        ] {
            let (goes_on, text) = shown(Vec::new(), &backend("/run/lender.sock", VERSION, state));
            assert!(goes_on, "{text}");
            assert!(text.contains("device disk0 of VM web1: goes on"), "{text}");
            assert!(
                text.contains("its backend goes on as farside 9.1.0"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_device_whose_state_is_not_read_would_be_lost() {
        let newest = STATE_FORMAT.version();
        let later = backend("/run/lender.sock", VERSION, Some(newest + 1));
        let (goes_on, text) = shown(Vec::new(), &later);
        assert!(!goes_on);
        let versions = STATE_FORMAT.read();
        for part in [
            "would lose device disk0 of VM web1: the state of the model",
            &format!("has version {}", newest + 1),
            &format!("this farside ({FARSIDE}) reads {versions}"),
            "remedy: keep the later farside, or stop the VM",
        ] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }

    #[test]
    fn a_backend_of_another_protocol_would_lose_devices_of_this_host_alone() {
        let (goes_on, text) = shown(Vec::new(), &backend("/run/lender.sock", VERSION - 1, None));
        assert!(!goes_on);
        assert!(text.contains("of the lender protocol"), "{text}");
        let (goes_on, text) = shown(Vec::new(), &backend("tls:far:7410", VERSION - 1, None));
        assert!(goes_on, "{text}");
    }

    #[test]
    fn a_lender_does_not_take_leases_over_that_it_cannot_read() {
        let later = LeaseFormat {
            device: "disk0".parse().expect("an id"),
            vm: "web1".parse().expect("a name"),
            version: LEASES.version() + 1,
            worker: LEASES.version() + 1,
            state: Some(1),
            farside: Some("9.1.0".into()),
        };
        let lender = LenderCheck {
            socket: "/run/lender.sock".into(),
            farside: Some("9.1.0".into()),
            version: Some(LEASES.version()),
            obstacle: None,
            leases: vec![self::lease(later)],
        };
        let backend = backend("/run/lender.sock", VERSION, None);
        let (goes_on, text) = shown(vec![lender], &backend);
        assert!(!goes_on);
        let part = "would lose device disk0 of VM web1: its lease has version";
        assert!(text.contains(part), "{text}");
        assert!(text.contains("remedy: install farside 9.1.0"), "{text}");
    }
}
