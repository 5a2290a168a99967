//! Data over TCP, for guests with a network device.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener},
    thread::JoinHandle,
};

use anyhow::{Context, Result};

/// Data that is moved to its end by a thread.
pub struct Transfer(JoinHandle<std::io::Result<Vec<u8>>>);

impl Transfer {
    /// Sends `data` to the first that connects.
    pub fn send(listener: TcpListener, data: Vec<u8>) -> Self {
        Self(std::thread::spawn(move || {
            let (mut stream, _) = listener.accept()?;
            stream.write_all(&data)?;
            stream.shutdown(Shutdown::Write)?;
            Ok(data)
        }))
    }

    /// Receives what the first that connects sends until it closes the connection.
    pub fn receive(listener: TcpListener) -> Self {
        Self(std::thread::spawn(move || {
            let mut data = Vec::new();
            listener.accept()?.0.read_to_end(&mut data)?;
            Ok(data)
        }))
    }

    /// Waits for the end. Returns the data.
    pub fn wait(self) -> Result<Vec<u8>> {
        let moved = self.0.join().ok().context("a thread has panicked")?;
        moved.context("moving data over TCP")
    }
}
