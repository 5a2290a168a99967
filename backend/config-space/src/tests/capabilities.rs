use super::image::{Image, MSI, PCIE, PM, VENDOR, VPD, bar};
use super::*;
use farside_pci::BarKind;

const MSIX: u64 = 0xd0;

fn nvme() -> ConfigSpace {
    ConfigSpace::new(&Image::nvme().0).unwrap()
}

#[test]
fn the_list_goes_round_what_is_hidden() {
    let space = nvme();
    let expected = [
        (0x01, PM),
        (0x05, MSI),
        (0x10, PCIE),
        (0x11, MSIX),
        (0x09, VENDOR),
    ];
    assert_eq!(standard(&space), expected);
    for at in VPD..PCIE {
        assert_eq!(read_u8(&space, at), 0, "{at:#x} of a hidden capability");
    }
    let hidden: Vec<_> = space.hidden().iter().map(|h| (h.list, h.id)).collect();
    use policy::List::{Extended, Standard};
    assert_eq!(
        hidden,
        [
            (Standard, 0x03),
            (Extended, 0x10),
            (Extended, 0x18),
            (Extended, 0x7777)
        ]
    );
    assert!(
        space
            .hidden()
            .iter()
            .all(|h| !h.reason.is_empty() && !h.name.is_empty())
    );
}

#[test]
fn a_list_of_hidden_ones_is_no_list() {
    let mut image = Image::bare(256);
    image
        .link(0x34, 0x40)
        .standard(0x40, 0x03, 0x50)
        .standard(0x50, 0x14, 0);
    let space = ConfigSpace::new(&image.0).unwrap();
    assert_eq!((read_u16(&space, 6), read_u8(&space, 0x34)), (0, 0));
    assert_eq!(space.hidden().len(), 2);
}

#[test]
fn a_pointer_without_its_bit_is_not_followed() {
    let mut image = Image::bare(256);
    image.put(0x34, &[0x40]).standard(0x40, 0x01, 0);
    let space = ConfigSpace::new(&image.0).unwrap();
    assert!(standard(&space).is_empty() && space.hidden().is_empty());
}

#[test]
fn power_management_has_two_states_and_no_events() {
    let mut space = nvme();
    assert_eq!(read_u16(&space, PM + 2), 0x0003);
    assert_eq!(read_u16(&space, PM + 4), 0, "D0 after power-on");
    assert_eq!(space.power_state(), PowerState::D0);

    for unsupported in [1, 2] {
        assert!(write_u16(&mut space, PM + 4, unsupported).is_empty());
        assert_eq!(read_u16(&space, PM + 4), 0);
    }
    assert_eq!(
        list(write_u16(&mut space, PM + 4, 0xffff)),
        [Effect::PowerState(PowerState::D3hot)]
    );
    assert_eq!(read_u16(&space, PM + 4), 3);
    assert!(write_u16(&mut space, PM + 4, 1).is_empty());
    assert_eq!(space.power_state(), PowerState::D3hot);
}

#[test]
fn a_function_in_d3hot_neither_decodes_nor_masters() {
    let mut space = nvme();
    write_u16(&mut space, 4, 6);
    let staged = space.stage(PM + 4, &[3]);
    assert_eq!(staged.dma(), Edge::Falling);
    let effects = list(space.commit(staged));
    assert_eq!(
        effects,
        [
            Effect::BarMoved(0),
            Effect::BarMoved(2),
            Effect::PowerState(PowerState::D3hot)
        ]
    );
    assert!(space.bus_master() && !space.may_dma());
    assert_eq!(space.bar_address(0), None);
    assert_eq!(
        read_u32(&space, 0),
        0x0010_1b36,
        "configuration space still answers"
    );
}

