//! Adds borrowed devices to a domain and leaves the rest unchanged.

use std::path::PathBuf;

use farside_daemon::{DeviceId, VmName};
use roxmltree::Node;

use super::{
    DomainDevice, DomainError,
    fragments::{Args, arg, command_line, pairs},
    memory::{ACCESS, CELL, SOURCE},
    metadata::{self, Metadata},
    remove::remove_all,
    splice::{Layout, Splices},
    syntax::{Source, child},
};
use crate::{Device, Machine, Vm, ports, shared_memory::Properties};

/// Default number of root ports left free in a domain.
const DEFAULT_SPARE_PORTS: u16 = 2;

/// The devices that a domain borrows.
pub struct Borrowed<'a> {
    /// Devices, each with its port. Without a port, an existing device keeps its port, and a new
    /// one gets the lowest free one.
    pub devices: Vec<BorrowedDevice>,
    /// Addresses of lenders; if empty, those in the domain are kept.
    pub lenders: Vec<String>,
    /// Root ports to leave free for hot plug; `None` keeps the number.
    pub spare_ports: Option<u16>,
    /// Returns the socket of a VM's device: VM, device.
    pub socket: &'a dyn Fn(&VmName, &DeviceId) -> PathBuf,
}

/// A device to borrow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BorrowedDevice {
    /// Cluster-wide id.
    pub id: DeviceId,
    /// Number of its root port (on the i440FX: of its place on the bus).
    pub port: Option<u16>,
    /// Which function of the device there.
    pub function: u8,
    /// Position in the firmware's boot order.
    pub bootindex: Option<u32>,
}

/// The domain with the devices added to those that it borrows already. The rest is kept byte for
/// byte; a domain that has all of the devices is returned unchanged.
pub fn add_devices(xml: &str, borrowed: &Borrowed) -> Result<String, DomainError> {
    let source = Source::parse(xml)?;
    let domain = source.domain()?;
    let vm = source.empty_vm(domain)?;
    let present = match metadata::find(domain) {
        Some(element) => Some(Metadata::read(&source, element)?),
        None => None,
    };
    let wanted = merge(&vm, present.as_ref(), borrowed)?;
    if wanted.devices.is_empty() {
        return Ok(xml.to_owned());
    }
    let vm = wanted.vm(vm, borrowed.socket)?;
    if let Some(present) = &present
        && source.is_as_wanted(domain, present, &wanted, &vm)?
    {
        return Ok(xml.to_owned());
    }
    match present {
        Some(_) => put_in(&remove_all(xml)?, wanted, &vm),
        None => put_in(xml, wanted, &vm),
    }
}

fn merge(
    vm: &Vm,
    present: Option<&Metadata>,
    borrowed: &Borrowed,
) -> Result<Metadata, DomainError> {
    let mut wanted = present.cloned().unwrap_or_else(|| Metadata {
        spare_ports: match vm.machine {
            Machine::Q35 => DEFAULT_SPARE_PORTS,
            Machine::I440fx => 0,
        },
        ..Metadata::default()
    });
    wanted.added.clear();
    if let Some(spare) = borrowed.spare_ports {
        wanted.spare_ports = spare;
    }
    if !borrowed.lenders.is_empty() {
        wanted.lenders.clone_from(&borrowed.lenders);
    }
    let reserved: Vec<_> = borrowed.devices.iter().filter_map(|d| d.port).collect();
    for BorrowedDevice {
        id,
        port,
        function,
        bootindex,
    } in &borrowed.devices
    {
        if let Some(known) = wanted.devices.iter_mut().find(|known| known.id == *id) {
            let has = (known.port, known.function);
            if let Some(wanted) = port.map(|port| (port, *function)).filter(|it| *it != has) {
                return Err(DomainError::WouldMove {
                    domain: vm.name.clone(),
                    device: id.clone(),
                    has,
                    wanted,
                });
            }
            known.bootindex = bootindex.or(known.bootindex);
            continue;
        }
        let lowest_free = || {
            let used = |port: &u16| {
                reserved.contains(port) || wanted.devices.iter().any(|known| known.port == *port)
            };
            // With fewer devices than numbers there is one.
            (0..).find(|port| !used(port)).unwrap_or(u16::MAX)
        };
        wanted.devices.push(DomainDevice {
            id: id.clone(),
            port: port.unwrap_or_else(lowest_free),
            function: *function,
            bootindex: *bootindex,
        });
    }
    Ok(wanted)
}

