use farside_vfio_user::{ConnectionError, Errno, Refusal};

use crate::harness::*;

fn json(reply: &[u8]) -> serde_json::Value {
    let (nul, json) = reply[4..].split_last().unwrap();
    assert_eq!(*nul, 0);
    serde_json::from_slice(json).unwrap()
}

#[test]
fn offers_its_limits_to_a_client_that_names_none() {
    let mut wire = Wire::new();
    let mut payload = version_payload(0, 1, b"");
    payload.pop();
    let reply = wire.call(VERSION, &payload).unwrap();
    assert_eq!((get_u16(&reply, 0), get_u16(&reply, 2)), (0, 1));
    let caps = json(&reply);
    assert_eq!(
        caps,
        serde_json::json!({"capabilities": {
            "max_msg_fds": 16, "max_data_xfer_size": 1048576, "max_dma_maps": 65535,
            "pgsizes": 4096,
        }})
    );
    assert_eq!(wire.session.negotiated().unwrap().client_max_msg_fds, 1);
    wire.still_framed();
}

#[test]
fn takes_what_qemu_sends_and_answers_no_longer() {
    // QEMU receives the reply in the buffer of the request.
    let mut wire = Wire::new();
    let request = version_payload(
        0,
        0,
        br#"{"capabilities": {"migration": {"pgsize": 4096, "max_bitmap_size": 268435456},
            "max_msg_fds": 16, "max_data_xfer_size": 1048576, "pgsizes": 4096,
            "max_dma_maps": 65535, "write_multiple": true}}"#,
    );
    let reply = wire.call(VERSION, &request).unwrap();
    assert!(reply.len() <= request.len());
    assert_eq!(
        get_u16(&reply, 2),
        0,
        "the minor is at most what was proposed"
    );
    assert_eq!(json(&reply)["capabilities"]["write_multiple"], true);
    let negotiated = wire.session.negotiated().unwrap();
    assert!(negotiated.write_multiple);
    assert_eq!(negotiated.client_max_msg_fds, 16);
}

#[test]
fn answers_a_newer_minor_with_its_own() {
    let mut wire = Wire::new();
    let reply = wire.call(VERSION, &version_payload(0, 99, b"{}")).unwrap();
    assert_eq!(get_u16(&reply, 2), 1);
}

#[test]
fn ignores_capabilities_it_does_not_know() {
    let mut wire = Wire::new();
    let caps = br#"{"x": [1], "capabilities": {"twin_socket": {"supported": true}, "y": null}}"#;
    wire.call(VERSION, &version_payload(0, 1, caps)).unwrap();
}

#[test]
fn refuses_malformed_data_and_lets_the_client_try_again() {
    let bad: &[&[u8]] = &[
        b"",
        b"{",
        b"\"",
        b"[]",
        b"{}{}",
        b"{}\0",
        br#"{"capabilities": "23"}"#,
        br#"{"capabilities": []}"#,
        br#"{"capabilities": {"max_msg_fds": "foo"}}"#,
        br#"{"capabilities": {"max_msg_fds": -1}}"#,
        br#"{"capabilities": {"max_msg_fds": 1.5}}"#,
        br#"{"capabilities": {"max_data_xfer_size": 18446744073709551616}}"#,
        br#"{"capabilities": {"write_multiple": 1}}"#,
        b"\xff\xfe",
    ];
    for json in bad {
        let mut wire = Wire::new();
        wire.refused(VERSION, &version_payload(0, 1, json), Errno::INVAL);
    }
}

#[test]
fn refuses_deep_nesting_without_recursing_into_it() {
    let mut wire = Wire::new();
    let json = [br#"{"x":"#.as_slice(), &vec![b'['; 10_000]].concat();
    wire.refused(VERSION, &version_payload(0, 1, &json), Errno::INVAL);
}

#[test]
fn refuses_data_without_nul() {
    let mut wire = Wire::new();
    wire.refused(VERSION, &version_payload(0, 1, b"{}")[..6], Errno::INVAL);
}

#[test]
fn refuses_short_and_endless_data() {
    let mut wire = Wire::new();
    wire.refused(VERSION, &[], Errno::INVAL);
    let mut wire = Wire::new();
    wire.refused(VERSION, &[0; 3], Errno::INVAL);
    let mut wire = Wire::new();
    wire.refused(
        VERSION,
        &version_payload(0, 1, &vec![b' '; 20_000]),
        Errno::TOOBIG,
    );
}

#[test]
fn closes_on_another_major_after_saying_so() {
    let mut wire = Wire::new();
    wire.send(&message(7, VERSION, 0, &version_payload(1, 0, b"{}")));
    let error = wire.run().unwrap_err();
    assert!(matches!(
        error,
        ConnectionError::Protocol(Refusal::Version { major: 1, minor: 0 })
    ));
    let reply = wire.received().unwrap();
    assert_eq!(
        (reply.id, reply.error),
        (7, Errno::INVAL.raw_os_error() as u32)
    );
}

#[test]
fn refuses_anything_before_version() {
    for command in [
        DMA_MAP,
        DMA_UNMAP,
        GET_INFO,
        SET_IRQS,
        REGION_READ,
        RESET,
        6,
        16,
    ] {
        let mut wire = Wire::new();
        wire.refused(command, &[0; 32], Errno::INVAL);
        assert_eq!(wire.device.resets, 0);
    }
}

#[test]
fn refuses_a_second_version() {
    let mut wire = Wire::negotiated();
    wire.refused(VERSION, &version_payload(0, 0, b"{}"), Errno::INVAL);
    assert_eq!(wire.session.negotiated().unwrap().minor, 1);
}
