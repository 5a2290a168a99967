//! A signal that comes while a keeper starts is the backend's.

use std::{
    process::{Command, exit},
    time::{Duration, Instant},
};

use farside_keeper::{Former, Kept, Options, keep};
use libtest_mimic::{Arguments, Trial};
use rustix::process::{Signal, getpid, kill_process};

/// Has this program be a keeper.
const KEEPER: &str = "FARSIDE_KEEPER_TEST_SIGNAL";

/// Exit code of a backend that was sent the signal.
const SIGNALLED: u8 = 7;

const TIMEOUT: Duration = Duration::from_secs(30);

fn keeper() -> ! {
    let directory = std::env::temp_dir().join(format!("farside-signal-{}", std::process::id()));
    let former = Former::take(&directory.join("socket")).unwrap();
    kill_process(getpid(), Signal::TERM).unwrap();
    let options = Options {
        former,
        announce: &|_| (),
        patience: None,
    };
    let code = keep(backend, options).unwrap();
    let _ = std::fs::remove_dir_all(directory);
    exit(code.into());
}

/// Waits until SIGTERM is pending.
fn backend(_: Kept) -> u8 {
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let pending = status
            .lines()
            .find_map(|line| line.strip_prefix("ShdPnd:"))
            .and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
            .unwrap();
        if pending & 1 << (Signal::TERM.as_raw() - 1) != 0 {
            return SIGNALLED;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    0
}

fn main() {
    if std::env::var_os(KEEPER).is_some() {
        keeper();
    }
    let test = Trial::test("a_signal_during_the_start_is_the_backends", || {
        let keeper = Command::new(std::env::current_exe()?)
            .env(KEEPER, "1")
            .status()?;
        match keeper.code() {
            Some(code) if code == i32::from(SIGNALLED) => Ok(()),
            _ => Err(format!("the keeper ended by {keeper}").into()),
        }
    });
    libtest_mimic::run(&Arguments::from_args(), vec![test]).exit();
}
