//! `scripted-vmm --socket DEVICE.sock STEP…`: runs steps against a device as a
//! VMM with a guest would, and prints one JSON object at the end.

#![forbid(unsafe_code)]

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use farside_scripted_vmm::{
    number,
    ram::Layout,
    report::Report,
    session::{Options, Session},
    step::{GRAMMAR, Step},
    watchdog::Watchdog,
};
use serde::Serialize;

/// Stands where QEMU would: connects to a device that `farside serve` serves,
/// as a VMM and its guest, and does steps with it.
///
/// Prints one JSON object at the end. Exits with 0 when every step did what it
/// should, with 1 when not, with 3 when no answer came.
#[derive(Debug, Parser)]
#[command(after_help = steps_help())]
struct Args {
    /// The device's socket, as in $FARSIDE_RUNTIME_DIR/vm/NAME/DEVICE.sock.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Guest RAM.
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = size)]
    ram: u64,
    /// How much of it is low; the rest is from 4 GiB on [default: as fits].
    #[arg(long, value_name = "SIZE", value_parser = size)]
    low: Option<u64>,
    /// Make guest RAM of huge pages of 2 MiB.
    #[arg(long)]
    hugepages: bool,
    /// MSI-X vectors to set up [default: all].
    #[arg(long, value_name = "N")]
    vectors: Option<u32>,
    /// I/O queues of the device, each with a vector of its own.
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: u16,
    /// The device's namespace.
    #[arg(long, value_name = "ID", default_value_t = 1)]
    namespace: u32,
    /// The pattern of the first `io`; each further one takes the next number.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// How long to wait for the socket, seconds.
    #[arg(long, value_name = "S", default_value_t = 0)]
    wait: u64,
    /// How long the device may take for a command, seconds.
    #[arg(long, value_name = "S", default_value_t = 30)]
    timeout: u64,
    /// How long a whole step may take, seconds.
    #[arg(long, value_name = "S", default_value_t = 120)]
    deadline: u64,
    /// Write the JSON object to a file as well.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Take steps from standard input, one a line; print one line of JSON for
    /// each.
    #[arg(long, conflicts_with = "steps")]
    step: bool,
    /// The steps, each one argument.
    #[arg(value_name = "STEP", required_unless_present = "step", value_parser = step)]
    steps: Vec<String>,
}

fn steps_help() -> String {
    format!(
        "Steps: {GRAMMAR}.\nA step has those before it done that it needs: `'io 8M'` is a whole run."
    )
}

fn size(text: &str) -> Result<u64, String> {
    number::parse(text).map_err(|error| format!("{error:#}"))
}

/// A step that is well formed.
fn step(text: &str) -> Result<String, String> {
    match text.parse::<Step>() {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("{error:#}")),
    }
}

/// The JSON object of a run that failed before its first step.
#[derive(Serialize)]
struct Failure {
    ok: bool,
    error: String,
}

impl Failure {
    fn print(error: String) {
        eprintln!("error: {error}");
        print(&Failure { ok: false, error });
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::new().filter_or("FARSIDE_LOG", "warn")).init();
    match run(&args) {
        Ok(report) if report.ok => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            Failure::print(format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<Report> {
    let limit = Duration::from_secs(args.deadline);
    let watchdog = Watchdog::start(limit, move |what| {
        Failure::print(format!("{what}: not done within {limit:?}"));
        std::process::exit(3);
    });
    watchdog.begin("connecting");
    let mut session = Session::connect(Options {
        socket: args.socket.clone(),
        layout: Layout::new(args.ram, args.low, args.hugepages)?,
        vectors: args.vectors,
        queues: args.queues,
        namespace: args.namespace,
        seed: args.seed,
        patience: Duration::from_secs(args.wait),
        timeout: Duration::from_secs(args.timeout),
    })?;
    watchdog.rest();
    let mut input = std::io::stdin().lines();
    if args.step {
        while let Some(line) = input.next() {
            let line = line.context("reading steps")?;
            if !perform(&mut session, &watchdog, &line, &mut input, true)? {
                break;
            }
        }
    } else {
        for line in &args.steps {
            if !perform(&mut session, &watchdog, line, &mut input, false)? {
                break;
            }
        }
    }
    let report = session.finish()?;
    print(&report);
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(report)
}

/// Performs a step. Returns whether others may follow.
fn perform(
    session: &mut Session,
    watchdog: &Watchdog,
    line: &str,
    input: &mut impl Iterator<Item = std::io::Result<String>>,
    interactive: bool,
) -> Result<bool> {
    if line.trim().is_empty() {
        return Ok(true);
    }
    match line.parse() {
        Ok(Step::Quit) => return Ok(false),
        Ok(Step::Hold(label)) => {
            println!("ready {label}");
            std::io::stdout().flush().context("printing")?;
            input.next().transpose().context("waiting for a line")?;
        }
        // The answer contains the reason.
        _ => {}
    }
    watchdog.begin(line);
    let answer = session.run(line);
    watchdog.rest();
    if interactive {
        print(&answer);
        return Ok(true);
    }
    Ok(answer.error.is_none())
}

/// One line of JSON, at once.
fn print(value: &impl Serialize) {
    let line = serde_json::to_string(value).unwrap_or_else(|error| format!("{error:?}"));
    let mut out = std::io::stdout().lock();
    // Standard output may be closed.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
