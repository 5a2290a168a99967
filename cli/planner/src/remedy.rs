//! The remedy if something does not fit.

use std::fmt;

use farside_fabric::{NtbLimits, Size};
use serde::Serialize;

/// The required changes. All unset: no possible adapter is large enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Remedy {
    /// Sufficient BAR size, bytes.
    pub bar_size: Option<u64>,
    /// Sufficient LUT size.
    pub lut_entries: Option<u32>,
    /// Sufficient requester table size, with the entries of CPUs.
    pub requester_entries: Option<u32>,
    /// Sufficient share of a VM, where that is too small.
    pub per_vm: Option<u64>,
    /// Sufficient number of lenders like this one.
    pub lenders: Option<u64>,
}

impl Remedy {
    /// What has to be raised so that `devices` devices fit, whose LUT entries on an
    /// adapter `entries` returns (`None`: they do not fit).
    pub(crate) fn raise(
        limits: &NtbLimits,
        devices: u64,
        entries: impl Fn(&NtbLimits) -> Option<u64>,
    ) -> Self {
        let mut remedy = Self::default();
        // Valid limits are the only ones to search: their own rules end it.
        let enough = |candidate: &NtbLimits| {
            candidate.validate().is_ok()
                && entries(candidate).is_some_and(|n| n <= candidate.lut_entries.into())
        };
        let doubled = |value: u64, times: u32| value.checked_shl(times).filter(|&v| v > 0);
        let larger = (0..=16).find_map(|lut| {
            let lut_entries = limits.lut_entries.checked_shl(lut).filter(|&n| n > 0)?;
            let bars = (0..=50).filter_map(|times| doubled(limits.bar_size, times));
            bars.map(|bar_size| NtbLimits {
                bar_size,
                lut_entries,
                ..limits.clone()
            })
            .find(|candidate| enough(candidate))
        });
        let needed = devices.saturating_add(limits.reserved_requesters.into());
        let needed = u32::try_from(needed).ok();
        let table = needed.filter(|&requester_entries| {
            let candidate = NtbLimits {
                requester_entries,
                ..limits.clone()
            };
            candidate.validate().is_ok()
        });
        let (Some(larger), Some(table)) = (larger, table) else {
            // Half a remedy is none.
            return remedy;
        };
        remedy.bar_size = (larger.bar_size > limits.bar_size).then_some(larger.bar_size);
        remedy.lut_entries =
            (larger.lut_entries > limits.lut_entries).then_some(larger.lut_entries);
        remedy.requester_entries = (table > limits.requester_entries).then_some(table);
        remedy
    }

    /// The adapter with the raised values.
    pub fn apply(&self, limits: &NtbLimits) -> NtbLimits {
        NtbLimits {
            bar_size: self.bar_size.unwrap_or(limits.bar_size),
            lut_entries: self.lut_entries.unwrap_or(limits.lut_entries),
            requester_entries: self.requester_entries.unwrap_or(limits.requester_entries),
            ..limits.clone()
        }
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raise = [
            self.bar_size
                .map(|size| format!("bar-size to {}", Size(size))),
            self.lut_entries.map(|n| format!("lut-entries to {n}")),
            self.requester_entries
                .map(|n| format!("requester-entries to {n}")),
            self.per_vm.map(|n| format!("that share to {n}")),
        ];
        let raise: Vec<String> = raise.into_iter().flatten().collect();
        match (raise.as_slice(), self.lenders) {
            ([], None) => f.write_str("give the VMs less RAM or fewer devices"),
            ([], Some(lenders)) => write!(f, "use {lenders} such lenders"),
            (raise, lenders) => {
                write!(f, "raise {}", raise.join(" and "))?;
                match lenders {
                    Some(lenders) => write!(f, ", or use {lenders} such lenders"),
                    None => Ok(()),
                }
            }
        }
    }
}
