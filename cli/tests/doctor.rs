//! `farside doctor` on hosts that are directories: its findings, the suggested commands,
//! and their effect.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

const FARSIDE: &str = env!("CARGO_BIN_EXE_farside");

/// Timeout of tools and lenders on a loaded machine.
const PATIENCE: [&str; 2] = ["--timeout", "120"];

/// A host, with a stub of QEMU that only answers queries.
struct Host {
    directory: TempDir,
}

impl Host {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        for name in ["run", "etc/vm", "var", "bin"] {
            fs::create_dir_all(directory.path().join(name)).expect("a directory");
        }
        let host = Self { directory };
        host.qemu("echo 'QEMU emulator version 11.1.3'; echo 'name \"vfio-user-pci\", bus PCI'");
        host
    }

    fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    /// Writes an executable with the name of QEMU.
    fn qemu(&self, script: &str) {
        // Renamed into place: a file that is open for writing cannot be executed (ETXTBSY).
        let (new, path) = (self.path("bin/new"), self.path("bin/qemu-system-x86_64"));
        let script = format!("#!/bin/sh\n{script}\n");
        fs::write(&new, script).expect("writing");
        fs::set_permissions(&new, PermissionsExt::from_mode(0o755)).expect("a mode");
        fs::rename(new, path).expect("renaming");
    }

    fn describe(&self, vm: &str, text: &str) {
        fs::write(self.path(&format!("etc/vm/{vm}.toml")), text).expect("writing");
    }

    /// A command with this host's environment.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let bin = self.path("bin");
        command
            .env("FARSIDE_RUNTIME_DIR", self.path("run"))
            .env("FARSIDE_CONFIG_DIR", self.path("etc"))
            .env("FARSIDE_STATE_DIR", self.path("var"))
            .env(
                "PATH",
                format!("{}:/usr/bin:/bin:/usr/sbin:/sbin", bin.display()),
            );
        command
    }

    fn doctor(&self, args: &[&str]) -> Output {
        let mut command = self.command(FARSIDE);
        command.arg("doctor").args(args);
        command.output().expect("the program starts")
    }

    /// All findings.
    fn findings(&self, args: &[&str]) -> Vec<Value> {
        findings(&self.doctor(&[args, &["--json"], &PATIENCE].concat()))
    }
}

fn findings(output: &Output) -> Vec<Value> {
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("no JSON ({error}): {output:?}"));
    let problems = report["problems"].as_u64().expect("a number");
    assert_eq!(output.status.success(), problems == 0, "{output:?}");
    report["findings"].as_array().expect("a list").clone()
}

/// The findings of a check.
fn of_check<'a>(findings: &'a [Value], check: &str) -> Vec<&'a Value> {
    findings
        .iter()
        .filter(|finding| finding["check"] == check)
        .collect()
}

/// The only finding of a check, which must have that level and text.
#[track_caller]
fn one<'a>(findings: &'a [Value], check: &str, level: &str, word: &str) -> &'a Value {
    let found = of_check(findings, check);
    let [finding] = found.as_slice() else {
        panic!("not one finding of {check}: {findings:#?}");
    };
    assert_eq!(finding["level"], level, "{finding:#}");
    let what = finding["what"].as_str().expect("a text");
    assert!(what.contains(word), "no {word:?} in {finding:#}");
    finding
}