#[test]
fn leaving_d3hot_resets_a_function_that_does_not_keep_its_state() {
    let mut space = nvme();
    write_u16(&mut space, 4, 6);
    space.write(PM + 4, &[3]);
    let staged = space.stage(PM + 4, &[0]);
    assert_eq!(staged.dma(), Edge::Steady);
    let effects = list(space.commit(staged));
    assert!(matches!(
        effects[..],
        [
            Effect::CommandChanged {
                bus_master: Edge::Falling,
                memory: Edge::Falling,
                ..
            },
            Effect::PowerState(PowerState::D0),
            Effect::Reset(ResetCause::LeftD3hot),
        ]
    ));
    assert_eq!(read_u16(&space, 4), 0);
}

#[test]
fn leaving_d3hot_with_state_kept_starts_dma_again_and_can_be_refused() {
    let mut image = Image::nvme();
    image.put_u32(PM as usize + 4, 8); // No_Soft_Reset
    let mut space = ConfigSpace::new(&image.0).unwrap();
    write_u16(&mut space, 4, 6);
    space.write(PM + 4, &[3]);

    let staged = space.stage(PM + 4, &[0]);
    assert_eq!(staged.dma(), Edge::Rising);
    assert_eq!(staged.effects().reset(), None);
    let mut staged = staged;
    staged.refuse_bus_master();
    assert_eq!(space.commit(staged).bus_master(), Edge::Falling);
    assert!(!space.may_dma() && space.power_state() == PowerState::D0);
    assert_eq!(read_u16(&space, 4), 2);
}

#[test]
fn msi_with_everything() {
    let mut space = nvme();
    assert_eq!(
        read_u16(&space, MSI + 2),
        0x0186,
        "not enabled after power-on"
    );
    write_u32(&mut space, MSI + 4, 0xfee0_1007);
    write_u32(&mut space, MSI + 8, 0x1);
    write_u16(&mut space, MSI + 0xc, 0x4123);
    write_u32(&mut space, MSI + 0x10, !0);
    write_u32(&mut space, MSI + 0x14, !0);
    assert_eq!(read_u32(&space, MSI + 4), 0xfee0_1004);
    assert_eq!(read_u32(&space, MSI + 0x10), 0xff, "a mask bit a vector");
    assert_eq!(
        read_u32(&space, MSI + 0x14),
        0,
        "pending bits are read-only"
    );

    let expected = Msi {
        enabled: true,
        vectors: 4,
        address: 0x1_fee0_1004,
        data: 0x4123,
        mask: 0xff,
    };
    let effects = list(write_u16(&mut space, MSI + 2, 0xff21 | 0x8e));
    assert_eq!(effects, [Effect::MsiChanged(expected)]);
    assert_eq!(read_u16(&space, MSI + 2), 0x01a7);
    assert_eq!(space.msi(), Some(expected));
    // More than the device has: limited to the device's number.
    write_u16(&mut space, MSI + 2, 0x71);
    assert_eq!(space.msi().unwrap().vectors, 8);
}

#[test]
fn msi_in_all_its_layouts() {
    for (control, length) in [
        (0x0000, 0x0a),
        (0x0080, 0x0e),
        (0x0100, 0x14),
        (0x0180, 0x18),
    ] {
        let mut image = Image::bare(256);
        // As near the end as possible.
        let at = (256 - length) & !3;
        image
            .link(0x34, at)
            .standard(at, 0x05, 0)
            .put(at as usize + 2, &(control as u16).to_le_bytes());
        image.0.msi_vectors = 1;
        let mut space = ConfigSpace::new(&image.0).unwrap();
        let (wide, masked) = (control & 0x80 != 0, control & 0x100 != 0);
        let data = at + if wide { 12 } else { 8 };
        write_u32(&mut space, at + 8, !0);
        write_u16(&mut space, data, 0xabcd);
        let msi = space.msi().unwrap();
        assert_eq!(msi.data, 0xabcd);
        assert_eq!(msi.address >> 32 != 0, wide);
        if masked {
            write_u32(&mut space, data + 4, !0);
            assert_eq!(space.msi().unwrap().mask, 1);
        }
        let mut end = image.clone();
        end.link(0x34, at + 4)
            .standard(at + 4, 0x05, 0)
            .put(at as usize + 6, &(control as u16).to_le_bytes());
        if at + 4 + length > 256 {
            assert!(matches!(
                ConfigSpace::new(&end.0),
                Err(ConfigSpaceError::CapabilityOutside { .. })
            ));
        }
    }
}

