//! The lender's protocol over TCP: fragments, any lengths, a peer that does not read.
//!
//! Input: steps, each a byte for the kind; see [`run`].

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    time::Duration,
};

use farside_lender_protocol::{Channel, ChannelError, MAX_MESSAGE};
use rustix::net::sockopt::set_socket_linger;

use crate::input::Input;

thread_local! {
    static LISTENER: TcpListener = TcpListener::bind("127.0.0.1:0").expect("a port");
}

const DEADLINE: Duration = Duration::from_secs(20);

/// The type of the messages: text, which may be empty.
type Message = String;

/// Sends fragments to a channel, and compares what it receives with the bytes that were sent.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let (mut peer, ours) = pair();
    let mut channel = Channel::from_tcp(ours).expect("a connected socket");
    // The bytes that the channel has not consumed.
    let mut sent: Vec<u8> = Vec::new();
    // Bytes that the peer has not read.
    let mut answers: Vec<u8> = Vec::new();
    while !input.is_empty() {
        let kind = input.u8() % 8;
        let piece = match kind {
            // A message, and one in two parts.
            0..=2 => {
                let text = [b'a' + kind].repeat(usize::from(input.u8()) * 3);
                let text = String::from_utf8(text).expect("ASCII");
                framed(&postcard::to_stdvec(&text).expect("it can be encoded"))
            }
            3 => {
                let len = input.u8();
                input.bytes(len.into()).to_vec()
            }
            4 => input.u32().to_le_bytes().to_vec(),
            5 => {
                let len = input.u16();
                framed(input.bytes(len.into()))
            }
            6 => {
                let text = "x".repeat(usize::from(input.u16()));
                if channel.try_send(&text, &[]).is_ok_and(|sent| sent) {
                    answers.extend(framed(&postcard::to_stdvec(&text).expect("encoded")));
                }
                Vec::new()
            }
            _ => {
                drain(&mut peer, &mut answers);
                Vec::new()
            }
        };
        // In two parts, with the channel in between.
        let cut = match kind {
            1 => usize::from(input.u8()) % (piece.len() + 1),
            _ => 0,
        };
        for part in [&piece[..cut], &piece[cut..]] {
            if part.is_empty() {
                continue;
            }
            peer.write_all(part).expect("the channel reads");
            sent.extend(part);
            loop {
                let expected = next(&sent);
                let received = match &expected {
                    Next::Incomplete => channel.try_receive::<Message>(),
                    _ => match channel.receive::<Message>(DEADLINE) {
                        Ok(message) => Ok(Some(message)),
                        Err(error) => Err(error),
                    },
                };
                match (expected, received) {
                    (Next::Incomplete, Ok(None)) => break,
                    (Next::Message(text, used), Ok(Some((got, fds)))) => {
                        assert_eq!((got, fds.len()), (text, 0));
                        sent.drain(..used);
                    }
                    (Next::Malformed(used), Err(ChannelError::Malformed(_))) => {
                        sent.drain(..used);
                    }
                    // The start of the next message is unknown.
                    (Next::Unframed, Err(error)) => {
                        assert!(!matches!(error, ChannelError::Closed), "{error:?}");
                        assert!(channel.try_receive::<Message>().is_err());
                        return;
                    }
                    (expected, received) => panic!("{received:?} instead of {expected:?}"),
                }
            }
        }
    }
    while channel.wants_write() {
        channel.flush().expect("the peer reads");
        drain(&mut peer, &mut answers);
    }
    peer.set_nonblocking(false).expect("a socket");
    let mut rest = vec![0; answers.len()];
    peer.read_exact(&mut rest).expect("the rest of the answers");
    assert_eq!(rest, answers);
}

#[derive(Debug)]
enum Next {
    Incomplete,
    /// A message, and its bytes on the wire.
    Message(Message, usize),
    /// Not a message, but of a valid length.
    Malformed(usize),
    Unframed,
}

/// The first message of `bytes`.
fn next(bytes: &[u8]) -> Next {
    let Some((header, rest)) = bytes.split_first_chunk::<4>() else {
        return Next::Incomplete;
    };
    let len = u32::from_le_bytes(*header) as usize;
    if len == 0 || len > MAX_MESSAGE {
        return Next::Unframed;
    }
    let Some(message) = rest.get(..len) else {
        return Next::Incomplete;
    };
    match postcard::from_bytes(message) {
        Ok(text) => Next::Message(text, 4 + len),
        Err(_) => Next::Malformed(4 + len),
    }
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u32).to_le_bytes(), message].concat()
}

/// Reads what has arrived at the peer, which must be the first of `answers`.
fn drain(peer: &mut TcpStream, answers: &mut Vec<u8>) {
    let mut bytes = [0; 4096];
    match peer.read(&mut bytes) {
        Ok(len) => {
            assert_eq!(bytes[..len], answers[..len], "not what was sent");
            answers.drain(..len);
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
    }
}

/// A connected pair. The first does not block; closing it leaves no TIME_WAIT.
fn pair() -> (TcpStream, TcpStream) {
    LISTENER.with(|listener| {
        let address = listener.local_addr().expect("a port");
        let peer = TcpStream::connect(address).expect("a listener");
        let (ours, _) = listener.accept().expect("a connection");
        set_socket_linger(&peer, Some(Duration::ZERO)).expect("a socket");
        peer.set_nonblocking(true).expect("a socket");
        (peer, ours)
    })
}
