use farside_pci::BarKind;
use farside_pci::regs::STATUS_INTERRUPT;

use super::image::{Image, bar};
use super::*;

fn nvme() -> ConfigSpace {
    ConfigSpace::new(&Image::nvme().0).unwrap()
}

#[test]
fn identity_is_read_only() {
    let mut space = nvme();
    assert!(write_u32(&mut space, 0, !0).is_empty());
    assert!(write_u32(&mut space, 8, !0).is_empty());
    assert_eq!(read_u32(&space, 0), 0x0010_1b36);
    assert_eq!(read_u32(&space, 8), 0x0108_0202);
}

#[test]
fn the_function_is_alone_whatever_it_is_at_home() {
    assert_eq!(read_u8(&nvme(), 0x0e), 0);
}

#[test]
fn the_command_register_takes_what_the_function_has() {
    let mut space = nvme();
    write_u16(&mut space, 4, !0);
    assert_eq!(read_u16(&space, 4), 0x0547);
    let mut bare = ConfigSpace::new(&Image::bare(256).0).unwrap();
    write_u16(&mut bare, 4, !0);
    assert_eq!(read_u16(&bare, 4), 0x0544, "no BARs: no decoding to enable");
}

#[test]
fn the_image_may_have_been_in_use() {
    let mut image = Image::nvme();
    image.put(4, &[0x07, 0x04]);
    let space = ConfigSpace::new(&image.0).unwrap();
    assert_eq!(read_u16(&space, 4), 0);
    assert!(!space.may_dma());
}

#[test]
fn changes_of_the_command_register_are_told() {
    let mut space = nvme();
    let effects = list(write_u16(&mut space, 4, 0x0406));
    assert_eq!(
        effects[0],
        Effect::CommandChanged {
            bus_master: Edge::Rising,
            memory: Edge::Rising,
            io: Edge::Steady,
            intx_disable: Edge::Rising,
        }
    );
    // Neither the same value nor reserved bits are a change.
    assert!(write_u16(&mut space, 4, 0x0406).is_empty());
    assert!(write_u16(&mut space, 4, 0x0546).is_empty());
    assert!(space.intx_disabled() && space.bus_master() && space.may_dma());

    assert_eq!(write_u16(&mut space, 4, 0).bus_master(), Edge::Falling);
}

#[test]
fn error_bits_of_the_status_register_start_clear() {
    let mut image = Image::nvme();
    image.put(7, &[0xf9]);
    assert_eq!(read_u16(&ConfigSpace::new(&image.0).unwrap(), 6), 0x0010);
}

#[test]
fn bars_are_sized_by_writing_ones() {
    let mut space = nvme();
    let expected = [0xffff_c004, !0, 0xffff_f008, 0, 0, 0xffff_ffe1];
    for (bar, expected) in (0..).zip(expected) {
        write_u32(&mut space, 0x10 + 4 * bar, !0);
        assert_eq!(read_u32(&space, 0x10 + 4 * bar), expected, "BAR {bar}");
    }
}

#[test]
fn there_is_no_expansion_rom() {
    let mut image = Image::nvme();
    image.put_u32(0x30, 0xc000_0001);
    let mut space = ConfigSpace::new(&image.0).unwrap();
    write_u32(&mut space, 0x30, !0);
    assert_eq!(read_u32(&space, 0x30), 0);
}

#[test]
fn bar_addresses_are_known_while_they_are_decoded() {
    let mut space = nvme();
    assert!(write_u32(&mut space, 0x10, 0xfebf_0000).is_empty());
    assert!(write_u32(&mut space, 0x14, 0x12).is_empty());
    assert!(write_u32(&mut space, 0x24, 0xc0e1).is_empty());
    assert_eq!(space.bar_address(0), None);

    let effects = list(write_u16(&mut space, 4, 2));
    assert_eq!(effects[1..], [Effect::BarMoved(0), Effect::BarMoved(2)]);
    assert_eq!(
        space.bar_address(0),
        Some(GuestBarAddress::Memory(0x12_febf_0000))
    );
    assert_eq!(space.bar_address(1), None);
    assert_eq!(space.bar_address(5), None);

    let effects = list(write_u16(&mut space, 4, 3));
    assert_eq!(effects[1..], [Effect::BarMoved(5)]);
    assert_eq!(space.bar_address(5), Some(GuestBarAddress::Io(0xc0e0)));

    assert_eq!(
        list(write_u32(&mut space, 0x14, 0x13)),
        [Effect::BarMoved(0)]
    );
    assert_eq!(space.bar_address(6), None);
    assert_eq!(space.bar_address(255), None);
}

#[test]
fn the_interrupt_pin_is_there_if_the_line_is() {
    let mut image = Image::nvme();
    assert_eq!(read_u8(&ConfigSpace::new(&image.0).unwrap(), 0x3d), 1);
    image.put(0x3d, &[9]);
    assert_eq!(read_u8(&ConfigSpace::new(&image.0).unwrap(), 0x3d), 1);
    image.0.intx = false;
    assert_eq!(read_u8(&ConfigSpace::new(&image.0).unwrap(), 0x3d), 0);
}