#[test]
fn msix_enables_and_masks_and_nothing_else() {
    let mut space = nvme();
    assert_eq!(read_u16(&space, MSIX + 2), 0x0040, "off after power-on");
    let on = Msix {
        enabled: true,
        function_mask: false,
    };
    assert_eq!(
        list(write_u16(&mut space, MSIX + 2, 0x8fff)),
        [Effect::MsixChanged(on)]
    );
    assert_eq!(read_u16(&space, MSIX + 2), 0x8040);
    let masked = Msix {
        enabled: true,
        function_mask: true,
    };
    assert_eq!(
        list(space.write(MSIX + 3, &[0xc0])),
        [Effect::MsixChanged(masked)]
    );
    write_u32(&mut space, MSIX + 4, !0);
    write_u32(&mut space, MSIX + 8, !0);
    assert_eq!(
        (read_u32(&space, MSIX + 4), read_u32(&space, MSIX + 8)),
        (0x2000, 0x3000)
    );
}

#[test]
fn msix_tables_must_be_in_a_memory_bar() {
    // 65 vectors: 1040 bytes of table, 16 of pending bits.
    for (table, pending) in [
        (0x2001, 0x3000),
        (0x2005, 0x3000),
        (0x2007, 0x3000),
        (0x3bf8, 0x3000),
        (0x2000, 0x3ff8),
        (0xffff_fff8, 0x3000),
    ] {
        let mut image = Image::nvme();
        image
            .put_u32(MSIX as usize + 4, table)
            .put_u32(MSIX as usize + 8, pending);
        let error = ConfigSpace::new(&image.0).unwrap_err();
        assert!(
            matches!(error, ConfigSpaceError::MsixOutside { .. }),
            "{error}"
        );
    }
    let mut image = Image::nvme();
    image
        .put_u32(MSIX as usize + 4, 0x3bf0)
        .put_u32(MSIX as usize + 8, 0x3ff0);
    ConfigSpace::new(&image.0).unwrap();
}

#[test]
fn vector_counts_must_agree() {
    for (msi, msix) in [(7, 65), (8, 64), (0, 65), (8, 0)] {
        let mut image = Image::nvme();
        image.0.msi_vectors = msi;
        image.0.msix_vectors = msix;
        let error = ConfigSpace::new(&image.0).unwrap_err();
        assert!(matches!(error, ConfigSpaceError::Vectors { .. }), "{error}");
    }
    let mut image = Image::bare(256);
    image.0.msix_vectors = 1;
    assert!(ConfigSpace::new(&image.0).is_err());
}

