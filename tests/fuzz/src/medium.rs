//! The lender's half of a medium, and the frames of its borrower.
//!
//! Input: steps, each a byte for the kind; see [`run`].

use std::{cell::RefCell, fs::File, os::unix::net::UnixStream};

use farside_devices::block::{BlockQueue, DEPTH, Ended, EngineChoice, LentMedium};
use farside_medium::{Frame, HEADER, Link, LinkError};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::input::Input;

const SIZE: u64 = 1 << 20;

thread_local! {
    static IMAGE: RefCell<File> = RefCell::new(image());
}

fn image() -> File {
    let image = tempfile::tempfile().expect("a temporary file");
    image.set_len(SIZE).expect("room");
    image
}

/// Sends frames, well-formed and not, to a lent medium: it answers, or ends the connection, and the image keeps its
/// size.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let file = IMAGE.with_borrow(|image| image.try_clone().expect("a descriptor"));
    let (peer, ours) = UnixStream::pair().expect("a pair of sockets");
    for socket in [&peer, &ours] {
        socket.set_nonblocking(true).expect("a socket");
    }
    let read_only = input.u8() % 4 == 0;
    let link = Link::new(ours.into(), None).expect("a link without TLS");
    let block = BlockQueue::open(file, EngineChoice::Auto, DEPTH);
    let lent = LentMedium::new(
        block.expect("an engine"),
        (SIZE, read_only),
        ("disk0", link),
    );
    let mut lent = lent.expect("memory");
    while !input.is_empty() {
        let bytes = match input.u8() % 8 {
            0 => {
                let len = usize::from(input.u8());
                input.bytes(len).to_vec()
            }
            kind => {
                let frame = frame(kind, &mut input);
                let header = frame.encode();
                assert_eq!(Frame::decode(&header), Ok(frame));
                let data = vec![7; frame.data_len()];
                [&header[..], &data].concat()
            }
        };
        // Fails when the socket is full, or the connection has ended.
        let _ = send(&peer, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        match lent.turn(&mut || {}) {
            Ok(_) => {}
            Err(Ended::Returned) => break,
            Err(Ended::Cut(error)) => {
                assert!(matches!(error, LinkError::Frame(_)), "{error}");
                break;
            }
        }
        // Its answers are frames, and their data is what the sockets hold.
        let mut answer = [0; 4096];
        let _ = recv(&peer, &mut answer[..], RecvFlags::DONTWAIT);
        let (used, most) = lent.in_flight();
        assert!(used <= most);
    }
    drop(lent);
    let size = IMAGE.with_borrow(|image| image.metadata().expect("its size").len());
    assert_eq!(size, SIZE);
}

fn frame(kind: u8, input: &mut Input<'_>) -> Frame {
    let tag = u16::from(input.u8());
    let offset = u64::from(input.u32());
    match kind {
        1 | 2 => Frame::Read {
            tag,
            offset,
            len: u32::from(input.u16()),
        },
        3 | 4 => Frame::Write {
            tag,
            offset,
            len: u32::from(input.u16()) % (2 * HEADER as u32),
            durable: false,
        },
        5 => Frame::Allocate {
            tag,
            mode: i32::from(input.u8()),
            offset,
            len: u64::from(input.u16()),
        },
        6 => Frame::Sync { tag },
        _ => Frame::Return,
    }
}
