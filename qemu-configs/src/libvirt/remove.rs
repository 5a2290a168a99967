//! Removes borrowed devices, and the elements created for them, from a domain.

use std::ops::Range;

use farside_daemon::DeviceId;
use roxmltree::Node;

use super::{
    DomainError,
    edit::{Borrowed, BorrowedDevice, add_devices},
    fragments::command_line,
    memory,
    metadata::{self, Metadata},
    splice::{Splices, with_its_line},
    syntax::{Source, child},
};

/// The domain without farside's elements. A domain that borrows nothing is returned unchanged.
pub fn remove_all(xml: &str) -> Result<String, DomainError> {
    let mut text = xml.to_owned();
    // libvirt keeps one element of each namespace, but a text may have several.
    while let Some(rest) = remove_first(&text)? {
        text = rest;
    }
    Ok(text)
}

/// The domain without farside's first element in `<metadata>`, and without what that lists. `None`
/// if there is none.
fn remove_first(xml: &str) -> Result<Option<String>, DomainError> {
    let source = Source::parse(xml)?;
    let domain = source.domain()?;
    let Some(element) = metadata::find(domain) else {
        return Ok(None);
    };
    let ours = Metadata::read(&source, element)?;
    Ok(Some(without_ours(&source, domain, &ours)))
}

/// The domain without these devices; `rest` describes how the others are served (its devices are
/// ignored).
pub fn remove_devices(xml: &str, ids: &[DeviceId], rest: &Borrowed) -> Result<String, DomainError> {
    let source = Source::parse(xml)?;
    let domain = source.domain()?;
    let ours = match metadata::find(domain) {
        Some(element) => Metadata::read(&source, element)?,
        None => Metadata::default(),
    };
    for id in ids {
        if !ours.devices.iter().any(|device| device.id == *id) {
            let known: Vec<_> = ours.devices.iter().map(|d| d.id.as_str()).collect();
            return Err(DomainError::UnknownDevice {
                domain: source.name(domain)?,
                device: id.clone(),
                known: match known.as_slice() {
                    [] => "none".to_owned(),
                    some => some.join(", "),
                },
            });
        }
    }
    let kept = ours
        .devices
        .iter()
        .filter(|device| !ids.contains(&device.id));
    let kept = kept.map(|device| BorrowedDevice {
        id: device.id.clone(),
        port: Some(device.port),
        function: device.function,
        bootindex: device.bootindex,
    });
    let rest = Borrowed {
        devices: kept.collect(),
        lenders: ours.lenders.clone(),
        spare_ports: rest.spare_ports.or(Some(ours.spare_ports)),
        socket: rest.socket,
    };
    add_devices(&remove_all(xml)?, &rest)
}

/// The text without the elements that the metadata lists.
fn without_ours(source: &Source, domain: Node, ours: &Metadata) -> String {
    let mut splices = Splices::default();
    if let Some(metadata) = child(domain, "metadata") {
        let element = metadata::find(domain);
        take_out(source, &mut splices, ours, "metadata", metadata, element);
    }
    if let Some(backing) = child(domain, "memoryBacking") {
        // Keep elements that were changed since: they belong to the user now.
        let source_element = child(backing, "source").filter(|node| {
            ours.added.contains("source") && node.attribute("type") == Some("memfd")
        });
        let access = child(backing, "access").filter(|node| {
            ours.added.contains("access") && node.attribute("mode") == Some("shared")
        });
        let elements = source_element.into_iter().chain(access);
        take_out(
            source,
            &mut splices,
            ours,
            "memoryBacking",
            backing,
            elements,
        );
    }
    for (position, cell) in memory::cells(domain).into_iter().enumerate() {
        let attribute = cell.attribute_node("memAccess").filter(|attribute| {
            attribute.value() == "shared" && ours.added.contains(&format!("cell{position}"))
        });
        if let Some(attribute) = attribute {
            let Range { start, end } = attribute.range();
            // One space was inserted before it.
            splices.replace(start - 1..end, "");
        }
    }
    if let Some(commandline) = command_line(domain) {
        let args = ours.sort_args(domain).ours.into_iter().flatten();
        let args = args.map(|(node, _)| node);
        take_out(source, &mut splices, ours, "commandline", commandline, args);
    }
    splices.apply(source.text)
}

/// Removes elements from their parent, and the parent too if it was created for them and is then
/// empty.
fn take_out<'t, 'a: 't>(
    source: &Source<'a>,
    splices: &mut Splices,
    ours: &Metadata,
    key: &str,
    parent: Node<'t, 'a>,
    elements: impl IntoIterator<Item = Node<'t, 'a>>,
) {
    let mut ranges: Vec<_> = elements
        .into_iter()
        .map(|node| with_its_line(source.text, node.range()))
        .collect();
    ranges.sort_by_key(|range| range.start);
    let inside = source.inside(parent);
    let mut rest = String::new();
    let mut at = inside.start;
    for range in &ranges {
        rest += &source.text[at..range.start];
        at = range.end;
    }
    rest += &source.text[at..inside.end];
    if rest.trim().is_empty() {
        if ours.added.contains(key) {
            let whole = with_its_line(source.text, parent.range());
            return splices.replace(whole, "");
        }
        if ours.added.contains(&format!("{key}-contents")) {
            let (tag, _) = source.start_tag(parent);
            return splices.replace(tag - 1..parent.range().end, "/>");
        }
    }
    for range in ranges {
        splices.replace(range, "");
    }
}
