//! What a device thread reports, and to whom.

use std::sync::Arc;

use farside_daemon::{DeviceId, RateLimit, StateLog};
use farside_lender_protocol::{DeviceEntry, Generation};
use serde::{Deserialize, Serialize};

use crate::{
    registry::{Registry, Release},
    tokens::RegisterTokens,
};

/// The kinds of log lines about a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Line {
    /// A VM has borrowed the device.
    Borrowed,
    /// A lease was dropped before its VM used it.
    Dropped,
    /// A lease has ended.
    Ended,
    /// A borrow has failed.
    NotLent,
    /// A request was refused.
    Refused,
}

/// The owner of a device thread.
pub(crate) trait Home: Send {
    /// The device's entry in the registry.
    fn entry(&self) -> Option<DeviceEntry>;

    /// Tokens for register channels that have not connected yet.
    fn tokens(&self) -> &Arc<RegisterTokens>;

    /// The lease has ended, and the device can be lent again.
    fn released(&self, generation: Generation, how: Release);

    /// The lease has ended, and the device does DMA on, kept for its VM. Returns false, and has no effect, if it may not.
    fn keeps_running(&self, generation: Generation) -> bool;

    /// A lease that goes on begins, before its borrower is told.
    fn begins(&self) {}

    /// The borrower for which the device was kept after the lease `generation` has gone.
    fn left(&self, _generation: Generation) {}

    /// The lease may not go on over another connection: a flush has failed.
    fn end_chain(&self);

    /// The device's problem has changed, from `before` to `now`.
    fn problem(&self, before: Option<&str>, now: Option<&str>);

    /// The DMA faults of the lease, of which the device has reported `reported`.
    fn dma_faults(&self, reported: u64) -> u64;

    /// Logs a line, unless there are too many of its kind.
    fn line(&self, kind: Line, line: &str);
}

/// The lender's own process.
pub(crate) struct InLender {
    id: DeviceId,
    registry: Arc<Registry>,
    /// Limits the log lines that each borrow causes.
    lines: StateLog,
    /// Limits the log lines on refused borrows and requests, which a guest may cause.
    refused: RateLimit,
}

impl InLender {
    pub(crate) fn new(id: DeviceId, registry: Arc<Registry>) -> Self {
        Self {
            id,
            registry,
            lines: StateLog::new(|line| log::info!("{line}")),
            refused: RateLimit::new(),
        }
    }
}

impl Home for InLender {
    fn entry(&self) -> Option<DeviceEntry> {
        self.registry.borrowers_entry(&self.id)
    }

    fn tokens(&self) -> &Arc<RegisterTokens> {
        self.registry.tokens()
    }

    fn released(&self, generation: Generation, how: Release) {
        self.registry.release(&self.id, generation, how);
    }

    fn keeps_running(&self, generation: Generation) -> bool {
        self.registry.keep_running(&self.id, generation)
    }

    fn left(&self, generation: Generation) {
        self.registry.left(&self.id, generation);
    }

    fn end_chain(&self) {
        self.registry.end_chain(&self.id);
    }

    fn problem(&self, before: Option<&str>, now: Option<&str>) {
        match (now, before) {
            (Some(now), _) => log::error!("device {}: {now}", self.id),
            (None, Some(before)) => log::info!("device {}: recovered: {before}", self.id),
            (None, None) => {}
        }
        self.registry.set_problem(&self.id, now.map(str::to_owned));
    }

    fn dma_faults(&self, reported: u64) -> u64 {
        reported
    }

    fn line(&self, kind: Line, line: &str) {
        let level = match kind {
            Line::Borrowed => return self.lines.line("borrowed", line),
            Line::Dropped => return self.lines.line("dropped", line),
            Line::Ended => return self.lines.line("ended", line),
            Line::NotLent => log::Level::Error,
            Line::Refused => log::Level::Warn,
        };
        if let Some(held_back) = self.refused.allow() {
            log::log!(level, "{line}{held_back}");
        }
    }
}
