use farside_vfio_user::Errno;

use crate::harness::*;

#[test]
fn tells_a_resettable_pci_device() {
    let mut wire = Wire::negotiated();
    assert_eq!(
        wire.call(GET_INFO, &words(&[16, 0, 0, 0])).unwrap(),
        words(&[16, 3, 9, 5])
    );
}

#[test]
fn a_larger_buffer_gets_what_there_is() {
    let mut wire = Wire::negotiated();
    let payload = [words(&[64, 0, 0, 0]), vec![0; 48]].concat();
    assert_eq!(
        wire.call(GET_INFO, &payload).unwrap(),
        words(&[16, 3, 9, 5])
    );
    wire.still_framed();
}

#[test]
fn too_short_is_refused() {
    let mut wire = Wire::negotiated();
    wire.refused(GET_INFO, &[], Errno::INVAL);
    wire.refused(GET_INFO, &words(&[16, 0]), Errno::INVAL);
    wire.refused(GET_INFO, &words(&[16, 0, 0]), Errno::INVAL);
    wire.refused(GET_INFO, &words(&[15, 0, 0, 0]), Errno::INVAL);
}
