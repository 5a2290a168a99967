//! farside's metadata in a domain.

use std::{collections::BTreeSet, str::FromStr};

use farside_daemon::DeviceId;
use roxmltree::Node;

use super::{DomainError, NAMESPACE, syntax::Source};

/// A device that a domain borrows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainDevice {
    /// Cluster-wide id.
    pub id: DeviceId,
    /// Number of its root port (on the i440FX: of its place on the bus).
    pub port: u16,
    /// Which function of the device there.
    pub function: u8,
    /// Position in the firmware's boot order.
    pub bootindex: Option<u32>,
}

/// farside's element.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Metadata {
    pub(super) devices: Vec<DomainDevice>,
    pub(super) lenders: Vec<String>,
    pub(super) spare_ports: u16,
    /// Parent elements that were created for the devices.
    pub(super) added: BTreeSet<String>,
}

/// farside's element in the domain, if present.
pub(super) fn find<'a, 'i>(domain: Node<'a, 'i>) -> Option<Node<'a, 'i>> {
    let metadata = super::syntax::child(domain, "metadata")?;
    metadata
        .children()
        .find(|node| node.has_tag_name((NAMESPACE, "vm")))
}

impl Metadata {
    pub(super) fn read(source: &Source, element: Node) -> Result<Self, DomainError> {
        let ours = |name| {
            element
                .children()
                .filter(move |node| node.has_tag_name((NAMESPACE, name)))
        };
        let devices = ours("device").map(|node| {
            Ok(DomainDevice {
                id: required(source, node, "id")?.try_into()?,
                port: number(source, node, "port")?,
                function: optional(source, node, "function")?.unwrap_or_default(),
                bootindex: optional(source, node, "bootindex")?,
            })
        });
        let added = element.attribute("added").unwrap_or_default();
        Ok(Self {
            devices: devices.collect::<Result<_, DomainError>>()?,
            lenders: ours("lender")
                .map(|node| required(source, node, "address"))
                .collect::<Result<_, _>>()?,
            spare_ports: optional(source, element, "spare-ports")?.unwrap_or_default(),
            added: added.split_whitespace().map(str::to_owned).collect(),
        })
    }
}

fn optional<T: FromStr>(
    source: &Source,
    node: Node,
    name: &'static str,
) -> Result<Option<T>, DomainError> {
    match node.attribute(name) {
        None => Ok(None),
        Some(_) => number(source, node, name).map(Some),
    }
}

fn number<T: FromStr>(source: &Source, node: Node, name: &'static str) -> Result<T, DomainError> {
    let text = required(source, node, name)?;
    text.parse().map_err(|_| {
        let (line, column) = source.position_of(node);
        DomainError::Value {
            line,
            column,
            what: name,
            found: text,
            why: "it is to be a small number".to_owned(),
        }
    })
}

fn required(source: &Source, node: Node, name: &'static str) -> Result<String, DomainError> {
    match node.attribute(name) {
        Some(text) if !text.is_empty() => Ok(text.to_owned()),
        found => {
            let (line, column) = source.position_of(node);
            Err(DomainError::Value {
                line,
                column,
                what: name,
                found: found.unwrap_or_default().to_owned(),
                why: "it is to be said".to_owned(),
            })
        }
    }
}
