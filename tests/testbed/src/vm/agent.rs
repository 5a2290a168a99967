//! The host's end of the guest agent.

use std::fmt;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use farside_guest_agent::{Answer, BarAddress, FromGuest, Request, ToGuest, Width};

use super::board::{Board, hang_up, read_lines};

/// Single accesses take microseconds; but an emulated guest may be under load.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// The agent enforces a command's timeout; after this additional time the host assumes that
/// the agent hangs.
const GRACE: Duration = Duration::from_secs(30);

/// Bytes of a file per message.
const CHUNK: usize = 1 << 20;

/// A guest, controlled through its agent: shell commands, files, device registers, memory.
pub struct Guest {
    name: String,
    agent: Client,
    last_words: LastWords,
}

/// Describes the state of the VM when a guest does not reply.
type LastWords = Box<dyn Fn() -> String + Send + Sync>;

#[derive(Debug)]
struct Client {
    board: Board,
    socket: Mutex<UnixStream>,
    next_id: AtomicU64,
}

/// How a command in the guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit code, if it exited.
    pub code: Option<i32>,
    /// Signal, if it was killed by one.
    pub signal: Option<i32>,
    /// Whether it was killed on timeout.
    pub timed_out: bool,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// Whether it exited with code 0.
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.timed_out, self.code, self.signal) {
            (true, ..) => write!(f, "timed out")?,
            (_, Some(code), _) => write!(f, "exit code {code}")?,
            (_, _, Some(signal)) => write!(f, "signal {signal}")?,
            _ => write!(f, "unknown end")?,
        }
        for (name, text) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            let text = text.trim_end();
            if !text.is_empty() {
                write!(f, "\n-- {name}:\n{text}")?;
            }
        }
        Ok(())
    }
}

/// Locked memory in the guest, at a known guest-physical address. Allocated until
/// [`Guest::free_page`] or the guest's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestPage {
    handle: u64,
    /// Guest-physical address.
    pub gpa: u64,
    /// Size in bytes.
    pub len: u64,
}

/// A command that runs in the guest.
#[derive(Debug)]
#[must_use = "the command's end is seen by `wait`"]
pub struct Pending<'a> {
    guest: &'a Guest,
    id: u64,
    command: String,
    timeout: Duration,
}

impl Pending<'_> {
    /// Waits for the end of the command.
    pub fn wait(self) -> Result<Output> {
        let timeout = self.timeout + GRACE;
        self.wait_for(timeout)
    }

    /// As [`Pending::wait`], with a timeout that may be shorter than the command's.
    pub fn wait_for(self, timeout: Duration) -> Result<Output> {
        let Self {
            guest,
            id,
            command,
            timeout: _,
        } = self;
        let context = || format!("VM {}: `{command}`", guest.name);
        match guest
            .agent
            .wait(id, timeout)
            .map_err(|error| guest.quote(&error.to_string()))
            .with_context(context)?
        {
            Answer::Exit {
                code,
                signal,
                timed_out,
                stdout,
                stderr,
            } => Ok(Output {
                code,
                signal,
                timed_out,
                stdout: text(&stdout).with_context(context)?,
                stderr: text(&stderr).with_context(context)?,
            }),
            other => Err(unexpected(&other)),
        }
    }
}

impl Client {
    fn start(socket: UnixStream, board: Board) -> Result<Self> {
        let (on_line, on_close) = (board.clone(), board.clone());
        read_lines(
            "guest-agent",
            &socket,
            move |line| receive(&on_line, line),
            move || {
                tell(on_close.change(|state| {
                    state.agent.closed = true;
                    state.agent.take_ended()
                }))
            },
        )?;
        Ok(Client {
            board,
            socket: Mutex::new(socket),
            next_id: AtomicU64::new(0),
        })
    }

    fn send(&self, request: Request) -> Result<u64> {
        self.send_for(request, None)
    }