impl Metadata {
    /// The parts of the VM that borrowing depends on.
    pub(super) fn vm(
        &self,
        mut vm: Vm,
        socket: &dyn Fn(&VmName, &DeviceId) -> PathBuf,
    ) -> Result<Vm, DomainError> {
        vm.spare_ports = self.spare_ports;
        let devices = self.devices.iter().map(|device| Device {
            id: device.id.clone(),
            port: Some(device.port),
            function: device.function,
            socket: socket(&vm.name, &device.id),
            bootindex: device.bootindex,
        });
        vm.devices = devices.collect();
        vm.check()?;
        Ok(vm)
    }
}

impl<'a> Source<'a> {
    /// The domain's properties, without devices.
    pub(super) fn empty_vm(&self, domain: Node<'_, 'a>) -> Result<Vm, DomainError> {
        let memory = self.memory(domain)?;
        // A domain may have any number of KiB; the derived values are coarser.
        let mut vm = Vm::new(self.name(domain)?, memory.next_multiple_of(1 << 20));
        vm.machine = self.machine(domain)?;
        Ok(vm)
    }

    fn is_as_wanted(
        &self,
        domain: Node<'_, 'a>,
        present: &Metadata,
        wanted: &Metadata,
        vm: &Vm,
    ) -> Result<bool, DomainError> {
        let lacking = self.lacking(domain);
        let there = present.sort_args(domain).ours;
        let pairs = pairs(vm)?;
        Ok(present.devices == wanted.devices
            && present.lenders == wanted.lenders
            && present.spare_ports == wanted.spare_ports
            && !lacking.source
            && !lacking.access
            && lacking.cells.is_empty()
            && lacking.private.is_empty()
            && there
                .iter()
                .map(|[(_, option), (_, value)]| (*option, *value))
                .eq(pairs
                    .iter()
                    .map(|(option, value)| (*option, value.as_str()))))
    }

    /// Fails if another element uses one of our addresses or ids.
    fn check_taken(
        &self,
        domain: Node<'_, 'a>,
        wanted: &Metadata,
        vm: &Vm,
    ) -> Result<(), DomainError> {
        let slots = ports::slots(vm.machine, vm.port_count());
        let taken = |node: Node, address: String| {
            let (line, column) = self.position_of(node);
            Err(DomainError::AddressTaken {
                line,
                column,
                address,
                first: slots.start,
                last: slots.end - 1,
            })
        };
        let devices = child(domain, "devices").into_iter();
        for device in devices.flat_map(|devices| devices.children()) {
            let Some(address) = child(device, "address") else {
                continue;
            };
            let number = |name| address.attribute(name).map_or(Some(0), parse_number);
            if address.attribute("type") == Some("pci")
                && number("domain") == Some(0)
                && number("bus") == Some(0)
                && number("slot").is_some_and(|slot| slots.contains(&slot))
            {
                let slot = number("slot").unwrap_or_default();
                return taken(address, format!("00:{slot:02x}"));
            }
        }
        let ids: Vec<_> = pairs(vm)?
            .iter()
            .filter_map(|(_, value)| {
                Properties::parse(value, "driver")
                    .get("id")
                    .map(str::to_owned)
            })
            .collect();
        let id_taken = |node: Node, id: &str| {
            let (line, column) = self.position_of(node);
            let id = id.to_owned();
            Err(DomainError::IdTaken { line, column, id })
        };
        let Args { ours, others } = wanted.sort_args(domain);
        // Beside those that are added, it would be one of farside's too many.
        if let Some([_, (node, value)]) = ours.first() {
            let properties = Properties::parse(value, "driver");
            let id = properties.get("id").or(properties.get("node-name"));
            return id_taken(*node, id.unwrap_or_default());
        }
        for (node, value) in others {
            let properties = Properties::parse(value, "driver");
            if let Some(id) = properties
                .get("id")
                .filter(|id| ids.iter().any(|ours| ours == id))
            {
                return id_taken(node, id);
            }
            let on_root = matches!(properties.get("bus"), None | Some("pcie.0" | "pci.0"));
            let slot = properties.get("addr").and_then(|addr| {
                let slot = addr.split('.').next()?;
                usize::from_str_radix(slot.trim_start_matches("0x"), 16).ok()
            });
            if let Some(slot) = slot.filter(|slot| on_root && slots.contains(slot)) {
                return taken(node, format!("00:{slot:02x}"));
            }
        }
        Ok(())
    }
}

