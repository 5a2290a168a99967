//! `farside devices`.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use anyhow::bail;
use farside_backend_api::{DeviceList, ListedDevice};
use farside_bench::text_table;
use farside_error_chain::Chain;
use farside_lender_protocol::{Address, Availability, BarOwner, CallError, Client, Transport};

use farside_vm_config::{HostConfig, places};

use crate::{args::Devices, lenders::ask_all, terminal::Plain};

pub(crate) fn run(args: &Devices) -> anyhow::Result<()> {
    set_availability(args)?;
    if args.watch {
        return watch();
    }
    list_known(args)
}

/// Prints what lenders announce, until the process is stopped.
fn watch() -> anyhow::Result<()> {
    let discovery = HostConfig::read()?.discovery();
    let watch = discovery.map(|discovery| discovery.watch()).transpose()?;
    let Some(mut watch) = watch.flatten() else {
        bail!(
            "nothing to watch: {} has no `[etcd]` (endpoints = [\"https://HOST:2379\"])",
            places::host().display()
        );
    };
    loop {
        for change in watch.wait() {
            let line = Plain(change.to_string());
            match writeln!(io::stdout(), "{line}") {
                Ok(()) => {}
                // The reader has gone.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn list_known(args: &Devices) -> anyhow::Result<()> {
    let mut listed = Vec::new();
    let mut errors = Vec::new();
    let mut at = BTreeMap::new();
    for (address, devices) in ask_all(&args.lenders, list)? {
        match devices {
            Ok(devices) => {
                for ListedDevice { device, .. } in &devices {
                    let first = at.entry(device.id.clone()).or_insert(address.clone());
                    if *first != address {
                        errors.push(format!(
                            "device {} is at two lenders, {first} and {address}: rename it at one of them",
                            device.id
                        ));
                    }
                }
                listed.extend(devices);
            }
            Err(error) => errors.push(Chain(&error).to_string()),
        }
    }
    if listed.is_empty() && !errors.is_empty() {
        bail!("{}", errors.join("\n"));
    }
    if args.json {
        let document = DeviceList::new(listed);
        println!("{}", serde_json::to_string_pretty(&document)?);
    } else {
        print_table(listed);
    }
    match errors.is_empty() {
        true => Ok(()),
        false => bail!("{}", errors.join("\n")),
    }
}

fn list(address: &Address, client: &mut Client) -> Result<Vec<ListedDevice>, CallError> {
    let lender = client.lender().to_owned();
    let devices = client.devices()?.into_iter().map(|device| ListedDevice {
        lender: lender.clone(),
        address: address.clone(),
        transport: transport(address, &device.source),
        device,
    });
    Ok(devices.collect())
}

/// How the device would reach a VM of this host.
fn transport(address: &Address, source: &str) -> Transport {
    let bars = match source {
        "vfio" => BarOwner::Lender,
        _ => BarOwner::Borrower,
    };
    Transport::between(address, bars)
}

fn print_table(listed: Vec<ListedDevice>) {
    let problems: Vec<String> = listed
        .iter()
        .filter_map(|ListedDevice { device, .. }| {
            let problem = device.problem.as_ref()?;
            Some(format!("problem: device {}: {problem}", device.id))
        })
        .collect();
    let rows: Vec<Vec<String>> = listed
        .into_iter()
        .map(|listed| {
            let ListedDevice {
                lender,
                transport,
                device,
                ..
            } = listed;
            let reserved = device.reservation().map(|fence| {
                format!(
                    "reserved for VM {} (migration {})",
                    fence.vm, fence.migration
                )
            });
            let used_by = match device.borrowed_by {
                Some(by) => Some(format!(
                    "VM {} (generation {}, {} s)",
                    by.vm, by.generation, by.seconds
                )),
                None => device.kept.map(|kept| kept.to_string()).or(reserved),
            };
            let state = (device.availability != Availability::Available)
                .then(|| device.availability.to_string());
            let used_by = match (used_by, state) {
                (Some(used_by), Some(state)) => format!("{used_by}, {state}"),
                (used_by, state) => used_by.or(state).unwrap_or_else(|| "-".into()),
            };
            vec![
                device.id.to_string(),
                lender,
                transport.to_string(),
                device.source,
                device.summary,
                used_by,
            ]
        })
        .collect();
    let table = text_table(
        &["DEVICE", "LENDER", "TRANSPORT", "SOURCE", "WHAT", "USED BY"],
        &rows,
    );
    print!("{}", Plain(table));
    for problem in problems {
        println!("{}", Plain(problem));
    }
}

fn set_availability(args: &Devices) -> anyhow::Result<()> {
    if args.unavailable.is_empty() && args.available.is_empty() {
        return Ok(());
    }
    let addresses = args.lenders.addresses()?;
    let [address] = addresses.as_slice() else {
        bail!("the availability of a device is set at one lender: give --lender once");
    };
    let mut client = Client::connect(address, None)?;
    for (devices, available) in [(&args.unavailable, false), (&args.available, true)] {
        for device in devices {
            client.set_available(device, available)?;
        }
    }
    Ok(())
}
