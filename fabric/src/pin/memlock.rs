//! The limit on locked memory, which is small for ordinary users.

use std::{fs, io, sync::Once};

use rustix::{
    process::{Resource, getrlimit},
    thread::{CapabilitySet, capabilities},
};

use super::{PinError, PinPolicy};
use crate::Size;

/// The memlock limit is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the memlock limit is too small to lock guest memory: RLIMIT_MEMLOCK is {}, {} are locked \
     already and {} more are needed; raise it with `ulimit -l {}` (as root, or in \
     /etc/security/limits.conf) or `LimitMEMLOCK={needed_total}` in a systemd unit, or grant \
     CAP_IPC_LOCK",
    Size(*limit), Size(*locked), Size(*needed), needed_total.div_ceil(1024)
)]
pub struct MemlockTooSmall {
    /// The limit, bytes.
    pub limit: u64,
    /// Bytes that this process has locked already.
    pub locked: u64,
    /// Bytes to be locked now.
    pub needed: u64,
    /// The smallest limit that would do, bytes.
    pub needed_total: u64,
}

/// Whether to lock `needed` bytes, according to the limit and the policy.
pub(super) fn may_lock(needed: u64, policy: PinPolicy) -> Result<bool, PinError> {
    match (check_memlock(needed), policy) {
        (Ok(()), _) => Ok(true),
        (Err(PinError::Memlock(error)), PinPolicy::Prefer) => {
            warn_once(&error);
            Ok(false)
        }
        (Err(error), _) => Err(error),
    }
}

/// Checks that `needed` more bytes may be locked.
///
/// # Errors
/// [`PinError::Memlock`] names the required limit and how to raise it.
pub fn check_memlock(needed: u64) -> Result<(), PinError> {
    let Some(limit) = getrlimit(Resource::Memlock).current else {
        return Ok(());
    };
    let capable =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if capable {
        return Ok(());
    }
    let locked = locked_now().map_err(|source| PinError::System {
        what: "read how much memory is locked from /proc/self/status",
        source,
    })?;
    let needed_total = locked.saturating_add(needed);
    if needed_total <= limit {
        return Ok(());
    }
    Err(PinError::Memlock(MemlockTooSmall {
        limit,
        locked,
        needed,
        needed_total,
    }))
}

/// Bytes that this process has locked.
fn locked_now() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    line.and_then(|line| line.split_whitespace().next())
        .and_then(|kib| kib.parse::<u64>().ok())
        .and_then(|kib| kib.checked_mul(1024))
        .ok_or_else(|| io::Error::other("no line VmLck there"))
}

fn warn_once(error: &MemlockTooSmall) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| log::warn!("guest memory is populated but not locked: {error}"));
}
