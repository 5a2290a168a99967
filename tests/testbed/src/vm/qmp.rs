//! QEMU's control channel: JSON, one document a line.
//!
//! Our own few lines instead of a client crate: those read with no deadline, and
//! bring types generated from one QEMU version's schema, where we use six
//! commands.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use super::board::{Board, hang_up, read_lines};

/// QEMU answers between two emulated instructions; on a busy machine, late.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub struct Qmp {
    board: Board,
    socket: Mutex<UnixStream>,
    next_id: AtomicU64,
    /// Where QEMU's last words are.
    log: PathBuf,
}

/// Something that QEMU reported of itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// As QEMU's documentation names it, such as `DEVICE_DELETED`.
    pub name: String,
    /// What it says.
    pub data: Value,
}

impl Qmp {
    pub(crate) fn start(socket: UnixStream, board: Board, log: PathBuf) -> Result<Self> {
        let (on_line, on_close) = (board.clone(), board.clone());
        read_lines(
            "qmp",
            &socket,
            move |line| receive(&on_line, line),
            move || on_close.change(|state| state.qmp.closed = true),
        )?;
        Ok(Qmp {
            board,
            socket: Mutex::new(socket),
            next_id: AtomicU64::new(0),
            log,
        })
    }

    /// QEMU is gone; it mostly printed why.
    fn ended(&self) -> String {
        let log = super::read_lossy(&self.log);
        match log.trim() {
            "" => "QEMU ended".to_owned(),
            text => format!("QEMU ended, having printed:\n{}", super::tail(text)),
        }
    }

    pub(crate) fn negotiate(&self) -> Result<()> {
        self.board
            .wait(REPLY_TIMEOUT, |state| {
                (state.qmp.greeted || state.qmp.closed).then_some(())
            })
            .context("QEMU's monitor did not greet")?;
        self.execute("qmp_capabilities", json!({})).map(drop)
    }

    /// Runs any command and returns what it returns.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut line = json!({"execute": command, "arguments": arguments, "id": id}).to_string();
        line.push('\n');
        self.socket
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write_all(line.as_bytes())
            .with_context(|| format!("sending {command} to QEMU"))?;
        let reply = self.board.wait(REPLY_TIMEOUT, |state| {
            let closed = || Err(self.ended());
            let reply = state.qmp.replies.remove(&id);
            reply.or_else(|| state.qmp.closed.then(closed))
        });
        match reply {
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) => Err(anyhow!("QEMU's {command} failed: {error}")),
            None => bail!("QEMU did not answer {command} within {REPLY_TIMEOUT:?}"),
        }
    }

    /// How many events there were; for [`Qmp::wait_event`].
    pub fn event_count(&self) -> usize {
        self.board.look(|state| state.qmp.events.len())
    }

    /// Waits for an event of that name, from the `since`th on, that `matches`.
    pub fn wait_event(
        &self,
        name: &str,
        since: usize,
        timeout: Duration,
        matches: impl Fn(&Value) -> bool,
    ) -> Result<Event> {
        let event = self.board.wait(timeout, |state| {
            let found = state.qmp.events.iter().skip(since);
            found
                .filter(|event| event.name == name)
                .find(|event| matches(&event.data))
                .cloned()
                .map(Ok)
                .or_else(|| state.qmp.closed.then(|| Err(anyhow!(self.ended()))))
        });
        match event {
            Some(event) => event.with_context(|| format!("no {name} came")),
            None => bail!("QEMU did not report {name} within {timeout:?}"),
        }
    }

    /// Adds a device; `device` is what `-device` takes as JSON.
    pub fn device_add(&self, device: Value) -> Result<()> {
        self.execute("device_add", device).map(drop)
    }

    /// Removes a device and waits until the guest has let it go.
    pub fn device_del(&self, id: &str, timeout: Duration) -> Result<()> {
        let since = self.event_count();
        self.execute("device_del", json!({"id": id}))?;
        self.wait_event("DEVICE_DELETED", since, timeout, |data| {
            data["device"] == id
        })
        .map(drop)
    }

    /// Resets the machine, as its reset button would.
    pub fn system_reset(&self) -> Result<()> {
        self.execute("system_reset", json!({})).map(drop)
    }

    /// Presses the machine's power button.
    pub fn system_powerdown(&self) -> Result<()> {
        self.execute("system_powerdown", json!({})).map(drop)
    }

    /// Ends QEMU.
    pub fn quit(&self) -> Result<()> {
        self.execute("quit", json!({})).map(drop)
    }

    /// The machine's state: `running`, `paused`, `internal-error`, ….
    pub fn status(&self) -> Result<String> {
        let status = self.execute("query-status", json!({}))?;
        Ok(status["status"].as_str().unwrap_or("unknown").to_owned())
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        hang_up(&self.socket);
    }
}

fn receive(board: &Board, line: &str) {
    let message: Value = match serde_json::from_str(line) {
        Ok(message) => message,
        Err(error) => {
            log::warn!("QEMU's monitor said what is no JSON: {error}: {line}");
            return;
        }
    };
    board.change(|state| {
        let qmp = &mut state.qmp;
        if message.get("QMP").is_some() {
            qmp.greeted = true;
        } else if let Some(name) = message["event"].as_str() {
            match name {
                "STOP" => qmp.stopped = true,
                "RESUME" => qmp.stopped = false,
                _ => {}
            }
            qmp.events.push(Event {
                name: name.to_owned(),
                data: message["data"].clone(),
            });
        } else if let Some(id) = message["id"].as_u64() {
            let result = match message.get("return") {
                Some(value) => Ok(value.clone()),
                None => Err(message["error"]["desc"]
                    .as_str()
                    .unwrap_or("without a reason")
                    .to_owned()),
            };
            qmp.replies.insert(id, result);
        } else {
            log::warn!("QEMU's monitor said: {line}");
        }
    });
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    /// A monitor that answers each command with the next line of a script.
    fn scripted(script: &'static [&'static str]) -> Qmp {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
            let mut out = theirs;
            out.write_all(b"{\"QMP\": {}}\n").unwrap();
            for answer in script {
                lines.next().unwrap().unwrap();
                out.write_all(answer.as_bytes()).unwrap();
            }
        });
        Qmp::start(ours, Board::default(), "/no/log".into()).unwrap()
    }

    #[test]
    fn a_device_is_gone_when_the_event_says_so() {
        let qmp = scripted(&[
            "{\"return\": {}, \"id\": 0}\n",
            "{\"event\": \"DEVICE_DELETED\", \"data\": {\"path\": \"/other\"}}\n\
             {\"return\": {}, \"id\": 1}\n\
             {\"event\": \"DEVICE_DELETED\", \"data\": {\"device\": \"nvme0\"}}\n",
        ]);
        qmp.negotiate().unwrap();
        qmp.device_del("nvme0", Duration::from_secs(20)).unwrap();
        assert_eq!(qmp.event_count(), 2);
    }

    #[test]
    fn errors_name_the_command() {
        let qmp = scripted(&["{\"error\": {\"desc\": \"no such id\"}, \"id\": 0}\n"]);
        let error = qmp.device_del("x", Duration::from_secs(20)).unwrap_err();
        assert_eq!(error.to_string(), "QEMU's device_del failed: no such id");
        let error = qmp.quit().unwrap_err();
        assert!(format!("{error:#}").contains("quit"), "{error:#}");
    }
}
