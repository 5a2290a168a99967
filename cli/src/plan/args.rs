//! The arguments of `farside plan`.

use std::path::PathBuf;

use anyhow::bail;
use clap::{Args as ClapArgs, ValueEnum};
use farside_fabric::parse_size;
use farside_guest_layout::{Gpa, GpaRange};
use farside_lender_protocol::Address;
use farside_planner::Reserved;

use crate::values::{HugePagesArg, MachineArg};

/// Calculate which VMs, devices and hosts fit an NTB or an IOMMU
///
/// Accesses none of them. Calculates guest layout, DMA windows, LUT entries, requester
/// entries, addresses and memory to lock. Fails (exit status 1) if something does not fit,
/// and prints the required change.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  farside plan --guest 4G                        one q35 VM of 4 GiB, default adapter
  farside plan --guest 30x16G --bar-size 512G    thirty VMs of 16 GiB, larger BAR
  farside plan --guest 8G:pc:2 --guest 4x1G      a VM of type pc with 2 devices, then four others
  farside plan --guest 4G --config lender.toml   the adapter of a lender's [fabric]
  farside plan --nodes 60 --devices-per-pair 30  a cluster
  farside plan --guest 64G --fabric vfio         lender and VM on one machine
  farside plan --adapters                        adapters by name, and where their numbers are from")]
pub(crate) struct Plan {
    /// VMs that borrow from one lender: number, RAM, machine type, devices of each.
    /// May be given more than once; they borrow in that order.
    #[arg(long = "guest", value_name = "[Nx]RAM[:MACHINE[:DEVICES]]", value_parser = parse_guest)]
    pub(crate) guests: Vec<GuestArg>,
    /// Machine type of guests given without one.
    #[arg(long, value_enum, default_value = "q35")]
    pub(crate) machine: MachineArg,
    /// Number of devices of guests given without one.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) devices: u16,
    /// Page size of guest RAM.
    #[arg(long, value_enum, value_name = "SIZE")]
    pub(crate) hugepages: Option<HugePagesArg>,
    /// Fabric to plan for.
    #[arg(long, value_enum, default_value = "ntb")]
    pub(crate) fabric: FabricArg,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,

    /// Adapter preset; other flags override its values.
    #[arg(
        long,
        value_name = "NAME",
        default_value = "dolphin-pxh830",
        help_heading = "NTB adapter"
    )]
    pub(crate) adapter: String,
    /// List the adapter presets, with the sources of their values.
    #[arg(long, help_heading = "NTB adapter")]
    pub(crate) adapters: bool,
    /// Take the adapter from `[fabric]` of a lender's configuration.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "adapter",
        help_heading = "NTB adapter"
    )]
    pub(crate) config: Option<PathBuf>,
    /// Query a running lender for the limits of its adapter.
    #[arg(
        long,
        value_name = "ADDRESS",
        conflicts_with_all = ["adapter", "config"],
        help_heading = "NTB adapter"
    )]
    pub(crate) lender: Option<Address>,
    /// BAR for all DMA windows, such as 32G; a power of two.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "NTB adapter")]
    pub(crate) bar_size: Option<u64>,
    /// Entries of the look-up table that cuts the BAR into segments; a power of two.
    #[arg(long, value_name = "N", help_heading = "NTB adapter")]
    pub(crate) lut_entries: Option<u32>,
    /// Required alignment of peer addresses.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "NTB adapter")]
    pub(crate) alignment: Option<u64>,
    /// Maximum number of LUT entries of one window; 1 if each window has a separate
    /// BAR.
    #[arg(long, value_name = "N", help_heading = "NTB adapter")]
    pub(crate) entries_per_window: Option<u32>,
    /// Entries of the requester table: each lent device takes one.
    #[arg(long, value_name = "N", help_heading = "NTB adapter")]
    pub(crate) requester_entries: Option<u32>,
    /// Number of requester entries reserved for CPUs.
    #[arg(long, value_name = "N", help_heading = "NTB adapter")]
    pub(crate) reserved_requesters: Option<u32>,

    /// Hosts of a cluster, each with such an adapter. Each lends to --peers
    /// others and borrows from as many. With --guest, such VMs use the devices,
    /// with as many devices each.
    #[arg(long, value_name = "N", help_heading = "Cluster")]
    pub(crate) nodes: Option<u32>,
    /// Devices that a host lends to one other [default: what the requester table has].
    #[arg(long, value_name = "N", requires = "nodes", help_heading = "Cluster")]
    pub(crate) devices_per_pair: Option<u32>,
    /// Number of other hosts that each host lends to at the same time.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Cluster")]
    pub(crate) peers: u32,
    /// BARs of a device, which its borrower reaches through its own adapter.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "16K", help_heading = "Cluster")]
    pub(crate) device_bars: u64,
    /// Entries of a switch port for requesters of the other ports.
    #[arg(long, value_name = "N", requires = "nodes", help_heading = "Cluster")]
    pub(crate) switch_requesters: Option<u64>,

    /// Bits of the addresses that the lender's IOMMU maps: 39, 48 or 57.
    #[arg(
        long,
        value_name = "BITS",
        default_value_t = 48,
        help_heading = "IOMMU"
    )]
    pub(crate) iova_bits: u32,
    /// A range that cannot be mapped, as in /sys/kernel/iommu_groups/*/reserved_regions:
    /// first and last address. May be given more than once; x86's
    /// 0xfee00000-0xfeefffff always counts. (AMD hosts: 0xfd00000000-0xffffffffff.)
    #[arg(long, value_name = "START-END", value_parser = parse_range, help_heading = "IOMMU")]
    pub(crate) reserved: Vec<Reserved>,
}