#[test]
fn a_stale_socket_is_gone_when_the_command_is_typed() {
    let host = Host::new();
    let directory = host.path("run/vm/web1");
    fs::create_dir_all(&directory).expect("a directory");
    let socket = directory.join("disk0.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    one(&host.findings(&[]), "sockets", "ok", "1 in use");
    drop(listener);

    let found = host.findings(&[]);
    let stale = one(&found, "sockets", "problem", "disk0.sock");
    let command = stale["fix"][0].as_str().expect("a command");
    let typed = host.command("sh").args(["-c", command]).status();
    assert!(typed.expect("sh starts").success(), "{command}");
    assert!(!socket.exists());
    one(&host.findings(&[]), "sockets", "ok", "none stale");
}

#[test]
fn a_bad_description_is_named_with_its_line() {
    let host = Host::new();
    host.describe("web1", "memory = \"1G\"\nmemroy = \"2G\"\n");
    host.describe(
        "web2",
        "devices = [\"disk0\", \"disk0\"]\nlenders = [\"/no/lender\"]\n",
    );
    let found = host.findings(&[]);
    let descriptions = of_check(&found, "description");
    for (finding, vm, word) in [
        (0, "web1", "line 2"),
        (1, "web2", "\"disk0\" is used twice"),
    ] {
        let finding = descriptions[finding];
        assert_eq!(
            (&finding["level"], &finding["vm"]),
            (&"problem".into(), &vm.into())
        );
        assert!(
            finding["what"]
                .as_str()
                .is_some_and(|what| what.contains(word)),
            "{finding:#}"
        );
        let fix = finding["fix"][0].as_str().expect("a command");
        assert!(fix.ends_with(&format!("etc/vm/{vm}.toml")), "{fix}");
    }
    // Only the named VM.
    let only = host.findings(&["web1"]);
    one(&only, "description", "problem", "line 2");
    one(
        &host.findings(&["web9"]),
        "description",
        "problem",
        "no configuration",
    );
    let bad_name = host.findings(&["../etc/passwd"]);
    one(
        &bad_name,
        "description",
        "problem",
        "character that is not allowed",
    );
}

/// A lender with the DMA test device, ended when dropped.
struct Lender(Child);

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn lend(host: &Host, id: &str) -> Lender {
    let mut command = host.command(FARSIDE);
    let child = command
        .args(["lend", "--dma-test", id])
        .stderr(Stdio::piped())
        .spawn();
    let mut lender = Lender(child.expect("the program starts"));
    let log = BufReader::new(lender.0.stderr.take().expect("a pipe"));
    let mut lines = log.lines().map_while(Result::ok);
    assert!(
        lines.any(|line| line.contains("listens at")),
        "the lender has ended"
    );
    lender
}

#[test]
fn a_lender_that_is_away_and_then_there() {
    let host = Host::new();
    host.describe("web1", "devices = [\"dma0\"]\n");
    let found = host.findings(&[]);
    let away = one(&found, "lender", "problem", "cannot reach");
    assert!(
        away["fix"][1]
            .as_str()
            .is_some_and(|fix| fix.starts_with("farside lend"))
    );
    assert!(of_check(&found, "device").is_empty(), "{found:#?}");

    let lender = lend(&host, "dma0");
    let found = host.findings(&[]);
    one(&found, "lender", "ok", "lends 1 device,");
    one(&found, "device", "ok", "dma0");
    drop(lender);
    // It was killed and has left its socket.
    one(&host.findings(&[]), "sockets", "problem", "lender.sock");

    let _lender = lend(&host, "dma1");
    one(
        &host.findings(&[]),
        "device",
        "problem",
        "no lender has dma0; they have dma1",
    );
}

#[test]
fn a_lender_and_a_qemu_that_say_nothing() {
    let host = Host::new();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address");
    host.describe(
        "web1",
        &format!("devices = [\"a\"]\nlenders = [\"tcp:{address}\"]\n"),
    );
    host.qemu("sleep 1000");
    let found = findings(&host.doctor(&["--json", "--timeout", "0.2"]));
    let lender = of_check(&found, "lender")[0];
    assert_eq!(lender["level"], "problem", "{lender:#}");
    one(&found, "qemu", "problem", "did not answer within 200ms");
}

#[test]
fn qemus_that_cannot_be_used() {
    let host = Host::new();
    // A host without VMs does not need it.
    host.qemu("echo 'QEMU emulator version 7.2.9'");
    one(&host.findings(&[]), "qemu", "note", "QEMU 7.2");
    host.describe("web1", "lenders = [\"/no/lender\"]\n");
    one(&host.findings(&[]), "qemu", "problem", "QEMU 7.2");
    host.describe("web1", "qemu = \"/no/such/qemu\"\n");
    let found = host.findings(&[]);
    let missing = one(&found, "qemu", "problem", "cannot run \"/no/such/qemu\"");
    assert!(
        missing["fix"][0]
            .as_str()
            .is_some_and(|fix| fix.starts_with("${EDITOR:-vi} ") && fix.contains("web1.toml"))
    );
    host.describe("web1", "");
    host.qemu("echo 'QEMU emulator version 11.1.3'; echo 'name \"vfio-user-pci\", bus PCI'");
    one(&host.findings(&[]), "qemu", "ok", "QEMU 11.1");
}

#[test]
fn a_vm_larger_than_the_memlock_limit() {
    let host = Host::new();
    let limited = |description: &str| {
        host.describe("web1", description);
        // Dropping the capability removes root's right to lock any amount.
        let script = format!(
            "set -e; ulimit -l 4096; if [ $(id -u) = 0 ]; then drop='setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock'; fi; \
             exec $drop '{FARSIDE}' doctor web1 --json --timeout 120"
        );
        let output = host.command("sh").args(["-c", &script]).output();
        findings(&output.expect("sh starts"))
    };
    let found = limited("memory = \"1G\"\npin = \"require\"\n");
    let memlock = one(
        &found,
        "memlock",
        "problem",
        "may lock 4 MiB, and guest RAM to lock is 1 GiB",
    );
    let fix = memlock["fix"][0].as_str().expect("a command");
    assert!(fix.contains("memlock 1114112"), "{fix}");
    // The soft fabric does not require it.
    one(&limited("memory = \"1G\"\n"), "memlock", "note", "4 MiB");
    one(
        &limited("memory = \"4M\"\npin = \"require\"\n"),
        "memlock",
        "ok",
        "4 MiB",
    );
}

#[test]
fn people_see_lines_and_the_exit_status_counts_problems() {
    let host = Host::new();
    // Nothing is configured: nothing can be wrong.
    let well = host.doctor(&PATIENCE);
    let text = String::from_utf8_lossy(&well.stdout);
    assert!(well.status.success() && well.stderr.is_empty(), "{well:?}");
    assert!(
        text.contains("ok       qemu: qemu-system-x86_64 is QEMU 11.1"),
        "{text}"
    );
    assert!(
        text.contains("note     description: no VM is configured"),
        "{text}"
    );

    host.describe("web1", "devices = 3\n");
    let sick = host.doctor(&[&["--quiet"], &PATIENCE[..]].concat());
    let text = String::from_utf8_lossy(&sick.stdout);
    assert_eq!(sick.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&sick.stderr), "error: 1 problem\n");
    assert!(text.contains("problem  description (VM web1): "), "{text}");
    assert!(
        text.contains("\n         why: ") && text.contains("\n         fix: "),
        "{text}"
    );
    assert!(!text.contains("ok    "), "{text}");
}