/// All other reads are served locally.
#[test]
fn interrupt_status_is_the_devices_while_intx_is_in_use() {
    let mut space = nvme();
    let shapes = [(6, 1, 0), (6, 2, 0), (4, 4, 2), (5, 2, 1), (0, 64, 6)];
    for (offset, len, at) in shapes {
        assert_eq!(space.interrupt_status_at(offset, len), Some(at));
    }
    let beside = [(4, 2), (7, 1), (8, 4), (6, 0), (0, 6), (u64::MAX, 8)];
    for (offset, len) in beside {
        assert_eq!(space.interrupt_status_at(offset, len), None, "{offset:#x}");
    }
    // INTx disable has no effect on it.
    write_u16(&mut space, 4, COMMAND_INTX_DISABLE);
    assert_eq!(space.interrupt_status_at(6, 2), Some(0));
    for id in [0x05, 0x11] {
        let (_, at) = *standard(&space).iter().find(|(has, _)| *has == id).unwrap();
        let before = read_u16(&space, at + 2);
        let enable = if id == 0x05 { 1 } else { 1 << 15 };
        write_u16(&mut space, at + 2, before | enable);
        assert_eq!(space.interrupt_status_at(6, 2), None, "{id:#x} is on");
        write_u16(&mut space, at + 2, before);
        assert_eq!(space.interrupt_status_at(6, 2), Some(0));
    }
    let mut image = Image::nvme();
    image.0.intx = false;
    let space = ConfigSpace::new(&image.0).unwrap();
    assert_eq!(space.interrupt_status_at(6, 2), None, "it has no pin");
}

/// The image's Interrupt Status is not passed on: it may be outdated.
#[test]
fn interrupt_status_of_the_image_is_not_kept() {
    let mut image = Image::nvme();
    image.put(6, &[0x10 | STATUS_INTERRUPT as u8]);
    let space = ConfigSpace::new(&image.0).unwrap();
    assert_eq!(read_u16(&space, 6), 0x10);
}

#[test]
fn scratch_registers_of_the_system_take_anything() {
    let mut space = nvme();
    assert!(space.write(0x3c, &[0x0b]).is_empty());
    assert!(space.write(0x0c, &[0x10, 0x20]).is_empty());
    assert_eq!(read_u8(&space, 0x3c), 0x0b);
    assert_eq!(
        read_u16(&space, 0x0c),
        0x0010,
        "PCI Express has no latency timer"
    );
}

#[test]
fn past_the_end_is_nothing() {
    let mut space = ConfigSpace::new(&Image::bare(256).0).unwrap();
    assert_eq!(space.size(), 256);
    assert_eq!(read_u32(&space, 254), 0xffff_0000);
    assert_eq!(read_u32(&space, 256), !0);
    assert_eq!(read_u32(&space, u64::MAX - 1), !0);
    assert!(write_u32(&mut space, 254, 0).is_empty());
    assert!(write_u32(&mut space, u64::MAX, 0).is_empty());
    space.read(0, &mut []);
    assert!(space.write(4, &[]).is_empty());
}

#[test]
fn impossible_bars_are_errors() {
    let cases = [
        (
            0,
            bar(
                0x1001,
                BarKind::Memory32 {
                    prefetchable: false,
                },
            ),
        ),
        (
            0,
            bar(
                0,
                BarKind::Memory32 {
                    prefetchable: false,
                },
            ),
        ),
        (
            0,
            bar(
                8,
                BarKind::Memory32 {
                    prefetchable: false,
                },
            ),
        ),
        (
            0,
            bar(
                1 << 32,
                BarKind::Memory32 {
                    prefetchable: false,
                },
            ),
        ),
        (5, bar(0x1000, BarKind::Memory64 { prefetchable: true })),
        (1, bar(0x1000, BarKind::Memory64 { prefetchable: true })),
        (0, bar(2, BarKind::Io)),
        (0, bar(1 << 17, BarKind::Io)),
    ];
    for (index, wrong) in cases {
        let mut image = Image::bare(256);
        image.0.bars[2] = Some(bar(
            0x1000,
            BarKind::Memory32 {
                prefetchable: false,
            },
        ));
        image.0.bars[index] = Some(wrong);
        let error = ConfigSpace::new(&image.0).unwrap_err();
        assert!(
            matches!(error, ConfigSpaceError::Bar { bar, .. } if bar == index),
            "{error}"
        );
    }
}

#[test]
fn the_largest_bar_works() {
    let mut image = Image::bare(256);
    image.0.bars[0] = Some(bar(1 << 63, BarKind::Memory64 { prefetchable: true }));
    let mut space = ConfigSpace::new(&image.0).unwrap();
    write_u32(&mut space, 0x10, !0);
    write_u32(&mut space, 0x14, !0);
    assert_eq!(
        (read_u32(&space, 0x10), read_u32(&space, 0x14)),
        (0xc, 0x8000_0000)
    );
}

#[test]
fn a_rom_has_a_bar_of_its_size() {
    let mut space = ConfigSpace::new(&Image::nvme().0).unwrap();
    write_u32(&mut space, 0x30, !0);
    assert_eq!(read_u32(&space, 0x30), 0, "no ROM");
    space.add_rom(0xfe00);
    write_u32(&mut space, 0x30, !0);
    assert_eq!(read_u32(&space, 0x30), 0xffff_0001);
    space.reset();
    assert_eq!(read_u32(&space, 0x30), 0);
}
