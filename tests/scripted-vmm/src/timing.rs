//! Time measurements.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::report::RoundTrip;

/// Whole microseconds.
pub fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Repeats an operation `count` times (at least once), sequentially.
///
/// # Errors
/// The operation's first error.
pub fn round_trips(count: u64, mut once: impl FnMut() -> Result<()>) -> Result<RoundTrip> {
    let count = count.max(1);
    let mut times = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        once()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let micros = |hundredths: usize| {
        let rank = (times.len() * hundredths).div_ceil(100).max(1);
        times[rank - 1].as_secs_f64() * 1e6
    };
    Ok(RoundTrip {
        n: count,
        p50_us: micros(50),
        p99_us: micros(99),
    })
}
