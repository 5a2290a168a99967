//! A lender that is restarted immediately after it was killed or stopped, as by `systemctl
//! restart`: it can lock the image again.

use std::{
    io::{BufRead, BufReader, Write, stdout},
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, Stdio},
    time::{Duration, Instant},
};

/// Rounds of each kind.
const ROUNDS: usize = 8;

/// Maximum start time: a lender whose image is in use waits for 2 s.
const LONGEST_START: Duration = Duration::from_secs(10);

struct Lender {
    child: Child,
    /// Kept open, so that the lender can keep logging.
    _log: BufReader<ChildStderr>,
}

impl Lender {
    /// Returns once it listens; fails if it ends before.
    fn start(dir: &Path, image: &Path) -> Result<Self, String> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_farside"))
            .arg("lend")
            .arg("--socket")
            .arg(dir.join("lender.sock"))
            .arg("--nvme")
            .arg(format!("disk0={}", image.display()))
            .env("XDG_STATE_HOME", dir)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let began = Instant::now();
        let mut log = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut said = String::new();
        while log.read_line(&mut said).expect("UTF-8") > 0 {
            if said.contains("listens at") {
                assert!(began.elapsed() < LONGEST_START, "{:?}", began.elapsed());
                return Ok(Self { child, _log: log });
            }
        }
        child.wait().expect("a child");
        Err(said)
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status();
        assert!(sent.expect("kill(1)").success());
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // If it has already ended, only the wait is needed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Restarts a lender of `image` after each signal. The next is started as soon as the
/// process is gone.
fn restart(dir: &Path, image: &Path) {
    let start = || Lender::start(dir, image);
    let mut lender = start().expect("nobody else has the image");
    for signal in ["-KILL", "-TERM"] {
        for round in 0..ROUNDS {
            lender.signal(signal);
            lender.child.wait().expect("a child");
            let next = start();
            lender = next.unwrap_or_else(|log| panic!("{signal}, round {round}: {log}"));
        }
    }
}

fn image(dir: &Path) -> PathBuf {
    let image = dir.join("disk0.img");
    let file = std::fs::File::create(&image).expect("a file");
    file.set_len(16 << 20).expect("a size");
    image
}

#[test]
fn the_image_file_of_a_restarted_lender_is_its_own_again() {
    let dir = tempfile::tempdir().expect("a directory");
    restart(dir.path(), &image(dir.path()));
}

/// Detached when dropped.
struct Loop(PathBuf);

impl Loop {
    /// `None` if this host or this user has no loop devices.
    fn attach(image: &Path) -> Option<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(image)
            .output();
        match output {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8(output.stdout).expect("UTF-8");
                let device = Self(path.trim().into());
                // The read-only flag of the device's last user survives the detach.
                let reset = Command::new("blockdev")
                    .arg("--setrw")
                    .arg(&device.0)
                    .status();
                assert!(reset.expect("blockdev(8)").success());
                Some(device)
            }
            refused => {
                // For `cargo xtask test`: libtest captures `eprintln!`.
                let test = "the_block_device_of_a_restarted_lender_is_its_own_again";
                writeln!(
                    stdout().lock(),
                    "skipped: {test}: no loop device: {refused:?}"
                )
                .expect("stdout");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("-d").arg(&self.0).status();
        if !std::thread::panicking() {
            assert!(detached.expect("losetup(8)").success());
        }
    }
}

#[test]
fn the_block_device_of_a_restarted_lender_is_its_own_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(device) = Loop::attach(&image(dir.path())) else {
        return;
    };
    restart(dir.path(), &device.0);
}
