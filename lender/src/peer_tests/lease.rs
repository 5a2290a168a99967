//! A lease from another host, from its grant to its end.

use std::{io::Write, os::fd::AsFd, time::Duration};

use farside_fabric::{Iova, PeerAddress};
use farside_irq_relay::{Action, IrqData, IrqEventFd, IrqIndex, IrqRange, IrqTarget, SetIrqs};
use farside_lender_protocol::{
    BarMemory, CallError, ChannelError, ErrorKind, IrqUpdate, Reply, Request, Transport,
    irq_counts,
    registers::{Access, Event},
};
use rustix::net::sockopt::{set_socket_linger, set_socket_recv_buffer_size};

use super::{
    device::{BAR, DOORBELL, Done, SCRATCH},
    host::{DEADLINE, DEVICE, DEVICES, Host, expect_closed, send_frame, until},
};

pub(super) fn write(offset: u64, value: u64) -> Access {
    Access::Write {
        bar: 0,
        offset,
        len: 8,
        value,
    }
}

const READ: Access = Access::Read {
    bar: 0,
    offset: SCRATCH,
    len: 8,
};

#[test]
fn a_device_is_used_and_returned_without_any_descriptor() {
    let host = Host::new();
    let mut client = host.client("a");
    client
        .check(&DEVICE.parse().unwrap(), Transport::Ntb, Vec::new())
        .unwrap();
    let lease = client
        .borrow_device(&DEVICE.parse().unwrap(), Transport::Ntb, &[])
        .unwrap();
    assert_eq!(lease.bars, [BarMemory::Peer { address: BAR }]);
    assert!(lease.files.is_empty());
    let mut registers = lease.registers;
    registers.send(&write(SCRATCH, 7), &[], DEADLINE).unwrap();
    registers.send(&READ, &[], DEADLINE).unwrap();
    let (event, _) = registers.receive::<Event>(DEADLINE).unwrap();
    assert_eq!(event, Event::Data { value: 7 });
    assert_eq!(client.open_window(Iova::new(0), BAR, 4096).unwrap(), 1);
    client.enable_bus_master().unwrap();
    // The interrupt arrives before the reply to a read that follows its cause.
    registers.send(&write(DOORBELL, 1), &[], DEADLINE).unwrap();
    registers.send(&READ, &[], DEADLINE).unwrap();
    let (event, _) = registers.receive::<Event>(DEADLINE).unwrap();
    assert!(matches!(event, Event::Interrupt(_)), "{event:?}");
    let (event, _) = registers.receive::<Event>(DEADLINE).unwrap();
    assert_eq!(event, Event::Data { value: 1 });
    client.return_device().unwrap();
    let gone = registers.receive::<Event>(DEADLINE).unwrap_err();
    assert!(matches!(gone, ChannelError::Closed), "{gone}");
    host.wait_until_free();
    let done = [
        Done::Begin,
        Done::Write(7),
        Done::Window,
        Done::BusMaster,
        Done::Write(1),
        Done::Close,
        Done::Settle,
        Done::End,
    ];
    assert_eq!(host.log(), done);
}

#[test]
fn what_needs_a_descriptor_is_refused_and_the_lease_stays() {
    let host = Host::new();
    let mut client = host.client("a");
    for refused in [
        client.check(
            &DEVICE.parse().unwrap(),
            Transport::SharedMemory,
            Vec::new(),
        ),
        client
            .borrow_device(&DEVICE.parse().unwrap(), Transport::SharedMemory, &[])
            .map(|_| ()),
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(&error, CallError::Refused(_)), "{error}");
        assert!(error.to_string().contains("through an NTB"), "{error}");
    }
    let _lease = client
        .borrow_device(&DEVICE.parse().unwrap(), Transport::Ntb, &[])
        .unwrap();
    let counts = irq_counts(
        &host
            .client("b")
            .describe(&DEVICE.parse().unwrap())
            .unwrap()
            .description,
    )
    .unwrap();
    let range = IrqRange::new(&counts, IrqIndex::Msix as u32, 0, 1).unwrap();
    let sinks = IrqData::Targets(vec![Some(IrqTarget::from(IrqEventFd::new().unwrap()))]);
    let request = SetIrqs::new(range, Action::Trigger, sinks).unwrap();
    let (update, fds) = IrqUpdate::new(&request, false);
    let file = tempfile::tempfile().unwrap();
    // Refused by the client, without a request to the lender.
    for refused in [
        client.set_irqs(update.clone(), &fds),
        client.map_peer(PeerAddress::new(0), 4096, file.as_fd(), 0, true),
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(&error, CallError::NotSent(_)), "{error}");
        assert!(error.to_string().contains("over TCP"), "{error}");
    }
    // Refused by the lender, from a client that does not check.
    let map_peer = client.set_irqs(update, &[]).unwrap_err();
    assert!(map_peer.to_string().contains("are relayed"), "{map_peer}");
    let (relayed, fds) = IrqUpdate::new(&request, true);
    assert!(fds.is_empty());
    client.set_irqs(relayed, &[]).unwrap();
    assert_eq!(host.holder().as_deref(), Some("a"));
}

