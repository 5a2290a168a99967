use std::{
    io::{Read, Write},
    net::TcpStream,
};

use proptest::prelude::*;

use farside_pki::issue::{self, Validity};

use super::*;

const SOON: Duration = Duration::from_secs(5);

/// Two connected TCP sockets.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, listener.accept().unwrap().0)
}

/// A channel over TCP, and the bare socket at its other end.
fn channel_and_socket() -> (Channel, TcpStream) {
    let (a, b) = sockets();
    (Channel::from_tcp(a).unwrap(), b)
}

/// Two connected ends of each kind.
fn pairs() -> [(Channel, Channel); 3] {
    let (a, b) = sockets();
    let tcp = [a, b].map(|socket| Channel::from_tcp(socket).unwrap());
    [Channel::pair().unwrap(), tcp.into(), tls_pair()]
}

/// The directory with the certificates of a host, `localhost`.
fn certificates() -> tempfile::TempDir {
    let pki = tempfile::tempdir().unwrap();
    let (dir, days) = (pki.path(), Validity::days(1));
    issue::init(dir, "test CA", days, false).unwrap();
    let local = ["127.0.0.1".parse().unwrap()];
    issue::issue(dir, "localhost", &local, days, dir, false).unwrap();
    pki
}

/// A client and a lender, after their handshake.
fn tls_pair() -> (Channel, Channel) {
    let pki = certificates();
    let (a, b) = sockets();
    let credentials = Credentials::load(pki.path(), Side::Server).unwrap();
    let mut lender = Channel::accept_tls(b, &credentials).unwrap();
    let shaken = std::thread::spawn(move || {
        let deadline = Instant::now() + SOON;
        lender.shake(deadline, SOON).unwrap();
        lender
    });
    let credentials = Credentials::load(pki.path(), Side::Client).unwrap();
    let deadline = Instant::now() + SOON;
    let client = Channel::connect_tls(a, "localhost", &credentials, deadline, SOON).unwrap();
    (client, shaken.join().unwrap())
}

fn frame(message: &[u8]) -> Vec<u8> {
    let mut frame = (message.len() as u32).to_le_bytes().to_vec();
    frame.extend(message);
    frame
}

