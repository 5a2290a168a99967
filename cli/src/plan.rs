//! `farside plan`: what fits, before anything is built.

mod args;
mod text;

use anyhow::{Context, bail};
use farside_fabric::NtbLimits;
use farside_lender::config::Config;
use farside_lender_protocol::Client;
use farside_planner::{
    AddressRules, Answer, Cluster, ClusterPlan, Guest, PRESETS, Preset, plan_cluster, plan_ntb,
    plan_vfio,
};
use farside_qemu_configs::HugePages;

pub(crate) use args::Plan;
use args::{FabricArg, GuestArg};

use crate::values::HugePagesArg;

pub(crate) fn run(args: &Plan) -> anyhow::Result<()> {
    if args.adapters {
        print!("{}", text::adapters());
        return Ok(());
    }
    let answer = answer(args)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&answer)?);
    } else {
        print!("{}", text::answer(&answer));
    }
    match answer.problems().as_slice() {
        [] => Ok(()),
        problems => bail!("does not fit: {}", problems.join("\nand: ")),
    }
}

fn answer(args: &Plan) -> anyhow::Result<Answer> {
    let guests: Vec<Guest> = args.guests.iter().map(|spec| guest(spec, args)).collect();
    let mut rules = AddressRules {
        bits: args.iova_bits,
        ..AddressRules::default()
    };
    rules.reserved.extend(args.reserved.iter().cloned());
    let mut answer = Answer::default();
    match (args.fabric, args.nodes) {
        (FabricArg::Vfio, Some(_)) => {
            bail!("--nodes is for many hosts, --fabric vfio for one: use only one of them")
        }
        (FabricArg::Vfio, None) => {
            args.needs_guest()?;
            answer.vfio = Some(plan_vfio(&guests, &rules)?);
        }
        (FabricArg::Ntb, nodes) => {
            let (name, limits) = limits(args)?;
            answer.adapter = Some(name);
            if let Some(nodes) = nodes {
                answer.cluster = Some(cluster(args, nodes, &limits, &guests)?);
            } else {
                args.needs_guest()?;
            }
            if !guests.is_empty() {
                answer.ntb = Some(plan_ntb(&guests, &limits, &rules)?);
            }
        }
    }
    answer.fits = answer.problems().is_empty();
    Ok(answer)
}

fn cluster(
    args: &Plan,
    nodes: u32,
    limits: &NtbLimits,
    guests: &[Guest],
) -> anyhow::Result<ClusterPlan> {
    let guest = match guests {
        [] => None,
        [guest] => Some(guest),
        _ => bail!(
            "{} kinds of guest for a cluster of {nodes} hosts: give one --guest with --nodes",
            guests.len()
        ),
    };
    limits.validate()?;
    let cluster = Cluster {
        nodes,
        devices: args
            .devices_per_pair
            .unwrap_or_else(|| limits.max_devices()),
        peers: args.peers,
        device_bars: args.device_bars,
        switch_requesters: args.switch_requesters,
    };
    Ok(plan_cluster(&cluster, limits, guest)?)
}

fn guest(spec: &GuestArg, args: &Plan) -> Guest {
    Guest {
        vms: spec.vms,
        ram: spec.ram,
        machine: spec.machine.unwrap_or(args.machine).machine(),
        devices: spec.devices.unwrap_or(args.devices),
        huge_pages: match args.hugepages {
            Some(HugePagesArg::Of2MiB) => HugePages::Of2MiB,
            Some(HugePagesArg::Of1GiB) => HugePages::Of1GiB,
            None => HugePages::None,
        },
    }
}

/// Whose limits these are, and the limits: a preset's, a configuration's or a
/// running lender's, and flags on top.
fn limits(args: &Plan) -> anyhow::Result<(String, NtbLimits)> {
    let (mut name, base) = match (&args.config, &args.lender) {
        (Some(path), _) => (path.display().to_string(), Config::load(path)?.fabric),
        (None, Some(address)) => {
            let mut client = Client::connect(address, None)?;
            (format!("lender {}", client.lender()), client.limits()?)
        }
        (None, None) => {
            let preset = Preset::find(&args.adapter).with_context(|| {
                let names = PRESETS.iter().map(|preset| preset.name);
                format!(
                    "unknown adapter {:?}: use one of {}, or give its limits by flags",
                    args.adapter,
                    names.collect::<Vec<_>>().join(", ")
                )
            })?;
            (preset.name.to_owned(), preset.limits.clone())
        }
    };
    let limits = NtbLimits {
        bar_size: args.bar_size.unwrap_or(base.bar_size),
        lut_entries: args.lut_entries.unwrap_or(base.lut_entries),
        alignment: args.alignment.or(base.alignment),
        entries_per_window: args.entries_per_window.or(base.entries_per_window),
        requester_entries: args.requester_entries.unwrap_or(base.requester_entries),
        reserved_requesters: args.reserved_requesters.unwrap_or(base.reserved_requesters),
        per_vm: base.per_vm,
    };
    if limits != base {
        name += ", changed by flags";
    }
    Ok((name, limits))
}
