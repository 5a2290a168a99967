//! `farside status`.

use std::{
    io::{self, ErrorKind, Read},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail};
use farside_daemon::{check_name, check_name_of, paths};
use farside_lender_protocol::{Address, Client, DeviceStatus};
use farside_vm_control::connect_by;
use serde_json::{Value, json};

use crate::args::Status;

/// How long a backend may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &Status) -> anyhow::Result<()> {
    let vms = match &args.vm {
        Some(vm) => vec![vm.clone()],
        None => running_vms()?,
    };
    let mut backends = Vec::new();
    let (mut hang, mut denied) = (false, false);
    for vm in &vms {
        check_name_of("VM name", vm)?;
        match backend(&paths::status_socket(vm)) {
            Ok(Some(report)) => backends.push(report),
            Ok(None) if args.vm.is_some() => bail!("no backend runs for VM {vm}"),
            // A directory that a killed backend left.
            Ok(None) => {}
            Err(error) if args.vm.is_some() => return Err(error),
            Err(error) => {
                log::warn!("VM {vm}: {error:#}");
                match is_denied(&error) {
                    true => denied = true,
                    false => hang = true,
                }
            }
        }
    }
    let mut lenders = Vec::new();
    for address in args.lenders.addresses() {
        match lender(&address) {
            Ok(lender) => lenders.push(lender),
            Err(error) if args.lenders.lenders.is_empty() => log::warn!("{error:#}"),
            Err(error) => return Err(error),
        }
    }
    if args.json {
        let all = json!({ "backends": backends, "lenders": lenders });
        println!("{}", serde_json::to_string_pretty(&all)?);
    } else {
        print!("{}", text(&backends, &lenders, hang || denied));
    }
    if hang {
        bail!("not every backend answers");
    }
    if backends.is_empty() && lenders.is_empty() {
        if denied {
            bail!("this user may not connect to the backends here");
        }
        bail!("neither a backend nor a lender runs here");
    }
    Ok(())
}

/// One backend's report; none if no backend listens at `socket`.
pub(crate) fn backend(socket: &Path) -> anyhow::Result<Option<Value>> {
    let failed = |what: &str, error: io::Error| match error.kind() {
        ErrorKind::WouldBlock => anyhow!(
            "the backend does not answer at {} within {TIMEOUT:?}: it hangs, or is stopped",
            socket.display()
        ),
        _ => anyhow::Error::new(error).context(format!("cannot {what} {}", socket.display())),
    };
    let connected = connect_by(socket, Instant::now() + TIMEOUT).map_err(io::Error::from);
    let mut stream = match connected {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(failed("connect to", error)),
    };
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut report = Vec::new();
    let read = stream.read_to_end(&mut report);
    read.map_err(|error| failed("read the status from", error))?;
    let report = serde_json::from_slice(&report);
    report.with_context(|| format!("malformed status from {}", socket.display()))
}

/// Whether a backend belongs to another user, and may well answer that one.
fn is_denied(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<io::Error>();
    cause.is_some_and(|cause| cause.kind() == ErrorKind::PermissionDenied)
}

#[derive(serde::Serialize)]
struct LenderReport {
    lender: String,
    address: Address,
    devices: Vec<DeviceStatus>,
}

fn lender(address: &Address) -> anyhow::Result<LenderReport> {
    let mut client = Client::connect(address, None)?;
    let devices = client
        .devices()?
        .into_iter()
        .map(|device| client.status(&device.id))
        .collect::<Result<_, _>>()?;
    Ok(LenderReport {
        lender: client.lender().to_owned(),
        address: address.clone(),
        devices,
    })
}

fn running_vms() -> anyhow::Result<Vec<String>> {
    let folder = paths::runtime_dir().join("vm");
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", folder.display()));
        }
    };
    let mut vms = Vec::new();
    for entry in entries {
        if let Ok(name) = entry?.file_name().into_string()
            && check_name(&name).is_ok()
        {
            vms.push(name);
        }
    }
    vms.sort();
    Ok(vms)
}

fn text(backends: &[Value], lenders: &[LenderReport], hidden: bool) -> String {
    let mut out = String::new();
    let mut line = |indent: usize, text: String| {
        out += &" ".repeat(indent);
        out += &text;
        out.push('\n');
    };
    if backends.is_empty() && !hidden {
        line(0, "no backend runs".into());
    }
    for backend in backends {
        line(0, format!("VM {}", plain(&backend["vm"])));
        for device in backend["devices"].as_array().into_iter().flatten() {
            line(
                2,
                format!(
                    "{}{}: {} (epoch {})",
                    plain(&device["device"]),
                    match device["attached"].as_bool() {
                        Some(true) => " (attached)",
                        _ => "",
                    },
                    plain(&device["state"]),
                    plain(&device["epoch"])
                ),
            );
            line(
                4,
                format!(
                    "{} MiB pinned ({} MiB locked), {} DMA windows, {} LUT entries",
                    mib(&device["bytes_pinned"]),
                    mib(&device["bytes_locked"]),
                    plain(&device["dma_windows"]),
                    plain(&device["lut_entries"])
                ),
            );
            if device["bme_to_ready_us"] != 0 {
                line(
                    4,
                    format!(
                        "last bus-master enable: DMA-ready after {} µs, {} layout probes",
                        plain(&device["bme_to_ready_us"]),
                        plain(&device["layout_probes"])
                    ),
                );
            }
            if let Some(error) = device["last_error"].as_str() {
                line(4, format!("last error: {error}"));
            }
        }
    }
    for lender in lenders {
        line(0, format!("lender {} ({})", lender.lender, lender.address));
        for device in &lender.devices {
            let lease = match &device.entry.borrowed_by {
                Some(by) => format!(
                    "borrowed by VM {} (epoch {}, {} s)",
                    by.vm, by.epoch, by.seconds
                ),
                None => "free".into(),
            };
            line(
                2,
                format!("{} ({}): {lease}", device.entry.id, device.entry.summary),
            );
            if let Some(problem) = &device.entry.problem {
                line(4, format!("problem: {problem}"));
            }
            let media_errors = device
                .counters
                .iter()
                .find(|(name, _)| name == "media_errors");
            if let Some((_, count @ 1..)) = media_errors {
                line(4, format!("{count} commands failed at the medium"));
            }
            let usage = &device.usage;
            line(
                4,
                format!(
                    "{} windows, {} LUT entries, {} MiB mapped, bus master {}",
                    usage.windows,
                    usage.lut_entries,
                    usage.bytes_mapped >> 20,
                    if device.bus_master { "on" } else { "off" }
                ),
            );
            let interrupts: u64 = device.interrupts.iter().map(|(_, _, count)| count).sum();
            line(
                4,
                format!(
                    "{interrupts} interrupts on {} vectors",
                    device.interrupts.len()
                ),
            );
            line(4, format!("{} DMA faults", device.faults.total));
            for record in &device.faults.recent {
                line(6, format!("#{}: {}", record.sequence, record.fault));
            }
        }
    }
    out
}

/// A JSON value without the quotes.
fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

fn mib(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0) >> 20
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_of_another_user_does_not_hang() {
        let error = |kind| anyhow::Error::from(io::Error::from(kind)).context("cannot connect");
        assert!(is_denied(&error(ErrorKind::PermissionDenied)));
        assert!(!is_denied(&error(ErrorKind::OutOfMemory)));
        assert!(!is_denied(&anyhow!("the backend does not answer")));
    }
}
