//! `farside status`.

use std::{io::Read, os::unix::net::UnixStream, path::Path, time::Duration};

use anyhow::Context;
use farside_control::{Address, Client, DeviceStatus, paths};
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
    for vm in &vms {
        match backend(&paths::status_socket(vm)) {
            Ok(report) => backends.push(report),
            Err(error) if args.vm.is_some() => {
                return Err(error.context(format!("no backend runs for VM {vm}")));
            }
            // A folder that a killed backend left.
            Err(error) => log::debug!("VM {vm}: {error:#}"),
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
        print!("{}", text(&backends, &lenders));
    }
    Ok(())
}

/// One backend's report.
pub(crate) fn backend(socket: &Path) -> anyhow::Result<Value> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut report = Vec::new();
    stream
        .read_to_end(&mut report)
        .with_context(|| format!("{} does not answer for {TIMEOUT:?}", socket.display()))?;
    serde_json::from_slice(&report)
        .with_context(|| format!("malformed status from {}", socket.display()))
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
        if let Ok(name) = entry?.file_name().into_string() {
            vms.push(name);
        }
    }
    vms.sort();
    Ok(vms)
}

fn text(backends: &[Value], lenders: &[LenderReport]) -> String {
    let mut out = String::new();
    let mut line = |indent: usize, text: String| {
        out += &" ".repeat(indent);
        out += &text;
        out.push('\n');
    };
    if backends.is_empty() {
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
