//! The peer at the socket is untrusted and may send anything.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixListener,
    process::{Command, Stdio},
    thread,
};

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// Connects to a peer that sends `text`, repeatedly if `endless`, until the connection closes.
fn meet(text: &'static [u8], endless: bool, limit: Duration) -> Result<Monitor, Error> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || -> io::Result<()> {
        let (mut peer, _) = listener.accept()?;
        peer.write_all(text)?;
        if endless {
            loop {
                peer.write_all(text)?;
            }
        }
        // Until the connection closes.
        io::copy(&mut peer, &mut io::sink()).map(drop)
    });
    Monitor::open(&"web1".parse().unwrap(), &path, limit)
}

fn refused(text: &'static [u8], endless: bool, limit: Duration) -> String {
    meet(text, endless, limit).unwrap_err().to_string()
}

#[test]
fn a_greeting_is_taken() {
    let text = b"{\"QMP\":{}}\n{\"event\":\"STOP\"}\n{\"return\":{},\"id\":0}\n{\"event\":\"RES";
    let mut monitor = meet(text, false, LONG).unwrap();
    assert_eq!(monitor.pid(), Some(std::process::id()));
    let soon = Instant::now() + Duration::from_secs(1);
    let event = monitor.wait_event(Instant::now() + LONG, |_| true).unwrap();
    assert_eq!(event.expect("an event").name, "STOP");
    // An incomplete line is not a greeting.
    assert!(monitor.wait_event(soon, |_| true).unwrap().is_none());
}

#[test]
fn a_client_that_the_service_manager_took_connects_to_qemu_anew() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let qemu = thread::spawn(move || {
        for _ in 0..2 {
            let (mut peer, _) = listener.accept().unwrap();
            peer.write_all(b"{\"QMP\":{}}\n{\"return\":{},\"id\":0}\n")
                .unwrap();
            io::copy(&mut peer, &mut io::sink()).unwrap();
        }
    });
    let vm = "web1".parse().unwrap();
    let monitor = Monitor::open_beyond(&vm, &path, LONG, |_| true).unwrap();
    assert_eq!(monitor.pid(), Some(std::process::id()));
    drop(monitor);
    qemu.join().unwrap();
}

/// In its own process, this acts as a QEMU that exits on a connection.
#[test]
fn one_that_ends_while_somebody_connects_runs_no_more() {
    const PATH: &str = "FARSIDE_TEST_MONITOR";
    if let Some(path) = std::env::var_os(PATH) {
        let listener = UnixListener::bind(path).unwrap();
        println!("bound");
        listener.accept().unwrap();
        std::process::exit(0);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let name = "monitor::tests::one_that_ends_while_somebody_connects_runs_no_more";
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(PATH, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(other.stdout.take().unwrap()).lines();
    assert!(lines.map(Result::unwrap).any(|line| line.contains("bound")));
    let error = Monitor::open(&"web1".parse().unwrap(), &path, LONG).unwrap_err();
    other.wait().unwrap();
    assert!(matches!(error, Error::NotRunning { .. }), "{error}");
}

#[test]
fn who_does_not_greet_is_no_monitor() {
    for text in [
        b"hello\n".as_slice(),
        b"\n",
        b"\0\xff\xfe\n",
        b"[[[[[[[[\n",
        b"{\"QMP\":{}\n",
    ] {
        let said = refused(text, false, LONG);
        assert!(said.contains("invalid JSON"), "{text:?}: {said}");
    }
    for text in [b"{}\n".as_slice(), b"null\n", b"{\"return\":{}}\n"] {
        let said = refused(text, false, LONG);
        assert!(said.contains("no QEMU's monitor"), "{text:?}: {said}");
    }
    let said = refused(&[b'x'; 1 << 16], true, LONG);
    assert!(said.contains("longer than 4194304 bytes"), "{said}");
}

#[test]
fn who_says_nothing_or_half_a_line_is_given_up() {
    for text in [b"".as_slice(), b"{\"QMP\":"] {
        let said = refused(text, false, Duration::from_millis(50));
        assert!(said.contains("does not answer"), "{said}");
        assert!(said.contains("one client at a time"), "{said}");
    }
}

#[test]
fn who_never_stops_holds_nobody_up() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || while theirs.write_all(b"{\"event\":\"STOP\"}\n").is_ok() {});
    let mut client = QmpClient::new(ours);
    let deadline = Instant::now() + Duration::from_millis(100);
    while let Some(event) = client.wait_event(deadline, |_| true).unwrap() {
        assert_eq!(event.name, "STOP");
        assert!(Instant::now() < deadline + LONG, "it goes on");
    }
}