    /// Sends a request; `nested` is closed when the request ends.
    fn send_for(&self, request: Request, nested: Option<&Board>) -> Result<u64> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut line =
            serde_json::to_vec(&ToGuest { id, request }).context("encoding a request")?;
        line.push(b'\n');
        self.board.change(|state| {
            state.agent.open.insert(id);
            if let Some(board) = nested {
                state.agent.nested.insert(id, board.clone());
            }
        });
        self.socket
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write_all(&line)
            .context("sending to the guest's agent")?;
        Ok(id)
    }

    fn wait(&self, id: u64, timeout: Duration) -> Result<Answer> {
        let reply = self.board.wait(timeout, |state| {
            let agent = &mut state.agent;
            if let Some(reply) = agent.replies.remove(&id) {
                Some(reply)
            } else if agent.closed {
                Some(Err("QEMU ended".to_owned()))
            } else if !agent.open.contains(&id) {
                Some(Err("the guest rebooted meanwhile".to_owned()))
            } else {
                None
            }
        });
        match reply {
            Some(reply) => reply.map_err(|error| anyhow!(error)),
            None => bail!("the guest's agent did not answer within {timeout:?}"),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        hang_up(&self.socket);
    }
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guest")
            .field("name", &self.name)
            .field("agent", &self.agent)
            .finish_non_exhaustive()
    }
}

impl Guest {
    /// `socket` connects to the agent; its messages go to `board`.
    pub(crate) fn start(
        name: String,
        socket: UnixStream,
        board: Board,
        last_words: LastWords,
    ) -> Result<Self> {
        Ok(Self {
            name,
            agent: Client::start(socket, board)?,
            last_words,
        })
    }

    /// The VM's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits until the agent in the guest has started. The error includes the end of the
    /// guest's log.
    pub fn wait_agent(&self, timeout: Duration) -> Result<()> {
        self.wait_boot(1, timeout)
    }

    /// How often the agent has started: 1 after the first boot, 2 after a reboot.
    pub fn boots(&self) -> u64 {
        self.agent.board.look(|state| state.agent.hellos)
    }

    /// Waits until the agent has started `boots` times.
    pub fn wait_boot(&self, boots: u64, timeout: Duration) -> Result<()> {
        let started = self.agent.board.wait(timeout, |state| {
            let booted = state.agent.hellos >= boots;
            (booted || state.agent.closed).then_some(booted)
        });
        match started {
            Some(true) => Ok(()),
            Some(false) => Err(self.quote("QEMU ended before the guest's agent started")),
            None => {
                let what = format!("the guest's agent did not start within {timeout:?}");
                Err(self.quote(&what))
            }
        }
    }

    /// Waits until QEMU has closed the agent's socket, as it does when it ends.
    pub fn wait_gone(&self, timeout: Duration) -> Result<()> {
        let gone = self
            .agent
            .board
            .wait(timeout, |state| state.agent.closed.then_some(()));
        gone.ok_or_else(|| self.quote(&format!("QEMU has not ended within {timeout:?}")))
    }

    /// An error with the VM's state and logs.
    pub(crate) fn quote(&self, what: &str) -> anyhow::Error {
        anyhow!("VM {}: {what}{}", self.name, (self.last_words)())
    }

