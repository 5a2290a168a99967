//! A server at its limit of open files. In a separate process, since the limit is the
//! process's.

#[path = "support/device.rs"]
#[allow(dead_code, reason = "most of it is for the tests of single commands")]
mod device;
#[path = "wire/harness.rs"]
#[allow(dead_code, reason = "most of it is for the tests of single commands")]
mod harness;

use farside_vfio_user::Errno;
use harness::*;
use rustix::process::{Resource, getrlimit, setrlimit};

/// The kernel ends a read behind descriptors, even dropped ones: the server must read
/// the rest without another edge.
#[test]
fn a_request_behind_descriptors_that_were_dropped_is_served() {
    let mut wire = Wire::negotiated();
    wire.server.read_ahead();
    let canary = Canary::new();
    let before = getrlimit(Resource::Nofile);
    let mut none = before;
    none.current = Some(0);
    setrlimit(Resource::Nofile, none).unwrap();
    let map = [words(&[32, 3]), longs(&[0, 0x10000, 0x1000])].concat();
    wire.send_fds(&message(1, DMA_MAP, 0, &map), &[canary.fd()]);
    wire.send(&message(2, GET_INFO, 0, &words(&[16, 0, 0, 0])));
    wire.run().unwrap();
    setrlimit(Resource::Nofile, before).unwrap();
    let refused = wire.received().expect("a reply to the first");
    assert_eq!(
        (refused.id, refused.error),
        (1, Errno::INVAL.raw_os_error() as u32)
    );
    let served = wire.received().expect("a reply to the second");
    assert_eq!((served.id, served.error), (2, 0));
    assert!(canary.closed_elsewhere());
}