#[test]
fn reserved_numbers_of_msi_vectors_are_refused() {
    for (log2, vectors) in [(6u16, 64), (7, 128)] {
        let mut image = Image::nvme();
        let control: u16 = 0x01b1 | log2 << 1;
        image.put(MSI as usize + 2, &control.to_le_bytes());
        image.0.msi_vectors = vectors;
        let error = ConfigSpace::new(&image.0).unwrap_err();
        let expected =
            format!("the MSI capability at {MSI:#x} has {vectors} vectors; the most is 32");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn pci_express_takes_the_devices_controls_and_not_the_links() {
    let mut space = nvme();
    assert_eq!(read_u16(&space, PCIE + 8), 0x2810);
    assert_eq!(read_u16(&space, PCIE + 0xa), 0);
    assert_eq!(
        list(write_u16(&mut space, PCIE + 8, 0x7fff)),
        [Effect::PcieControl(0x79ff)]
    );
    assert_eq!(read_u16(&space, PCIE + 8), 0x79ff);
    write_u16(&mut space, PCIE + 0x10, !0);
    assert_eq!(read_u16(&space, PCIE + 0x10), 0x00cb);
    write_u16(&mut space, PCIE + 0x12, !0);
    assert_eq!(read_u16(&space, PCIE + 0x12), 0x1043);
    // Atomics, LTR, OBFF, TPH, prefixes are removed, timeouts stay.
    assert_eq!(read_u32(&space, PCIE + 0x24), 0x0010_001f);
    write_u16(&mut space, PCIE + 0x28, !0);
    assert_eq!(read_u16(&space, PCIE + 0x28), 0x031f);
    write_u32(&mut space, PCIE + 0x2c, !0);
    assert_eq!(read_u32(&space, PCIE + 0x2c), 0);
}

#[test]
fn a_function_level_reset_undoes_everything_and_stops_dma_first() {
    let mut space = nvme();
    let fresh = space.clone();
    write_u32(&mut space, 0x10, 0xfebf_0000);
    write_u16(&mut space, 4, 0x0406);
    write_u16(&mut space, MSIX + 2, 0x8000);
    write_u16(&mut space, PCIE + 8, 0x2950);

    let staged = space.stage(PCIE + 8, &0xa950_u16.to_le_bytes());
    assert_eq!(staged.dma(), Edge::Falling);
    let effects = list(space.commit(staged));
    assert!(matches!(
        effects[0],
        Effect::CommandChanged {
            bus_master: Edge::Falling,
            ..
        }
    ));
    assert_eq!(
        effects.last(),
        Some(&Effect::Reset(ResetCause::FunctionLevel))
    );
    assert!(effects.contains(&Effect::MsixChanged(Msix {
        enabled: false,
        function_mask: false
    })));
    assert_eq!(space.bytes, fresh.bytes);
    assert_eq!(read_u16(&space, PCIE + 8), 0x2810, "the bit reads 0");
    // Also by a write of the high byte alone.
    let effects = space.write(PCIE + 9, &[0x80]);
    assert_eq!(effects.reset(), Some(ResetCause::FunctionLevel));
}

#[test]
fn a_device_without_flr_does_not_reset() {
    let mut image = Image::nvme();
    image.put_u32(PCIE as usize + 4, 0x0000_8fe2);
    let mut space = ConfigSpace::new(&image.0).unwrap();
    assert!(write_u16(&mut space, PCIE + 8, 0xa810).is_empty());
    assert_eq!(read_u16(&space, PCIE + 8), 0x2810);
}

#[test]
fn only_endpoints_can_be_lent() {
    for port in [4, 5, 6, 7, 8, 10] {
        let mut image = Image::nvme();
        image.put(PCIE as usize + 2, &[port << 4 | 2]);
        assert_eq!(
            ConfigSpace::new(&image.0).unwrap_err(),
            ConfigSpaceError::PortType(port)
        );
    }
    for endpoint in [0, 1, 9] {
        let mut image = Image::nvme();
        image.put(PCIE as usize + 2, &[endpoint << 4 | 2]);
        ConfigSpace::new(&image.0).unwrap();
    }
}

#[test]
fn vendor_specific_is_as_it_is() {
    let mut space = nvme();
    space.write(VENDOR, &[0xff; 8]);
    let mut data = [0; 8];
    space.read(VENDOR, &mut data);
    assert_eq!(data, [9, 0, 8, 1, 2, 3, 4, 5]);
}

#[test]
fn advanced_features_reset_without_pci_express() {
    let mut image = Image::bare(256);
    image.0.bars[0] = Some(bar(
        0x1000,
        BarKind::Memory32 {
            prefetchable: false,
        },
    ));
    image
        .link(0x34, 0x40)
        .standard(0x40, 0x13, 0)
        .put(0x42, &[6, 3, 0, 1]);
    let mut space = ConfigSpace::new(&image.0).unwrap();
    write_u16(&mut space, 4, 6);
    let effects = list(space.write(0x44, &[1]));
    assert!(matches!(
        effects[..],
        [
            Effect::CommandChanged {
                bus_master: Edge::Falling,
                ..
            },
            Effect::BarMoved(0),
            Effect::Reset(ResetCause::FunctionLevel)
        ]
    ));
    assert_eq!(read_u16(&space, 0x44), 0);

    image.put(0x43, &[1]);
    let mut space = ConfigSpace::new(&image.0).unwrap();
    assert!(space.write(0x44, &[1]).is_empty());
}
