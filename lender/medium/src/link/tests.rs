use std::os::unix::net::UnixStream;

use proptest::prelude::*;

use super::*;
use crate::{Cipher, Condition, MAX_DATA};

fn secrets() -> (Secrets, Secrets) {
    let direction = |byte| Direction {
        cipher: Cipher::Aes128Gcm,
        key: vec![byte; 16],
        iv: [byte; 12],
        sequence: 3,
    };
    let of = |sending, receiving| Secrets {
        sending: direction(sending),
        receiving: direction(receiving),
    };
    (of(1, 2), of(2, 1))
}

fn pair(with_tls: bool) -> (Link, Link) {
    let (near, far) = UnixStream::pair().unwrap();
    for socket in [&near, &far] {
        socket.set_nonblocking(true).unwrap();
    }
    let (ours, theirs) = secrets();
    let link = |socket: UnixStream, secrets: &Secrets| {
        Link::new(socket.into(), with_tls.then_some(secrets)).unwrap()
    };
    (link(near, &ours), link(far, &theirs))
}

/// Memory in pieces, with the vectors that name them.
struct Buffer {
    bytes: Vec<u8>,
    iovecs: Vec<libc::iovec>,
}

impl Buffer {
    fn new(mut bytes: Vec<u8>, piece: usize) -> Self {
        let iovecs = bytes
            .chunks_mut(piece)
            .map(|piece| libc::iovec {
                iov_base: piece.as_mut_ptr().cast(),
                iov_len: piece.len(),
            })
            .collect();
        Self { bytes, iovecs }
    }

    fn memory(&self) -> Memory {
        // SAFETY: each test drops its links before its buffers, or waits until a frame has passed.
        unsafe { Memory::new(self.iovecs.as_ptr(), self.iovecs.len()) }
    }
}

