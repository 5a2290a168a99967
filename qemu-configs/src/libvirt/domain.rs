//! Parses a domain.

use farside_daemon::VmName;
use roxmltree::Node;

use super::{
    DomainDevice, DomainError,
    metadata::{self, Metadata},
    syntax::{Source, child, text_of},
};
use crate::Machine;

/// A domain that borrows devices, as passed to libvirt's hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainVm {
    /// The domain's name.
    pub name: VmName,
    /// Maximum guest RAM, in bytes.
    pub memory: u64,
    /// Chipset.
    pub machine: Machine,
    /// Its borrowed devices.
    pub devices: Vec<DomainDevice>,
    /// Addresses of lenders; empty for the one of this host.
    pub lenders: Vec<String>,
    /// Root ports left free for hot plug.
    pub spare_ports: u16,
}

/// The borrowed devices in a domain's XML: `None` if it borrows none. It may be an inactive domain
/// or a running one's (`virsh dumpxml`, the standard input of a hook).
///
/// ```
/// let xml = "<domain type='kvm'><name>web1</name>
///     <metadata><f:vm xmlns:f='urn:farside:libvirt:1'><f:device id='disk0' port='0'/></f:vm></metadata>
///     <memory unit='GiB'>4</memory><os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type></os></domain>";
/// let vm = farside_qemu_configs::read_domain(xml).unwrap().unwrap();
/// assert_eq!((vm.name.as_str(), vm.memory), ("web1", 4 << 30));
/// assert_eq!(vm.devices[0].id, "disk0");
/// ```
pub fn read_domain(xml: &str) -> Result<Option<DomainVm>, DomainError> {
    let source = Source::parse(xml)?;
    let domain = source.domain()?;
    let Some(element) = metadata::find(domain) else {
        return Ok(None);
    };
    let Metadata {
        devices,
        lenders,
        spare_ports,
        added: _,
    } = Metadata::read(&source, element)?;
    Ok(Some(DomainVm {
        name: source.name(domain)?,
        memory: source.memory(domain)?,
        machine: source.machine(domain)?,
        devices,
        lenders,
        spare_ports,
    }))
}

impl<'a> Source<'a> {
    /// The root element, which must be a domain.
    pub(super) fn domain(&self) -> Result<Node<'_, 'a>, DomainError> {
        let root = self.tree.root_element();
        if root.tag_name().name() == "domain" && root.tag_name().namespace().is_none() {
            return Ok(root);
        }
        let (line, column) = self.position_of(root);
        let found = self.written_name(root).to_owned();
        Err(DomainError::NotADomain {
            line,
            column,
            found,
        })
    }

    pub(super) fn required<'t>(
        &self,
        node: Node<'t, 'a>,
        element: &'static str,
    ) -> Result<Node<'t, 'a>, DomainError> {
        child(node, element).ok_or_else(|| {
            let (line, column) = self.position_of(node);
            DomainError::Missing {
                line,
                column,
                element,
            }
        })
    }

    pub(super) fn name(&self, domain: Node<'_, 'a>) -> Result<VmName, DomainError> {
        Ok(text_of(self.required(domain, "name")?).try_into()?)
    }

    /// The maximum RAM of the guest, in bytes.
    pub(super) fn memory(&self, domain: Node<'_, 'a>) -> Result<u64, DomainError> {
        let now = self.size(self.required(domain, "memory")?)?;
        match child(domain, "maxMemory") {
            Some(most) => Ok(now.max(self.size(most)?)),
            None => Ok(now),
        }
    }

    fn size(&self, node: Node<'_, 'a>) -> Result<u64, DomainError> {
        let text = text_of(node);
        let unit = node.attribute("unit").unwrap_or("KiB");
        let bytes = text
            .parse::<u64>()
            .ok()
            .zip(unit_bytes(unit))
            .and_then(|(number, unit)| number.checked_mul(unit));
        bytes.ok_or_else(|| {
            let (line, column) = self.position_of(node);
            DomainError::Value {
                line,
                column,
                what: "the size",
                found: format!("{text} {unit}"),
                why: "give a number, and a unit such as KiB or GiB".to_owned(),
            }
        })
    }

    /// The chipset. Fails if the domain is not a PC under QEMU.
    pub(super) fn machine(&self, domain: Node<'_, 'a>) -> Result<Machine, DomainError> {
        let unsupported = |node: Node, what, found: &str, needed| {
            let (line, column) = self.position_of(node);
            DomainError::Unsupported {
                line,
                column,
                what,
                found: found.to_owned(),
                needed,
            }
        };
        let kind = domain.attribute("type").unwrap_or_default();
        if !matches!(kind, "kvm" | "qemu") {
            let what = "the domain has the type";
            return Err(unsupported(domain, what, kind, "kvm or qemu"));
        }
        let os = self.required(domain, "os")?;
        let kind = self.required(os, "type")?;
        let arch = kind.attribute("arch").unwrap_or("x86_64");
        if arch != "x86_64" {
            let what = "the domain has the architecture";
            return Err(unsupported(kind, what, arch, "x86_64"));
        }
        // libvirt's default is `pc`.
        match kind.attribute("machine").unwrap_or("pc") {
            "q35" => Ok(Machine::Q35),
            "pc" => Ok(Machine::I440fx),
            version if version.starts_with("pc-q35-") => Ok(Machine::Q35),
            version if version.starts_with("pc-i440fx-") => Ok(Machine::I440fx),
            other => {
                let what = "the domain has the machine";
                Err(unsupported(
                    kind,
                    what,
                    other,
                    "q35, pc, or a version of them",
                ))
            }
        }
    }
}

/// Bytes of libvirt's units (`virScaleInteger`).
fn unit_bytes(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    if matches!(unit.as_str(), "b" | "byte" | "bytes") {
        return Some(1);
    }
    let power = ["k", "m", "g", "t", "p", "e"]
        .iter()
        .position(|letter| unit.starts_with(letter))?;
    let power = u32::try_from(power).ok()? + 1;
    match &unit[1..] {
        "" | "ib" => Some(1 << (10 * power)),
        "b" => Some(1000_u64.pow(power)),
        _ => None,
    }
}