#[test]
fn a_mapping_without_its_file_is_refused() {
    let host = Host::new();
    let (mut peer, token) = host.borrow("a");
    let _registers = host.registers(token).unwrap();
    let request = Request::MapPeer {
        peer_address: PeerAddress::new(0),
        len: 4096,
        offset: 0,
        writable: true,
    };
    let error = peer.call(request, 0).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.message.contains("TCP cannot carry"), "{error}");
}

#[test]
fn a_borrower_that_goes_in_any_way_gives_the_device_back() {
    let host = Host::new();
    // Before its register channel has connected.
    let (peer, _token) = host.borrow("a");
    drop(peer);
    host.wait_until_free();
    for how in [
        "FIN",
        "RST",
        "half closed",
        "registers FIN",
        "registers RST",
    ] {
        let (mut peer, token) = host.borrow("a");
        let mut registers = host.registers(token).unwrap();
        registers.send(&write(SCRATCH, 1), &[], DEADLINE).unwrap();
        peer.call(Request::EnableBusMaster, 1).unwrap();
        let at_once = Some(Duration::ZERO);
        match how {
            "FIN" => drop(peer),
            "RST" => {
                set_socket_linger(&peer.channel, at_once).unwrap();
                drop(peer);
            }
            "half closed" => {
                peer.channel.shut_down_sending().unwrap();
                // The lender closes the connection when everything is undone.
                let end = peer.channel.receive::<Reply>(DEADLINE).unwrap_err();
                assert!(matches!(end, ChannelError::Closed), "{end}");
                assert_eq!(host.holder(), None);
            }
            "registers FIN" => drop(registers),
            _ => {
                set_socket_linger(&registers, at_once).unwrap();
                drop(registers);
            }
        }
        host.wait_until_free();
    }
}

#[test]
fn a_lender_that_stops_is_noticed() {
    let host = Host::new();
    let mut client = host.client("a");
    let lease = client
        .borrow_device(&DEVICE.parse().unwrap(), Transport::Ntb, &[])
        .unwrap();
    let mut registers = lease.registers;
    drop(host);
    let gone = registers.receive::<Event>(DEADLINE).unwrap_err();
    assert!(matches!(gone, ChannelError::Closed), "{gone}");
    let error = client.enable_bus_master().unwrap_err();
    assert!(matches!(error, CallError::Lost(_)), "{error}");
}

#[test]
fn broken_frames_end_a_lease_and_half_ones_hold_nothing_up() {
    let host = Host::new();
    for bytes in [
        &u32::MAX.to_le_bytes()[..],
        &0u32.to_le_bytes(),
        &[2, 0, 0, 0, 0xff, 0xff],
    ] {
        let (peer, token) = host.borrow("a");
        let _registers = host.registers(token).unwrap();
        let mut socket = std::net::TcpStream::from(peer.channel.into_socket());
        socket.set_nonblocking(false).unwrap();
        // Half a frame on one connection; the other keeps working.
        socket.write_all(&bytes[..2]).unwrap();
        assert_eq!(host.holder().as_deref(), Some("a"));
        socket.write_all(&bytes[2..]).unwrap();
        expect_closed(socket);
        host.wait_until_free();
    }
    let (mut peer, token) = host.borrow("a");
    let registers = host.registers(token).unwrap();
    let mut socket = std::net::TcpStream::from(registers.into_socket());
    socket.set_nonblocking(false).unwrap();
    socket.write_all(&[9, 0]).unwrap();
    peer.call(Request::Reset, 0).unwrap();
    socket.write_all(&[0, 0]).unwrap();
    peer.call(Request::Reset, 0).unwrap();
    socket.write_all(&[0xff; 9]).unwrap();
    expect_closed(socket);
    host.wait_until_free();
}

/// A borrower that sends requests and does not read loses its own lease only.
#[test]
fn a_borrower_that_does_not_read_is_given_up() {
    let host = Host::new();
    let mut other = host.client("b");
    let lease = other
        .borrow_device(&DEVICES[1].parse().unwrap(), Transport::Ntb, &[])
        .unwrap();
    let mut others = lease.registers;
    let (_peer, token) = host.borrow("a");
    let mut registers = host.registers(token).unwrap();
    // A small buffer, so that little is in flight when the lender's send blocks.
    set_socket_recv_buffer_size(&registers, 4096).unwrap();
    until("the lender closes the channel", || {
        others.send(&READ, &[], DEADLINE).unwrap();
        others.receive::<Event>(DEADLINE).unwrap();
        loop {
            match registers.try_send(&READ, &[]) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(_) => return true,
            }
        }
    });
    host.wait_until_free();
    other.reset().unwrap();
}

#[test]
fn before_a_lease_garbage_and_silence_cost_a_peer_its_connection() {
    let host = Host::new();
    for bytes in [&[0xff; 9][..], &[0, 0, 0, 0], &[1, 0, 0, 0, 0xff]] {
        let mut socket = host.socket();
        socket.write_all(bytes).unwrap();
        expect_closed(socket);
    }
    let mut socket = host.socket();
    send_frame(&mut socket, &[0x80; 60_000]);
    expect_closed(socket);
    // Sends nothing, or an incomplete message. The timeout is short in tests.
    expect_closed(host.socket());
    let mut socket = host.socket();
    socket.write_all(&[200, 0, 0, 0, 1]).unwrap();
    expect_closed(socket);
    assert_eq!(host.holder(), None);
}