    pub(crate) fn power_off(&self) -> Result<()> {
        match self.ask(Request::PowerOff) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.context("powering off")),
        }
    }

    pub(crate) fn ask_reboot(&self) -> Result<()> {
        self.ask(Request::Reboot).context("rebooting").map(drop)
    }

    /// Runs a shell command in the guest. It is killed on timeout; the output reports a
    /// timeout or a non-zero exit code, neither of which is an error.
    pub fn exec(&self, command: &str, timeout: Duration) -> Result<Output> {
        self.exec_start(command, timeout)?.wait()
    }

    /// As [`Guest::exec`], but any result other than exit code 0 is an error. Returns the
    /// standard output.
    pub fn exec_ok(&self, command: &str, timeout: Duration) -> Result<String> {
        let output = self.exec(command, timeout)?;
        if !output.success() {
            bail!("VM {}: `{command}`: {output}", self.name);
        }
        Ok(output.stdout)
    }

    /// Starts a shell command in the guest without waiting for its end.
    pub fn exec_start(&self, command: &str, timeout: Duration) -> Result<Pending<'_>> {
        let id = self.agent.send(Request::Exec {
            command: command.to_owned(),
            timeout_ms: millis(timeout),
        })?;
        Ok(Pending {
            guest: self,
            id,
            command: command.to_owned(),
            timeout,
        })
    }

    /// As [`Guest::exec_start`], for a command that is a nested VM's QEMU.
    pub(crate) fn exec_qemu(
        &self,
        command: &str,
        timeout: Duration,
        nested: &Board,
    ) -> Result<Pending<'_>> {
        let request = Request::Exec {
            command: command.to_owned(),
            timeout_ms: millis(timeout),
        };
        Ok(Pending {
            guest: self,
            id: self.agent.send_for(request, Some(nested))?,
            command: command.to_owned(),
            timeout,
        })
    }

    /// The release of the guest's kernel.
    pub fn kernel_release(&self) -> String {
        self.agent.board.look(|state| state.agent.kernel.clone())
    }

    /// Reads from a BAR with one access.
    pub fn mmio_read(&self, at: &BarAddress, width: Width) -> Result<u64> {
        self.value(Request::MmioRead {
            at: at.clone(),
            width,
        })
    }

    /// Writes to a BAR with one access.
    pub fn mmio_write(&self, at: &BarAddress, width: Width, value: u64) -> Result<()> {
        self.done(Request::MmioWrite {
            at: at.clone(),
            width,
            value,
        })
    }

    /// Writes a value to `count` consecutive locations of a BAR.
    pub fn mmio_fill(&self, at: &BarAddress, width: Width, value: u64, count: u64) -> Result<()> {
        self.done(Request::MmioFill {
            at: at.clone(),
            width,
            value,
            count,
        })
    }

    /// Reads a PCI function's configuration space.
    pub fn config_read(&self, bdf: &str, offset: u64, width: Width) -> Result<u64> {
        self.value(Request::ConfigRead {
            bdf: bdf.to_owned(),
            offset,
            width,
        })
    }

    /// Writes a PCI function's configuration space.
    pub fn config_write(&self, bdf: &str, offset: u64, width: Width, value: u64) -> Result<()> {
        self.done(Request::ConfigWrite {
            bdf: bdf.to_owned(),
            offset,
            width,
            value,
        })
    }

    /// Allocates up to 2 MiB of zeroed, contiguous guest memory for a device.
    pub fn alloc_page(&self, len: u64) -> Result<GuestPage> {
        match self.ask(Request::AllocPage { len })? {
            Answer::Page { handle, gpa, len } => Ok(GuestPage { handle, gpa, len }),
            other => Err(unexpected(&other)),
        }
    }

    /// Reads allocated memory.
    pub fn read_page(&self, page: GuestPage, offset: u64, len: u64) -> Result<Vec<u8>> {
        self.data(Request::ReadPage {
            handle: page.handle,
            offset,
            len,
        })
    }

    /// Writes allocated memory.
    pub fn write_page(&self, page: GuestPage, offset: u64, data: &[u8]) -> Result<()> {
        self.done(Request::WritePage {
            handle: page.handle,
            offset,
            data: STANDARD.encode(data),
        })
    }

    /// Frees allocated memory.
    pub fn free_page(&self, page: GuestPage) -> Result<()> {
        self.done(Request::FreePage {
            handle: page.handle,
        })
    }

    /// Reads guest-physical memory that the guest's kernel does not use as RAM:
    /// ROMs, device memory, ranges reserved with `memmap=`.
    pub fn phys_read(&self, gpa: u64, len: u64) -> Result<Vec<u8>> {
        self.data(Request::PhysRead { gpa, len })
    }

    /// Writes guest-physical memory; see [`Guest::phys_read`].
    pub fn phys_write(&self, gpa: u64, data: &[u8]) -> Result<()> {
        self.done(Request::PhysWrite {
            gpa,
            data: STANDARD.encode(data),
        })
    }

    /// Writes a file in the guest.
    pub fn write_file(&self, path: &str, data: &[u8]) -> Result<()> {
        let mut offset = 0;
        loop {
            let rest = &data[offset..];
            let chunk = &rest[..rest.len().min(CHUNK)];
            self.done(Request::WriteFile {
                path: path.to_owned(),
                offset: offset as u64,
                data: STANDARD.encode(chunk),
            })?;
            offset += chunk.len();
            if offset == data.len() {
                return Ok(());
            }
        }
    }

    /// Reads a file in the guest.
    pub fn read_file(&self, path: &str) -> Result<Vec<u8>> {
        let mut data = Vec::new();
        loop {
            let chunk = self.data(Request::ReadFile {
                path: path.to_owned(),
                offset: data.len() as u64,
                len: CHUNK as u64,
            })?;
            if chunk.is_empty() {
                return Ok(data);
            }
            data.extend(chunk);
        }
    }

    /// Waits until a path exists in the guest, such as a disk's device node.
    pub fn wait_path(&self, path: &str, timeout: Duration) -> Result<()> {
        self.wait_path_is(path, true, timeout)
    }

    /// Waits until a path no longer exists in the guest.
    pub fn wait_no_path(&self, path: &str, timeout: Duration) -> Result<()> {
        self.wait_path_is(path, false, timeout)
    }

    fn wait_path_is(&self, path: &str, present: bool, timeout: Duration) -> Result<()> {
        let id = self.agent.send(Request::WaitPath {
            path: path.to_owned(),
            present,
            timeout_ms: millis(timeout),
        })?;
        self.agent
            .wait(id, timeout + GRACE)
            .map(drop)
            .map_err(|error| self.quote(&error.to_string()))
    }

    fn ask(&self, request: Request) -> Result<Answer> {
        let id = self.agent.send(request)?;
        self.agent
            .wait(id, REPLY_TIMEOUT)
            .with_context(|| format!("VM {}", self.name))
    }

    fn done(&self, request: Request) -> Result<()> {
        match self.ask(request)? {
            Answer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    fn value(&self, request: Request) -> Result<u64> {
        match self.ask(request)? {
            Answer::Value(value) => Ok(value),
            other => Err(unexpected(&other)),
        }
    }

    fn data(&self, request: Request) -> Result<Vec<u8>> {
        match self.ask(request)? {
            Answer::Data(data) => decode(&data),
            other => Err(unexpected(&other)),
        }
    }
}

fn receive(board: &Board, line: &str) {
    match serde_json::from_str(line) {
        Ok(FromGuest::Hello { kernel, boot_id }) => board.change(|state| {
            log::debug!("guest agent of boot {boot_id} started");
            state.agent.hellos += 1;
            state.agent.kernel = kernel;
            // The agent that would have answered these has ended.
            state.agent.open.clear();
            tell(state.agent.take_ended());
        }),
        Ok(FromGuest::Reply { id, result }) => board.change(|state| {
            state.agent.open.remove(&id);
            state.agent.replies.insert(id, result);
            tell(state.agent.take_ended());
        }),
        // A partial line of an agent that a reset cut off.
        Err(error) => log::warn!("the guest's agent said what it should not: {error}: {line}"),
    }
}

/// Notifies nested VMs that their QEMU has ended.
fn tell(nested: Vec<Board>) {
    for board in nested {
        board.close();
    }
}

fn unexpected(answer: &Answer) -> anyhow::Error {
    anyhow!("the guest's agent answered something else than was asked: {answer:?}")
}

fn decode(data: &str) -> Result<Vec<u8>> {
    STANDARD
        .decode(data)
        .context("the guest's agent sent what is not base64")
}

fn text(data: &str) -> Result<String> {
    Ok(String::from_utf8_lossy(&decode(data)?).into_owned())
}

fn millis(timeout: Duration) -> u64 {
    timeout.as_millis().try_into().unwrap_or(u64::MAX)
}