fn write(tag: u16, len: usize) -> Frame {
    Frame::Write {
        tag,
        offset: 4096 * u64::from(tag),
        len: len as u32,
        durable: tag.is_multiple_of(2),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Frames of any lengths arrive in order with their data, however they are cut.
    #[test]
    fn frames_arrive_with_their_data(
        lens in proptest::collection::vec((0..40_000usize, 1..9000usize), 1..20),
        with_tls: bool,
    ) {
        let (mut near, mut far) = pair(with_tls);
        let data = |n: usize, len: usize| (0..len).map(|i| (i * 7 + n) as u8).collect::<Vec<_>>();
        let sent: Vec<_> = lens.iter().enumerate()
            .map(|(n, &(len, piece))| Buffer::new(data(n, len), piece)).collect();
        let into: Vec<_> = lens.iter()
            .map(|&(len, piece)| Buffer::new(vec![0; len], piece / 2 + 1)).collect();
        for (n, buffer) in sent.iter().enumerate() {
            near.post(write(n as u16, buffer.bytes.len()), buffer.memory());
        }
        let mut next = 0;
        while next < lens.len() {
            near.flush().unwrap();
            let placed = |frame: &Frame| match *frame {
                Frame::Write { tag, .. } => Ok(into[usize::from(tag)].memory()),
                other => Err(FrameError::Unexpected(other)),
            };
            while let Some(frame) = far.receive(placed).unwrap() {
                prop_assert_eq!(frame, write(next as u16, lens[next].0));
                prop_assert_eq!(&into[next].bytes, &sent[next].bytes);
                next += 1;
            }
        }
        prop_assert_eq!(near.sent(), lens.len() as u64);
        prop_assert!(!near.wants_write());
    }

    /// Rubbish ends the connection, or is waited for: it reaches no memory but that of frames.
    #[test]
    fn rubbish_is_an_error_or_waits(bytes in proptest::collection::vec(any::<u8>(), 0..300), with_tls: bool) {
        let (near, mut far) = pair(with_tls);
        rustix::net::send(&near, &bytes, rustix::net::SendFlags::empty()).unwrap();
        let received = far.receive(|frame| Err(FrameError::Unexpected(*frame)));
        if bytes.len() >= HEADER + usize::from(with_tls) * MAX_BODY {
            prop_assert!(received.is_err());
        } else {
            prop_assert!(!matches!(received, Ok(Some(_))));
        }
    }
}

#[test]
fn a_record_that_was_changed_is_refused() {
    let (mut near, mut far) = pair(true);
    near.post(Frame::Alive, Memory::NONE);
    near.flush().unwrap();
    let mut record = [0; 256];
    let (_, len) =
        rustix::net::recv(&far, &mut record[..], rustix::net::RecvFlags::empty()).unwrap();
    record[len - 20] ^= 1;
    rustix::net::send(&near, &record[..len], rustix::net::SendFlags::empty()).unwrap();
    let error = far.receive(|_| Ok(Memory::NONE)).unwrap_err();
    assert!(
        matches!(error, LinkError::Tls(RecordError::Forged)),
        "{error}"
    );
}

#[test]
fn a_closed_connection_is_told_from_a_quiet_one() {
    for with_tls in [false, true] {
        let (mut near, mut far) = pair(with_tls);
        assert!(far.receive(|_| Ok(Memory::NONE)).unwrap().is_none());
        near.post(Frame::Return, Memory::NONE);
        near.flush().unwrap();
        near.shut_down();
        let received = far.receive(|_| Ok(Memory::NONE)).unwrap();
        assert_eq!(received, Some(Frame::Return));
        let error = far.receive(|_| Ok(Memory::NONE)).unwrap_err();
        assert!(matches!(error, LinkError::Closed), "{error}");
    }
}

#[test]
fn after_a_short_read_the_socket_is_not_read_until_the_next_call() {
    let (mut near, mut far) = pair(false);
    let none = |_: &Frame| Ok(Memory::NONE);
    let mut post = |frame| {
        near.post(frame, Memory::NONE);
        near.flush().unwrap();
    };
    post(Frame::Alive);
    assert_eq!(far.receive_some(none).unwrap(), Some(Frame::Alive));
    post(Frame::Return);
    assert_eq!(far.receive_some(none).unwrap(), None);
    assert_eq!(far.receive_some(none).unwrap(), Some(Frame::Return));
    // Who waits for an edge reads until the socket is empty.
    post(Frame::Alive);
    assert_eq!(far.receive(none).unwrap(), Some(Frame::Alive));
    post(Frame::Return);
    assert_eq!(far.receive(none).unwrap(), Some(Frame::Return));
}

#[test]
fn frames_of_a_page_are_received_by_one_call() {
    let (mut near, mut far) = pair(false);
    let from = Buffer::new(vec![7; 4096], 4096);
    let into = Buffer::new(vec![0; 4096], 4096);
    for tag in 0..8 {
        near.post(write(tag, 4096), from.memory());
    }
    near.flush().unwrap();
    for tag in 0..8 {
        let received = far.receive_some(|_| Ok(into.memory())).unwrap();
        assert_eq!(received, Some(write(tag, 4096)));
        // The rest is read ahead: nothing is left in the socket.
        let mut left = [0];
        let peek = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(&far, &mut left[..], peek);
        assert_eq!(peeked.unwrap_err(), Errno::AGAIN);
    }
    drop((near, far));
}

#[test]
fn silence_ends_a_connection_and_an_idle_one_says_that_it_is_alive() {
    let (mut near, mut far) = pair(false);
    near.tick(true).unwrap();
    assert!(far.receive(|_| Ok(Memory::NONE)).unwrap().is_none());
    near.spoken = Instant::now().checked_sub(IDLE).unwrap();
    near.tick(true).unwrap();
    let received = far.receive(|_| Ok(Memory::NONE)).unwrap();
    assert_eq!(received, Some(Frame::Alive));
    near.heard = Instant::now().checked_sub(SILENCE).unwrap();
    assert!(matches!(near.tick(true), Err(LinkError::Silent(_))));
}

#[test]
fn the_longest_frame_passes_a_socket_that_is_full() {
    for with_tls in [false, true] {
        let (mut near, mut far) = pair(with_tls);
        let (from, into) = (
            Buffer::new(vec![7; MAX_DATA], 4096),
            Buffer::new(vec![0; MAX_DATA], 65536),
        );
        let done = Frame::Done {
            tag: 9,
            result: MAX_DATA as i32,
            data: MAX_DATA as u32,
            condition: Condition {
                size: 1,
                full: true,
                read_only: false,
            },
        };
        near.post(done, from.memory());
        near.flush().unwrap();
        assert!(near.wants_write());
        let received = loop {
            match far.receive(|_| Ok(into.memory())).unwrap() {
                Some(frame) => break frame,
                None => near.flush().unwrap(),
            }
        };
        assert_eq!(received, done);
        assert!(into.bytes == from.bytes);
    }
}
