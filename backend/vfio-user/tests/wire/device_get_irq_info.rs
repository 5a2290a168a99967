use farside_vfio_user::Errno;

use crate::harness::*;

#[test]
fn tells_each_type() {
    let mut wire = Wire::negotiated();
    // Eventfd 1, maskable 2, automasked 4, noresize 8: as the product reports them, and
    // for MSI, which this device lacks, as Linux does.
    for (index, flags, count) in [(0, 7, 1), (1, 9, 0), (2, 3, 8), (3, 9, 1), (4, 9, 1)] {
        let reply = wire.call(GET_IRQ_INFO, &words(&[16, 0, index, 0])).unwrap();
        assert_eq!(reply, words(&[16, flags, index, count]));
    }
}

#[test]
fn unknown_types_and_short_requests_are_refused() {
    let mut wire = Wire::negotiated();
    wire.refused(GET_IRQ_INFO, &words(&[16, 0, 5, 0]), Errno::INVAL);
    wire.refused(GET_IRQ_INFO, &words(&[16, 0, u32::MAX, 0]), Errno::INVAL);
    wire.refused(GET_IRQ_INFO, &words(&[15, 0, 0, 0]), Errno::INVAL);
    wire.refused(GET_IRQ_INFO, &words(&[16, 0, 0]), Errno::INVAL);
    wire.refused(GET_IRQ_INFO, &[], Errno::INVAL);
}
