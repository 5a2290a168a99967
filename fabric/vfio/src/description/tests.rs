use farside_pci::Bdf;

use super::*;

fn area(offset: u64, len: u64) -> SparseMmapArea {
    SparseMmapArea { offset, len }
}

fn region(size: u64) -> Region {
    Region {
        can_map: true,
        size,
        file_offset: 0,
        sparse: None,
    }
}

fn regions(bars: &[(usize, u64)]) -> Vec<Region> {
    let mut regions = vec![region(0); 8];
    for &(bar, size) in bars {
        regions[bar] = region(size);
    }
    regions[7] = region(4096);
    regions
}

/// An NVMe device as a host that used it leaves it: BARs assigned, bus master on,
/// MSI-X enabled, in D3.
fn used_drive() -> Vec<u8> {
    let mut config = vec![0; 4096];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[0x36, 0x1b, 0x10, 0x00, 0x06, 0x04, 0x10, 0x00]);
    put(0x08, &[0x02, 0x02, 0x08, 0x01, 0x10, 0x40]);
    put(0x10, &[0x04, 0x00, 0x80, 0xfe, 0x01, 0x00, 0x00, 0x00]);
    put(0x18, &[0x01, 0xc0, 0, 0]);
    put(0x30, &[0x01, 0x00, 0x00, 0xfe]);
    put(0x34, &[0x40]);
    put(0x3c, &[0x0b, 0x01]);
    // MSI-X: 65 vectors, table at 0x2000, pending bits at 0x3000, both BAR 0.
    put(
        0x40,
        &[0x11, 0x60, 0x40, 0xc0, 0x00, 0x20, 0, 0, 0x00, 0x30, 0, 0],
    );
    put(0x60, &[0x01, 0x80, 0x03, 0x00, 0x0b, 0x81, 0, 0]);
    put(0x80, &[0x05, 0x00, 0xb7, 0x00]);
    config
}

fn bdf() -> Bdf {
    "0000:03:00.0".parse().unwrap()
}

fn describe_drive(config: Vec<u8>) -> Description {
    let counts = IrqCounts::new().with_intx().with_msi(8).unwrap();
    let counts = counts.with_msix(65).unwrap();
    let regions = regions(&[(0, 0x4000), (2, 0x20)]);
    describe(bdf(), config, &regions, counts).unwrap()
}

#[test]
fn a_used_drive_is_described_as_after_a_reset() {
    let found = describe_drive(used_drive());
    let word = |at: usize| u32::from_le_bytes(*found.config[at..].first_chunk().unwrap());
    assert_eq!(word(0x04), 0x0010_0000, "command register");
    assert_eq!(word(0x0c), 0, "cache line and latency");
    assert_eq!((word(0x10), word(0x14), word(0x18)), (4, 0, 1), "BARs");
    assert_eq!(word(0x30), 0, "expansion ROM");
    assert_eq!(word(0x3c), 0x0100, "interrupt line and pin");
    assert_eq!(word(0x40), 0x0040_6011, "MSI-X");
    assert_eq!(word(0x64), 0x0008, "power state");
    assert_eq!(word(0x80), 0x0086_0005, "MSI");
    assert_eq!(found.summary, "1b36:0010 NVMe controller at 0000:03:00.0");
    assert!(found.intx);
    assert_eq!((found.msi_vectors, found.msix_vectors), (8, 65));
    farside_config_space::ConfigSpace::new(&found).unwrap();
}

#[test]
fn bars_are_mappable_but_for_the_msix_pages() {
    let found = describe_drive(used_drive());
    let bar = found.bars[0].as_ref().unwrap();
    let prefetchable = false;
    assert_eq!(bar.kind, BarKind::Memory64 { prefetchable });
    assert_eq!(
        (bar.size, &bar.mappable[..]),
        (0x4000, &[area(0, 0x2000)][..])
    );
    assert_eq!(found.bars[1], None);
    let io = found.bars[2].as_ref().unwrap();
    assert_eq!((io.kind, io.size), (BarKind::Io, 0x20));
    assert!(io.mappable.is_empty());
}

#[test]
fn traps_take_whole_pages_out_of_what_the_kernel_allows() {
    let all = region(0x8000);
    assert_eq!(mappable(&all, &[]), [area(0, 0x8000)]);
    let table = [(0x1ff8, 0x10)];
    assert_eq!(
        mappable(&all, &table),
        [area(0, 0x1000), area(0x3000, 0x5000)]
    );
    let both = [(0x2000, 0x410), (0x7800, 0x10)];
    assert_eq!(
        mappable(&all, &both),
        [area(0, 0x2000), area(0x3000, 0x4000)]
    );
    assert!(mappable(&all, &[(0, 0x8000)]).is_empty());
    // A table that goes beyond its BAR: a broken device, or a hostile one.
    assert_eq!(mappable(&all, &[(0x7000, u64::MAX)]), [area(0, 0x7000)]);
    let sparse = Region {
        sparse: Some(vec![(0x4800, 0x10_0000), (0, 0x2800)]),
        ..all.clone()
    };
    assert_eq!(
        mappable(&sparse, &[]),
        [area(0, 0x2000), area(0x5000, 0x3000)]
    );
    assert!(mappable(&region(0x800), &[]).is_empty());
    assert!(
        mappable(
            &Region {
                can_map: false,
                ..all
            },
            &[]
        )
        .is_empty()
    );
}

#[test]
fn bridges_and_odd_sizes_are_refused() {
    let mut config = used_drive();
    config[HEADER_TYPE] = 0x81;
    let error = describe(bdf(), config, &regions(&[]), IrqCounts::new()).unwrap_err();
    assert!(error.to_string().contains("bridge"), "{error}");
    let regions = regions(&[(0, 0x3000)]);
    let error = describe(bdf(), used_drive(), &regions, IrqCounts::new()).unwrap_err();
    assert!(error.to_string().contains("BAR 0 of 0x3000"), "{error}");
}

#[test]
fn configuration_space_is_as_large_as_the_kernel_says() {
    assert_eq!(config_size(&regions(&[])), 4096);
    let mut small = regions(&[]);
    small[7].size = 256;
    assert_eq!(config_size(&small), 256);
    assert_eq!(config_size(&[]), 256);
}

#[test]
fn classes_have_names() {
    assert_eq!(class_text(0x01_08_02), "NVMe controller");
    assert_eq!(class_text(0x02_00_00), "Ethernet adapter");
    assert_eq!(class_text(0xff_00_00), "device of class ff0000");
}
