//! A device whose borrower over the network is cut off, as `farside devices`, `status` and `revoke` have it.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use farside_lender_protocol::{
    Address, CallError, Channel, Client, ErrorKind, MediumLease, Secret,
};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(20);

const KEEP: Duration = Duration::from_secs(100);

/// A lender of disk0 at a TCP port.
struct Lender {
    child: Child,
    port: Address,
}

impl Lender {
    fn start(dir: &Path) -> Self {
        let mut child = farside(dir)
            .arg("lend")
            .arg("--config")
            .arg(dir.join("lender.toml"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut log = BufReader::new(child.stderr.take().expect("a pipe"));
        let port = loop {
            let mut line = String::new();
            let read = log.read_line(&mut line).expect("UTF-8");
            assert!(read > 0, "it ended");
            if let Some((_, port)) = line.split_once("listens at tcp:") {
                break format!("tcp:{}", port.trim()).parse().expect("an address");
            }
        };
        // Else the lender would wait for room in the pipe.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Self { child, port }
    }

    fn borrow(
        &self,
        vm: &str,
        resumes: Option<Secret>,
    ) -> Result<(MediumLease, Channel), CallError> {
        let vm = vm.parse().expect("a name");
        let client = Client::connect(&self.port, Some(&vm))?;
        client.borrow_medium(&"disk0".parse().expect("an id"), KEEP, resumes)
    }

    /// Borrows as soon as the lender has ended the lease before.
    fn borrow_soon(&self, vm: &str, resumes: Option<Secret>) -> (MediumLease, Channel) {
        let began = Instant::now();
        loop {
            match self.borrow(vm, resumes) {
                Ok(lent) => return lent,
                Err(CallError::Refused(error))
                    if error.kind == ErrorKind::Busy && began.elapsed() < DEADLINE =>
                {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn refusal(&self, vm: &str, resumes: Option<Secret>) -> (ErrorKind, String) {
        match self.borrow(vm, resumes) {
            Err(CallError::Refused(error)) => (error.kind, error.message),
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // SIGKILL: what a lender that starts anew knows is in its file.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn farside(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farside"));
    command
        .env("FARSIDE_RUNTIME_DIR", dir)
        .env("FARSIDE_CONFIG_DIR", dir)
        .env("FARSIDE_STATE_DIR", dir);
    command
}

fn says(dir: &Path, arguments: &[&str]) -> String {
    let output = farside(dir).args(arguments).output();
    let output = output.expect("the program starts");
    let [out, err] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
    assert!(output.status.success(), "{arguments:?}: {err}");
    out
}

/// The JSON of the device in `farside devices`.
fn listed(dir: &Path) -> Value {
    let json: Value = serde_json::from_str(&says(dir, &["devices", "--json"])).expect("JSON");
    json["devices"][0].clone()
}

/// Waits until the lender keeps the device for web1.
fn wait_kept(dir: &Path) -> Value {
    let began = Instant::now();
    loop {
        let device = listed(dir);
        if device["kept"]["vm"] == "web1" {
            return device;
        }
        assert!(began.elapsed() < DEADLINE, "{device}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn stage() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    let image = dir.path().join("disk0.img");
    let file = fs::File::create(&image).expect("a file");
    file.set_len(16 << 20).expect("a size");
    let config = format!(
        "listen = [\"tcp:127.0.0.1:0\"]\nkeep-at-most = 60\n\
         [[device]]\nid = \"disk0\"\nborrowers = [\"network\"]\nmodel.nvme = {{ image = {image:?} }}\n"
    );
    fs::write(dir.path().join("lender.toml"), config).expect("a file");
    dir
}

#[test]
fn a_kept_device_is_listed_over_a_restart_until_it_is_revoked() {
    let stage = stage();
    let dir = stage.path();
    let mut lender = Lender::start(dir);
    let (lease, connection) = lender.borrow("web1", None).expect("a lease");
    let chain = lease.chain;
    assert!(listed(dir)["kept"].is_null());
    drop(connection);
    for restart in [false, true] {
        if restart {
            drop(lender);
            lender = Lender::start(dir);
        }
        let device = wait_kept(dir);
        assert!(device["borrowed_by"].is_null(), "{device}");
        // No longer than the lender's `keep-at-most`.
        let left = device["kept"]["left"].as_u64().expect("a number");
        assert!((30..=60).contains(&left), "{left}");
        for command in ["devices", "status"] {
            let text = says(dir, &[command]);
            assert!(text.contains("kept for VM web1 (cut "), "{command}: {text}");
        }
        let (kind, text) = lender.refusal("web2", None);
        assert_eq!(kind, ErrorKind::Busy);
        assert!(text.contains("kept for VM web1"), "{text}");
    }
    // Neither in a list nor in a status.
    let secret = String::from(chain);
    for json in [&["devices", "--json"][..], &["status", "--json"]] {
        assert!(!says(dir, json).contains(&secret), "{json:?}");
    }
    let (lease, connection) = lender.borrow_soon("web1", Some(chain));
    assert_eq!(lease.chain, chain);
    assert_eq!(listed(dir)["borrowed_by"]["vm"], "web1");
    drop(connection);
    wait_kept(dir);
    let text = says(dir, &["revoke", "disk0"]);
    assert!(
        text.contains("disk0 is no longer kept for VM web1"),
        "{text}"
    );
    assert!(listed(dir)["kept"].is_null());
    says(dir, &["devices", "--available", "disk0"]);
    let (kind, text) = lender.refusal("web1", Some(chain));
    assert_eq!(kind, ErrorKind::ChainEnded);
    assert!(text.contains("its lease has ended since"), "{text}");
    lender.borrow("web2", None).expect("a lease");
}

#[test]
fn a_borrower_that_comes_back_ends_its_half_open_lease() {
    let stage = stage();
    let lender = Lender::start(stage.path());
    let (first, _open) = lender.borrow("web1", None).expect("a lease");
    let (kind, text) = lender.refusal("web2", None);
    assert_eq!(kind, ErrorKind::Busy);
    assert!(text.contains("is borrowed by VM web1"), "{text}");
    let (kind, text) = lender.refusal("web1", Some(first.chain));
    assert_eq!(kind, ErrorKind::Busy);
    assert!(text.contains("is being ended"), "{text}");
    let (next, _) = lender.borrow_soon("web1", Some(first.chain));
    assert_eq!(next.chain, first.chain);
    assert!(next.generation > first.generation);
}
