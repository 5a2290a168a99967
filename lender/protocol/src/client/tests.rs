//! A lender that answers late.

use std::{sync::mpsc, thread::JoinHandle};

use farside_fabric::{Iova, PeerAddress};

use super::*;
use crate::{Instance, Listener};

const DEADLINE: Duration = Duration::from_secs(20);

/// A lender that answers a request when the test triggers it: with `Done`, or with
/// `Window`.
struct Lender {
    answer: mpsc::Sender<()>,
    seen: mpsc::Receiver<Request>,
    thread: JoinHandle<()>,
}

impl Lender {
    fn start(address: &std::path::Path) -> Self {
        let listener = Listener::bind(address).unwrap();
        let (answer, told) = mpsc::channel();
        let (saw, seen) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut peer = loop {
                match listener.accept().unwrap() {
                    Some(peer) => break peer,
                    None => std::thread::yield_now(),
                }
            };
            while let Ok((Envelope { request, .. }, _)) = peer.receive::<Envelope>(DEADLINE) {
                let reply = match &request {
                    Request::Hello { .. } => Reply::Welcome {
                        lender: "late".into(),
                        instance: Instance::random().unwrap(),
                    },
                    request => {
                        saw.send(request.clone()).unwrap();
                        told.recv().unwrap();
                        match request {
                            Request::OpenWindow { .. } => Reply::Window { lut_entries: 3 },
                            _ => Reply::Done,
                        }
                    }
                };
                peer.send(&reply, &[], DEADLINE).unwrap();
            }
        });
        Self {
            answer,
            seen,
            thread,
        }
    }
}

fn open(client: &mut Client) -> Result<u32, CallError> {
    client.open_window(Iova::new(0), PeerAddress::new(0), 1 << 20)
}

/// Time for the request to reach the lender's thread on a loaded host.
fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(2))
}

#[test]
fn a_late_answer_costs_time_and_is_not_taken_for_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lender.sock");
    let lender = Lender::start(&path);
    let mut client = Client::connect(&path.into(), None).unwrap();

    client.set_deadline(soon());
    let error = open(&mut client).unwrap_err();
    assert!(matches!(error, CallError::Late(_)), "{error}");
    // Sent nevertheless: a reset must not be lost because an earlier call was late.
    client.set_deadline(soon());
    let error = client.close().unwrap_err();
    assert!(matches!(error, CallError::Late(_)), "{error}");
    client.set_deadline(None);
    for _ in ["open", "close", "close"] {
        lender.answer.send(()).unwrap();
    }
    client.close().unwrap();
    lender.answer.send(()).unwrap();
    assert_eq!(open(&mut client).unwrap(), 3);
    let names: Vec<_> = lender
        .seen
        .try_iter()
        .map(|request| match request {
            Request::OpenWindow { .. } => "open",
            Request::Close => "close",
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(names, ["open", "close", "close", "open"]);

    // Nothing is sent after the deadline.
    client.set_deadline(Some(Instant::now()));
    let error = client.close().unwrap_err();
    assert!(matches!(error, CallError::Late(_)), "{error}");
    client.set_deadline(None);
    lender.answer.send(()).unwrap();
    assert_eq!(open(&mut client).unwrap(), 3);

    assert!(client.hang_up(DEADLINE));
    lender.thread.join().unwrap();
}

#[test]
fn a_lender_that_is_not_reached_has_the_hint_that_helps() {
    use std::io::ErrorKind;
    for (kind, hint) in [
        (ErrorKind::NotFound, "is `farside lend` running?"),
        (ErrorKind::ConnectionRefused, "is `farside lend` running?"),
        (ErrorKind::PermissionDenied, "`borrowers` in lender.toml"),
        (ErrorKind::TimedOut, "/run/lender.sock"),
    ] {
        let error = CallError::Unreachable {
            address: "/run/lender.sock".parse().unwrap(),
            source: kind.into(),
        };
        let said = error.to_string();
        assert!(said.contains(hint), "{kind}: {said}");
        assert_eq!(said.contains('('), kind != ErrorKind::TimedOut, "{said}");
    }
}
