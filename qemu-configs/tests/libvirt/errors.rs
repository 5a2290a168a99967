//! Refusals, their positions and their messages.

use farside_qemu_configs::{
    Borrowed, BorrowedDevice, DomainError, add_devices, check_domain, remove_devices,
};

use crate::common::{VIRT_INSTALL, add, borrowed, device, socket};

fn refused(xml: &str) -> String {
    add(xml, &["disk0"]).unwrap_err().to_string()
}

fn changed(from: &str, to: &str) -> String {
    assert!(VIRT_INSTALL.contains(from));
    VIRT_INSTALL.replacen(from, to, 1)
}

#[test]
fn what_is_not_a_domain() {
    assert_eq!(
        refused(&changed("</name>", "</nam>")),
        "line 7, column 13: this is not well-formed XML: expected 'name' tag, not 'nam'"
    );
    assert!(refused("").starts_with("line 1, column 1: this is not well-formed XML: "));
    assert_eq!(
        refused("<network>\n</network>"),
        "line 1, column 1: this is <network>, and not a libvirt <domain>: \
         give what `virsh dumpxml --inactive NAME` prints"
    );
    assert_eq!(
        refused("\n<domain xmlns='urn:x'/>").split(':').next(),
        Some("line 2, column 1")
    );
    let entities = "<!DOCTYPE domain [<!ENTITY a 'b'>]><domain><name>&a;</name></domain>";
    assert!(refused(entities).contains("not well-formed XML"));
    assert_eq!(
        refused("<domain type='kvm'>\n  <name>a</name>\n</domain>"),
        "line 1, column 1: the domain has no <memory>"
    );
}

#[test]
fn vms_that_cannot_borrow() {
    for (from, to, said) in [
        (
            "type='kvm'",
            "type='xen'",
            "line 6, column 1: the domain has the type \"xen\": borrowed devices need kvm or qemu",
        ),
        (
            "arch='x86_64'",
            "arch='aarch64'",
            "line 18, column 5: the domain has the architecture \"aarch64\": borrowed devices need x86_64",
        ),
        (
            "pc-q35-10.0",
            "microvm",
            "line 18, column 5: the domain has the machine \"microvm\": \
             borrowed devices need q35, pc, or a version of them",
        ),
        (
            "unit='KiB'>4194304",
            "unit='pages'>4194304",
            "line 14, column 3: the size \"4194304 pages\" cannot be read: \
             give a number, and a unit such as KiB or GiB",
        ),
    ] {
        assert_eq!(refused(&changed(from, to)), said);
    }
    assert_eq!(
        refused(&changed("<name>web1", "<name>my web")),
        "VM name \"my web\" has a character that is not allowed; use 1 to 48 letters, digits, `-`, `_` and `.`, \
         first a letter or digit"
    );
}

#[test]
fn memory_that_was_made_private_on_purpose() {
    for (inside, said) in [
        (
            "<access mode='private'/>",
            "line 18, column 3: <access mode='private'/> keeps guest RAM from being shared with \
             farside: change it to <access mode='shared'/>",
        ),
        (
            "<source type='anonymous'/>",
            "line 18, column 3: <source type='anonymous'/> keeps guest RAM from being shared with \
             farside: change it to <source type='memfd'/>",
        ),
    ] {
        let xml = changed(
            "  <os>",
            &format!("  <memoryBacking>\n  {inside}</memoryBacking>\n  <os>"),
        );
        assert_eq!(refused(&xml), said);
        let found = check_domain(&xml, &socket).unwrap();
        assert!(matches!(found[1], DomainError::Private { .. }), "{found:?}");
    }
}

#[test]
fn a_domain_without_shared_memory_is_found_by_checking() {
    let found = check_domain(VIRT_INSTALL, &socket).unwrap();
    assert_eq!(found, [DomainError::NotShared { line: 6, column: 1 }]);
    assert_eq!(
        found[0].to_string(),
        "line 6, column 1: guest RAM is private to QEMU: <memoryBacking> needs \
         <source type='memfd'/> and <access mode='shared'/> (farside libvirt --edit adds them)"
    );
}

