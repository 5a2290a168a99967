//! QMP's lines on a UNIX socket.

use std::{
    io::{ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use serde_json::Value;

use super::Event;
use crate::{Error, process::Process};

/// Longest line. QEMU's longest answers, such as its schema, have some 300 KiB. A
/// QEMU that its guest has taken over says what it likes: bounds memory.
const MAX_LINE: usize = 4 << 20;

/// How long a QEMU that hangs up on who has just connected may take to end.
const ENDING: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Socket {
    vm: String,
    path: PathBuf,
    stream: UnixStream,
    process: Process,
    /// It has answered.
    known: bool,
    /// What was read and not yet taken.
    buffer: Vec<u8>,
}

/// What QEMU sends.
pub(super) enum Line {
    Event(Event),
    Answer(Value),
}

impl Socket {
    /// Connects, and takes the greeting.
    pub(super) fn connect(
        vm: &str,
        path: &Path,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Self, Error> {
        let failed = |what: &str| Error::system(format!("{}: {what}", path.display()));
        let stream = match connect_by(path, deadline) {
            Ok(stream) => stream,
            Err(Errno::NOENT) => {
                let vm = vm.to_owned();
                let hint = String::new();
                return Err(Error::NotRunning { vm, hint });
            }
            Err(Errno::CONNREFUSED) => {
                return Err(Error::NotRunning {
                    vm: vm.to_owned(),
                    hint: format!(" ({} is what a QEMU that ended has left)", path.display()),
                });
            }
            // Its backlog is full.
            Err(Errno::AGAIN) => {
                return Err(Error::MonitorFull {
                    vm: vm.to_owned(),
                    path: path.to_owned(),
                });
            }
            Err(errno) => return Err(failed("cannot connect")(errno.into())),
        };
        let process = Process::of_peer(&stream).map_err(failed("whose process is it?"))?;
        let mut socket = Self {
            vm: vm.to_owned(),
            path: path.to_owned(),
            stream,
            process,
            known: false,
            buffer: Vec::new(),
        };
        // Its first line; only clients that others keep out wait for it.
        match socket.next_value(deadline)? {
            Some(greeting) if greeting.get("QMP").is_some() => Ok(socket),
            Some(_) => Err(socket.lost("this is no QEMU's monitor")),
            None => Err(socket.silent(limit)),
        }
    }

    pub(super) fn process(&self) -> &Process {
        &self.process
    }

    pub(super) fn send(&mut self, line: &Value, deadline: Instant) -> Result<(), Error> {
        let mut text = line.to_string();
        text.push('\n');
        let sent = self
            .stream
            .set_write_timeout(Some(left(deadline)))
            .and_then(|()| self.stream.write_all(text.as_bytes()));
        sent.map_err(|error| self.hung_up(error))
    }

    /// The next line. None when `deadline` comes first; what was read before it
    /// is taken after it, too.
    pub(super) fn receive(&mut self, deadline: Instant) -> Result<Option<Line>, Error> {
        let Some(value) = self.next_value(deadline)? else {
            return Ok(None);
        };
        Ok(Some(match value["event"].as_str() {
            Some(name) => Line::Event(Event {
                name: name.to_owned(),
                data: value["data"].clone(),
            }),
            None => {
                self.known = true;
                Line::Answer(value)
            }
        }))
    }

    pub(super) fn silent(&self, limit: Duration) -> Error {
        Error::MonitorSilent {
            vm: self.vm.clone(),
            pid: self.process.pid(),
            path: self.path.clone(),
            limit,
        }
    }

    fn next_value(&mut self, deadline: Instant) -> Result<Option<Value>, Error> {
        let mut looked = 0;
        loop {
            let end = self.buffer[looked..].iter().position(|&byte| byte == b'\n');
            if let Some(end) = end {
                let line: Vec<u8> = self.buffer.drain(..=looked + end).collect();
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|error| self.lost(format!("it said what is no JSON: {error}")));
            }
            looked = self.buffer.len();
            if looked > MAX_LINE {
                return Err(self.lost(format!("a line is longer than {MAX_LINE} bytes")));
            }
            // Looked at after each read: one who never stops sending lets none
            // of them come late.
            if Instant::now() >= deadline {
                return Ok(None);
            }
            let mut piece = [0; 16 << 10];
            let read = self
                .stream
                .set_read_timeout(Some(left(deadline)))
                .and_then(|()| self.stream.read(&mut piece));
            match read {
                Ok(0) => return Err(self.hung_up("QEMU has closed it, or ended")),
                Ok(len) => self.buffer.extend_from_slice(&piece[..len]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(error) => return Err(self.hung_up(error)),
            }
        }
    }

    /// One that ends while somebody connects has ended before.
    fn hung_up(&self, why: impl ToString) -> Error {
        let ended = || self.process.wait(Instant::now() + ENDING);
        if !self.known && matches!(ended(), Ok(true)) {
            return Error::NotRunning {
                vm: self.vm.clone(),
                hint: " (QEMU has just ended)".to_owned(),
            };
        }
        self.lost(why)
    }

    fn lost(&self, why: impl ToString) -> Error {
        Error::MonitorLost {
            vm: self.vm.clone(),
            why: why.to_string(),
        }
    }
}

/// Connects; a full backlog is waited for until `deadline`, then fails with EAGAIN.
pub fn connect_by(path: &Path, deadline: Instant) -> Result<UnixStream, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    set_socket_timeout(&socket, Timeout::Send, Some(left(deadline)))?;
    connect(&socket, &address)?;
    Ok(socket.into())
}

/// Zero would mean for ever.
fn left(deadline: Instant) -> Duration {
    deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1))
}

#[cfg(test)]
mod tests;
