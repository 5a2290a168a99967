//! The register file and the PCI function.

use super::{
    super::{
        ConfigError, Ntb, Port, PortConfig,
        regs::{
            ID, LUT, MSIX_PBA, MSIX_TABLE, REGISTERS_BAR, REGISTERS_SIZE, VERSION, caps, counts,
            lut_entry, reg, requester_entry,
        },
    },
    world::World,
};

#[test]
fn the_register_set_is_as_written_down() {
    let mut world = World::new();
    world.ntb = Ntb::new([
        PortConfig::default(),
        PortConfig {
            window_size: 4 << 30,
            lut_entries: 1024,
        },
    ])
    .unwrap();
    for port in Port::BOTH {
        assert_eq!(world.get32(port, reg::ID), ID);
        assert_eq!(world.get32(port, reg::VERSION), VERSION);
        assert_eq!(world.get32(port, reg::PORT), port.number());
        let has = world.get32(port, reg::COUNTS);
        assert_eq!(counts::doorbells(has), 32);
        assert_eq!(counts::scratchpads(has), 16);
        assert_eq!(counts::requesters(has), 32);
    }
    let (a, b) = (
        world.get32(Port::A, reg::CAPS),
        world.get32(Port::B, reg::CAPS),
    );
    assert_eq!((caps::window_shift(a), caps::lut_shift(a)), (30, 9));
    assert_eq!((caps::window_shift(b), caps::lut_shift(b)), (32, 10));
    assert_eq!(caps::address_align_shift(a), 12);
    assert_eq!(world.get32(Port::A, reg::PEER_CAPS), b);
    assert_eq!(world.get32(Port::B, reg::PEER_CAPS), a);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let sizes = |window_size, lut_entries| PortConfig {
        window_size,
        lut_entries,
    };
    let check = |sizes: PortConfig| Ntb::new([PortConfig::default(), sizes]).map(|_| ());
    for bad in [0, 1 << 19, 3 << 30, 1 << 41] {
        assert_eq!(check(sizes(bad, 1)), Err(ConfigError::WindowSize(bad)));
    }
    for bad in [0, 3, 8192] {
        let error = check(sizes(1 << 30, bad));
        assert_eq!(error, Err(ConfigError::LutEntries(bad)));
    }
    assert!(matches!(
        check(sizes(1 << 20, 512)),
        Err(ConfigError::Segment { most: 256, .. })
    ));
    check(sizes(1 << 20, 256)).unwrap();
    check(sizes(1 << 40, 1)).unwrap();
}

#[test]
fn a_lut_entry_keeps_address_and_valid_bit() {
    let mut world = World::new();
    world.put64(Port::A, lut_entry(1), !0);
    assert_eq!(world.get64(Port::A, lut_entry(1)), !0xffe);
    world.put32(Port::A, lut_entry(2) + 4, 0x12);
    world.put32(Port::A, lut_entry(2), 0x3456_7001);
    assert_eq!(world.get64(Port::A, lut_entry(2)), 0x12_3456_7001);
    // One byte.
    world.put(Port::A, lut_entry(2) + 4, &[0x13]);
    assert_eq!(world.get64(Port::A, lut_entry(2)), 0x13_3456_7001);
    // The LUT has 16 entries; higher offsets are reserved.
    world.put64(Port::A, lut_entry(16), !0);
    assert_eq!(world.get64(Port::A, lut_entry(16)), 0);
    assert_eq!(world.get64(Port::B, lut_entry(1)), 0);
}

#[test]
fn a_requester_entry_keeps_rid_and_valid_bit() {
    let mut world = World::new();
    world.put32(Port::A, requester_entry(31), !0);
    assert_eq!(world.get32(Port::A, requester_entry(31)), 0x8000_ffff);
    world.put32(Port::A, requester_entry(31) + 4, !0);
    assert_eq!(world.get32(Port::A, requester_entry(31) + 4), 0);
}

#[test]
fn msix_vectors_are_masked_first_and_their_pending_bits_are_told() {
    let mut world = World::new();
    assert_eq!(world.get32(Port::A, MSIX_TABLE + 32 * 16 + 12), 1);
    world.put64(Port::A, MSIX_TABLE + 16, 0x1234_5678_9abc_def0);
    assert_eq!(world.get64(Port::A, MSIX_TABLE + 16), 0x1234_5678_9abc_def0);
    world.hosts.pending = vec![(Port::A, 1), (Port::A, 32), (Port::B, 5)];
    assert_eq!(world.get64(Port::A, MSIX_PBA), 1 << 32 | 1 << 1);
    world.put64(Port::A, MSIX_PBA, !0);
    assert_eq!(world.get64(Port::B, MSIX_PBA), 1 << 5);
}

#[test]
fn accesses_of_any_alignment_see_the_same_bytes() {
    let mut world = World::new();
    world.put64(Port::A, lut_entry(0), 0x1122_3344_5566_7001);
    let whole = world.read_bar(Port::A, REGISTERS_BAR, 0, 0x10000).unwrap();
    for offset in [0, 0xe, LUT - 3, LUT + 1, 0xfff7] {
        for len in 0..=9 {
            let part = world.read_bar(Port::A, REGISTERS_BAR, offset, len);
            let from = offset as usize;
            assert_eq!(part.unwrap(), whole[from..from + len]);
        }
    }
    // Past the end of the BAR.
    let past = world.read_bar(Port::A, REGISTERS_BAR, REGISTERS_SIZE - 2, 4);
    assert_eq!(past.unwrap(), [0xff; 4]);
    let other = world.read_bar(Port::A, 4, 0, 4);
    assert_eq!(other.unwrap(), [0xff; 4]);
}

#[test]
fn what_is_read_only_stays() {
    let mut world = World::new();
    let before = world.read_bar(Port::A, REGISTERS_BAR, 0, 0x18).unwrap();
    world.put(Port::A, 0, &[0xff; 0x18]);
    let after = world.read_bar(Port::A, REGISTERS_BAR, 0, 0x18).unwrap();
    assert_eq!(before, after);
    world.put(Port::A, reg::ERROR_INFO, &[0xff; 0x24]);
    let errors = world.read_bar(Port::A, REGISTERS_BAR, reg::ERROR_INFO, 0x24);
    assert_eq!(errors.unwrap(), [0; 0x24]);
}
