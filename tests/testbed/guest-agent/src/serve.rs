//! Answers the host's requests from the virtio-serial port.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use farside_guest_agent::{Answer, FromGuest, PORT_NAME, Request, ToGuest};
use rustix::system::{RebootCommand, reboot};

use crate::pages::{self, Pages};
use crate::{exec, files, pci};

/// The port appears shortly after its driver has loaded.
const PORT_TIMEOUT: Duration = Duration::from_secs(20);

struct Agent {
    port: Mutex<File>,
    pages: Mutex<Pages>,
}

/// Serves requests for ever.
pub fn run() -> Result<()> {
    let path = find_port()?;
    let port = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))?;
    let agent = Arc::new(Agent {
        port: Mutex::new(port.try_clone().context("duplicating the port")?),
        pages: Mutex::default(),
    });
    // A reset may have truncated the previous agent's last line: end it.
    (&port).write_all(b"\n").context("writing to the port")?;
    let read = |path: &str| fs::read_to_string(path).with_context(|| format!("reading {path}"));
    agent.send(&FromGuest::Hello {
        boot_id: read("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
        kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
    })?;
    let mut lines = BufReader::new(port);
    let mut line = String::new();
    loop {
        line.clear();
        let n = lines.read_line(&mut line).context("reading the port")?;
        if n == 0 {
            // The host's end is closed; it may reopen.
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let message: ToGuest = match serde_json::from_str(&line) {
            Ok(message) => message,
            Err(error) => {
                eprintln!("guest-agent: not a request: {error}: {line}");
                continue;
            }
        };
        let agent = Arc::clone(&agent);
        // One thread per request, so that a long command does not delay others.
        std::thread::spawn(move || agent.answer(message));
    }
}

impl Agent {
    fn send(&self, message: &FromGuest) -> Result<()> {
        let mut line = serde_json::to_vec(message).context("encoding a message")?;
        line.push(b'\n');
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        port.write_all(&line).context("writing to the port")
    }

    fn answer(&self, message: ToGuest) {
        let end = match message.request {
            Request::PowerOff => Some(RebootCommand::PowerOff),
            Request::Reboot => Some(RebootCommand::Restart),
            _ => None,
        };
        let reply = FromGuest::Reply {
            id: message.id,
            result: self
                .handle(message.request)
                .map_err(|error| format!("{error:#}")),
        };
        if let Err(error) = self.send(&reply) {
            eprintln!("guest-agent: {error:#}");
        }
        if let Some(command) = end {
            rustix::fs::sync();
            if let Err(error) = reboot(command) {
                eprintln!("guest-agent: reboot: {error}");
            }
        }
    }

    fn handle(&self, request: Request) -> Result<Answer> {
        let pages = || self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let decode = |data: &str| STANDARD.decode(data).context("data is not base64");
        let encode = |data: Vec<u8>| Answer::Data(STANDARD.encode(data));
        let done = |()| Answer::Done;
        let index = |n: u64| usize::try_from(n).context("number too large");
        match request {
            Request::Exec {
                command,
                timeout_ms,
            } => exec::run(&command, Duration::from_millis(timeout_ms)),
            Request::MmioRead { at, width } => pci::mmio_read(&at, width).map(Answer::Value),
            Request::MmioWrite { at, width, value } => {
                pci::mmio_fill(&at, width, value, 1).map(done)
            }
            Request::MmioFill {
                at,
                width,
                value,
                count,
            } => pci::mmio_fill(&at, width, value, count).map(done),
            Request::ConfigRead { bdf, offset, width } => {
                pci::config_read(&bdf, offset, width).map(Answer::Value)
            }
            Request::ConfigWrite {
                bdf,
                offset,
                width,
                value,
            } => pci::config_write(&bdf, offset, width, value).map(done),
            Request::AllocPage { len } => pages().alloc(len),
            Request::ReadPage {
                handle,
                offset,
                len,
            } => pages()
                .get(handle)?
                .read_bytes(index(offset)?, index(len)?)
                .map(encode),
            Request::WritePage {
                handle,
                offset,
                data,
            } => pages()
                .get(handle)?
                .write_bytes(index(offset)?, &decode(&data)?)
                .map(done),
            Request::FreePage { handle } => pages().free(handle).map(done),
            Request::PhysRead { gpa, len } => pages::phys_read(gpa, len).map(encode),
            Request::PhysWrite { gpa, data } => pages::phys_write(gpa, &decode(&data)?).map(done),
            Request::WriteFile { path, offset, data } => {
                files::write(&path, offset, &decode(&data)?).map(done)
            }
            Request::ReadFile { path, offset, len } => files::read(&path, offset, len).map(encode),
            Request::WaitPath {
                path,
                present,
                timeout_ms,
            } => files::wait(&path, present, Duration::from_millis(timeout_ms)).map(done),
            Request::PowerOff | Request::Reboot => Ok(Answer::Done),
        }
    }
}

/// Finds the port by its name, as udev would.
fn find_port() -> Result<PathBuf> {
    let deadline = Instant::now() + PORT_TIMEOUT;
    loop {
        for entry in fs::read_dir("/sys/class/virtio-ports")
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            let device = PathBuf::from("/dev").join(entry.file_name());
            if name.trim() == PORT_NAME && device.exists() {
                return Ok(device);
            }
        }
        if Instant::now() >= deadline {
            bail!("no virtio-serial port named {PORT_NAME} after {PORT_TIMEOUT:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
