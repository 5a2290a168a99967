//! Whoever is at the socket may be anyone, and says anything.

use std::{
    io::{self, BufRead, BufReader},
    os::unix::net::UnixListener,
    process::{Command, Stdio},
    thread,
};

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// Connects to who says `text`, again and again if `endless`, until we hang up.
fn meet(text: &'static [u8], endless: bool, limit: Duration) -> Result<Socket, Error> {
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
        // Until we hang up.
        peer.read(&mut [0]).map(drop)
    });
    Socket::connect("web1", &path, Instant::now() + limit, limit)
}

fn refused(text: &'static [u8], endless: bool, limit: Duration) -> String {
    meet(text, endless, limit).unwrap_err().to_string()
}

#[test]
fn a_greeting_is_taken() {
    let mut socket = meet(b"{\"QMP\":{}}\n{\"event\":\"STOP\"}\n{\"ret", false, LONG).unwrap();
    assert_eq!(socket.process().pid(), std::process::id());
    let soon = Instant::now() + Duration::from_secs(1);
    let Some(Line::Event(event)) = socket.receive(Instant::now() + LONG).unwrap() else {
        panic!("no event");
    };
    assert_eq!(event.name, "STOP");
    // Half a line is none.
    assert!(socket.receive(soon).unwrap().is_none());
}

/// In its own process, this is a QEMU that ends when somebody connects.
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
    let name = "monitor::socket::tests::one_that_ends_while_somebody_connects_runs_no_more";
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(PATH, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(other.stdout.take().unwrap()).lines();
    assert!(lines.map(Result::unwrap).any(|line| line.contains("bound")));
    let error = Socket::connect("web1", &path, Instant::now() + LONG, LONG).unwrap_err();
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
        assert!(said.contains("no JSON"), "{text:?}: {said}");
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
    let mut socket = meet(b"{\"QMP\":{},\"event\":\"STOP\"}\n", true, LONG).unwrap();
    let deadline = Instant::now() + Duration::from_millis(100);
    while let Some(line) = socket.receive(deadline).unwrap() {
        assert!(matches!(line, Line::Event(_)));
        assert!(Instant::now() < deadline + LONG, "it goes on");
    }
}
