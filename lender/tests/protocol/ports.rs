//! TCP ports: addresses at which a lender listens, and its connection limit.

use std::path::Path;

use farside_daemon::raise_open_files;
use farside_lender::{
    Lender, StartError,
    config::{Config, DeviceConfig, Model, TlsConfig},
};
use farside_lender_protocol::{Address, Request, Transport, VERSION};

use crate::peer::{DEVICE, Peer, Running, pki, until};

/// Maximum number of connections of a lender per port.
const MAX_PEERS: usize = 256;

fn start(listen: &str, plain: bool) -> Result<Vec<Address>, StartError> {
    start_with(listen, plain, None)
}

fn start_with(listen: &str, plain: bool, pki: Option<&Path>) -> Result<Vec<Address>, StartError> {
    let dir = tempfile::tempdir().unwrap();
    let lender = Lender::start(Config {
        socket: dir.path().join("lender.sock"),
        listen: vec![listen.parse().unwrap()],
        listen_plain: plain,
        tls: Some(TlsConfig {
            directory: pki.map(Path::to_owned),
        }),
        device: vec![DeviceConfig {
            id: DEVICE.parse().unwrap(),
            source: Model::dma_test().into(),
            borrowers: Vec::new(),
        }],
        ..Config::default()
    })?;
    Ok(lender.addresses())
}

#[test]
fn a_plain_port_that_other_hosts_may_reach_takes_more_than_naming_it() {
    for everywhere in ["tcp:0.0.0.0:0", "tcp:[::]:0", "tcp:[::ffff:0.0.0.0]:0"] {
        let error = start(everywhere, false).unwrap_err();
        assert!(matches!(error, StartError::Plain(_)), "{error}");
        let said = error.to_string();
        assert!(
            said.contains(everywhere)
                && said.contains("listen-plain")
                && said.contains("tls:HOST:PORT"),
            "{said}"
        );
    }
    let addresses = start("tcp:0.0.0.0:0", true).unwrap();
    assert!(addresses[1].is_tcp(), "{addresses:?}");
    // An IPv4-mapped address is the IPv4 address in it.
    start("tcp:[::ffff:127.0.0.1]:0", false).unwrap();
    let addresses = start("tcp:127.0.0.1:0", false).unwrap();
    // With the port that the kernel assigned.
    assert!(!addresses[1].to_string().ends_with(":0"), "{addresses:?}");
}

#[test]
fn a_port_with_tls_is_open_to_other_hosts_and_needs_certificates() {
    let addresses = start_with("tls:0.0.0.0:0", false, Some(pki())).unwrap();
    assert!(addresses[1].to_string().starts_with("tls:0.0.0.0:"));
    let empty = tempfile::tempdir().unwrap();
    let error = start_with("tls:127.0.0.1:0", false, Some(empty.path())).unwrap_err();
    assert!(matches!(error, StartError::Certificates(_)), "{error}");
    let said = farside_error_chain::Chain(&error).to_string();
    let file = empty.path().join("ca-cert.pem").display().to_string();
    assert!(
        said.contains(&file) && said.contains("farside pki"),
        "{said}"
    );
}

#[test]
fn what_cannot_be_listened_at_is_named() {
    let error = start("/run/other.sock", false).unwrap_err().to_string();
    assert!(
        error.contains("/run/other.sock") && error.contains("`socket`"),
        "{error}"
    );
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:{}", other.local_addr().unwrap());
    let chain = |error: StartError| farside_error_chain::Chain(&error).to_string();
    let error = chain(start(&taken, false).unwrap_err());
    assert!(error.contains(&taken), "{error}");
    // An address for documentation (RFC 5737), which no host has.
    let error = chain(start("tcp:192.0.2.1:0", false).unwrap_err());
    assert!(error.contains("tcp:192.0.2.1:0"), "{error}");
}

#[test]
fn a_crowd_at_the_port_locks_nobody_out_of_the_socket() {
    raise_open_files();
    let lender = Running::new();
    let port = &lender.addresses[1];
    let mut crowd: Vec<Peer> = (0..MAX_PEERS)
        .map(|_| Peer::connect(port).greeted("a"))
        .collect();
    // One connection too many.
    Peer::connect(port).expect_closed();
    let (mut peer, _registers) = lender.borrow(DEVICE, "b");
    peer.call(Request::Reset, &[]).unwrap();
    // Accepted connections are served, and closing one frees its place.
    crowd[7]
        .call(Request::Devices { after: None }, &[])
        .unwrap();
    crowd.pop();
    until("there is room", || {
        let mut peer = Peer::connect(port);
        peer.try_hello(VERSION).is_ok()
    });
}

#[test]
fn a_model_is_not_lent_to_another_host() {
    let lender = Running::new();
    let mut peer = Peer::connect(&lender.addresses[1]).greeted("a");
    let mut borrow = |transport| {
        let device = DEVICE.parse().unwrap();
        peer.call(
            Request::Borrow {
                device,
                transport,
                fence: None,
            },
            &[],
        )
        .unwrap_err()
    };
    let error = borrow(Transport::SharedMemory);
    assert!(error.message.contains("through an NTB"), "{error}");
    borrow(Transport::Ntb);
    assert_eq!(lender.holder(DEVICE), None);
}
