//! The XML fragments that farside adds.

use roxmltree::Node;

use super::{
    DomainError, NAMESPACE, QEMU_NAMESPACE, anchor,
    metadata::Metadata,
    splice::Layout,
    syntax::{Source, attribute},
};
use crate::{Vm, command_line::SERIALISES, ports, qemu_id, shared_memory::Properties};

impl Metadata {
    /// Our element in `<metadata>`.
    pub(super) fn xml(&self, layout: &Layout) -> String {
        let inner = layout.deeper().line();
        let mut xml = format!("<farside:vm xmlns:farside='{NAMESPACE}'");
        xml += &format!(" spare-ports='{}'", self.spare_ports);
        if !self.added.is_empty() {
            let added: Vec<_> = self.added.iter().map(String::as_str).collect();
            xml += &format!(" added='{}'", attribute(&added.join(" ")));
        }
        xml.push('>');
        for device in &self.devices {
            xml += &format!("{inner}<farside:device id='{}'", attribute(&device.id));
            xml += &format!(" port='{}'", device.port);
            if device.function != 0 {
                xml += &format!(" function='{}'", device.function);
            }
            if let Some(place) = device.bootindex {
                xml += &format!(" bootindex='{place}'");
            }
            xml += "/>";
        }
        for lender in &self.lenders {
            xml += &format!("{inner}<farside:lender address='{}'/>", attribute(lender));
        }
        xml + &layout.line() + "</farside:vm>"
    }
}

/// Our arguments: options and their values.
pub(super) fn pairs(vm: &Vm) -> Result<Vec<(&'static str, String)>, DomainError> {
    let mut pairs: Vec<_> = vm
        .root_ports()
        .iter()
        .map(|port| (DEVICE, json(port)))
        .collect();
    for position in 0..vm.devices.len() {
        pairs.push((DEVICE, json(&vm.vfio_user_pci(position)?)));
    }
    if let Some(device) = vm.devices.first() {
        pairs.push((BLOCKDEV, json(&anchor::value(&device.socket))));
    }
    Ok(pairs)
}

const DEVICE: &str = "-device";
const BLOCKDEV: &str = "-blockdev";

fn json(part: &impl serde::Serialize) -> String {
    serde_json::to_string(part).expect(SERIALISES)
}

/// An argument of `<qemu:commandline>`; `prefix` with its colon.
pub(super) fn arg(prefix: &str, value: &str) -> String {
    format!("<{prefix}arg value='{}'/>", attribute(value))
}

/// libvirt's element for QEMU arguments, if present.
pub(super) fn command_line<'t, 'a>(domain: Node<'t, 'a>) -> Option<Node<'t, 'a>> {
    domain
        .children()
        .find(|node| node.has_tag_name((QEMU_NAMESPACE, "commandline")))
}

/// Arguments for QEMU in the domain: nodes and values.
pub(super) fn args<'t, 'a>(domain: Node<'t, 'a>) -> Vec<(Node<'t, 'a>, &'t str)> {
    let children = command_line(domain)
        .into_iter()
        .flat_map(|node| node.children());
    children
        .filter(|node| node.has_tag_name((QEMU_NAMESPACE, "arg")))
        .map(|node| (node, node.attribute("value").unwrap_or_default()))
        .collect()
}

/// Arguments, by owner.
pub(super) struct Args<'t, 'a> {
    /// Ours: each option and its value.
    pub(super) ours: Vec<[(Node<'t, 'a>, &'t str); 2]>,
    /// Values of other arguments.
    pub(super) others: Vec<(Node<'t, 'a>, &'t str)>,
}

impl Metadata {
    /// Identifies farside's arguments by their ids.
    pub(super) fn sort_args<'t, 'a>(&self, domain: Node<'t, 'a>) -> Args<'t, 'a> {
        let all = args(domain);
        let mut sorted = Args {
            ours: Vec::new(),
            others: Vec::new(),
        };
        let mut rest = all.as_slice();
        while let [first, after @ ..] = rest {
            match after {
                [second, after @ ..] if self.owns(first.1, second.1) => {
                    sorted.ours.push([*first, *second]);
                    rest = after;
                }
                _ => {
                    sorted.others.push(*first);
                    rest = after;
                }
            }
        }
        sorted
    }

    fn owns(&self, option: &str, value: &str) -> bool {
        let properties = Properties::parse(value, "driver");
        let driver = properties.get("driver");
        if option == BLOCKDEV {
            return anchor::is(driver, properties.get("node-name"));
        }
        let (DEVICE, Some(driver), Some(id)) = (option, driver, properties.get("id")) else {
            return false;
        };
        match driver {
            "vfio-user-pci" => self.devices.iter().any(|device| qemu_id(&device.id) == id),
            "pcie-root-port" => (0..self.port_count()).any(|port| ports::name(port) == id),
            _ => false,
        }
    }

    fn port_count(&self) -> usize {
        let used = self.devices.iter().map(|device| device.port).max();
        used.map_or(0, |port| usize::from(port) + 1) + usize::from(self.spare_ports)
    }
}

impl<'a> Source<'a> {
    /// The prefix of QEMU's namespace in the domain, with its colon, and its declaration if
    /// missing.
    pub(super) fn qemu_prefix(&self, domain: Node<'_, 'a>) -> (String, String) {
        if let Some(element) = command_line(domain) {
            let name = self.written_name(element);
            let prefix = name.strip_suffix("commandline").unwrap_or_default();
            return (prefix.to_owned(), String::new());
        }
        match domain.lookup_prefix(QEMU_NAMESPACE) {
            Some(prefix) => (format!("{prefix}:"), String::new()),
            None => (
                "qemu:".to_owned(),
                format!(" xmlns:qemu='{QEMU_NAMESPACE}'"),
            ),
        }
    }
}
