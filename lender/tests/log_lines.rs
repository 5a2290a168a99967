//! The log lines that peers without a lease can cause. In a separate process, as the logger
//! is global.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Mutex,
    time::Duration,
};

use farside_lender::{
    Lender,
    config::{Config, DeviceConfig, Model},
};
use farside_lender_protocol::{Address, Channel, Envelope};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        LINES.lock().unwrap().push(record.args().to_string());
    }

    fn flush(&self) {}
}

fn dropped() -> Vec<String> {
    let lines = LINES.lock().unwrap();
    let dropped = lines.iter().filter(|line| line.starts_with("dropping"));
    dropped.cloned().collect()
}

#[test]
fn peers_at_a_port_cannot_flood_the_log_nor_silence_those_of_this_host() {
    log::set_logger(&Lines).unwrap();
    log::set_max_level(log::LevelFilter::Info);
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("lender.sock");
    let lender = Lender::start(Config {
        socket: socket.clone(),
        listen: vec!["tcp:127.0.0.1:0".parse().unwrap()],
        device: vec![DeviceConfig {
            id: "dma0".parse().unwrap(),
            source: Model::dma_test().into(),
            borrowers: Vec::new(),
        }],
        ..Config::default()
    })
    .unwrap();
    let stop = lender.stop_handle();
    let addresses = lender.addresses();
    let thread = std::thread::spawn(move || lender.run().unwrap());
    let Address::Tcp { host, port } = &addresses[1] else {
        panic!("{addresses:?}");
    };
    for _ in 0..100 {
        let mut peer = TcpStream::connect((host.as_str(), *port)).unwrap();
        peer.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        // Until the lender has closed the connection; it may not have read everything.
        let _ = peer.read_to_end(&mut Vec::new());
    }
    let lines = dropped();
    assert!((1..=20).contains(&lines.len()), "{lines:#?}");
    assert!(lines[0].contains(r#"first bytes are "GET ""#), "{lines:#?}");

    let mut peer = Channel::connect(&socket.into(), dir.path(), Duration::from_secs(20)).unwrap();
    peer.send(&0xffu8, &[], Duration::from_secs(20)).unwrap();
    assert!(peer.receive::<Envelope>(Duration::from_secs(20)).is_err());
    let lines = &dropped()[lines.len()..];
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains("malformed"), "{lines:#?}");
    stop.raise();
    thread.join().unwrap();
}
