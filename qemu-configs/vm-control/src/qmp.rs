//! A client of QMP, the protocol of QEMU's monitor: commands, and events with a
//! deadline.

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// Time limit for an answer. Long, because an emulating QEMU on a loaded host answers late.
pub const ANSWER: Duration = Duration::from_secs(60);

/// Maximum number of unread events. Bounds memory.
const MAX_EVENTS: usize = 1024;

/// Maximum length of a line. QEMU's longest answers, such as its schema, have some 300 KiB. Bounds
/// memory, since a compromised QEMU may send anything.
const MAX_LINE: usize = 4 << 20;

/// A QMP event.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name in QEMU's documentation, such as `DEVICE_DELETED`.
    pub name: String,
    /// Its data.
    pub data: Value,
}

/// A failed command.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The connection closed, usually because QEMU exited.
    #[error("{0}")]
    Closed(String),
    /// The peer does not speak QMP.
    #[error("{0}")]
    Malformed(String),
    /// The deadline passed.
    #[error("no answer in time")]
    Silent,
    /// QEMU refused the command.
    #[error("{reason}")]
    Refused {
        /// QMP's class of the error, such as `DeviceNotFound`.
        class: String,
        /// QEMU's description of it.
        reason: String,
    },
}

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub struct QmpClient {
    stream: UnixStream,
    /// Bytes that were read and not yet parsed.
    buffer: Vec<u8>,
    events: VecDeque<Event>,
    next_id: u64,
}

impl QmpClient {
    /// A client on a connected socket. Call [`QmpClient::greet`] first.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
            events: VecDeque::new(),
            next_id: 0,
        }
    }

    /// Reads QEMU's greeting, its first line; `qmp_capabilities` must follow. QEMU serves one
    /// client at a time, and greets the next after that one disconnects.
    pub fn greet(&mut self, deadline: Instant) -> Result<(), QmpError> {
        let greeting = self.next_line(deadline)?.ok_or(QmpError::Silent)?;
        match greeting.get("QMP") {
            Some(_) => Ok(()),
            None => Err(QmpError::Malformed("this is no QEMU's monitor".to_owned())),
        }
    }

    /// Executes a command, and returns its result.
    pub fn run(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let deadline = Instant::now() + ANSWER;
        let id = self.next_id;
        self.next_id += 1;
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        self.stream
            .set_write_timeout(Some(left(deadline)))
            .and_then(|()| self.stream.write_all(line.as_bytes()))
            .map_err(|error| QmpError::Closed(error.to_string()))?;
        loop {
            match self.receive(deadline)?.ok_or(QmpError::Silent)? {
                Line::Answer(answer) if answer["id"] == id => return returned(command, &answer),
                // An answer to an abandoned command, or an event.
                _ => {}
            }
        }
    }

    /// Waits for the next event that `wanted` accepts; earlier ones are dropped. Returns `None` at
    /// `deadline`.
    pub fn wait_event(
        &mut self,
        deadline: Instant,
        wanted: impl Fn(&Event) -> bool,
    ) -> Result<Option<Event>, QmpError> {
        loop {
            while let Some(event) = self.events.pop_front() {
                if wanted(&event) {
                    return Ok(Some(event));
                }
            }
            if self.receive(deadline)?.is_none() {
                return Ok(None);
            }
        }
    }

    /// Reads the next line, and keeps it if it is an event. Returns `None` at `deadline`; a partly
    /// read line is kept.
    fn receive(&mut self, deadline: Instant) -> Result<Option<Line>, QmpError> {
        let Some(mut line) = self.next_line(deadline)? else {
            return Ok(None);
        };
        let Some(name) = line["event"].as_str() else {
            return Ok(Some(Line::Answer(line)));
        };
        let name = name.to_owned();
        log::debug!("QEMU reports {name} {}", line["data"]);
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        let data = line["data"].take();
        self.events.push_back(Event { name, data });
        Ok(Some(Line::Event))
    }

    fn next_line(&mut self, deadline: Instant) -> Result<Option<Value>, QmpError> {
        let mut searched = 0;
        loop {
            let end = self.buffer[searched..]
                .iter()
                .position(|&byte| byte == b'\n');
            if let Some(end) = end {
                let line: Vec<u8> = self.buffer.drain(..=searched + end).collect();
                return serde_json::from_slice(&line).map(Some).map_err(|error| {
                    QmpError::Malformed(format!("it sent invalid JSON: {error}"))
                });
            }
            searched = self.buffer.len();
            if searched > MAX_LINE {
                let text = format!("a line is longer than {MAX_LINE} bytes");
                return Err(QmpError::Malformed(text));
            }
            // Checked before each read: a peer that never stops sending must not
            // delay the deadline.
            if Instant::now() >= deadline {
                return Ok(None);
            }
            let mut piece = [0; 16 << 10];
            let read = self
                .stream
                .set_read_timeout(Some(left(deadline)))
                .and_then(|()| self.stream.read(&mut piece));
            match read {
                Ok(0) => {
                    return Err(QmpError::Closed("QEMU has closed it, or ended".to_owned()));
                }
                Ok(len) => self.buffer.extend_from_slice(&piece[..len]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(error) => return Err(QmpError::Closed(error.to_string())),
            }
        }
    }
}

enum Line {
    /// Kept in [`QmpClient::events`].
    Event,
    Answer(Value),
}

/// The value in QEMU's answer to a command.
pub(crate) fn returned(command: &str, answer: &Value) -> Result<Value, QmpError> {
    let text = |value: &Value| value.as_str().unwrap_or("without a reason").to_owned();
    match (answer.get("return"), answer.get("error")) {
        (Some(value), _) => Ok(value.clone()),
        (None, Some(error)) => Err(QmpError::Refused {
            class: text(&error["class"]),
            reason: text(&error["desc"]),
        }),
        (None, None) => Err(QmpError::Malformed(format!(
            "the answer to {command} is malformed: {answer}"
        ))),
    }
}

/// Zero would mean no timeout.
pub(crate) fn left(deadline: Instant) -> Duration {
    deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1))
}
