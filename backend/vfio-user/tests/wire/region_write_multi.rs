use farside_vfio_user::Errno;

use crate::harness::*;

fn record(offset: u64, region: u32, count: u32, data: [u8; 8]) -> Vec<u8> {
    [access(offset, region, count), data.to_vec()].concat()
}

fn multi(count: u64, records: &[Vec<u8>]) -> Vec<u8> {
    [longs(&[count]), records.concat()].concat()
}

#[test]
fn writes_in_order_and_says_how_many() {
    let mut wire = Wire::negotiated();
    let records = [
        record(0, 0, 8, [1; 8]),
        record(2, 0, 4, [2; 8]),
        record(3, 0, 1, [3; 8]),
        record(0x100, 7, 2, [4; 8]),
    ];
    assert_eq!(
        wire.call(WRITE_MULTI, &multi(4, &records)).unwrap(),
        longs(&[4])
    );
    let read = wire.call(REGION_READ, &access(0, 0, 8)).unwrap();
    assert_eq!(read[16..], [1, 1, 2, 3, 2, 2, 1, 1]);
}

#[test]
fn as_many_as_qemu_sends_without_a_reply() {
    let mut wire = Wire::negotiated();
    let records: Vec<_> = (0..200).map(|n| record(n, 0, 1, [n as u8; 8])).collect();
    wire.send(&message(1, WRITE_MULTI, NO_REPLY, &multi(200, &records)));
    wire.run().unwrap();
    assert!(wire.received().is_none());
    let read = wire.call(REGION_READ, &access(0, 0, 200)).unwrap();
    assert_eq!(read[16..], (0..200).collect::<Vec<u8>>());
}

#[test]
fn none_is_fine() {
    let mut wire = Wire::negotiated();
    assert_eq!(wire.call(WRITE_MULTI, &multi(0, &[])).unwrap(), longs(&[0]));
}

#[test]
fn a_count_that_does_not_match_is_refused() {
    let mut wire = Wire::negotiated();
    let one = [record(0, 0, 1, [9; 8])];
    for count in [0, 2, u64::MAX, u64::MAX / 24 + 2] {
        wire.refused(WRITE_MULTI, &multi(count, &one), Errno::INVAL);
    }
    wire.refused(WRITE_MULTI, &[], Errno::INVAL);
    wire.refused(WRITE_MULTI, &[0; 7], Errno::INVAL);
    wire.refused(WRITE_MULTI, &multi(1, &one)[..31], Errno::INVAL);
    wire.refused(
        WRITE_MULTI,
        &[multi(1, &one), vec![0]].concat(),
        Errno::INVAL,
    );
}

#[test]
fn one_bad_record_and_nothing_is_written() {
    let mut wire = Wire::negotiated();
    for bad in [
        record(0, 9, 1, [9; 8]),
        record(0, 0, 9, [9; 8]),
        record(0, 0, u32::MAX, [9; 8]),
        record(u64::MAX, 0, 1, [9; 8]),
    ] {
        let errno = wire
            .call(WRITE_MULTI, &multi(2, &[record(0, 0, 8, [9; 8]), bad]))
            .unwrap_err();
        assert!(errno == Errno::INVAL || errno == Errno::TOOBIG);
        wire.still_framed();
    }
    let read = wire.call(REGION_READ, &access(0, 0, 8)).unwrap();
    assert_eq!(read[16..], [0; 8]);
}
