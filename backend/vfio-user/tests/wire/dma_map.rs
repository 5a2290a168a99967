use farside_vfio_user::Errno;

use crate::harness::*;

const LAST_PAGE: u64 = !0xfff;

fn map(argsz: u32, flags: u32, offset: u64, address: u64, size: u64) -> Vec<u8> {
    [words(&[argsz, flags]), longs(&[offset, address, size])].concat()
}

#[test]
fn maps_with_and_without_a_descriptor() {
    let mut wire = Wire::negotiated();
    let canary = Canary::new();
    let with = map(32, 3, 0x2000, 0, 0x1000);
    let reply = wire.call_fds(DMA_MAP, &with, &[canary.fd()]).unwrap();
    assert!(reply.payload.is_empty());
    let reply = wire.call(DMA_MAP, &map(32, 1, 0, 0x1000, 0x1000)).unwrap();
    assert!(reply.is_empty());
    assert_eq!(
        wire.device.dma,
        [(0, 0x1000, true), (0x1000, 0x1000, false)]
    );
}

#[test]
fn mapping_over_a_range_says_so() {
    let mut wire = Wire::negotiated();
    wire.call(DMA_MAP, &map(32, 3, 0, 0x1000, 0x2000)).unwrap();
    wire.refused(DMA_MAP, &map(32, 3, 0, 0x2000, 0x1000), Errno::EXIST);
}

#[test]
fn flags_that_newer_clients_set_are_ignored() {
    let mut wire = Wire::negotiated();
    wire.call(DMA_MAP, &map(32, 0xf, 0, 0, 0x1000)).unwrap();
}

#[test]
fn a_wrong_length_is_refused() {
    let mut wire = Wire::negotiated();
    let good = map(32, 3, 0, 0, 0x1000);
    for length in [0, 4, 31] {
        wire.refused(DMA_MAP, &good[..length], Errno::INVAL);
    }
    wire.refused(DMA_MAP, &[good, vec![0]].concat(), Errno::INVAL);
    wire.refused(DMA_MAP, &map(31, 3, 0, 0, 0x1000), Errno::INVAL);
    assert!(wire.device.dma.is_empty());
}

#[test]
fn ranges_that_are_empty_unaligned_or_wrap_are_refused() {
    let mut wire = Wire::negotiated();
    for (offset, address, size) in [
        (0, 0, 0),
        (0, 1, 0x1000),
        (0, 0, 0x1001),
        (1, 0, 0x1000),
        (0, 0, u64::MAX),
        (0, 0x2000, LAST_PAGE),
        (0, LAST_PAGE, 0x2000),
        (LAST_PAGE, 0, 0x1000),
    ] {
        wire.refused(DMA_MAP, &map(32, 3, offset, address, size), Errno::INVAL);
    }
    assert!(wire.device.dma.is_empty());
}

#[test]
fn the_last_page_of_the_address_space_can_be_mapped() {
    let mut wire = Wire::negotiated();
    wire.call(DMA_MAP, &map(32, 3, 0, LAST_PAGE, 0x1000))
        .unwrap();
}

#[test]
fn the_descriptor_of_a_refused_map_closed_elsewhere() {
    let mut wire = Wire::negotiated();
    let canary = Canary::new();
    let payload = map(32, 3, 0, 1, 0x1000);
    assert!(wire.call_fds(DMA_MAP, &payload, &[canary.fd()]).is_err());
    assert!(canary.closed_elsewhere());
    wire.still_framed();
}
