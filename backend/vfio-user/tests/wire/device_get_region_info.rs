use farside_vfio_user::Errno;

use crate::device::{BAR0_FILE_OFFSET, BAR0_SIZE, BAR2_SIZE, CONFIG_SIZE};
use crate::harness::*;

const READ: u32 = 1;
const WRITE: u32 = 2;
const MMAP: u32 = 4;
const CAPS: u32 = 8;

fn request(argsz: u32, index: u32) -> Vec<u8> {
    [words(&[argsz, 0, index, 0]), longs(&[0, 0])].concat()
}

fn info(argsz: u32, flags: u32, index: u32, caps: u32, size: u64, offset: u64) -> Vec<u8> {
    [words(&[argsz, flags, index, caps]), longs(&[size, offset])].concat()
}

#[test]
fn a_region_without_mapping() {
    let mut wire = Wire::negotiated();
    let reply = wire
        .call_fds(GET_REGION_INFO, &request(32, 7), &[])
        .unwrap();
    assert_eq!(reply.payload, info(32, READ | WRITE, 7, 0, CONFIG_SIZE, 0));
    assert!(reply.fds.is_empty());
}

#[test]
fn regions_that_are_absent_have_no_size() {
    let mut wire = Wire::negotiated();
    for index in [1, 3, 4, 5, 6, 8] {
        let reply = wire.call(GET_REGION_INFO, &request(32, index)).unwrap();
        assert_eq!(reply, info(32, 0, index, 0, 0, 0));
    }
}

#[test]
fn a_region_that_is_mappable_as_a_whole_needs_no_capability() {
    let mut wire = Wire::negotiated();
    let reply = wire
        .call_fds(GET_REGION_INFO, &request(32, 2), &[])
        .unwrap();
    assert_eq!(
        reply.payload,
        info(32, READ | WRITE | MMAP, 2, 0, BAR2_SIZE, 0)
    );
    assert_eq!(reply.fds.len(), 1);
}

#[test]
fn sparse_areas_come_with_a_descriptor() {
    let mut wire = Wire::negotiated();
    for argsz in [64, 65, 4096, u32::MAX] {
        let reply = wire
            .call_fds(GET_REGION_INFO, &request(argsz, 0), &[])
            .unwrap();
        let flags = READ | WRITE | MMAP | CAPS;
        let head = info(64, flags, 0, 32, BAR0_SIZE, BAR0_FILE_OFFSET);
        // id 1, version 1, no next; one area.
        let cap = [words(&[1 | 1 << 16, 0, 1, 0]), longs(&[0x1000, 0x1000])].concat();
        assert_eq!(reply.payload, [head, cap].concat());
        assert_eq!(reply.fds.len(), 1);
        wire.still_framed();
    }
}

#[test]
fn a_small_argsz_learns_what_it_needs_and_nothing_it_could_misuse() {
    let mut wire = Wire::negotiated();
    for argsz in [32, 63] {
        let reply = wire
            .call_fds(GET_REGION_INFO, &request(argsz, 0), &[])
            .unwrap();
        assert_eq!(reply.payload, info(64, READ | WRITE, 0, 0, BAR0_SIZE, 0));
        assert!(reply.fds.is_empty());
        wire.still_framed();
    }
}

#[test]
fn the_buffer_to_fill_may_be_sent() {
    let mut wire = Wire::negotiated();
    let payload = [request(64, 0), vec![0; 32]].concat();
    assert_eq!(wire.call(GET_REGION_INFO, &payload).unwrap().len(), 64);
    wire.still_framed();
}

#[test]
fn unknown_regions_and_short_requests_are_refused() {
    let mut wire = Wire::negotiated();
    wire.refused(GET_REGION_INFO, &request(32, 9), Errno::INVAL);
    wire.refused(GET_REGION_INFO, &request(32, u32::MAX), Errno::INVAL);
    wire.refused(GET_REGION_INFO, &request(31, 0), Errno::INVAL);
    wire.refused(GET_REGION_INFO, &request(32, 0)[..31], Errno::INVAL);
    wire.refused(GET_REGION_INFO, &[], Errno::INVAL);
}
