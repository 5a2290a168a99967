//! QEMU's monitor, compromised: lines of any kind, cut off anywhere.
//!
//! Input: a byte with the number of commands, then QEMU's bytes.

use std::{
    io::Write,
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use farside_vm_control::QmpClient;
use serde_json::json;

use crate::input::Input;

/// Most bytes: they must fit in the socket's buffer.
const MAX_BYTES: usize = 64 << 10;

/// Greets, executes commands and waits for an event.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let commands = input.u8() % 4;
    let (ours, mut qemu) = UnixStream::pair().expect("a pair of sockets");
    let bytes = &input.0[..input.0.len().min(MAX_BYTES)];
    qemu.write_all(bytes).expect("there is room");
    // Closed at the end: a client that would wait for more sees that.
    qemu.shutdown(std::net::Shutdown::Write).expect("a socket");
    let mut client = QmpClient::new(ours);
    let deadline = Instant::now() + Duration::from_secs(20);
    if client.greet(deadline).is_err() {
        return;
    }
    for _ in 0..commands {
        if client.run("query-status", json!({})).is_err() {
            return;
        }
    }
    let _ = client.wait_event(deadline, |event| event.name == "DEVICE_DELETED");
}
