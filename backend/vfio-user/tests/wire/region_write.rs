use farside_vfio_user::Errno;

use crate::harness::*;

fn write(offset: u64, region: u32, data: &[u8]) -> Vec<u8> {
    [access(offset, region, data.len() as u32), data.to_vec()].concat()
}

#[test]
fn writes_and_echoes_the_request_without_the_data() {
    let mut wire = Wire::negotiated();
    for length in [1, 2, 3, 4, 8, 5000] {
        let data: Vec<u8> = (0..length).map(|n| n as u8 ^ 0x5a).collect();
        let reply = wire.call(REGION_WRITE, &write(0x20, 0, &data)).unwrap();
        assert_eq!(reply, access(0x20, 0, length));
        let read = wire.call(REGION_READ, &access(0x20, 0, length)).unwrap();
        assert_eq!(read[16..], data);
    }
}

#[test]
fn data_that_does_not_match_the_count_is_refused() {
    let mut wire = Wire::negotiated();
    wire.refused(REGION_WRITE, &[], Errno::INVAL);
    wire.refused(REGION_WRITE, &access(0, 0, 4)[..15], Errno::INVAL);
    wire.refused(REGION_WRITE, &access(0, 0, 4), Errno::INVAL);
    wire.refused(
        REGION_WRITE,
        &[access(0, 0, 4), vec![1; 3]].concat(),
        Errno::INVAL,
    );
    wire.refused(
        REGION_WRITE,
        &[access(0, 0, 4), vec![1; 5]].concat(),
        Errno::INVAL,
    );
    wire.refused(
        REGION_WRITE,
        &[access(0, 0, u32::MAX), vec![1; 4]].concat(),
        Errno::TOOBIG,
    );
    let read = wire.call(REGION_READ, &access(0, 0, 8)).unwrap();
    assert_eq!(read[16..], [0; 8], "nothing was written");
}

#[test]
fn unknown_regions_and_ranges_that_wrap_are_refused() {
    let mut wire = Wire::negotiated();
    wire.refused(REGION_WRITE, &write(0, 9, &[1]), Errno::INVAL);
    wire.refused(REGION_WRITE, &write(u64::MAX, 0, &[1]), Errno::INVAL);
    wire.refused(REGION_WRITE, &write(0x3fff, 0, &[1, 2]), Errno::INVAL);
}
