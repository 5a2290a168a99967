//! The binary: steps from its arguments and from standard input.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixListener,
    process::{Command, Stdio},
};

use farside_scripted_vmm::report::{Answer, Found, Report};

use crate::host::{DISK, Host, Served};

const PROGRAM: &str = env!("CARGO_BIN_EXE_scripted-vmm");

fn program(served: &Served) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("--socket").arg(served.socket(DISK));
    command.args(["--ram", "32M", "--low", "16M", "--deadline", "20"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

#[test]
fn a_script_ends_in_one_object() {
    let host = Host::with_disk();
    let served = host.serve(DISK);
    let json = host.directory("a").join("report.json");
    let mut child = program(&served)
        .arg("--json")
        .arg(&json)
        .args(["before-bme 50", "hold before bme", "io 1M", "rogue hole"])
        .args(["latency 10", "unbind"])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready before bme");
    assert_eq!(served.state(), "leased");
    let mut input = child.stdin.take().unwrap();
    writeln!(input).unwrap();
    let last = lines.next().unwrap().unwrap();
    assert!(lines.next().is_none());
    assert!(child.wait().unwrap().success());
    let report: Report = serde_json::from_str(&last).unwrap();
    assert!(report.ok);
    assert_eq!(report.checksum_ok, Some(true));
    assert_eq!(report.rogue_bytes_written, Some(0));
    let in_file: Report = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!(in_file.msix_guest, report.msix_guest);
}

#[test]
fn steps_from_the_input_are_answered_one_by_one() {
    let host = Host::with_disk();
    let served = host.serve(DISK);
    let mut child = program(&served).arg("--step").spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut input = child.stdin.take().unwrap();
    let mut ask = |step: &str| -> Answer {
        writeln!(input, "{step}").unwrap();
        serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap()
    };
    assert_eq!(ask("map").found, Some(Found::Mapped(32 << 20)));
    assert!(ask("reset").ok);
    assert_eq!(served.state(), "leased");
    let wrong = ask("jump");
    assert!(wrong.error.is_some_and(|error| error.contains("no `jump`")));
    assert!(ask("bme").ok);
    assert_eq!(served.state(), "ready");
    assert!(ask("io 64K").ok);
    writeln!(input, "quit").unwrap();
    let report: Report = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    // One step was invalid.
    assert!(!report.ok);
    assert_eq!(report.checksum_ok, Some(true));
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

#[test]
fn what_cannot_be_is_said_at_once() {
    let host = Host::with_disk();
    let served = host.serve(DISK);
    let output = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = output(program(&served).arg("io lots"));
    assert!(said.contains("is not a number"), "{said}");
    let said = output(Command::new(PROGRAM).args(["--socket", "/nowhere.sock", "io 1M"]));
    assert!(
        said.contains("connecting to the device socket /nowhere.sock"),
        "{said}"
    );
    // The device was not borrowed.
    assert_eq!(served.state(), "described");
}

/// The client itself would block for ever.
#[test]
fn a_backend_that_never_answers_ends_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("silent.sock");
    let _silent = UnixListener::bind(&path).unwrap();
    let output = Command::new(PROGRAM)
        .arg("--socket")
        .arg(&path)
        .args(["--deadline", "1", "io 1M"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["ok"], false);
    assert_eq!(said["error"], "connecting: not done within 1s");
}
