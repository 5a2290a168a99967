use farside_vfio_user::Errno;

use crate::harness::*;

#[test]
fn reads_with_the_request_before_the_data() {
    let mut wire = Wire::negotiated();
    for count in [1, 2, 3, 4, 8, 100] {
        let reply = wire.call(REGION_READ, &access(0x10, 7, count)).unwrap();
        let data: Vec<u8> = (0x10..0x10 + count).map(|at| at as u8).collect();
        assert_eq!(reply, [access(0x10, 7, count), data].concat());
    }
}

#[test]
fn reads_nothing_when_nothing_is_asked() {
    let mut wire = Wire::negotiated();
    assert_eq!(
        wire.call(REGION_READ, &access(4, 7, 0)).unwrap(),
        access(4, 7, 0)
    );
}

#[test]
fn a_wrong_length_is_refused() {
    let mut wire = Wire::negotiated();
    let good = access(0, 7, 4);
    wire.refused(REGION_READ, &[], Errno::INVAL);
    wire.refused(REGION_READ, &good[..15], Errno::INVAL);
    wire.refused(REGION_READ, &[good, vec![0]].concat(), Errno::INVAL);
}

#[test]
fn unknown_regions_and_ranges_that_wrap_are_refused() {
    let mut wire = Wire::negotiated();
    wire.refused(REGION_READ, &access(0, 9, 4), Errno::INVAL);
    wire.refused(REGION_READ, &access(0, u32::MAX, 4), Errno::INVAL);
    wire.refused(REGION_READ, &access(u64::MAX, 7, 4), Errno::INVAL);
    wire.refused(REGION_READ, &access(u64::MAX - 3, 7, 4), Errno::INVAL);
}

#[test]
fn the_device_says_where_it_ends() {
    let mut wire = Wire::negotiated();
    wire.refused(REGION_READ, &access(4093, 7, 4), Errno::INVAL);
    wire.call(REGION_READ, &access(4092, 7, 4)).unwrap();
}

#[test]
fn more_than_was_agreed_is_too_big() {
    let mut wire = Wire::negotiated();
    wire.refused(REGION_READ, &access(0, 7, (1 << 20) + 1), Errno::TOOBIG);
    wire.refused(REGION_READ, &access(0, 7, u32::MAX), Errno::TOOBIG);
}
