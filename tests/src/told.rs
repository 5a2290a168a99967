//! Durations of tests, and logs of those that fail.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use anyhow::Context;
use libtest_mimic::{Completion, Failed, Trial};

/// Runs a test; if it fails or panics, `story` is shown with the reason.
pub fn told<T>(
    test: impl FnOnce() -> anyhow::Result<T>,
    story: impl FnOnce() -> String,
) -> Result<T, Failed> {
    let what = match catch_unwind(AssertUnwindSafe(test)) {
        Ok(Ok(passed)) => return Ok(passed),
        Ok(Err(error)) => format!("{error:#}"),
        Err(panic) => panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "a panic without words".to_owned()),
    };
    Err(format!("{what}\n{}", story()).into())
}

/// The number in the environment variable `name`, if it is set: `cargo xtask soak` sets more
/// repetitions than a test has by default.
pub fn from_env(name: &str) -> anyhow::Result<Option<u64>> {
    match std::env::var(name) {
        Ok(text) => text.parse().map(Some).with_context(|| name.to_owned()),
        Err(_) => Ok(None),
    }
}

/// The load of a test, which sets its limit on a busy host.
#[derive(Clone, Copy, Debug)]
pub enum Weight {
    /// Guests: 15 minutes.
    Guests,
    /// Hosts in VMs, many guests, or half an hour of kills: an hour.
    Hosts,
    /// A test suite of Linux: six hours.
    Suite,
}

impl Weight {
    /// Of a test of guests that kills `FARSIDE_KILLS` times: the soak's thousand take longer than what a test does by itself.
    pub fn of_kills() -> Self {
        match std::env::var_os("FARSIDE_KILLS") {
            Some(_) => Self::Hosts,
            None => Self::Guests,
        }
    }

    fn limit(self) -> Duration {
        Duration::from_secs(
            60 * match self {
                Self::Guests => 15,
                Self::Hosts => 60,
                Self::Suite => 360,
            },
        )
    }
}

/// A test that prints its duration, of which `cargo xtask test` lists the longest. If it
/// exceeds the limit of its weight, all tests of this binary end.
pub fn trial(
    name: &str,
    weight: Weight,
    test: impl FnOnce() -> Result<Completion, Failed> + Send + 'static,
) -> Trial {
    let watched = name.to_owned();
    Trial::ignorable_test(name, move || {
        let began = Instant::now();
        let (ended, end) = channel::<()>();
        let name = watched.clone();
        let limit = weight.limit();
        std::thread::spawn(move || {
            if end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{name}: has not ended within {limit:?}");
                std::process::exit(101);
            }
        });
        let result = test();
        drop(ended);
        println!("took: {watched}: {:.1}s", began.elapsed().as_secs_f64());
        result
    })
}
