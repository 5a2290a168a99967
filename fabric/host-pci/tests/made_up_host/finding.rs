//! Listing functions, their properties, and their selection by a filter.

use farside_host_pci::{Filter, FunctionKind, HostPci, PciError};
use farside_pci::Bdf;
use proptest::prelude::*;

use crate::host::{MadeUpHost, bdf};

const NVME: u32 = 0x01_0802;
const NET: u32 = 0x02_0000;

fn host() -> MadeUpHost {
    let host = MadeUpHost::new();
    host.function("0000:00:00.0", [0x8086, 0x29c0], 0x06_0000, None);
    host.function("0000:00:04.0", [0x1b36, 0x0010], NVME, Some("nvme"));
    host.function("0000:00:05.0", [0x8086, 0x10c9], NET, Some("igb"));
    host.function("0000:00:05.1", [0x8086, 0x10c9], NET, None);
    host
}

fn select(host: &MadeUpHost, filter: &str) -> Result<Vec<String>, PciError> {
    let found = host.pci().select(&filter.parse::<Filter>().unwrap())?;
    Ok(found.iter().map(|info| info.bdf.to_string()).collect())
}

#[test]
fn tells_what_a_function_is() {
    let host = host();
    let info = host.pci().function(&bdf("00:04.0")).unwrap();
    assert_eq!((info.vendor, info.device, info.class), (0x1b36, 0x10, NVME));
    assert_eq!(info.kind, FunctionKind::Endpoint);
    assert_eq!(info.driver.as_deref(), Some("nvme"));
    assert_eq!(info.driver_override, None);
    assert_eq!(info.iommu_group, Some(4));
    assert_eq!(info.physfn, None);
    assert_eq!(info.sriov, None);
    assert_eq!(info.dma_limit_bits(), Some(64));
    assert_eq!(
        info.to_string(),
        "0000:00:04.0 [1b36:0010] class 0108 (nvme)"
    );
}

#[test]
fn a_default_dma_mask_is_believed_only_of_the_devices_own_driver() {
    let host = host();
    let limit = |driver: Option<&str>| {
        let address = format!("0000:00:1{}.0", driver.map_or(0, |d| d.len() % 7 + 1));
        host.function(&address, [1, 2], NVME, driver);
        host.file(
            &format!("sys/bus/pci/devices/{address}/dma_mask_bits"),
            "32\n",
        );
        host.pci()
            .function(&bdf(&address))
            .unwrap()
            .dma_limit_bits()
    };
    assert_eq!(limit(Some("nvme")), Some(32));
    assert_eq!(limit(Some("vfio-pci")), None);
    assert_eq!(limit(None), None);
}

#[test]
fn bridges_are_told_by_their_header_and_an_ntb_is_none() {
    let host = host();
    let kind = |address: &str| host.pci().function(&bdf(address)).unwrap().kind;
    assert_eq!(kind("0000:00:00.0"), FunctionKind::HostBridge);
    host.function("0000:00:06.0", [0x8086, 1], 0x06_0400, Some("pcieport"));
    host.header_type("sys/devices/pci0000:00/0000:00:06.0", 0x81);
    assert_eq!(kind("0000:00:06.0"), FunctionKind::PciBridge);
    host.function("0000:00:07.0", [0x8086, 2], 0x06_8000, None);
    assert_eq!(kind("0000:00:07.0"), FunctionKind::Endpoint);
    // Configuration space of a powered-down function reads as all ones.
    host.header_type("sys/devices/pci0000:00/0000:00:07.0", 0xff);
    assert_eq!(kind("0000:00:07.0"), FunctionKind::Endpoint);
}

#[test]
fn filters_select_endpoints_in_order() {
    let host = host();
    assert_eq!(select(&host, "00:04.0").unwrap(), ["0000:00:04.0"]);
    assert_eq!(
        select(&host, "vendor=8086,device=10c9").unwrap(),
        ["0000:00:05.0", "0000:00:05.1"]
    );
    assert_eq!(select(&host, "class=0108").unwrap(), ["0000:00:04.0"]);
    // The host bridge has this vendor too, and is never selected.
    assert_eq!(
        select(&host, "vendor=8086").unwrap(),
        ["0000:00:05.0", "0000:00:05.1"]
    );
}

#[test]
fn a_filter_that_matches_nothing_names_what_is_near() {
    let host = host();
    let near = |filter: &str| select(&host, filter).unwrap_err().to_string();
    assert!(near("00:05.7").contains("near it are 0000:00:05.0, 0000:00:05.1"));
    assert!(near("00:09.0").contains("0000:00:04.0"));
    assert!(near("20:09.0").contains("4 functions on other buses"));
    let device = near("vendor=8086,device=1111");
    assert!(
        device.contains("close are 0000:00:05.0 [8086:10c9]"),
        "{device}"
    );
    assert!(!device.contains("0000:00:04.0"), "{device}");
    let class = near("class=0300");
    assert!(class.contains("0000:00:04.0"), "{class}");
    let vfs = near("vfs-of:0000:00:05.0");
    assert!(vfs.contains("no SR-IOV"), "{vfs}");
}

#[test]
fn an_empty_host_is_an_error_not_a_panic() {
    let empty = tempfile::TempDir::new().unwrap();
    let pci = HostPci::at(empty.path());
    assert_eq!(pci.functions().unwrap(), []);
    let error = pci.select(&"class=01".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("no endpoints"), "{error}");
    assert!(matches!(
        pci.function(&bdf("00:04.0")),
        Err(PciError::NoFunction { .. })
    ));
}

#[test]
fn an_attribute_that_is_no_number_is_named() {
    let host = host();
    for (name, value) in [
        ("vendor", "8086"),
        ("vendor", "0x18086"),
        ("class", "0xzz"),
        ("dma_mask_bits", "many"),
    ] {
        let path = format!("sys/bus/pci/devices/0000:00:04.0/{name}");
        let before = host.read(&path);
        host.file(&path, value);
        let error = host.pci().function(&bdf("00:04.0")).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, PciError::Malformed { .. }), "{text}");
        assert!(text.contains(name) && text.contains(value), "{text}");
        host.file(&path, &before);
    }
}

#[test]
fn interrupts_are_counted_by_vector() {
    let host = host();
    host.file(
        "proc/interrupts",
        "      CPU0  CPU1\n 24:  5  6  IR-PCI-MSIX-0000:00:04.0  0-edge  vfio-msix[0](0000:00:04.0)\n",
    );
    let counts = host.pci().interrupt_counts(&bdf("00:04.0")).unwrap();
    assert_eq!(counts.len(), 1);
    assert_eq!((counts[0].vector, counts[0].count), (0, 11));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a driver's attributes contain, the query returns an answer or an error.
    #[test]
    fn no_attribute_makes_it_panic(
        name in prop::sample::select(vec![
            "vendor", "class", "dma_mask_bits", "driver_override", "sriov_totalvfs", "sriov_numvfs",
            "config",
        ]),
        bytes: Vec<u8>,
    ) {
        let host = MadeUpHost::new();
        host.function("0000:00:04.0", [1, 2], NVME, Some("nvme"));
        std::fs::write(host.path(&format!("sys/bus/pci/devices/0000:00:04.0/{name}")), &bytes).unwrap();
        let address: Bdf = bdf("00:04.0");
        let pci = host.pci();
        if let Err(error) = pci.function(&address) {
            prop_assert!(error.to_string().len() < 2000);
        }
        let _ = pci.usage(&address);
        let _ = pci.group(&address);
    }
}