/// A number in libvirt's format.
fn parse_number(text: &str) -> Option<usize> {
    match text.strip_prefix("0x") {
        Some(hex) => usize::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Adds the devices to a domain without elements of farside.
pub(super) fn put_in(xml: &str, mut wanted: Metadata, vm: &Vm) -> Result<String, DomainError> {
    let source = Source::parse(xml)?;
    let domain = source.domain()?;
    source.check_taken(domain, &wanted, vm)?;
    let lacking = source.lacking(domain);
    if let Some(private) = lacking.private.into_iter().next() {
        return Err(private);
    }
    let mut editor = Editor {
        source: &source,
        layout: Layout::of_root(&xml[source.inside(domain)]),
        splices: Splices::default(),
        wanted: &mut wanted,
    };
    let mut backing = Vec::new();
    for (lacks, name, text) in [
        (lacking.source, "source", SOURCE),
        (lacking.access, "access", ACCESS),
    ] {
        if lacks {
            editor.wanted.added.insert(name.to_owned());
            backing.push(text.to_owned());
        }
    }
    if !backing.is_empty() {
        let memory = source.required(domain, "memory")?;
        let after = [Some(memory), child(domain, "currentMemory")];
        let after = after.into_iter().flatten().map(|node| node.range().end);
        editor.fill(
            "memoryBacking",
            ("memoryBacking", ""),
            child(domain, "memoryBacking"),
            after.max().unwrap_or_default(),
            |_| backing,
        );
    }
    for (position, cell) in lacking.cells {
        let after = cell.range().start + 1 + source.written_name(cell).len();
        editor.splices.insert(after, format!(" {CELL}"));
        editor.wanted.added.insert(format!("cell{position}"));
    }
    let (prefix, declaration) = source.qemu_prefix(domain);
    let mut args = Vec::new();
    for (option, value) in pairs(vm)? {
        args.extend([arg(&prefix, option), arg(&prefix, &value)]);
    }
    let name = source.required(domain, "name")?;
    let last = domain.last_element_child().unwrap_or(name).range().end;
    let element = format!("{prefix}commandline");
    let there = command_line(domain);
    editor.fill("commandline", (&element, &declaration), there, last, |_| {
        args
    });

    let after = name.range().end;
    // The added arguments are complete except for this.
    let there = child(domain, "metadata");
    editor.note("metadata", there);
    let ours = editor.wanted.clone();
    editor.fill("metadata", ("metadata", ""), there, after, |layout| {
        vec![ours.xml(layout)]
    });
    Ok(editor.splices.apply(xml))
}

struct Editor<'e, 'a> {
    source: &'e Source<'a>,
    /// Layout of the domain's children.
    layout: Layout,
    splices: Splices,
    wanted: &'e mut Metadata,
}

impl<'e, 'a> Editor<'e, 'a> {
    /// Records that an element is created, or an empty one filled.
    fn note(&mut self, key: &str, there: Option<Node<'_, 'a>>) {
        match there {
            None => self.wanted.added.insert(key.to_owned()),
            Some(node) if self.source.start_tag(node).1 => {
                self.wanted.added.insert(format!("{key}-contents"))
            }
            Some(_) => false,
        };
    }

    /// Appends elements to a child of the domain, which is created after `after` if missing. The
    /// inserted text always follows a tag, on a new line if the domain has lines, so that it can be
    /// removed exactly.
    fn fill(
        &mut self,
        key: &str,
        (name, attributes): (&str, &str),
        there: Option<Node<'_, 'a>>,
        after: usize,
        elements: impl FnOnce(&Layout) -> Vec<String>,
    ) {
        self.note(key, there);
        let source = self.source;
        let lines = |layout: &Layout| {
            let elements = elements(layout).into_iter();
            elements
                .map(|element| layout.line() + &element)
                .collect::<String>()
        };
        let (deeper, end) = (self.layout.deeper(), self.layout.line());
        let Some(node) = there else {
            let inside = lines(&deeper);
            let text = format!("{end}<{name}{attributes}>{inside}{end}</{name}>");
            return self.splices.insert(after, text);
        };
        let (tag, empty) = source.start_tag(node);
        if empty {
            let name = source.written_name(node);
            let text = format!(">{}{end}</{name}>", lines(&deeper));
            return self.splices.replace(tag - "/>".len()..tag, &text);
        }
        let layout = self.layout.within(&source.text[source.inside(node)]);
        let last = node.children().rfind(Node::is_element);
        let at = last.map_or(tag, |last| last.range().end);
        self.splices.insert(at, lines(&layout));
    }
}
