//! The refused DMAs of one device.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};

use crate::{Fault, FaultReason};

/// Counts and remembers refused DMAs of one device, and logs them.
///
/// A guest can cause faults as fast as it likes. So memory is bounded (the last
/// [`FaultLog::REMEMBERED`] faults), and log lines are too: at most
/// [`FaultLog::LINES`] in [`FaultLog::PERIOD`], then one with how many were left
/// out.
#[derive(Debug)]
pub struct FaultLog {
    device: String,
    total: AtomicU64,
    by_reason: [AtomicU64; FaultReason::ALL.len()],
    recent: Mutex<Recent>,
}

#[derive(Debug)]
struct Recent {
    records: VecDeque<FaultRecord>,
    /// When the current period of log lines began, and the lines in it.
    period: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

/// A fault, when and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultRecord {
    /// Number of the fault, from 1, among all of the device.
    pub sequence: u64,
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// The fault.
    pub fault: Fault,
}

/// How many faults of each reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReasonCounts {
    /// [`FaultReason::BusMasterDisabled`].
    pub bus_master_disabled: u64,
    /// [`FaultReason::LenderDomain`].
    pub lender_domain: u64,
    /// [`FaultReason::Window`].
    pub window: u64,
    /// [`FaultReason::BorrowerDomain`].
    pub borrower_domain: u64,
    /// [`FaultReason::Permission`].
    pub permission: u64,
    /// [`FaultReason::MemoryGone`].
    pub memory_gone: u64,
}

/// A copy of a [`FaultLog`] for status displays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultSummary {
    /// All faults.
    pub total: u64,
    /// By reason.
    pub by_reason: ReasonCounts,
    /// The last ones, oldest first.
    pub recent: Vec<FaultRecord>,
}

impl FaultLog {
    /// How many faults are remembered one by one.
    pub const REMEMBERED: usize = 64;
    /// Most log lines in a period.
    pub const LINES: u32 = 10;
    /// The period.
    pub const PERIOD: Duration = Duration::from_secs(5);

    /// An empty log of the device `device`.
    pub fn new(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            total: AtomicU64::new(0),
            by_reason: Default::default(),
            recent: Mutex::new(Recent {
                records: VecDeque::with_capacity(Self::REMEMBERED),
                period: None,
                lines: 0,
                suppressed: 0,
            }),
        }
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// All faults so far.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Counts, remembers and logs `fault`.
    pub fn record(&self, fault: Fault) {
        self.by_reason[fault.reason.index()].fetch_add(1, Ordering::Relaxed);
        let mut recent = self.recent();
        // Under the lock, so that numbers are remembered in order.
        let sequence = self.total.fetch_add(1, Ordering::Relaxed) + 1;
        if recent.records.len() == Self::REMEMBERED {
            recent.records.pop_front();
        }
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        recent.records.push_back(FaultRecord {
            sequence,
            unix_ms: since_1970.map_or(0, |elapsed| elapsed.as_millis() as u64),
            fault,
        });
        let Some(suppressed) = recent.may_log(Instant::now()) else {
            return;
        };
        drop(recent);
        let device = &self.device;
        match suppressed {
            0 => log::warn!("{device}: {fault}"),
            _ => log::warn!("{device}: {fault} ({suppressed} earlier faults were not logged)"),
        }
    }

    /// A copy of the recorded faults.
    pub fn summary(&self) -> FaultSummary {
        let recent = self.recent();
        let count = |reason: FaultReason| self.by_reason[reason.index()].load(Ordering::Relaxed);
        FaultSummary {
            total: self.total(),
            by_reason: ReasonCounts {
                bus_master_disabled: count(FaultReason::BusMasterDisabled),
                lender_domain: count(FaultReason::LenderDomain),
                window: count(FaultReason::Window),
                borrower_domain: count(FaultReason::BorrowerDomain),
                permission: count(FaultReason::Permission),
                memory_gone: count(FaultReason::MemoryGone),
            },
            recent: recent.records.iter().copied().collect(),
        }
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        // Every state of `Recent` is a good one.
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recent {
    /// `None` when a line would be one too many; else how many were left out
    /// since the last line. (`RateLimit` is the daemons', of which the fabric knows nothing.)
    fn may_log(&mut self, now: Instant) -> Option<u64> {
        let fresh = self
            .period
            .is_none_or(|began| now.duration_since(began) >= FaultLog::PERIOD);
        if fresh {
            self.period = Some(now);
            self.lines = 0;
        }
        if self.lines >= FaultLog::LINES {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Iova};

    fn fault(iova: u64, reason: FaultReason) -> Fault {
        Fault {
            iova: Iova::new(iova),
            len: 1,
            access: Access::Read,
            reason,
        }
    }

    #[test]
    fn counts_all_and_remembers_the_last() {
        let log = FaultLog::new("nvme0");
        for iova in 0..100 {
            log.record(fault(iova, FaultReason::Window));
        }
        log.record(fault(7, FaultReason::Permission));
        let summary = log.summary();
        assert_eq!(summary.total, 101);
        assert_eq!(summary.by_reason.window, 100);
        assert_eq!(summary.by_reason.permission, 1);
        assert_eq!(summary.recent.len(), FaultLog::REMEMBERED);
        assert_eq!(summary.recent[0].sequence, 101 - 63);
        assert_eq!(summary.recent[63].fault.iova, Iova::new(7));
    }

    #[test]
    fn lines_are_limited_and_the_rest_is_counted() {
        let log = FaultLog::new("nvme0");
        let mut recent = log.recent();
        let start = Instant::now();
        let lines = (0..1000).filter(|_| recent.may_log(start).is_some());
        assert_eq!(lines.count(), FaultLog::LINES as usize);
        let suppressed = recent.may_log(start + FaultLog::PERIOD);
        assert_eq!(suppressed, Some(1000 - u64::from(FaultLog::LINES)));
    }
}
