//! What a domain says about itself to us.

use std::collections::BTreeSet;

use roxmltree::Node;

use super::{DomainError, NAMESPACE, syntax::Source};

/// A device that a domain borrows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainDevice {
    /// Cluster-wide id.
    pub id: String,
    /// Number of its root port (on the i440FX: of its place on the bus).
    pub port: u16,
}

/// Our element.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Metadata {
    pub(super) devices: Vec<DomainDevice>,
    pub(super) lenders: Vec<String>,
    pub(super) spare_ports: u16,
    /// Surroundings that were made for the devices.
    pub(super) added: BTreeSet<String>,
}

/// Our element in the domain, if there is one.
pub(super) fn find<'a, 'i>(domain: Node<'a, 'i>) -> Option<Node<'a, 'i>> {
    let metadata = super::syntax::child(domain, "metadata")?;
    metadata
        .children()
        .find(|node| node.has_tag_name((NAMESPACE, "vm")))
}

impl Metadata {
    pub(super) fn read(source: &Source, element: Node) -> Result<Self, DomainError> {
        let number = |node: Node, name: &'static str| -> Result<u16, DomainError> {
            let text = node.attribute(name).unwrap_or_default();
            text.parse().map_err(|_| {
                let (line, column) = source.position_of(node);
                DomainError::Value {
                    line,
                    column,
                    what: name,
                    found: text.to_owned(),
                    why: "it is to be a number".to_owned(),
                }
            })
        };
        let ours = |name| {
            element
                .children()
                .filter(move |node| node.has_tag_name((NAMESPACE, name)))
        };
        let devices = ours("device").map(|node| {
            Ok(DomainDevice {
                id: required(source, node, "id")?,
                port: number(node, "port")?,
            })
        });
        let spare_ports = match element.attribute("spare-ports") {
            None => 0,
            Some(_) => number(element, "spare-ports")?,
        };
        let added = element.attribute("added").unwrap_or_default();
        Ok(Self {
            devices: devices.collect::<Result<_, DomainError>>()?,
            lenders: ours("lender")
                .map(|node| required(source, node, "address"))
                .collect::<Result<_, _>>()?,
            spare_ports,
            added: added.split_whitespace().map(str::to_owned).collect(),
        })
    }
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
