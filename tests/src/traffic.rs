//! For guests with a network device: a tap interface, and data over TCP.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::JoinHandle,
};

use anyhow::{Context, Result, ensure};
use farside_testbed::Testbed;
use sha2::{Digest, Sha256};

use crate::image::{hex, noise};

/// A tap interface of this machine, up, with an address in a network of its own; removed on drop. Takes root.
pub struct Tap {
    testbed: Testbed,
    name: String,
    /// The first three bytes of its network's addresses.
    network: String,
}

impl Tap {
    /// Makes one.
    ///
    /// # Errors
    /// Those of `ip`.
    pub fn new(testbed: &Testbed) -> Result<Self> {
        static TAPS: AtomicU32 = AtomicU32::new(0);
        let number = TAPS.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        let tap = Self {
            testbed: testbed.clone(),
            name: format!("fs{pid}-{number}"),
            network: format!("10.{}.{}", 64 + (pid + 64 * number) % 192, pid / 64 % 256),
        };
        let Self { name, network, .. } = &tap;
        tap.ip(&format!("tuntap add {name} mode tap"))?;
        tap.ip(&format!("address add {network}.1/24 dev {name}"))?;
        tap.ip(&format!("link set {name} up"))?;
        Ok(tap)
    }

    /// Why this process cannot make one, if so.
    pub fn unable() -> Option<&'static str> {
        if !rustix::process::geteuid().is_root() {
            return Some("a tap interface takes root");
        }
        match std::fs::File::open("/dev/net/tun") {
            Ok(_) => None,
            Err(_) => Some("this kernel has no /dev/net/tun"),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This machine's address.
    pub fn host(&self) -> String {
        format!("{}.1", self.network)
    }

    /// The guest's address, of the 24 bits that a network has.
    pub fn guest(&self) -> String {
        format!("{}.2", self.network)
    }

    fn ip(&self, line: &str) -> Result<()> {
        let output = self.testbed.tool("ip").args(line.split(' ')).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ip {line}: {said}");
        Ok(())
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        // Fails if it was never made.
        let _ = self.ip(&format!("link delete {}", self.name));
    }
}

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

    /// Sends data to the first that connects, until `going` is false. [`Transfer::wait`] returns its SHA-256, as text.
    pub fn send_while(listener: TcpListener, going: Arc<AtomicBool>) -> Self {
        Self(std::thread::spawn(move || {
            let (mut stream, _) = listener.accept()?;
            let mut hash = Sha256::new();
            let mut seed = 0;
            while going.load(Ordering::Relaxed) {
                let data = noise(seed, 1 << 20);
                hash.update(&data);
                stream.write_all(&data)?;
                seed += 1;
            }
            stream.shutdown(Shutdown::Write)?;
            Ok(hex(&hash.finalize()).into_bytes())
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
