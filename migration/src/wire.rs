//! The messages between the two hosts: JSON, each with its length before it.

use std::io::{Read, Write};

use farside_daemon::VmName;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    Error, ErrorKind, Journal, MANIFEST_VERSION, Result,
    check::{Answer, Question},
};

/// The version of the messages. Hosts of different versions refuse each other.
pub const PROTOCOL_VERSION: u32 = 6;

/// Longest message, bytes.
const MAX_MESSAGE: usize = 4 << 20;

/// Precedes each message's length. It distinguishes an agent from a login shell that prints
/// a greeting.
const MARK: [u8; 4] = *b"fsm1";

/// Versions of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of farside.
    pub farside: String,
    /// Version of the manifest.
    pub manifest: u32,
    /// Version of the messages.
    pub protocol: u32,
}

impl Hello {
    /// Of this binary.
    pub fn ours() -> Self {
        Self {
            farside: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: MANIFEST_VERSION,
            protocol: PROTOCOL_VERSION,
        }
    }

    /// Refuses another version, by name.
    pub fn check(&self) -> Result<()> {
        let ours = Self::ours();
        if *self == ours {
            return Ok(());
        }
        let text = |hello: &Self| {
            format!(
                "farside {} (manifest {}, protocol {})",
                hello.farside, hello.manifest, hello.protocol
            )
        };
        Err(Error::new(
            ErrorKind::Version,
            format!(
                "the other host has {}, this one {}: install the same farside on both",
                text(self),
                text(&ours)
            ),
        ))
    }
}

/// A request of the host that the VM leaves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// First message.
    Hello(Hello),
    /// Checks what would stop the VM from coming here; changes nothing.
    Check(Box<Question>),
    /// The same, and records the migration.
    Prepare(Box<Journal>),
    /// The lenders have handed the devices over: installs the VM.
    Install(Box<Journal>),
    /// Starts the VM.
    Start {
        /// The migration.
        id: String,
        /// The VM.
        vm: VmName,
    },
    /// Starts a QEMU that waits for the guest.
    Incoming {
        /// The migration.
        id: String,
        /// The VM.
        vm: VmName,
    },
    /// The other host is done.
    Finish {
        /// The migration.
        id: String,
        /// The VM.
        vm: VmName,
    },
    /// Ends the VM, if it was started, and removes its configuration.
    StopThere {
        /// The migration.
        id: String,
        /// The VM.
        vm: VmName,
    },
}

/// The reply to a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// To `Hello`.
    Hello {
        /// The versions of the other host.
        hello: Hello,
        /// The host's own name.
        host: String,
    },
    /// Done.
    Done,
    /// To `Check`.
    Checked(Answer),
    /// To `Incoming`: the TCP port at which QEMU listens. The address is in the journal: this host
    /// does not send its guest to one that the other host names.
    Listening(u16),
    /// Not done.
    Failed(Error),
}

/// Sends one message.
pub(crate) fn send(mut stream: impl Write, message: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec(message).map_err(|error| Error::lost(error.to_string()))?;
    if text.len() > MAX_MESSAGE {
        return Err(Error::refused(format!(
            "a message of {} bytes; at most {MAX_MESSAGE} can be sent",
            text.len()
        )));
    }
    let mut frame = MARK.to_vec();
    frame.extend((text.len() as u32).to_le_bytes());
    frame.extend(text);
    stream
        .write_all(&frame)
        .and_then(|()| stream.flush())
        .map_err(|error| Error::lost(format!("the connection broke: {error}")))
}

/// Receives one message; none when the other side has closed.
pub(crate) fn receive<T: DeserializeOwned>(mut stream: impl Read) -> Result<Option<T>> {
    let broke = |error: std::io::Error| Error::lost(format!("the connection broke: {error}"));
    let mut head = [0; 8];
    let mut got = 0;
    while got < head.len() {
        match stream.read(&mut head[got..]) {
            Ok(0) if got == 0 => return Ok(None),
            Ok(0) => return Err(unclean(&head[..got])),
            Ok(count) => got += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(broke(error)),
        }
    }
    let [_, _, _, _, len @ ..] = head;
    if !head.starts_with(&MARK) {
        return Err(unclean(&head));
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_MESSAGE {
        return Err(Error::lost(format!(
            "a message of {len} bytes was announced; at most {MAX_MESSAGE} are taken"
        )));
    }
    let mut text = vec![0; len];
    stream.read_exact(&mut text).map_err(broke)?;
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| Error::lost(format!("malformed message: {error}")))
}

fn unclean(head: &[u8]) -> Error {
    Error::lost(format!(
        "not an agent's message but {:?}: does a login shell print something there, or is farside missing?",
        String::from_utf8_lossy(head)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request::Start {
            id: "1".into(),
            vm: "web1".parse().unwrap(),
        }
    }

    #[test]
    fn a_message_is_received_as_sent_and_the_end_is_seen() {
        let mut wire = Vec::new();
        send(&mut wire, &request()).unwrap();
        send(&mut wire, &Request::Hello(Hello::ours())).unwrap();
        let mut from = wire.as_slice();
        let first = receive::<Request>(&mut from).unwrap();
        assert!(matches!(first, Some(Request::Start { vm, .. }) if vm == "web1"));
        assert!(matches!(receive(&mut from), Ok(Some(Request::Hello(_)))));
        assert!(matches!(receive::<Request>(&mut from), Ok(None)));
    }

    #[test]
    fn what_is_no_message_is_refused_and_nothing_big_is_allocated() {
        let mut wire = Vec::new();
        send(&mut wire, &request()).unwrap();
        let mut huge = MARK.to_vec();
        huge.extend(u32::MAX.to_le_bytes());
        for bad in [
            b"Last login: today\n".as_slice(),
            b"bash",
            &wire[..6],
            &wire[..wire.len() - 1],
            &huge,
        ] {
            let error = receive::<Request>(bad).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Lost, "{error}");
        }
        let error = receive::<Request>(b"Last login".as_slice()).unwrap_err();
        assert!(error.message.contains("Last"), "{error}");
    }

    /// QEMU would execute an `exec:` URI.
    #[test]
    fn the_other_host_names_a_port_and_nothing_else() {
        let reply = |listening: &str| {
            let text = format!("{{\"Listening\":{listening}}}");
            serde_json::from_str::<Reply>(&text)
        };
        assert!(matches!(reply("49152"), Ok(Reply::Listening(49152))));
        for other in ["\"exec:id\"", "\"tcp:203.0.113.5:4444\"", "65536", "-1"] {
            reply(other).unwrap_err();
        }
    }

    #[test]
    fn other_versions_are_refused_by_name() {
        Hello::ours().check().unwrap();
        let other = Hello {
            farside: "9.8.7".into(),
            ..Hello::ours()
        };
        let error = other.check().unwrap_err();
        assert_eq!(error.kind, ErrorKind::Version);
        assert!(error.message.contains("9.8.7"), "{error}");
    }
}
