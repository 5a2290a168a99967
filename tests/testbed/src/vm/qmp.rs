//! QEMU's monitor: commands and events.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
pub use farside_vm_control::Event;
use farside_vm_control::{QMP_ANSWER, QmpClient, QmpError};
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Value, json};

use super::board::Board;

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub struct Qmp {
    board: Board,
    socket: UnixStream,
    client: Arc<Mutex<QmpClient>>,
    /// QEMU's log.
    log: PathBuf,
}

impl Qmp {
    pub(crate) fn new(socket: UnixStream, board: Board, log: PathBuf) -> Result<Self> {
        let copy = || socket.try_clone().context("duplicating a socket");
        let hung_up = copy()?;
        board.change(|state| state.qmp.socket = Some(hung_up));
        Ok(Qmp {
            board,
            client: Arc::new(Mutex::new(QmpClient::new(copy()?))),
            socket,
            log,
        })
    }

    /// QEMU has ended; its log usually has the reason.
    fn ended(&self) -> String {
        let log = super::read_lossy(&self.log);
        match log.trim() {
            "" => "QEMU ended".to_owned(),
            text => format!("QEMU ended, having printed:\n{}", super::tail(text)),
        }
    }

    /// Enters command mode, once QEMU has started within `limit`; afterwards events are
    /// sent unasked.
    pub(crate) fn negotiate(&self, limit: Duration) -> Result<()> {
        let greeted = lock(&self.client).greet(Instant::now() + limit);
        greeted.context("QEMU's monitor did not greet")?;
        self.execute("qmp_capabilities", json!({}))?;
        let socket = self.socket.try_clone().context("duplicating a socket")?;
        let (client, board) = (self.client.clone(), self.board.clone());
        std::thread::Builder::new()
            .name("qmp".to_owned())
            .spawn(move || watch(&socket, &client, &board))
            .context("starting a reader thread")?;
        Ok(())
    }

    /// Where the guest's CPUs are, three times, and the state of its interrupt controllers: for the
    /// error about a guest that hangs. Ends at the first command that fails.
    pub fn cpus(&self) -> String {
        const COMMANDS: [&str; 6] = [
            "info registers -a",
            "info registers -a",
            "info registers -a",
            "info lapic",
            "info pic",
            "info irq",
        ];
        let mut text = String::new();
        for command in COMMANDS {
            let arguments = json!({ "command-line": command });
            let answer = match self.execute("human-monitor-command", arguments) {
                Ok(answer) => answer,
                Err(error) => return text + &format!("-- {command}: {error:#}\n"),
            };
            text += &format!("-- {command}\n");
            for line in answer.as_str().unwrap_or_default().lines() {
                let wanted = !command.starts_with("info registers")
                    || ["CPU#", "IP=", "SP=", "CS ="]
                        .iter()
                        .any(|word| line.contains(word));
                if wanted {
                    text += &format!("{line}\n");
                }
            }
        }
        text
    }

    /// Executes any command and returns its result.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        let mut client = lock(&self.client);
        let ran = client.run(command, arguments);
        // Posts events that precede the reply before returning. `watch` handles the end of
        // the connection.
        let _ = post(&mut client, &self.board);
        ran.map_err(|error| match error {
            QmpError::Closed(_) => anyhow!("QEMU's {command} failed: {}", self.ended()),
            QmpError::Silent => anyhow!("QEMU did not answer {command} within {QMP_ANSWER:?}"),
            error => anyhow!("QEMU's {command} failed: {error}"),
        })
    }

    /// The number of events so far, for [`Qmp::wait_event`].
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

    /// Adds a device; `device` has the JSON form of `-device`.
    pub fn device_add(&self, device: Value) -> Result<()> {
        self.execute("device_add", device).map(drop)
    }

    /// Removes a device and waits until the guest has released it.
    pub fn device_del(&self, id: &str, timeout: Duration) -> Result<()> {
        let since = self.event_count();
        self.execute("device_del", json!({"id": id}))?;
        self.wait_event("DEVICE_DELETED", since, timeout, |data| {
            data["device"] == id
        })
        .map(drop)
    }

    /// Resets the machine (`system_reset`).
    pub fn system_reset(&self) -> Result<()> {
        self.execute("system_reset", json!({})).map(drop)
    }

    /// Requests an ACPI shutdown (`system_powerdown`).
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
        self.board.change(|state| state.qmp.hang_up());
    }
}

/// Posts events to the board as they arrive, until the connection ends.
fn watch(socket: &UnixStream, client: &Mutex<QmpClient>, board: &Board) {
    let next = || -> Result<()> {
        rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(socket, PollFlags::IN)], None))?;
        Ok(post(&mut lock(client), board)?)
    };
    let error = loop {
        if let Err(error) = next() {
            break error;
        }
    };
    log::debug!("QEMU's monitor: {error}");
    board.change(|state| state.qmp.closed = true);
}

/// Posts pending events to the board.
fn post(client: &mut QmpClient, board: &Board) -> Result<(), QmpError> {
    let soon = || Instant::now() + Duration::from_millis(1);
    while let Some(event) = client.wait_event(soon(), |_| true)? {
        board.change(|state| {
            match &*event.name {
                "STOP" => state.qmp.stopped = true,
                "RESUME" => state.qmp.stopped = false,
                _ => {}
            }
            state.qmp.events.push(event);
        });
    }
    Ok(())
}

fn lock(client: &Mutex<QmpClient>) -> MutexGuard<'_, QmpClient> {
    client.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};

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
        Qmp::new(ours, Board::default(), "/no/log".into()).unwrap()
    }

    #[test]
    fn a_device_is_gone_when_the_event_says_so() {
        let qmp = scripted(&[
            "{\"return\": {}, \"id\": 0}\n",
            "{\"event\": \"DEVICE_DELETED\", \"data\": {\"path\": \"/other\"}}\n\
             {\"return\": {}, \"id\": 1}\n\
             {\"event\": \"DEVICE_DELETED\", \"data\": {\"device\": \"nvme0\"}}\n",
        ]);
        qmp.negotiate(QMP_ANSWER).unwrap();
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