/// Whether poll(2) reports the channel readable.
fn is_readable(channel: &Channel) -> bool {
    let mut fds = [PollFd::new(channel, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

fn wait_readable(channel: &Channel) {
    let deadline = Instant::now() + SOON;
    channel.wait(PollFlags::IN, deadline, SOON).unwrap();
}

#[test]
fn a_deadline_is_shown_as_people_read_it() {
    let late = ChannelError::TimedOut(Duration::from_nanos(4_004_053_287));
    assert_eq!(late.to_string(), "no answer within 4.0s");
}

#[test]
fn messages_keep_their_boundaries() {
    for (mut a, mut b) in pairs() {
        let long = vec![0x5au8; MAX_MESSAGE - 3];
        a.send(&1u32, &[], SOON).unwrap();
        a.send(&2u32, &[], SOON).unwrap();
        assert_eq!(b.receive::<u32>(SOON).unwrap().0, 1);
        assert_eq!(b.receive::<u32>(SOON).unwrap().0, 2);
        assert!(b.try_receive::<u32>().unwrap().is_none());
        b.send(&long, &[], SOON).unwrap();
        assert!(a.receive::<Vec<u8>>(SOON).unwrap().0 == long);
        drop(a);
        assert!(matches!(b.receive::<u32>(SOON), Err(ChannelError::Closed)));
    }
}

#[test]
fn descriptors_ride_along_within_a_host_only() {
    let [(mut a, mut b), (mut peer_address, mut other), _] = pairs();
    let file = tempfile::tempfile().unwrap();
    a.send(&1u32, &[file.as_fd()], SOON).unwrap();
    assert_eq!(b.receive::<u32>(SOON).unwrap().1.len(), 1);
    assert!(peer_address.is_tcp() && !a.is_tcp());
    let error = peer_address.send(&1u32, &[file.as_fd()], SOON).unwrap_err();
    assert!(error.to_string().contains("cannot be sent over TCP"));
    // The channel is still usable.
    peer_address.send(&2u32, &[], SOON).unwrap();
    assert_eq!(other.receive::<u32>(SOON).unwrap().0, 2);
}

#[test]
fn a_message_over_a_limit_is_not_sent() {
    let file = tempfile::tempfile().unwrap();
    for (mut a, mut b) in pairs() {
        let long = vec![0u8; MAX_MESSAGE];
        let error = a.send(&long, &[], SOON).unwrap_err();
        assert!(matches!(error, ChannelError::TooLarge { .. }), "{error}");
        let many = [file.as_fd(); MAX_FDS + 1];
        assert!(a.send(&0u8, &many, SOON).is_err());
        assert!(b.try_receive::<u8>().unwrap().is_none());
        a.send(&7u8, &[], SOON).unwrap();
        assert_eq!(b.receive::<u8>(SOON).unwrap().0, 7);
    }
}

#[test]
fn a_full_queue_is_said_and_waited_for() {
    for (mut a, mut b) in pairs() {
        let mut sent = 0u64;
        while a.try_send(&sent, &[]).unwrap() {
            sent += 1;
        }
        // The last one may be partly sent.
        assert_eq!(a.interest().contains(PollFlags::OUT), a.wants_write());
        let short = Duration::from_millis(1);
        // TCP moves what was sent to the peer's queue a little later, which makes room again.
        let error = loop {
            match a.send(&sent, &[], short) {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, ChannelError::TimedOut(_)), "{error}");
        assert_eq!(a.sent.load(Ordering::Relaxed), sent);
        for expected in 0..sent {
            // As the owner's loop does, which polls for OUT as well.
            a.flush().unwrap();
            assert_eq!(b.receive::<u64>(SOON).unwrap().0, expected);
        }
        a.send(&sent, &[], SOON).unwrap();
        assert_eq!(b.receive::<u64>(SOON).unwrap().0, sent);
    }
}

#[test]
fn a_message_that_was_cut_goes_out_with_any_call() {
    type Call = fn(&mut Channel);
    let calls: [Call; 2] = [
        |channel| assert!(channel.try_receive::<u8>().unwrap().is_none()),
        |channel| assert!(channel.try_send(&0u8, &[]).is_ok()),
    ];
    for call in calls {
        let (mut a, mut b) = channel_and_socket();
        let message = vec![0x5au8; MAX_MESSAGE - 3];
        let mut sent = 0;
        while !a.wants_write() {
            assert!(a.try_send(&message, &[]).unwrap());
            sent += 1;
        }
        // Not accepted: neither sent nor buffered.
        assert!(!a.try_send(&message, &[]).unwrap());
        let reader = std::thread::spawn(move || {
            let mut received = vec![0; sent * (HEADER + MAX_MESSAGE)];
            b.read_exact(&mut received).unwrap();
            (received, b)
        });
        while a.wants_write() {
            let deadline = Instant::now() + SOON;
            a.wait(PollFlags::OUT, deadline, SOON).unwrap();
            call(&mut a);
        }
        let (received, _b) = reader.join().unwrap();
        let encoded = postcard::to_stdvec(&message).unwrap();
        assert!(received == frame(&encoded).repeat(sent));
    }
}

/// The message is larger than the socket's buffer, and the peer does not read.
#[test]
fn sending_to_a_peer_that_does_not_read_times_out() {
    let (mut a, _b) = channel_and_socket();
    let message = vec![0u8; MAX_MESSAGE - 3];
    let patience = Duration::from_millis(20);
    let error = loop {
        let started = Instant::now();
        if let Err(error) = a.send(&message, &[], patience) {
            assert!(started.elapsed() >= patience);
            break error;
        }
    };
    assert!(matches!(error, ChannelError::TimedOut(_)), "{error}");
}

/// Single bytes do not extend a deadline.
#[test]
fn receiving_from_a_peer_that_sends_byte_by_byte_times_out() {
    let (mut a, mut b) = channel_and_socket();
    b.write_all(&100u32.to_le_bytes()).unwrap();
    let patience = Duration::from_millis(30);
    let dribble = std::thread::spawn(move || {
        for _ in 0..99 {
            // Fails after the channel is dropped.
            if b.write_all(&[0]).is_err() {
                return;
            }
            std::thread::yield_now();
        }
        // Keeps the connection open until then.
        let _ = b.read(&mut [0]);
    });
    let error = a.receive::<Vec<u8>>(patience).unwrap_err();
    assert!(matches!(error, ChannelError::TimedOut(_)), "{error}");
    drop(a);
    dribble.join().unwrap();
}

#[test]
fn lengths_that_no_message_has_are_refused_for_good() {
    for len in [0, MAX_MESSAGE as u32 + 1, u32::MAX] {
        let (mut a, mut b) = channel_and_socket();
        b.write_all(&frame(&[1])).unwrap();
        assert_eq!(a.receive::<u8>(SOON).unwrap().0, 1);
        b.write_all(&len.to_le_bytes()).unwrap();
        b.write_all(&frame(&[1])).unwrap();
        let error = a.receive::<u8>(SOON).unwrap_err();
        match error {
            ChannelError::TooLarge { len: said, .. } => assert_eq!(said, len as usize),
            ChannelError::Malformed(_) => assert_eq!(len, 0),
            other => panic!("{len}: {other}"),
        }
        // Not reported as EOF, with which a lender ends a lease.
        let error = a.receive::<u8>(SOON).unwrap_err();
        assert!(matches!(error, ChannelError::Io(_)), "{error}");
    }
}

#[test]
fn what_follows_a_message_in_its_frame_is_ignored_and_garbage_is_not() {
    let (mut a, mut b) = channel_and_socket();
    b.write_all(&frame(&[5, 6, 7])).unwrap();
    b.write_all(&frame(&[0xff; 20])).unwrap();
    b.write_all(&frame(&[9])).unwrap();
    assert_eq!(a.receive::<u8>(SOON).unwrap().0, 5);
    let error = a.receive::<u64>(SOON).unwrap_err();
    assert!(matches!(error, ChannelError::Malformed(_)), "{error}");
    assert_eq!(a.receive::<u8>(SOON).unwrap().0, 9);
}

#[test]
fn a_peer_that_goes_in_the_middle_of_a_message_is_gone() {
    let whole = frame(&[0; 100]);
    for cut in [0, 1, 4, 50] {
        // FIN: all data is read first.
        let (mut a, mut b) = channel_and_socket();
        b.write_all(&frame(&[3])).unwrap();
        b.write_all(&whole[..cut]).unwrap();
        drop(b);
        assert_eq!(a.receive::<u8>(SOON).unwrap().0, 3);
        for _ in 0..2 {
            let error = a.receive::<Vec<u8>>(SOON).unwrap_err();
            assert!(matches!(error, ChannelError::Closed), "{error}");
        }
        // RST, as from a host that has rebooted.
        let (mut a, mut b) = channel_and_socket();
        b.write_all(&whole[..cut]).unwrap();
        let linger = Some(Duration::ZERO);
        rustix::net::sockopt::set_socket_linger(&b, linger).unwrap();
        drop(b);
        let error = a.receive::<Vec<u8>>(SOON).unwrap_err();
        assert!(matches!(error, ChannelError::Closed), "{error}");
        assert!(a.try_send(&0u8, &[]).is_err());
    }
}

#[test]
fn the_last_words_of_a_peer_are_heard() {
    for (mut a, mut b) in pairs() {
        a.send(&1u8, &[], SOON).unwrap();
        a.shut_down_sending().unwrap();
        assert_eq!(b.receive::<u8>(SOON).unwrap().0, 1);
        assert!(matches!(b.receive::<u8>(SOON), Err(ChannelError::Closed)));
        b.send(&2u8, &[], SOON).unwrap();
        assert_eq!(a.receive::<u8>(SOON).unwrap().0, 2);
    }
}

const HEADER: usize = 4;

/// `cargo test -p farside-lender-protocol --release -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn round_trip_times() {
    use crate::registers::{Access, Event};

    const ROUNDS: usize = 100_000;
    for (mut a, mut b) in pairs() {
        let kind = match a.identity().unwrap() {
            Identity::User { .. } => "UNIX",
            Identity::Network { .. } => "TCP",
            Identity::Host { .. } => "TLS",
        };
        let echo = std::thread::spawn(move || {
            while let Ok((Access::Read { offset, .. }, _)) = b.receive(SOON) {
                b.send(&Event::Data { value: offset }, &[], SOON).unwrap();
            }
        });
        let mut times: Vec<Duration> = (0..ROUNDS)
            .map(|n| {
                let started = Instant::now();
                let read = Access::Read {
                    bar: 0,
                    offset: 4 * n as u64,
                    len: 4,
                };
                a.send(&read, &[], SOON).unwrap();
                let (event, _) = a.receive::<Event>(SOON).unwrap();
                assert_eq!(
                    event,
                    Event::Data {
                        value: 4 * n as u64
                    }
                );
                started.elapsed()
            })
            .collect();
        times.sort();
        println!(
            "{kind}: median {:?}, 99 % {:?}",
            times[ROUNDS / 2],
            times[ROUNDS * 99 / 100]
        );
        drop(a);
        echo.join().unwrap();
    }
}

/// As with an interrupt's eventfd behind it: one message for each readable poll, none left over.
#[test]
fn poll_reports_each_message_in_a_tls_session() {
    let (mut a, mut b) = tls_pair();
    let long = vec![0x5au8; MAX_MESSAGE - 3];
    for n in 0..20u32 {
        a.send(&n, &[], SOON).unwrap();
    }
    for n in 0..20u32 {
        wait_readable(&b);
        assert_eq!(b.try_receive::<u32>().unwrap().unwrap().0, n);
    }
    assert!(!is_readable(&b));
    // Several records, which may arrive one by one.
    a.send(&long, &[], SOON).unwrap();
    assert!(b.receive::<Vec<u8>>(SOON).unwrap().0 == long);
    assert!(!is_readable(&b) && b.try_receive::<u8>().unwrap().is_none());
}

/// A connection that is cut must not look like the end of a lease, with which a lender confirms that
/// the device's DMA has stopped.
#[test]
fn a_session_that_is_cut_is_not_closed() {
    let (mut a, b) = tls_pair();
    // As if the process had been killed: no close_notify.
    shutdown(&b, Shutdown::Both).unwrap();
    std::mem::forget(b);
    for _ in 0..2 {
        let error = a.receive::<u8>(SOON).unwrap_err();
        assert!(matches!(error, ChannelError::Tls(TlsError::Cut)), "{error}");
    }
    let (mut a, b) = tls_pair();
    drop(b);
    let error = a.receive::<u8>(SOON).unwrap_err();
    assert!(matches!(error, ChannelError::Closed), "{error}");
}

proptest! {
    /// The messages do not depend on the segmentation of the bytes, and a loop that
    /// receives one message for each readable poll misses none.
    #[test]
    fn any_cuts_of_the_bytes_give_the_same_messages(
        messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..12),
        cuts in prop::collection::vec(1usize..200, 1..60),
    ) {
        let (mut a, mut b) = channel_and_socket();
        let mut bytes = Vec::new();
        for message in &messages {
            bytes.extend(frame(&postcard::to_stdvec(message).unwrap()));
        }
        let mut received: Vec<Vec<u8>> = Vec::new();
        let mut cuts = cuts.iter().cycle();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (piece, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
            b.write_all(piece).unwrap();
            rest = later;
            wait_readable(&a);
            while is_readable(&a) {
                received.extend(a.try_receive::<Vec<u8>>().unwrap().map(|(message, _)| message));
            }
        }
        prop_assert_eq!(received, messages);
    }
}

#[test]
fn a_peer_of_another_protocol_is_named_by_its_first_bytes() {
    for (sent, shown) in [
        (&b"HTTP/1.1 400 Bad Request\r\n"[..], r#""HTTP""#),
        (b"SSH-2.0-", r#""SSH-""#),
        // A TLS alert.
        (b"\x15\x03\x01\x00\x02", r#""\x15\x03\x01\x00""#),
    ] {
        let (mut a, mut b) = channel_and_socket();
        b.write_all(sent).unwrap();
        let error = a.receive::<u8>(SOON).unwrap_err().to_string();
        assert!(error.contains(shown), "{error}");
    }
}
