//! The connection to the other host: a remote shell that starts farside there.

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, channel},
    },
    time::{Duration, Instant},
};

use farside_daemon::ends_by;

use crate::{
    Error, ErrorKind, Hello, Peer, Reply, Request, Result,
    wire::{receive, send},
};

/// The default remote shell. It gives up a host that does not answer for a minute.
const SSH: &str = "ssh -T -o ServerAliveInterval=15 -o ServerAliveCountMax=4";

/// The command that is run on the other host.
const COMMAND: [&str; 3] = ["farside", "migration", "agent"];

/// Time limit for the agent to exit.
const END: Duration = Duration::from_secs(5);

/// Time limit for the rest of stderr once the connection broke.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Longest line of it that is kept, characters.
const MAX_WORDS: usize = 300;

/// A remote shell: the words before the host's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shell(Vec<String>);

impl Shell {
    /// Splits a command as a shell would. None: ssh.
    pub fn new(command: Option<&str>) -> Result<Self> {
        let command = command.unwrap_or(SSH);
        match shlex::split(command) {
            Some(words) if !words.is_empty() => Ok(Self(words)),
            _ => Err(Error::refused(format!(
                "invalid command of a remote shell {command:?}: give one such as 'ssh -p 2222'"
            ))),
        }
    }

    fn command(&self, host: &str) -> Result<Command> {
        // The shell would parse it as an option.
        if host.is_empty() || host.starts_with('-') {
            return Err(Error::refused(format!("invalid host name {host:?}")));
        }
        let mut command = Command::new(&self.0[0]);
        command.args(&self.0[1..]).arg(host).args(COMMAND);
        Ok(command)
    }
}

/// The other host. Connects at the first request, and not again once the connection
/// broke.
pub struct Remote {
    host: String,
    shell: Shell,
    line: Line,
}

enum Line {
    Idle,
    Open(Call),
    Broken(Error),
}

struct Call {
    child: Child,
    input: Option<ChildStdin>,
    output: ChildStdout,
    /// The last line of its standard error.
    last_line: Arc<Mutex<String>>,
    /// Disconnected at the end of its standard error.
    all_said: Receiver<()>,
}

impl Remote {
    /// The host of that name.
    pub fn new(host: &str, shell: Shell) -> Self {
        Self {
            host: host.to_owned(),
            shell,
            line: Line::Idle,
        }
    }

    fn open(&self) -> Result<Call> {
        let mut command = self.shell.command(&self.host)?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| {
                let program = command.get_program().display();
                Error::lost(format!("cannot run {program}: {error}"))
            })?;
        let (Some(input), Some(output), Some(log)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(Error::lost("the remote shell has no pipes"));
        };
        let host = self.host.clone();
        let last_line = Arc::new(Mutex::new(String::new()));
        let (closed, all_said) = channel();
        let keep = Arc::clone(&last_line);
        std::thread::spawn(move || {
            for line in BufReader::new(log).split(b'\n').map_while(|line| line.ok()) {
                let line = String::from_utf8_lossy(&line);
                let line = line.trim_end();
                log::info!("{host}: {line}");
                if !line.is_empty() {
                    *keep.lock().unwrap_or_else(PoisonError::into_inner) =
                        line.chars().take(MAX_WORDS).collect();
                }
            }
            drop(closed);
        });
        let mut call = Call {
            child,
            input: Some(input),
            output,
            last_line,
            all_said,
        };
        match call.exchange(&Request::Hello(Hello::ours()))? {
            Reply::Hello { hello, .. } => hello.check()?,
            Reply::Failed(error) => return Err(error),
            Reply::Done | Reply::Checked(_) | Reply::Listening(_) => {
                return Err(Error::lost("no answer to Hello"));
            }
        }
        Ok(call)
    }
}

impl Call {
    fn exchange(&mut self, request: &Request) -> Result<Reply> {
        let sent = match &mut self.input {
            Some(input) => send(input, request),
            None => Ok(()),
        };
        match sent {
            // EPIPE: the agent has exited.
            Err(error) if error.kind == ErrorKind::Lost => return Err(self.gone()),
            sent => sent?,
        }
        receive(&mut self.output)?.ok_or_else(|| self.gone())
    }

    fn gone(&self) -> Error {
        let said = match self.last_words() {
            Some(words) => format!(" (its output: {words})"),
            None => String::new(),
        };
        Error::lost(format!(
            "the agent there has ended, or was never started{said}: is the same farside installed there, and does the remote shell work (`ssh HOST true`)?"
        ))
    }

    /// The last line that the remote shell or the agent wrote to stderr. Another of its
    /// streams is closed, so the end of this one is near.
    fn last_words(&self) -> Option<String> {
        // After the time limit, use what there is.
        let _ = self.all_said.recv_timeout(LAST_WORDS);
        let line = self
            .last_line
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        (!line.is_empty()).then(|| line.clone())
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // The agent exits at the end of its input.
        self.input = None;
        if !ends_by(&self.child, Instant::now() + END).unwrap_or(false) {
            // Fails only if it has exited.
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

impl Peer for Remote {
    fn ask(&mut self, request: Request) -> Result<Reply> {
        if matches!(self.line, Line::Idle) {
            self.line = match self.open() {
                Ok(call) => Line::Open(call),
                Err(error) => Line::Broken(error),
            };
        }
        let error = match &mut self.line {
            Line::Open(call) => match call.exchange(&request) {
                Ok(reply) => return Ok(reply),
                Err(error) => error,
            },
            Line::Broken(error) => return Err(error.clone()),
            Line::Idle => Error::lost("it was not called"),
        };
        self.line = Line::Broken(error.clone());
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(shell: &str, host: &str) -> Error {
        let shell = Shell::new(Some(shell)).unwrap();
        let request = Request::Hello(Hello::ours());
        Remote::new(host, shell).ask(request).unwrap_err()
    }

    #[test]
    fn the_words_of_a_shell_are_split_and_the_host_comes_after_them() {
        let shell = Shell::new(Some("ssh -i 'my key'")).unwrap();
        let command = shell.command("rack1-b").unwrap();
        let words: Vec<_> = command.get_args().collect();
        assert_eq!(
            words,
            ["-i", "my key", "rack1-b", "farside", "migration", "agent"]
        );
        for bad in ["", "'"] {
            assert!(Shell::new(Some(bad)).is_err(), "{bad:?}");
        }
        for bad in ["", "-oProxyCommand=x"] {
            assert!(shell.command(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_is_no_agent_is_told_from_one() {
        let greeting = ask("sh -c 'echo Welcome to this host; cat >/dev/null'", "b");
        assert!(greeting.message.contains("Welcome"), "{greeting}");
        let nothing = ask("sh -c 'cat >/dev/null & exit 1'", "b");
        assert!(
            nothing.message.contains("same farside installed"),
            "{nothing}"
        );
        let missing = ask("/no/such/shell", "b");
        assert!(missing.message.contains("/no/such/shell"), "{missing}");
        let locked_out = ask(
            "sh -c 'echo Host key verification failed. >&2; exit 255'",
            "b",
        );
        assert!(
            locked_out
                .message
                .contains("(its output: Host key verification failed.)")
        );
        for error in [greeting, nothing, missing, locked_out] {
            assert_eq!(error.kind, ErrorKind::Lost);
        }
    }
}
