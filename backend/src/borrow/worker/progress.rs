//! What the log says of a bus-master enable that takes long.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use farside_fabric::pin::PinProgress;

use super::Settings;

/// Logs how far pinning is, every second of it, and once that it is late.
pub(super) struct Progress {
    name: String,
    started: Instant,
    /// The seconds that are logged.
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
        let PinProgress { done, total } = at;
        let (done, total) = (done >> 20, total >> 20);
        let elapsed = self.started.elapsed();
        let Self {
            name,
            timeout,
            limit,
            ..
        } = self;
        if elapsed > *timeout && timeout < limit && !self.late.swap(true, Ordering::Relaxed) {
            log::warn!(
                "{name}: late: {done} of {total} MiB of guest RAM pinned after {timeout:?}; going on, for {limit:?} in all"
            );
        }
        if self.logged.fetch_max(elapsed.as_secs(), Ordering::Relaxed) < elapsed.as_secs() {
            log::info!("{name}: pinning guest RAM, {done} of {total} MiB");
        }
    }
}
