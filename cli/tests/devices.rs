//! `farside devices` at several lenders.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

/// A lender of DMA test devices.
struct Lender {
    child: Child,
    socket: PathBuf,
}

impl Lender {
    fn start(dir: &Path, devices: &[&str]) -> Self {
        let devices = devices.iter().flat_map(|id| ["--dma-test", id]);
        let mut child = farside(dir)
            .arg("lend")
            .args(devices)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let log = BufReader::new(child.stderr.take().expect("a pipe"));
        let lender = Self {
            child,
            socket: dir.join("lender.sock"),
        };
        let mut lines = log.lines().map(|line| line.expect("UTF-8"));
        assert!(lines.any(|line| line.contains("listens at")), "it ended");
        lender
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // If it has ended, only the wait is needed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn farside(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farside"));
    command
        .env("FARSIDE_RUNTIME_DIR", dir)
        .env("FARSIDE_STATE_DIR", dir);
    command
}

fn devices(dir: &Path, lenders: &[&Path]) -> (Output, String, String) {
    let mut command = farside(dir);
    command.arg("devices");
    for lender in lenders {
        command.arg("--lender").arg(lender);
    }
    let output = command.output().expect("the program starts");
    let [out, err] = [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8(bytes.clone()).expect("UTF-8"));
    (output, out, err)
}

#[test]
fn lenders_that_answer_are_listed_and_the_others_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let [a, b, c] = ["a", "b", "c"].map(|name| {
        let dir = dir.path().join(name);
        std::fs::create_dir(&dir).expect("a directory");
        dir
    });
    let first = Lender::start(&a, &["dma0"]);
    let second = Lender::start(&b, &["dma1"]);
    let gone = c.join("lender.sock");

    let (output, out, err) = devices(&a, &[&first.socket, &second.socket]);
    assert!(output.status.success(), "{err}");
    assert!(out.contains("dma0") && out.contains("dma1"), "{out}");

    let (output, out, err) = devices(&a, &[&gone, &first.socket, &second.socket]);
    assert_eq!(output.status.code(), Some(1));
    assert!(out.contains("dma0") && out.contains("dma1"), "{out}");
    let unreachable = format!("cannot reach the lender at {}", gone.display());
    assert!(err.contains(&unreachable), "{err}");
}

#[test]
fn an_id_at_two_lenders_is_an_error_that_names_both() {
    let dir = tempfile::tempdir().expect("a directory");
    let [a, b] = ["a", "b"].map(|name| {
        let dir = dir.path().join(name);
        std::fs::create_dir(&dir).expect("a directory");
        dir
    });
    let first = Lender::start(&a, &["dma0"]);
    let second = Lender::start(&b, &["dma0", "dma1"]);
    let [at_first, at_second] = [&first, &second].map(|lender| lender.socket.display());
    let both = format!("device dma0 is at two lenders, {at_first} and {at_second}");

    let (output, out, err) = devices(&a, &[&first.socket, &second.socket]);
    assert_eq!(output.status.code(), Some(1));
    assert!(out.contains("dma1"), "{out}");
    assert!(err.contains(&both) && !err.contains("dma1"), "{err}");

    // The same lender twice is no second one.
    let (output, _, err) = devices(&a, &[&first.socket, &first.socket]);
    assert!(output.status.success(), "{err}");
}
