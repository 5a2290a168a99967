use farside_vfio_user::Errno;

use crate::harness::*;

#[test]
fn commands_that_exist_and_are_not_served() {
    let mut wire = Wire::negotiated();
    // Region I/O descriptors, DMA from client to server, dirty pages, device
    // feature, migration data.
    for command in [6, 11, 12, 14, 16, 17, 18] {
        for length in [0, 16, 40] {
            wire.refused(command, &vec![0; length], Errno::NOTSUP);
        }
    }
}

#[test]
fn commands_that_do_not_exist() {
    let mut wire = Wire::negotiated();
    for command in [0, 19, 999, u16::MAX] {
        wire.refused(command, &[], Errno::INVAL);
        wire.refused(command, &[0xff; 5000], Errno::INVAL);
    }
}
