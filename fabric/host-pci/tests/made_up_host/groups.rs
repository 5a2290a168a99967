//! IOMMU and IOMMU groups.

use farside_host_pci::{HostPci, Member, PciError};

use crate::host::{MadeUpHost, bdf};

fn host() -> MadeUpHost {
    let host = MadeUpHost::new();
    host.function("0000:00:04.0", [0x1b36, 0x0010], 0x01_0802, Some("nvme"));
    host.function("0000:00:1f.0", [0x8086, 0x2918], 0x06_0100, None);
    host.function(
        "0000:00:1f.3",
        [0x8086, 0x2930],
        0x0c_0500,
        Some("i801_smbus"),
    );
    host
}

fn not_viable(host: &MadeUpHost) -> String {
    let address = bdf("00:04.0");
    let group = host.pci().group(&address).unwrap();
    match group.viable(&address, &[]) {
        Err(error @ PciError::GroupNotViable { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_function_alone_in_its_group_is_viable() {
    let host = host();
    let address = bdf("00:04.0");
    let group = host.pci().group(&address).unwrap();
    assert_eq!(group.id, 4);
    assert_eq!(group.members.len(), 1);
    group.viable(&address, &[]).unwrap();
}

#[test]
fn a_group_with_a_function_of_the_host_names_it_and_its_driver() {
    let host = host();
    host.group("0000:00:04.0", 0x1f);
    let error = not_viable(&host);
    assert!(error.contains("group 31 of 0000:00:04.0"), "{error}");
    assert!(error.contains("0000:00:1f.3 (i801_smbus)"), "{error}");
    assert!(!error.contains("0000:00:1f.0 ("), "no driver: {error}");
    for words in [
        "Lend each of those",
        "one VM at a time",
        "leave them unused",
        "ACS",
    ] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn members_lent_together_are_no_obstacle() {
    let host = host();
    host.group("0000:00:04.0", 0x1f);
    let address = bdf("00:04.0");
    let group = host.pci().group(&address).unwrap();
    group.viable(&address, &[bdf("00:1f.3")]).unwrap();
    assert!(group.viable(&address, &[bdf("00:1f.0")]).is_err());
}

#[test]
fn bridges_and_harmless_drivers_are_no_obstacle() {
    let host = host();
    for (slot, driver) in [
        (8, "pcieport"),
        (9, "pci-stub"),
        (10, "vfio-pci"),
        (11, "mlx5_vfio_pci"),
    ] {
        let address = format!("0000:00:{slot:02x}.0");
        host.function(&address, [1, 2], 0x02_0000, Some(driver));
        host.group(&address, 4);
    }
    host.function("0000:00:0c.0", [1, 2], 0x06_0400, Some("some_port_driver"));
    host.header_type("sys/devices/pci0000:00/0000:00:0c.0", 1);
    host.group("0000:00:0c.0", 4);
    let address = bdf("00:04.0");
    let group = host.pci().group(&address).unwrap();
    assert_eq!(group.members.len(), 6);
    group.viable(&address, &[]).unwrap();
}

#[test]
fn a_device_of_another_bus_counts_as_a_member() {
    let host = host();
    host.file("sys/devices/platform/smmu-test/uevent", "");
    host.link(
        "sys/kernel/iommu_groups/4/devices/smmu-test",
        "sys/devices/platform/smmu-test",
    );
    let group = host.pci().group(&bdf("00:04.0")).unwrap();
    assert!(
        matches!(&group.members[1], Member::Other { name, driver: None } if name == "smmu-test")
    );
    group.viable(&bdf("00:04.0"), &[]).unwrap();
    host.link(
        "sys/devices/platform/smmu-test/driver",
        "sys/bus/platform/drivers/test-dma",
    );
    assert!(not_viable(&host).contains("smmu-test (test-dma)"));
}

/// A host without groups, with that command line, CPU and firmware table.
fn no_iommu(command_line: &str, cpu: &str, table: Option<&str>) -> String {
    let host = host();
    host.remove("sys/kernel/iommu_groups");
    host.remove("sys/bus/pci/devices/0000:00:04.0/iommu_group");
    host.file("proc/cmdline", command_line);
    host.file(
        "proc/cpuinfo",
        &format!("processor\t: 0\nvendor_id\t: {cpu}\n"),
    );
    if let Some(table) = table {
        host.file(&format!("sys/firmware/acpi/tables/{table}"), "");
    }
    let pci = host.pci();
    assert!(!pci.iommu_present().unwrap());
    match pci.group(&bdf("00:04.0")) {
        Err(error @ PciError::NoIommu { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn no_iommu_says_what_to_do_on_intel() {
    let neither = no_iommu("quiet", "GenuineIntel", None);
    assert!(
        neither.contains("VT-d") && neither.contains("add `intel_iommu=on`"),
        "{neither}"
    );
    assert!(neither.contains("CONFIG_INTEL_IOMMU") && neither.contains("CONFIG_IOMMU_SUPPORT"));
    let not_asked = no_iommu("quiet", "GenuineIntel", Some("DMAR"));
    assert!(
        not_asked.contains("the firmware has VT-d on"),
        "{not_asked}"
    );
    assert!(not_asked.contains("add `intel_iommu=on`"), "{not_asked}");
    let asked = no_iommu("intel_iommu=on", "GenuineIntel", None);
    assert!(asked.contains("turn VT-d on"), "{asked}");
    assert!(!asked.contains("add `intel_iommu=on`"), "{asked}");
    let built_without = no_iommu("intel_iommu=on,sm_on", "GenuineIntel", Some("DMAR"));
    assert!(
        built_without.contains("built without CONFIG_INTEL_IOMMU"),
        "{built_without}"
    );
}

#[test]
fn no_iommu_says_what_to_do_on_amd_and_when_it_is_turned_off() {
    let amd = no_iommu("quiet", "AuthenticAMD", None);
    assert!(
        amd.contains("AMD-Vi") && !amd.contains("intel_iommu"),
        "{amd}"
    );
    let amd = no_iommu("quiet", "AuthenticAMD", Some("IVRS"));
    assert!(amd.contains("CONFIG_AMD_IOMMU"), "{amd}");
    let off = no_iommu("iommu=off", "GenuineIntel", Some("DMAR"));
    assert!(off.contains("turns it off with `iommu=off`"), "{off}");
}

#[test]
fn a_function_that_the_iommu_leaves_out_is_told_apart_from_no_iommu() {
    let host = host();
    host.remove("sys/bus/pci/devices/0000:00:04.0/iommu_group");
    assert!(host.pci().iommu_present().unwrap());
    assert!(matches!(
        host.pci().group(&bdf("00:04.0")),
        Err(PciError::NoGroup { .. })
    ));
}

#[test]
fn a_group_that_vfio_made_up_confines_nothing() {
    let host = host();
    host.file("sys/kernel/iommu_groups/4/name", "vfio-noiommu\n");
    let error = host.pci().group(&bdf("00:04.0")).unwrap_err();
    assert!(matches!(error, PciError::NoIommu { .. }), "{error}");
    assert!(error.to_string().contains("noiommu"), "{error}");
}

#[test]
fn an_empty_host_has_no_iommu() {
    let empty = tempfile::TempDir::new().unwrap();
    assert!(matches!(
        HostPci::at(empty.path()).require_iommu(),
        Err(PciError::NoIommu { .. })
    ));
}
