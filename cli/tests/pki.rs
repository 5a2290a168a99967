//! Certificates made by `farside pki`, and two hosts that use them: processes that share a network and
//! no directory.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Output, Stdio},
};

fn farside(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farside"));
    command
        .args(args)
        .env("FARSIDE_PKI_DIR", dir)
        .env("FARSIDE_RUNTIME_DIR", dir)
        .env("FARSIDE_STATE_DIR", dir)
        .stdin(Stdio::null());
    command
}

fn run(dir: &Path, args: &[&str]) -> Output {
    farside(dir, args).output().expect("the program starts")
}

#[track_caller]
fn ok(dir: &Path, args: &[&str]) -> String {
    let output = run(dir, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[track_caller]
fn refused(dir: &Path, args: &[&str], words: &[&str]) {
    let output = run(dir, args);
    assert!(!output.status.success(), "{args:?} succeeds");
    let stderr = String::from_utf8_lossy(&output.stderr);
    for word in words {
        assert!(stderr.contains(word), "no {word:?} in {stderr}");
    }
}

/// A lender, killed on drop.
struct Lender(Child);

impl Lender {
    /// Starts one with a DMA test device, and returns its port.
    fn start(dir: &Path) -> (Self, String) {
        let args = "lend --listen tls:127.0.0.1:0 --dma-test dma-of-b --borrower host=rack1-a";
        let args: Vec<&str> = args.split(' ').collect();
        let mut command = farside(dir, &args);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
        let mut log = BufReader::new(child.stderr.take().expect("a pipe"));
        let lender = Self(child);
        let mut said = String::new();
        while log.read_line(&mut said).expect("UTF-8") > 0 {
            let port = said.split_once("listens at tls:127.0.0.1:");
            if let Some((_, port)) = port {
                let port = port.trim().to_owned();
                // So that it can keep logging.
                std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
                return (lender, port);
            }
        }
        panic!("{said}");
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn hosts_with_issued_certificates_lend_to_those_that_a_rule_names() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().expect("a directory"));
    let [ca, a, b] = dirs.each_ref().map(|dir| dir.path());
    let path = |dir: &Path| dir.to_str().expect("UTF-8").to_owned();
    ok(ca, &["pki", "init", "--name", "test CA"]);
    refused(ca, &["pki", "init"], &["ca-key.pem", "--force"]);
    let (to_a, to_b) = (path(a), path(b));
    ok(ca, &["pki", "issue", "rack1-a", "--output", &to_a]);
    refused(
        ca,
        &["pki", "issue", "rack1-a", "--output", &to_a],
        &["exists", "--force"],
    );
    ok(
        ca,
        &[
            "pki",
            "issue",
            "rack1-b",
            "--address",
            "127.0.0.1",
            "--output",
            &to_b,
        ],
    );
    let shown = ok(b, &["pki", "show"]);
    for word in [
        "server-cert.pem",
        "CN=rack1-b",
        "rack1-b, 127.0.0.1",
        "CN=test CA",
        "SHA256:",
        "issuing certificates",
    ] {
        assert!(shown.contains(word), "no {word:?} in {shown}");
    }

    let (_lender, port) = Lender::start(b);
    let address = format!("tls:127.0.0.1:{port}");
    let listed = ok(a, &["devices", "--lender", &address]);
    assert!(listed.contains("dma-of-b"), "{listed}");
    // The lender's own host has no rule, and does not see the device.
    let listed = ok(b, &["devices", "--lender", &address]);
    assert!(!listed.contains("dma-of-b"), "{listed}");
    let wrong = format!("tls:localhost:{port}");
    let words = ["CN=rack1-b", "is for rack1-b, 127.0.0.1, not for localhost"];
    refused(a, &["devices", "--lender", &wrong], &words);
    let plain = format!("tcp:127.0.0.1:{port}");
    refused(a, &["devices", "--lender", &plain], &["tls:HOST:PORT"]);
    // Without certificates.
    let words = ["ca-cert.pem", "farside pki"];
    let none = tempfile::tempdir().expect("a directory");
    refused(none.path(), &["devices", "--lender", &address], &words);
}
