//! Checks a domain that was written or changed by others.

use std::path::PathBuf;

use farside_daemon::{DeviceId, VmName};

use super::{
    DomainError,
    fragments::{command_line, pairs},
    metadata::{self, Metadata},
    syntax::{Source, child, children},
};
use crate::{Vm, shared_memory::Properties};

/// All problems that keep borrowed devices from working in a domain. Fails if the domain cannot be
/// parsed. `socket` returns the path at which the backend of a VM serves a device.
///
/// Checks a domain without borrowed devices as if it had some.
pub fn check_domain(
    xml: &str,
    socket: &dyn Fn(&VmName, &DeviceId) -> PathBuf,
) -> Result<Vec<DomainError>, DomainError> {
    let source = Source::parse(xml)?;
    let domain = source.domain()?;
    let vm = source.empty_vm(domain)?;
    let lacking = source.lacking(domain);
    let mut problems = Vec::new();
    let missing = [(lacking.source, "source"), (lacking.access, "access")];
    if missing.iter().any(|(lacks, _)| *lacks) {
        let place = child(domain, "memoryBacking").unwrap_or(domain);
        let (line, column) = source.position_of(place);
        problems.push(DomainError::NotShared { line, column });
    }
    for (_, cell) in lacking.cells {
        let (line, column) = source.position_of(cell);
        problems.push(DomainError::CellNotShared { line, column });
    }
    problems.extend(lacking.private);
    let devices = child(domain, "devices").into_iter();
    for viommu in devices.flat_map(|devices| children(devices, "iommu")) {
        let driver = child(viommu, "driver");
        let attribute = |name| driver.and_then(|driver| driver.attribute(name));
        // Without DMA translation it remaps interrupts only.
        let translates = attribute("dma_translation") != Some("off");
        let caching = attribute("caching_mode") == Some("on");
        if viommu.attribute("model") == Some("intel") && translates && !caching {
            let (line, column) = source.position_of(viommu);
            problems.push(DomainError::Viommu { line, column });
        }
    }
    if let Some(element) = metadata::find(domain) {
        let ours = Metadata::read(&source, element)?;
        let vm = ours.vm(vm, socket)?;
        let there = ours.sort_args(domain).ours;
        let place = command_line(domain).unwrap_or(domain);
        let there = there.iter().map(|[_, (node, value)]| (*node, *value));
        problems.extend(compare(&source, place, &vm, there.collect())?);
    }
    Ok(problems)
}

/// Compares the existing arguments with those that the devices need.
fn compare<'t, 'a>(
    source: &Source<'a>,
    place: roxmltree::Node<'t, 'a>,
    vm: &Vm,
    there: Vec<(roxmltree::Node<'t, 'a>, &'t str)>,
) -> Result<Vec<DomainError>, DomainError> {
    let mut problems = Vec::new();
    let id = |value: &str| {
        let properties = Properties::parse(value, "driver");
        let id = properties.get("id").or(properties.get("node-name"));
        id.map(str::to_owned)
    };
    let json = |value: &str| serde_json::from_str::<serde_json::Value>(value).ok();
    for (option, wanted) in pairs(vm)? {
        let found = there.iter().find(|(_, value)| id(value) == id(&wanted));
        let Some((node, found)) = found else {
            let (line, column) = source.position_of(place);
            problems.push(DomainError::NoArgument {
                line,
                column,
                option,
                wanted,
            });
            continue;
        };
        if json(found).is_none() || json(found) != json(&wanted) {
            let (line, column) = source.position_of(*node);
            problems.push(DomainError::OtherArgument {
                line,
                column,
                found: (*found).to_owned(),
                wanted,
                mib: vm.ram >> 20,
                timeout: vm.message_timeout_ms(),
            });
        }
    }
    Ok(problems)
}