impl Plan {
    pub(crate) fn needs_guest(&self) -> anyhow::Result<()> {
        if self.guests.is_empty() {
            bail!(
                "nothing to plan: give VMs, as in --guest 30x16G, or a cluster, as in --nodes 60"
            );
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum FabricArg {
    /// An NTB between two hosts, or the soft fabric that stands for one.
    #[value(alias = "soft")]
    Ntb,
    /// Linux VFIO: lender and VM on one machine.
    Vfio,
}

/// `[Nx]RAM[:MACHINE[:DEVICES]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuestArg {
    pub(crate) vms: u32,
    pub(crate) ram: u64,
    pub(crate) machine: Option<MachineArg>,
    pub(crate) devices: Option<u16>,
}

fn parse_guest(text: &str) -> Result<GuestArg, String> {
    let mut parts = text.split(':');
    let size = parts.next().unwrap_or_default();
    let (vms, ram) = match size.split_once(['x', 'X']) {
        Some((vms, ram)) => (number("VMs", vms)?, ram),
        None => (1, size),
    };
    let machine = parts.next().filter(|name| !name.is_empty());
    let machine = machine.map(|name| {
        MachineArg::from_str(name, true)
            .map_err(|_| format!("{name:?} is not a machine type: give q35 or pc"))
    });
    let devices = parts.next().map(|devices| number("devices", devices));
    if parts.next().is_some() {
        return Err(format!(
            "{text:?} has too many parts: give [Nx]RAM[:MACHINE[:DEVICES]], as in 30x16G:q35:2"
        ));
    }
    Ok(GuestArg {
        vms,
        ram: parse_size(ram)?,
        machine: machine.transpose()?,
        devices: devices.transpose()?,
    })
}

fn number<N: TryFrom<u64>>(what: &str, text: &str) -> Result<N, String> {
    let value: Option<u64> = text.trim().parse().ok();
    value
        .and_then(|value| N::try_from(value).ok())
        .ok_or_else(|| format!("{text:?} is not a number of {what} that can be: give one, as in 2"))
}

fn parse_range(text: &str) -> Result<Reserved, String> {
    let address = |text: &str| {
        let text = text.trim();
        match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        }
    };
    let range = || {
        let (start, last) = text.split_once('-')?;
        let (start, last) = (address(start)?, address(last)?);
        GpaRange::between(Gpa::new(start), Gpa::new(last.checked_add(1)?)).ok()
    };
    let range = range().ok_or_else(|| {
        format!(
            "{text:?} is not a range: give its first and last address, as in 0xfee00000-0xfeefffff"
        )
    })?;
    Ok(Reserved {
        range,
        what: "given by --reserved".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_are_read() {
        let plain = |vms, ram| GuestArg {
            vms,
            ram,
            machine: None,
            devices: None,
        };
        assert_eq!(parse_guest("4G"), Ok(plain(1, 4 << 30)));
        assert_eq!(parse_guest("30x16GiB"), Ok(plain(30, 16 << 30)));
        assert_eq!(
            parse_guest("2x1T:PC:3"),
            Ok(GuestArg {
                vms: 2,
                ram: 1 << 40,
                machine: Some(MachineArg::Pc),
                devices: Some(3),
            })
        );
        assert_eq!(parse_guest("1G::4").unwrap().devices, Some(4));
        for bad in [
            "",
            "x4G",
            "-1x4G",
            "4Q",
            "4G:i486",
            "4G:pc:many",
            "4G:pc:1:2",
            "5000000000x1G",
            "1G:q35:70000",
        ] {
            assert!(parse_guest(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn reserved_ranges_name_their_last_address() {
        let range = parse_range("0xfee00000-0xfeefffff").unwrap().range;
        assert_eq!(range.start().get(), 0xfee0_0000);
        assert_eq!(range.end().get(), 0xfef0_0000);
        for bad in [
            "",
            "1",
            "2-1",
            "0x-1",
            "0-0xffffffffffffffff",
            "a-b",
            "1-99999999999999999999",
        ] {
            assert!(parse_range(bad).is_err(), "{bad}");
        }
    }
}
