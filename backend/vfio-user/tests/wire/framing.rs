use farside_vfio_user::serve::Pumped;
use farside_vfio_user::{ConnectionError, Errno, MAX_MESSAGE_SIZE, Refusal};

use crate::harness::*;

const GET_INFO_PAYLOAD: [u32; 4] = [16, 0, 0, 0];

#[test]
fn a_message_may_come_byte_by_byte() {
    let mut wire = Wire::negotiated();
    let bytes = message(9, GET_INFO, 0, &words(&GET_INFO_PAYLOAD));
    for byte in bytes {
        assert!(wire.received().is_none());
        wire.send(&[byte]);
        assert_eq!(wire.run().unwrap(), Pumped::Idle);
    }
    assert_eq!(wire.received().unwrap().payload, words(&[16, 3, 9, 5]));
    wire.still_framed();
}

#[test]
fn a_message_may_come_in_any_two_parts() {
    let mut wire = Wire::negotiated();
    let write = [access(0, 0, 8), vec![0xa5; 8]].concat();
    let bytes = message(9, REGION_WRITE, 0, &write);
    for split in 1..bytes.len() {
        wire.send(&bytes[..split]);
        wire.run().unwrap();
        assert!(wire.received().is_none());
        wire.send(&bytes[split..]);
        wire.run().unwrap();
        assert_eq!(wire.received().unwrap().payload, access(0, 0, 8));
    }
}

#[test]
fn many_messages_may_come_in_one_segment() {
    let mut wire = Wire::negotiated();
    let mut bytes = Vec::new();
    for id in 0..50 {
        bytes.extend(message(3 * id, RESET, 0, &[]));
        bytes.extend(message(3 * id + 1, REGION_READ, 0, &access(0, 7, 4)));
        bytes.extend(message(
            3 * id + 2,
            REGION_WRITE,
            0,
            &[access(0, 0, 1), vec![1]].concat(),
        ));
    }
    wire.send(&bytes);
    wire.run().unwrap();
    for id in 0..150 {
        let reply = wire.received().unwrap();
        assert_eq!((reply.id, reply.error), (id, 0), "in order");
    }
    assert_eq!(wire.device.resets, 50);
    wire.still_framed();
}

#[test]
fn a_budget_lets_others_have_their_turn() {
    let mut wire = Wire::negotiated();
    wire.send(&message(0, RESET, 0, &[]).repeat(3));
    let Wire {
        server,
        session,
        device,
        ..
    } = &mut wire;
    let pumped = farside_vfio_user::serve::pump(server, session, device, 2).unwrap();
    assert_eq!(pumped, Pumped::Budget);
    assert_eq!(wire.device.resets, 2);
    assert_eq!(wire.run().unwrap(), Pumped::Idle);
    assert_eq!(wire.device.resets, 3);
}

#[test]
fn a_size_below_the_header_ends_the_connection() {
    for size in [0, 1, 15] {
        let mut wire = Wire::negotiated();
        wire.send(&raw_message(5, GET_INFO, size, 0, &[]));
        let error = wire.run().unwrap_err();
        assert!(
            matches!(error, ConnectionError::Protocol(Refusal::ShorterThanHeader(s)) if s == size)
        );
        let reply = wire.received().unwrap();
        assert_eq!(
            (reply.id, reply.error),
            (5, Errno::INVAL.raw_os_error() as u32)
        );
    }
}

#[test]
fn the_body_of_a_message_that_is_too_long_is_thrown_away() {
    let mut wire = Wire::negotiated();
    let size = MAX_MESSAGE_SIZE + 1;
    wire.send(&raw_message(5, REGION_WRITE, size, 0, &[]));
    wire.run().unwrap();
    // Answered before the body has arrived.
    let reply = wire.received().unwrap();
    assert_eq!(
        (reply.id, reply.error),
        (5, Errno::TOOBIG.raw_os_error() as u32)
    );
    // A body that consists of messages, which must not be served.
    let mut body = message(6, RESET, 0, &[]).repeat(size as usize / 16);
    body.truncate(size as usize - 16);
    for part in body.chunks(10_007) {
        wire.send(part);
        assert_eq!(wire.run().unwrap(), Pumped::Idle);
    }
    assert!(wire.received().is_none());
    assert_eq!(wire.device.resets, 0);
    wire.still_framed();
}

#[test]
fn the_longest_message_is_served_and_its_buffer_is_given_back() {
    let mut wire = Wire::negotiated();
    // Longer than BAR 0: refused by the device, not by the protocol.
    let count = 1 << 20;
    let write = [access(0, 0, count), vec![0x5a; count as usize]].concat();
    let bytes = message(1, REGION_WRITE, 0, &write);
    assert_eq!(bytes.len(), MAX_MESSAGE_SIZE as usize);
    for part in bytes.chunks(50_000) {
        wire.send(part);
        wire.run().unwrap();
    }
    assert_eq!(
        wire.received().unwrap().error,
        Errno::INVAL.raw_os_error() as u32
    );
    wire.still_framed();
}

#[test]
fn unknown_types_are_refused() {
    let mut wire = Wire::negotiated();
    for kind in 2..16 {
        wire.send(&message(
            kind as u16,
            GET_INFO,
            kind,
            &words(&GET_INFO_PAYLOAD),
        ));
        wire.run().unwrap();
        let reply = wire.received().unwrap();
        assert_eq!(reply.id, kind as u16);
        assert_eq!(reply.error, Errno::INVAL.raw_os_error() as u32);
        wire.still_framed();
    }
}

#[test]
fn replies_are_ignored() {
    let mut wire = Wire::negotiated();
    wire.send(&message(1, RESET, 1, &[]));
    wire.send(&message(1, REGION_READ, 1 | 1 << 5, &access(0, 0, 4)));
    wire.run().unwrap();
    assert!(wire.received().is_none());
    assert_eq!(wire.device.resets, 0);
    wire.still_framed();
}

#[test]
fn no_reply_is_honoured_in_success_and_in_failure() {
    let mut wire = Wire::negotiated();
    wire.send(&message(1, RESET, NO_REPLY, &[]));
    wire.send(&message(2, RESET, NO_REPLY, &[0]));
    wire.send(&message(3, 999, NO_REPLY, &[]));
    wire.send(&message(4, REGION_READ, NO_REPLY, &access(0, 7, 4)));
    wire.run().unwrap();
    assert!(wire.received().is_none());
    assert_eq!(wire.device.resets, 1);
    wire.still_framed();
}

#[test]
fn a_client_that_goes_is_noticed() {
    let mut wire = Wire::negotiated();
    wire.client.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(matches!(wire.run(), Err(ConnectionError::Closed)));

    let mut wire = Wire::negotiated();
    wire.send(&[1, 2, 3]);
    wire.client.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(matches!(
        wire.run(),
        Err(ConnectionError::ClosedInMessage { received: 3 })
    ));
}

#[test]
fn what_came_before_the_client_went_is_served() {
    let mut wire = Wire::negotiated();
    wire.send(&message(1, RESET, 0, &[]));
    wire.client.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(matches!(wire.run(), Err(ConnectionError::Closed)));
    assert_eq!(wire.device.resets, 1);
    assert_eq!(wire.received().unwrap().error, 0);
}
