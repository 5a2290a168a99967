//! Checks that a domain's RAM is shared.

use roxmltree::Node;

use super::{
    DomainError,
    syntax::{Source, child, children},
};

pub(super) const SOURCE: &str = "<source type='memfd'/>";
pub(super) const ACCESS: &str = "<access mode='shared'/>";
pub(super) const CELL: &str = "memAccess='shared'";

/// The missing elements for shared RAM.
pub(super) struct Lacking<'t, 'a> {
    /// No `<source>` in `<memoryBacking>`.
    pub(super) source: bool,
    /// No `<access>` in `<memoryBacking>`.
    pub(super) access: bool,
    /// Indices of NUMA cells without `memAccess`.
    pub(super) cells: Vec<(usize, Node<'t, 'a>)>,
    /// Elements that make RAM private. They may be intentional, so they are reported and not
    /// changed.
    pub(super) private: Vec<DomainError>,
}

/// The NUMA cells of a domain.
pub(super) fn cells<'t, 'a>(domain: Node<'t, 'a>) -> Vec<Node<'t, 'a>> {
    let numa = child(domain, "cpu").and_then(|cpu| child(cpu, "numa"));
    numa.map_or(Vec::new(), |numa| children(numa, "cell").collect())
}

impl<'a> Source<'a> {
    pub(super) fn lacking<'t>(&self, domain: Node<'t, 'a>) -> Lacking<'t, 'a> {
        let mut lacking = Lacking {
            source: true,
            access: true,
            cells: Vec::new(),
            private: Vec::new(),
        };
        let mut private = |node: Node, needed| {
            let (line, column) = self.position_of(node);
            let (end, _) = self.start_tag(node);
            lacking.private.push(DomainError::Private {
                line,
                column,
                found: self.text[node.range().start..end].to_owned(),
                needed,
            });
        };
        let backing = child(domain, "memoryBacking");
        if let Some(source) = backing.and_then(|backing| child(backing, "source")) {
            lacking.source = false;
            // Anonymous memory has no file descriptor that QEMU could share.
            if !matches!(source.attribute("type"), Some("memfd" | "file")) {
                private(source, SOURCE);
            }
        }
        if let Some(access) = backing.and_then(|backing| child(backing, "access")) {
            lacking.access = false;
            if access.attribute("mode") != Some("shared") {
                private(access, ACCESS);
            }
        }
        for (position, cell) in cells(domain).into_iter().enumerate() {
            match cell.attribute("memAccess") {
                Some("shared") => {}
                Some(_) => private(cell, CELL),
                None => lacking.cells.push((position, cell)),
            }
        }
        let devices = child(domain, "devices");
        for dimm in devices
            .iter()
            .flat_map(|devices| children(*devices, "memory"))
        {
            if matches!(dimm.attribute("access"), Some(access) if access != "shared") {
                private(dimm, "access='shared'");
            }
        }
        lacking
    }
}
