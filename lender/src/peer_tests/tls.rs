//! A lease over TLS, whose two connections are one host's.

use std::{io::Write, path::PathBuf};

use farside_lender_protocol::{
    CallError, Channel, ChannelError, Client, Envelope, Generation, Registers, RemoteError, Reply,
    Request, Transport, VERSION,
    registers::{Access, Event},
};
use farside_pki::{
    Renewed, Side,
    issue::{self, Validity},
};

use super::host::{DEADLINE, DEVICE, Host, expect_closed, until};

/// A CA's directory, with those of two hosts.
struct Site(tempfile::TempDir);

impl Site {
    fn new() -> Self {
        let site = Self(tempfile::tempdir().unwrap());
        let (ca, days) = (site.0.path(), Validity::days(1));
        issue::init(ca, "test CA", days, false).unwrap();
        let local = ["127.0.0.1".parse().unwrap()];
        for host in ["a", "b"] {
            issue::issue(ca, host, &local, days, &site.of(host), false).unwrap();
        }
        site
    }

    fn of(&self, host: &str) -> PathBuf {
        self.0.path().join(host)
    }

    fn lender(&self, borrower: &str) -> Host {
        let certificates = Renewed::load(&self.of("b"), Side::Server).unwrap();
        Host::with_tls(borrower, certificates)
    }
}

#[test]
fn a_host_borrows_with_tls_and_returns_the_device_when_it_goes() {
    let site = Site::new();
    let host = site.lender("host=a");
    let vm = Some("a".parse().unwrap());
    let connect = || Client::connect_by(&host.address, vm.as_ref(), &site.of("a"), None);
    let mut client = connect().unwrap();
    let device = DEVICE.parse().unwrap();
    let mut lease = client.borrow_device(&device, Transport::Ntb, &[]).unwrap();
    let read = Access::Read {
        bar: 0,
        offset: 8,
        len: 4,
    };
    for _ in 0..100 {
        lease.registers.send(&read, &[], DEADLINE).unwrap();
        let (event, _) = lease.registers.receive::<Event>(DEADLINE).unwrap();
        assert!(matches!(event, Event::Data { .. }), "{event:?}");
    }
    client.reset().unwrap();
    client.enable_bus_master().unwrap();
    // A write that a request follows on the other connection.
    let write = Access::Write {
        bar: 0,
        offset: 8,
        len: 4,
        value: 7,
    };
    lease.registers.send(&write, &[], DEADLINE).unwrap();
    client.close().unwrap();
    // The lender confirms the end of the lease by the end of the session.
    assert!(client.hang_up(DEADLINE));
    until("the device is free", || {
        let entry = connect().unwrap().status(&device).unwrap().entry;
        entry.borrowed_by.is_none()
    });
    let mut client = connect().unwrap();
    let _lease = client.borrow_device(&device, Transport::Ntb, &[]).unwrap();
    client.return_device().unwrap();
}

fn call(channel: &mut Channel, request: Request) -> Result<Reply, RemoteError> {
    let envelope = Envelope {
        generation: Generation(0),
        accesses: 0,
        request,
    };
    channel.send(&envelope, &[], DEADLINE).unwrap();
    match channel.receive(DEADLINE).unwrap().0 {
        Reply::Refused(error) => Err(error),
        reply => Ok(reply),
    }
}

#[test]
fn another_host_cannot_use_the_token_of_a_lease() {
    let site = Site::new();
    let host = site.lender("host=a");
    let connect = |pki| Channel::connect(&host.address, &site.of(pki), DEADLINE).unwrap();
    let mut lease = connect("a");
    let hello = Request::Hello {
        version: VERSION,
        vm: Some("a".into()),
    };
    call(&mut lease, hello).unwrap();
    let borrow = Request::Borrow {
        device: DEVICE.parse().unwrap(),
        transport: Transport::Ntb,
        fence: None,
    };
    let token = match call(&mut lease, borrow).unwrap() {
        Reply::Lease {
            registers: Registers::RegisterToken(token),
            ..
        } => token,
        other => panic!("{other:?}"),
    };
    let error = call(&mut connect("b"), Request::Registers { token }).unwrap_err();
    assert!(error.message.contains("another host's"), "{error}");
    // It has not used it up.
    call(&mut connect("a"), Request::Registers { token }).unwrap();
}

#[test]
fn a_handshake_that_stalls_ends_in_the_time_for_hello() {
    let site = Site::new();
    let host = site.lender("host=a");
    // Nothing at all, and a record's header (RFC 8446, 5.1) without the record.
    let silent = host.socket();
    let mut stalled = host.socket();
    stalled.write_all(&[0x16, 3, 1, 1, 0]).unwrap();
    // A handshake, and then nothing.
    let mut mute = Channel::connect(&host.address, &site.of("a"), DEADLINE).unwrap();
    for socket in [silent, stalled] {
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        expect_closed(socket);
    }
    let closed = mute.receive::<Reply>(DEADLINE).unwrap_err();
    assert!(!matches!(closed, ChannelError::TimedOut(_)), "{closed}");
}

#[test]
fn a_host_without_a_rule_borrows_nothing() {
    let site = Site::new();
    let host = site.lender("host=a,vm=web1");
    for (pki, vm) in [("b", "web1"), ("a", "web2")] {
        let vm = vm.parse().unwrap();
        let client = Client::connect_by(&host.address, Some(&vm), &site.of(pki), None);
        let device = DEVICE.parse().unwrap();
        let error = client
            .unwrap()
            .borrow_device(&device, Transport::Ntb, &[])
            .unwrap_err();
        assert!(matches!(error, CallError::Refused(_)), "{error}");
        assert!(
            error.to_string().contains(&format!("host={pki},vm={vm}")),
            "{error}"
        );
    }
}
