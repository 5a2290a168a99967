//! Peers that hold a connection and request nothing.

use std::{thread::sleep, time::Instant};

use farside_lender_protocol::{
    Channel, ChannelError, Envelope, Generation, Reply, Request, registers::Event,
};

use super::{
    device::SCRATCH,
    host::{DEADLINE, DEVICE, Host},
    lease::write,
};
use crate::connection::IDLE_TIMEOUT;

#[test]
fn an_idle_peer_is_dropped_and_one_that_requests_something_is_not() {
    let host = Host::new();
    let (mut idle, mut busy) = (host.hello("a"), host.hello("b"));
    // A part of a message is no request.
    let mut slow = host.hello("c");
    rustix::net::send(&slow.channel, &[1], rustix::net::SendFlags::NOSIGNAL).unwrap();
    let began = Instant::now();
    while began.elapsed() < IDLE_TIMEOUT + IDLE_TIMEOUT / 2 {
        busy.call(Request::Devices { after: None }, 0).unwrap();
        // That nothing happens within this time is what is tested.
        sleep(IDLE_TIMEOUT / 4);
    }
    for peer in [&mut idle, &mut slow] {
        let closed = peer.channel.receive::<Reply>(DEADLINE).unwrap_err();
        assert!(matches!(closed, ChannelError::Closed), "{closed}");
    }
    busy.call(Request::Devices { after: None }, 0).unwrap();
}

#[test]
fn a_lease_without_traffic_stays() {
    let host = Host::new();
    let (mut peer, token) = host.borrow("a");
    let mut registers = host.registers(token).unwrap();
    // Both connections are silent for longer than an idle peer may be.
    let silent = registers
        .receive::<Event>(IDLE_TIMEOUT + IDLE_TIMEOUT / 2)
        .unwrap_err();
    assert!(matches!(silent, ChannelError::TimedOut(_)), "{silent}");
    registers.send(&write(SCRATCH, 7), &[], DEADLINE).unwrap();
    peer.call(Request::Reset, 1).unwrap();
    assert_eq!(host.holder().as_deref(), Some("a"));
    let device = DEVICE.parse().unwrap();
    let status = host.client("b").status(&device).unwrap();
    assert!(status.entry.borrowed_by.is_some());
}

#[test]
fn refused_requests_before_hello_gain_no_time() {
    let host = Host::new();
    let mut peer = host.peer();
    let began = Instant::now();
    let refuse = |channel: &mut Channel| {
        let limits = Envelope {
            generation: Generation(0),
            accesses: 0,
            request: Request::Limits,
        };
        channel.send(&limits, &[], DEADLINE)?;
        channel.receive::<Reply>(DEADLINE)
    };
    while let Ok((reply, _)) = refuse(&mut peer.channel) {
        assert!(matches!(reply, Reply::Refused(_)), "{reply:?}");
        assert!(began.elapsed() < DEADLINE, "it is still connected");
    }
}
