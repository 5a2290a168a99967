//! Clients that do not read.

use std::io::Read;

use farside_vfio_user::serve::Pumped;
use farside_vfio_user::{ConnectionError, MAX_QUEUED_BYTES, Reply};

use crate::harness::*;

#[test]
fn a_client_that_does_not_read_is_stopped_and_goes_on_when_it_reads() {
    let mut wire = Wire::negotiated();
    let request = message(1, REGION_READ, 0, &access(0, 0, 0x4000));
    let mut asked = 0;
    while wire.run().unwrap() == Pumped::Idle {
        wire.send(&request);
        asked += 1;
    }
    // The server stopped with queued replies, and serves no more requests.
    assert!(wire.server.wants_write());
    wire.send(&message(2, RESET, 0, &[]));
    assert_eq!(wire.run().unwrap(), Pumped::Full);
    assert_eq!(wire.device.resets, 0);

    let mut got = 0;
    let mut reply = vec![0; 32 + 0x4000];
    wire.client.set_nonblocking(false).unwrap();
    while got < asked {
        wire.run().unwrap();
        wire.client.read_exact(&mut reply).unwrap();
        assert_eq!(get_u32(&reply, 4) as usize, reply.len());
        got += 1;
    }
    wire.client.set_nonblocking(true).unwrap();
    assert_eq!(wire.run().unwrap(), Pumped::Idle);
    assert_eq!(wire.received().unwrap().id, 2);
    wire.still_framed();
}

#[test]
fn replies_that_wait_are_bounded() {
    // A backend that ignores `wants_write`.
    let mut wire = Wire::negotiated();
    wire.send(&message(1, RESET, 0, &[]));
    let to = wire.server.receive().unwrap().unwrap().header.reply_to();
    let data = vec![0; 1 << 20];
    let region = farside_vfio_user::Region::Config;
    let mut sent = 0;
    let error = loop {
        match wire.server.send(
            to,
            Ok(Reply::RegionRead {
                region,
                offset: 0,
                data: &data,
            }),
        ) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, ConnectionError::ClientDoesNotRead { .. }));
    assert!(sent << 20 <= MAX_QUEUED_BYTES + (1 << 20));
}

#[test]
fn a_descriptor_waits_with_its_reply() {
    let mut wire = Wire::negotiated();
    let read = message(1, REGION_READ, 0, &access(0, 0, 0x4000));
    while wire.run().unwrap() == Pumped::Idle {
        wire.send(&read);
    }
    let mut waiting = 0;
    wire.send(&message(2, RESET, NO_REPLY, &[]));
    let to = {
        // Directly by the server: another region info.
        wire.server.receive().unwrap().unwrap().header
    };
    let mut to = to;
    to.flags = 0;
    let file = std::fs::File::open("/dev/null").unwrap();
    let info = farside_vfio_user::RegionInfo {
        region: farside_vfio_user::Region::Bar(0),
        size: 0x1000,
        readable: true,
        writable: true,
        mappable: Some(farside_vfio_user::Mappable {
            fd: std::os::fd::AsFd::as_fd(&file),
            offset: 0,
            areas: &[],
        }),
    };
    wire.server
        .send(to.reply_to(), Ok(Reply::RegionInfo { info, argsz: 32 }))
        .unwrap();
    drop(file);
    let last = loop {
        wire.server.flush().unwrap();
        match wire.received() {
            Some(reply) if reply.id == 1 => {
                assert!(reply.fds.is_empty());
                waiting += 1;
            }
            Some(reply) => break reply,
            None => panic!("the reply got lost after {waiting} others"),
        }
    };
    assert_eq!(last.fds.len(), 1);
}
