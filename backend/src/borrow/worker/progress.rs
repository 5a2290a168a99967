//! Progress messages for a slow bus-master enable.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use farside_fabric::pin::PinProgress;

use super::Settings;

/// Logs the progress of pinning each second, and once that it is late.
pub(super) struct Progress {
    name: String,
    started: Instant,
    /// Number of seconds already logged.
    logged: AtomicU64,
    timeout: Duration,
    limit: Duration,
    late: AtomicBool,
}

impl Progress {
    pub(super) fn new(name: String, settings: &Settings) -> Self {
        Self {
            name,
            started: Instant::now(),
            logged: AtomicU64::new(0),
            timeout: settings.open_timeout,
            limit: settings.open_limit(),
            late: AtomicBool::new(false),
        }
    }

    pub(super) fn show(&self, at: PinProgress) {
        let [late, progress] = self.lines(at, self.started.elapsed());
        if let Some(line) = late {
            log::warn!("{line}");
        }
        if let Some(line) = progress {
            log::info!("{line}");
        }
    }

    /// The lines to log after `elapsed`: the warning that it is late, and the progress.
    fn lines(&self, at: PinProgress, elapsed: Duration) -> [Option<String>; 2] {
        let PinProgress { done, total } = at;
        let (done, total) = (done >> 20, total >> 20);
        let Self {
            name,
            timeout,
            limit,
            ..
        } = self;
        let is_late = elapsed > *timeout && timeout < limit;
        let late = (is_late && !self.late.swap(true, Ordering::Relaxed)).then(|| {
            format!(
                "{name}: late: {done} of {total} MiB of guest RAM pinned after {timeout:?}; going on, for {limit:?} in all"
            )
        });
        let seconds = elapsed.as_secs();
        let is_next = self.logged.fetch_max(seconds, Ordering::Relaxed) < seconds;
        let progress = is_next.then(|| format!("{name}: pinning guest RAM, {done} of {total} MiB"));
        [late, progress]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_bus_master_enable_says_so_once_and_how_far_it_is_each_second() {
        let progress = Progress {
            name: "disk0".to_owned(),
            started: Instant::now(),
            logged: AtomicU64::new(0),
            timeout: Duration::from_secs(1),
            limit: Duration::from_secs(4),
            late: AtomicBool::new(false),
        };
        let lines = |millis, done: u64| {
            let (done, total) = (done << 20, 256 << 20);
            let lines = progress.lines(PinProgress { done, total }, Duration::from_millis(millis));
            lines.map(Option::unwrap_or_default)
        };
        assert_eq!(lines(900, 64), ["", ""]);
        let [late, progress] = lines(1100, 80);
        let told =
            "disk0: late: 80 of 256 MiB of guest RAM pinned after 1s; going on, for 4s in all";
        assert_eq!(late, told);
        assert_eq!(progress, "disk0: pinning guest RAM, 80 of 256 MiB");
        assert_eq!(lines(1900, 96), ["", ""]);
        assert_eq!(
            lines(2000, 99),
            ["", "disk0: pinning guest RAM, 99 of 256 MiB"]
        );
    }
}
