use farside_vfio_user::serve::Pumped;
use farside_vfio_user::{Errno, Reply};

use crate::harness::*;

#[test]
fn resets() {
    let mut wire = Wire::negotiated();
    assert!(wire.call(RESET, &[]).unwrap().is_empty());
    assert_eq!(wire.device.resets, 1);
}

#[test]
fn too_long_is_refused() {
    let mut wire = Wire::negotiated();
    wire.refused(RESET, &[0], Errno::INVAL);
    assert_eq!(wire.device.resets, 0);
}

#[test]
fn an_answer_may_come_later_and_holds_up_what_follows() {
    let mut wire = Wire::negotiated();
    wire.device.defer_reset = Some(None);
    wire.send(&message(1, RESET, 0, &[]));
    wire.send(&message(2, GET_INFO, 0, &words(&[16, 0, 0, 0])));
    assert_eq!(wire.run().unwrap(), Pumped::Later);
    assert!(wire.received().is_none());

    let to = wire.device.defer_reset.take().flatten().unwrap();
    wire.server.send(to, Ok(Reply::Done)).unwrap();
    assert_eq!(wire.run().unwrap(), Pumped::Idle);
    assert_eq!(wire.received().unwrap().id, 1);
    assert_eq!(wire.received().unwrap().id, 2);
}

/// The event loop is told of the third request once, while the first is held.
#[test]
fn what_arrives_while_an_answer_is_due_is_served_after_what_was_read_before() {
    let mut wire = Wire::negotiated();
    wire.server.read_ahead();
    wire.device.defer_reset = Some(None);
    let info = |id| message(id, GET_INFO, 0, &words(&[16, 0, 0, 0]));
    wire.send(&message(1, RESET, 0, &[]));
    wire.send(&info(2));
    assert_eq!(wire.run().unwrap(), Pumped::Later);
    wire.send(&info(3));

    let to = wire.device.defer_reset.take().flatten().unwrap();
    wire.server.send(to, Ok(Reply::Done)).unwrap();
    assert_eq!(wire.run().unwrap(), Pumped::Idle);
    for id in 1..=3 {
        assert_eq!(wire.received().unwrap().id, id);
    }
}