#[test]
fn a_viommu_that_hides_its_mappings_is_found_by_checking() {
    let with = |viommu: &str| {
        let domain = changed("</devices>", &format!("{viommu}</devices>"));
        let found = check_domain(&domain, &socket).unwrap().into_iter();
        let text = found.map(|problem| problem.to_string());
        text.filter(|text| text.contains("iommu"))
            .collect::<Vec<_>>()
    };
    for viommu in [
        "<iommu model='intel'/>",
        "<iommu model='intel'><driver intremap='on'/></iommu>",
        "<iommu model='intel'><driver caching_mode='off'/></iommu>",
    ] {
        let found = with(viommu);
        assert_eq!(found.len(), 1, "{viommu}: {found:?}");
        assert!(
            found[0].ends_with("add <driver caching_mode='on'/>"),
            "{found:?}"
        );
    }
    for viommu in [
        "",
        "<iommu model='intel'><driver caching_mode='on' intremap='on'/></iommu>",
        "<iommu model='intel'><driver dma_translation='off' intremap='on'/></iommu>",
        "<iommu model='virtio'/>",
    ] {
        assert_eq!(with(viommu), [""; 0], "{viommu}");
    }
}

#[test]
fn an_argument_that_went_missing_is_found_by_checking() {
    let edited = add(VIRT_INSTALL, &["disk0"]).unwrap();
    let lost = edited.replace("\"id\":\"dev-disk0\"", "\"id\":\"x\"");
    let found = check_domain(&lost, &socket).unwrap();
    assert_eq!(found.len(), 1);
    assert!(
        found[0]
            .to_string()
            .contains("QEMU is not given -device {\"driver\":\"vfio-user-pci\"")
    );
}

#[test]
fn addresses_and_ids_that_others_have() {
    let taken = changed("slot='0x02'", "slot='0x10'");
    assert_eq!(
        refused(&taken),
        "line 41, column 7: PCI address 00:10 is taken, and the ports of borrowed devices are to \
         be at device numbers 0x10 to 0x10 of bus 0: give this device another address, or leave \
         its <address> out and libvirt chooses one"
    );
    let commandline = |value: &str| {
        changed(
            "  </devices>\n</domain>\n",
            &format!(
                "</devices>\n<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n\
                 <qemu:arg value='-device'/>\n<qemu:arg value='{value}'/>\n</qemu:commandline></domain>\n"
            ),
        )
    };
    let said = refused(&commandline("edu,addr=10.0"));
    assert!(said.contains("PCI address 00:10 is taken"), "{said}");
    assert_eq!(
        refused(&commandline("edu,id=port1,addr=4")),
        "line 52, column 1: an argument for QEMU has the id \"port1\", which a part of farside \
         is to have: rename it"
    );
    assert!(add(&commandline("edu,bus=other,addr=0x10"), &["disk0"]).is_ok());
}

/// Beside the arguments that farside adds, the old ones would be taken for farside's when the domain
/// is edited again.
#[test]
fn arguments_of_farside_whose_metadata_somebody_removed() {
    let edited = add(VIRT_INSTALL, &["disk0"]).unwrap();
    let end = "</farside:vm>";
    let element = edited.find("<farside:vm").unwrap()..edited.find(end).unwrap() + end.len();
    let without = edited.replace(&edited[element], "");
    let taken = |xml: &str, id: &str| {
        let refused = refused(xml);
        assert!(refused.contains(&format!("has the id {id:?}")), "{refused}");
    };
    taken(&without, "port0");
    let is_anchor = |line: &&str| !line.contains("driver\":\"") || line.contains("\"vpc\"");
    let lines = without.lines().filter(|line| !line.contains("'-device'"));
    let anchor: Vec<_> = lines.filter(is_anchor).collect();
    taken(&anchor.join("\n"), "farside-borrowed-devices");
    // The i440FX has none of farside's root ports.
    let bridge = changed("pc-q35-10.0", "pc-i440fx-10.0").replace(
        "</domain>",
        "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
         <qemu:arg value='-device'/><qemu:arg value='pcie-root-port,id=port0,bus=x'/>\
         </qemu:commandline></domain>",
    );
    taken(&bridge, "port0");
}

#[test]
fn devices_that_would_move_or_are_not_there() {
    let edited = add(VIRT_INSTALL, &["disk0"]).unwrap();
    let moved = Borrowed {
        devices: vec![BorrowedDevice {
            port: Some(3),
            ..device("disk0")
        }],
        ..borrowed(&[])
    };
    assert_eq!(
        add_devices(&edited, &moved).unwrap_err().to_string(),
        "domain web1 has device disk0 at port 0, not 3: remove it first \
         (--remove --device disk0) if it is to move"
    );
    let said = remove_devices(&edited, &["disk1".parse().unwrap()], &borrowed(&[])).unwrap_err();
    assert_eq!(
        said.to_string(),
        "domain web1 does not borrow device disk1; it borrows disk0"
    );
}
