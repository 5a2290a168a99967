use farside_vfio_user::Errno;

use crate::harness::*;

const DIRTY: u32 = 1;
const ALL: u32 = 2;

fn unmap(argsz: u32, flags: u32, address: u64, size: u64) -> Vec<u8> {
    [words(&[argsz, flags]), longs(&[address, size])].concat()
}

fn with_maps(pages: u64) -> Wire {
    let mut wire = Wire::negotiated();
    for page in 0..pages {
        let map = [words(&[32, 3]), longs(&[0, 0x1000 * page, 0x1000])].concat();
        wire.call(DMA_MAP, &map).unwrap();
    }
    wire
}

#[test]
fn answers_with_the_range() {
    let mut wire = with_maps(2);
    let request = unmap(24, 0, 0x1000, 0x1000);
    assert_eq!(wire.call(DMA_UNMAP, &request).unwrap(), request);
    assert_eq!(wire.device.dma, [(0, 0x1000, false)]);
}

#[test]
fn all_is_bit_one() {
    let mut wire = with_maps(5);
    let request = unmap(24, ALL, 0, 0);
    assert_eq!(wire.call(DMA_UNMAP, &request).unwrap(), request);
    assert!(wire.device.dma.is_empty());
}

#[test]
fn all_with_a_range_is_refused() {
    let mut wire = with_maps(1);
    wire.refused(DMA_UNMAP, &unmap(24, ALL, 0, 0x1000), Errno::INVAL);
    wire.refused(DMA_UNMAP, &unmap(24, ALL, 0x1000, 0), Errno::INVAL);
    assert_eq!(wire.device.dma.len(), 1);
}

#[test]
fn dirty_bitmaps_are_not_supported() {
    let mut wire = with_maps(1);
    // As a client sends it: struct vfio_user_bitmap follows.
    let request = [unmap(40, DIRTY, 0, 0x1000), longs(&[4096, 8])].concat();
    wire.refused(DMA_UNMAP, &request, Errno::NOTSUP);
    wire.refused(DMA_UNMAP, &unmap(24, DIRTY, 0, 0x1000), Errno::NOTSUP);
    wire.refused(DMA_UNMAP, &unmap(24, ALL | DIRTY, 0, 0), Errno::INVAL);
    wire.refused(DMA_UNMAP, &unmap(24, 4, 0, 0x1000), Errno::NOTSUP);
    assert_eq!(wire.device.dma.len(), 1);
}

#[test]
fn a_range_that_is_not_mapped_is_no_entry() {
    let mut wire = with_maps(2);
    wire.refused(DMA_UNMAP, &unmap(24, 0, 0x10000, 0x1000), Errno::NOENT);
    wire.refused(DMA_UNMAP, &unmap(24, 0, 0, 0x2000), Errno::NOENT);
    assert_eq!(wire.device.dma.len(), 2);
}

#[test]
fn ranges_that_are_empty_unaligned_or_wrap_are_refused() {
    let mut wire = with_maps(1);
    wire.refused(DMA_UNMAP, &unmap(24, 0, 0, 0), Errno::INVAL);
    wire.refused(DMA_UNMAP, &unmap(24, 0, 0, 1), Errno::INVAL);
    wire.refused(DMA_UNMAP, &unmap(24, 0, 0x2000, !0xfff), Errno::INVAL);
}

#[test]
fn a_wrong_length_is_refused() {
    let mut wire = with_maps(1);
    let good = unmap(24, 0, 0, 0x1000);
    for length in [0, 8, 23] {
        wire.refused(DMA_UNMAP, &good[..length], Errno::INVAL);
    }
    wire.refused(DMA_UNMAP, &[good, vec![0]].concat(), Errno::INVAL);
    wire.refused(DMA_UNMAP, &unmap(23, 0, 0, 0x1000), Errno::INVAL);
    assert_eq!(wire.device.dma.len(), 1);
}
