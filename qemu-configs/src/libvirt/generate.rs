//! Generates a complete domain for a VM.

use std::{fmt::Write, path::PathBuf};

use super::{
    DomainDevice, DomainError, QEMU_NAMESPACE, edit::put_in, fragments::arg, metadata::Metadata,
    syntax::escape,
};
use crate::{Accel, Firmware, HugePages, Machine, Vm, check::path_text};

/// Properties of a domain that QEMU's command line does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainOptions {
    /// The QEMU binary, as an absolute path; by default libvirt's choice.
    pub emulator: Option<PathBuf>,
    /// Addresses of lenders; none for the one of this host.
    pub lenders: Vec<String>,
    /// Number of NUMA cells for CPUs and RAM; 0 and 1 mean none.
    pub numa_cells: u32,
    /// An emulated VT-d, for guests with very many CPUs or with device assignment. Only the q35 has
    /// it.
    pub iommu: bool,
}

impl Vm {
    /// A libvirt domain for the VM, with the same machine, memory and PCI addresses as
    /// [`Vm::command_line`]. [`Accel::Auto`] is KVM. The user adds disks, networks, and consoles
    /// other than the serial one; [`Vm::extra_args`] are passed on as they are.
    pub fn libvirt_domain(&self, options: &DomainOptions) -> Result<String, DomainError> {
        self.check()?;
        if options.iommu && self.machine != Machine::Q35 {
            return Err(DomainError::IommuNeedsQ35 {
                machine: self.machine.name(),
            });
        }
        let ports = self.ports().into_iter();
        let devices = self.devices.iter().zip(ports);
        let devices = devices.map(|(device, port)| DomainDevice {
            id: device.id.clone(),
            port: u16::try_from(port).expect("`Vm::check` limits ports"),
            function: device.function,
            bootindex: device.bootindex,
        });
        let metadata = Metadata {
            devices: devices.collect(),
            lenders: options.lenders.clone(),
            spare_ports: match self.machine {
                Machine::Q35 => self.spare_ports,
                Machine::I440fx => 0,
            },
            added: Default::default(),
        };
        put_in(&self.bare_domain(options)?, metadata, self)
    }

    /// The domain without devices and their requirements.
    fn bare_domain(&self, options: &DomainOptions) -> Result<String, DomainError> {
        let mut xml = String::new();
        let mut line = |depth: usize, text: &str| {
            let _ = writeln!(xml, "{:1$}{text}", "", depth * 2);
        };
        let kvm = self.accel != Accel::Tcg;
        let kind = if kvm { "kvm" } else { "qemu" };
        line(
            0,
            &format!("<domain type='{kind}' xmlns:qemu='{QEMU_NAMESPACE}'>"),
        );
        line(1, &format!("<name>{}</name>", escape(&self.name)));
        line(
            1,
            &format!("<memory unit='MiB'>{}</memory>", self.ram >> 20),
        );
        if let Some((size, unit)) = match self.huge_pages {
            HugePages::None => None,
            HugePages::Of2MiB => Some((2, "MiB")),
            HugePages::Of1GiB => Some((1, "GiB")),
        } {
            line(1, "<memoryBacking>");
            line(2, "<hugepages>");
            line(3, &format!("<page size='{size}' unit='{unit}'/>"));
            line(2, "</hugepages>");
            line(1, "</memoryBacking>");
        }
        line(1, &format!("<vcpu>{}</vcpu>", self.vcpus));
        line(1, "<os>");
        let machine = self.machine.name();
        line(
            2,
            &format!("<type arch='x86_64' machine='{machine}'>hvm</type>"),
        );
        if let Firmware::Ovmf { code, vars } = &self.firmware {
            let code = escape(path_text(code)?);
            line(
                2,
                &format!("<loader readonly='yes' type='pflash'>{code}</loader>"),
            );
            line(2, &format!("<nvram>{}</nvram>", escape(path_text(vars)?)));
        }
        line(1, "</os>");
        line(1, "<features>");
        line(2, "<acpi/>");
        line(2, "<apic/>");
        if options.iommu && kvm {
            // The kernel's I/O APIC does not support VT-d interrupt remapping.
            line(2, "<ioapic driver='qemu'/>");
        }
        line(1, "</features>");
        let cells = self.numa_cells(options.numa_cells)?;
        if cells.is_empty() {
            line(1, "<cpu mode='maximum'/>");
        } else {
            line(1, "<cpu mode='maximum'>");
            line(2, "<numa>");
            for (id, (cpus, mib)) in cells.iter().enumerate() {
                let cell = format!("<cell id='{id}' cpus='{cpus}' memory='{mib}' unit='MiB'");
                line(3, &format!("{cell} memAccess='shared'/>"));
            }
            line(2, "</numa>");
            line(1, "</cpu>");
        }
        line(1, "<clock offset='utc'/>");
        line(1, "<devices>");
        if let Some(program) = &options.emulator {
            line(
                2,
                &format!("<emulator>{}</emulator>", escape(path_text(program)?)),
            );
        }
        line(2, "<controller type='usb' model='none'/>");
        line(2, "<serial type='pty'/>");
        line(2, "<console type='pty'/>");
        // A balloon cannot free RAM that is pinned for a device.
        line(2, "<memballoon model='none'/>");
        if options.iommu {
            line(2, "<iommu model='intel'>");
            // Without caching mode QEMU does not report the guest's mappings.
            line(3, "<driver intremap='on' caching_mode='on'/>");
            line(2, "</iommu>");
        }
        line(1, "</devices>");
        if !self.extra_args.is_empty() {
            line(1, "<qemu:commandline>");
            for argument in &self.extra_args {
                line(2, &arg("qemu:", argument));
            }
            line(1, "</qemu:commandline>");
        }
        line(0, "</domain>");
        Ok(xml)
    }

    /// CPUs and MiB of each NUMA cell; empty without NUMA.
    fn numa_cells(&self, cells: u32) -> Result<Vec<(String, u64)>, DomainError> {
        if cells <= 1 {
            return Ok(Vec::new());
        }
        let mib = self.ram >> 20;
        let uneven = |why| DomainError::Numa {
            cells,
            vcpus: self.vcpus,
            mib,
            why,
        };
        if !self.vcpus.is_multiple_of(cells) {
            return Err(uneven("give a number of vCPUs that it divides"));
        }
        let granule = u64::from(cells) * self.huge_pages.granule();
        if !self.ram.is_multiple_of(granule) {
            return Err(uneven("give memory that it divides, into whole pages"));
        }
        let each = self.vcpus / cells;
        let cell = |cell: u32| {
            let (first, last) = (cell * each, cell * each + each - 1);
            let cpus = match each {
                1 => first.to_string(),
                _ => format!("{first}-{last}"),
            };
            (cpus, mib / u64::from(cells))
        };
        Ok((0..cells).map(cell).collect())
    }
}
