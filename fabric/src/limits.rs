//! The resources of an NTB adapter, and checks that they suffice.
//!
//! An adapter has one BAR for DMA windows. Its look-up table (LUT) cuts the
//! BAR into equal segments and translates each on its own; a window takes as
//! many consecutive entries as its span needs. Another table maps requesters
//! (devices and CPUs), so that completions of reads find their way back: each
//! borrowed device takes an entry of it.

use serde::{Deserialize, Serialize};

use crate::{PAGE_SIZE, PeerAddress, Size, deserialize_optional_size, deserialize_size};

/// Limits of an NTB adapter.
///
/// The default is an adapter of the Dolphin PXH830 class: 32 requester entries,
/// of which CPUs take 2, so 30 devices between a pair of hosts. The size of its
/// BAR is configurable, and its users advise to make it as large as possible:
/// 32 GiB with 256 LUT entries, so 128 MiB each, is *our* choice. As delivered
/// its prefetchable BAR is 256 MiB, too small for the RAM of most guests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct NtbLimits {
    /// Bytes of the BAR that windows are in; a power of two.
    #[serde(deserialize_with = "deserialize_size")]
    pub bar_size: u64,
    /// Entries of the look-up table; a power of two.
    pub lut_entries: u32,
    /// What a peer address must be a multiple of, bytes; a power of two. Left out,
    /// it is the segment size. (Older Intel NTBs: the BAR's size. AMD: 4096.)
    #[serde(deserialize_with = "deserialize_optional_size")]
    pub alignment: Option<u64>,
    /// Most LUT entries that one window may take; left out, all of them. It is 1
    /// where each window has a BAR and a translation register of its own (Intel,
    /// AMD): what lies side by side there cannot be joined.
    pub entries_per_window: Option<u32>,
    /// Entries of the requester table.
    pub requester_entries: u32,
    /// Number of those that the CPUs use.
    pub reserved_requesters: u32,
    /// The share of one VM.
    pub per_vm: VmShare,
}

/// The most that one VM may have of an adapter, all its devices together. Left out, whatever is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct VmShare {
    /// LUT entries.
    pub lut_entries: Option<u32>,
    /// Requester entries, one for each device.
    pub requester_entries: Option<u32>,
}

impl VmShare {
    /// No share is smaller than the adapter.
    pub const ALL: Self = Self {
        lut_entries: None,
        requester_entries: None,
    };

    /// Refuses a VM that has `used` LUT entries `needed` more if they exceed its share.
    pub(crate) fn check_lut_entries(self, used: u64, needed: u64) -> Result<(), LimitError> {
        match self.lut_entries {
            Some(limit) if used.saturating_add(needed) > limit.into() => {
                Err(LimitError::VmLutEntries {
                    used,
                    needed,
                    limit,
                })
            }
            _ => Ok(()),
        }
    }

    /// Refuses a VM that has `used` requester entries one for `device` if that exceeds its share.
    pub(crate) fn check_requester(self, device: &str, used: usize) -> Result<(), LimitError> {
        match self.requester_entries {
            Some(limit) if used >= limit as usize => Err(LimitError::VmRequesters {
                device: device.to_owned(),
                limit,
            }),
            _ => Ok(()),
        }
    }
}

impl Default for NtbLimits {
    fn default() -> Self {
        Self {
            bar_size: 32 << 30,
            lut_entries: 256,
            alignment: None,
            entries_per_window: None,
            requester_entries: 32,
            reserved_requesters: 2,
            per_vm: VmShare::ALL,
        }
    }
}

impl NtbLimits {
    /// Maximum BAR size: a quarter of the x86 address space.
    const MAX_BAR: u64 = 1 << 50;
    /// Largest LUT: far beyond real ones (Switchtec has 512 entries).
    const MAX_LUT: u32 = 1 << 16;

    /// Checks that the numbers can be those of an adapter.
    ///
    /// # Errors
    /// [`LimitError::Invalid`] names the first that cannot.
    pub fn validate(&self) -> Result<(), LimitError> {
        let invalid = |name, value, rule| Err(LimitError::Invalid { name, value, rule });
        let lut = u64::from(self.lut_entries);
        if !self.bar_size.is_power_of_two() || !(PAGE_SIZE..=Self::MAX_BAR).contains(&self.bar_size)
        {
            let rule = "a power of two from 4096 to 2^50 bytes";
            return invalid("bar-size", self.bar_size, rule);
        }
        if !lut.is_power_of_two() || self.lut_entries > Self::MAX_LUT {
            return invalid("lut-entries", lut, "a power of two from 1 to 65536");
        }
        if self.bar_size / lut < PAGE_SIZE {
            return invalid("lut-entries", lut, "at most bar-size / 4096");
        }
        if !self.alignment().is_power_of_two() || self.alignment() < PAGE_SIZE {
            let rule = "a power of two, at least 4096 bytes";
            return invalid("alignment", self.alignment(), rule);
        }
        if self.entries_per_window == Some(0) {
            return invalid("entries-per-window", 0, "at least 1, or left out");
        }
        if self.requester_entries <= self.reserved_requesters {
            let value = u64::from(self.requester_entries);
            return invalid("requester-entries", value, "more than reserved-requesters");
        }
        if self.requester_entries > Self::MAX_LUT {
            let value = u64::from(self.requester_entries);
            return invalid("requester-entries", value, "at most 65536");
        }
        let VmShare {
            lut_entries,
            requester_entries,
        } = self.per_vm;
        let shares = [
            ("per-vm.lut-entries", lut_entries),
            ("per-vm.requester-entries", requester_entries),
        ];
        if let Some((name, _)) = shares.iter().find(|(_, share)| *share == Some(0)) {
            return invalid(name, 0, "at least 1, or left out");
        }
        Ok(())
    }

    /// Most LUT entries that a VM may have.
    pub fn lut_entries_per_vm(&self) -> u32 {
        let most = self.per_vm.lut_entries.unwrap_or(self.lut_entries);
        most.min(self.lut_entries)
    }

    /// Most devices that a VM may have.
    pub fn devices_per_vm(&self) -> u32 {
        let most = self.per_vm.requester_entries;
        most.map_or(self.max_devices(), |most| most.min(self.max_devices()))
    }

    /// Bytes that one LUT entry translates.
    pub fn segment(&self) -> u64 {
        self.bar_size / u64::from(self.lut_entries.max(1))
    }

    /// What a peer address must be a multiple of, bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment.unwrap_or_else(|| self.segment())
    }

    /// LUT entries that a window of `len` bytes takes.
    pub fn entries_for(&self, len: u64) -> u64 {
        len.div_ceil(self.segment().max(1))
    }

    /// Most LUT entries that one window may take.
    pub fn max_entries(&self) -> u32 {
        let most = self.entries_per_window.unwrap_or(self.lut_entries);
        most.min(self.lut_entries)
    }

    /// Devices that can be lent at once.
    pub fn max_devices(&self) -> u32 {
        self.requester_entries
            .saturating_sub(self.reserved_requesters)
    }

    /// Refuses a window of `bytes` that would not fit even in an unused adapter.
    pub(crate) fn check_window(&self, bytes: u64) -> Result<(), LimitError> {
        let needed = self.entries_for(bytes);
        if needed <= u64::from(self.max_entries()) || self.max_entries() == self.lut_entries {
            return Ok(());
        }
        Err(LimitError::WindowTooLarge {
            bytes,
            needed,
            limit: self.max_entries(),
            segment: self.segment(),
            remedy: Remedy(self.larger_bar([bytes].into_iter())),
        })
    }

    /// The smallest BAR, larger than this one, that windows of `spans` bytes
    /// fit in with as many LUT entries; `None` when no size helps.
    pub(crate) fn larger_bar(&self, spans: impl Iterator<Item = u64> + Clone) -> Option<u64> {
        let mut larger = self.clone();
        while larger.bar_size < Self::MAX_BAR {
            larger.bar_size *= 2;
            let needed = || spans.clone().map(|span| larger.entries_for(span));
            if needed().fold(0, u64::saturating_add) <= u64::from(larger.lut_entries)
                && needed().all(|entries| entries <= u64::from(larger.max_entries()))
            {
                return Some(larger.bar_size);
            }
        }
        None
    }
}

/// The resources of an adapter that some windows use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NtbUse {
    /// Windows.
    pub windows: u32,
    /// LUT entries.
    pub lut_entries: u32,
    /// Bytes of the BAR: the entries' segments.
    pub bar_bytes: u64,
}

/// Whether windows of `spans` bytes fit in an adapter that has nothing else to
/// do, and what they take. Ask before a VM boots.
///
/// # Errors
/// [`LimitError::GuestTooLarge`] and [`LimitError::WindowTooLarge`] name what would
/// fit, and which BAR would do; [`LimitError::VmLutEntries`].
pub fn fits(spans: &[u64], limits: &NtbLimits) -> Result<NtbUse, LimitError> {
    limits.validate()?;
    spans
        .iter()
        .try_for_each(|&span| limits.check_window(span))?;
    let needed = spans
        .iter()
        .map(|&span| limits.entries_for(span))
        .fold(0, u64::saturating_add);
    let available = u64::from(limits.lut_entries);
    if needed <= available {
        limits.per_vm.check_lut_entries(0, needed)?;
        return Ok(NtbUse {
            windows: spans.len() as u32, // each takes an entry, or is empty
            lut_entries: needed as u32,
            bar_bytes: needed * limits.segment(),
        });
    }
    // All windows but one may end in a segment that they only begin.
    let spare = available.saturating_sub((spans.len() as u64).saturating_sub(1));
    let spare = spare.min(limits.max_entries().into());
    Err(LimitError::GuestTooLarge {
        bytes: spans.iter().copied().fold(0, u64::saturating_add),
        windows: spans.len(),
        needed,
        limit: limits.lut_entries,
        segment: limits.segment(),
        fits: spare * limits.segment(),
        bar_size: limits.bar_size,
        remedy: Remedy(limits.larger_bar(spans.iter().copied())),
    })
}

/// A request that exceeds a limit of the adapter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// Invalid limit in the configuration.
    #[error("NTB limit {name} = {value} must be {rule}")]
    Invalid {
        /// Its name in the configuration.
        name: &'static str,
        /// The configured value.
        value: u64,
        /// The requirement.
        rule: &'static str,
    },
    /// Windows for a whole guest do not fit in an empty adapter.
    #[error(
        "guest too large for the NTB's BAR of {}: {windows} windows over {} need {needed} LUT \
         entries of {}, the limit is {limit}; guest RAM of at most {} fits; {remedy}",
        Size(*bar_size), Size(*bytes), Size(*segment), Size(*fits)
    )]
    GuestTooLarge {
        /// Bytes that the windows span.
        bytes: u64,
        /// How many windows.
        windows: usize,
        /// LUT entries they need.
        needed: u64,
        /// LUT entries there are.
        limit: u32,
        /// Bytes an entry translates.
        segment: u64,
        /// Bytes of RAM that are sure to fit in as many windows.
        fits: u64,
        /// Bytes of the BAR.
        bar_size: u64,
        /// What to do.
        remedy: Remedy,
    },
    /// One window is larger than any of this adapter's can be.
    #[error(
        "a window of {} needs {needed} LUT entries of {}; this NTB has at most {limit} for one \
         window (entries-per-window), so a window of at most {} fits; {remedy}",
        Size(*bytes), Size(*segment), Size(*segment * u64::from(*limit))
    )]
    WindowTooLarge {
        /// Bytes of the window.
        bytes: u64,
        /// LUT entries it needs.
        needed: u64,
        /// LUT entries that one window may take.
        limit: u32,
        /// Bytes an entry translates.
        segment: u64,
        /// What to do.
        remedy: Remedy,
    },
    /// A window does not fit in the free LUT entries.
    #[error(
        "no room for a window of {} in the NTB's BAR: it needs {needed} consecutive LUT entries \
         of {}; of {limit}, {free} are free, at most {largest_run} of them consecutive; a window of \
         at most {} fits; {remedy}",
        Size(*bytes), Size(*segment), Size(*segment * u64::from(*largest_run))
    )]
    LutEntries {
        /// Bytes of the window.
        bytes: u64,
        /// LUT entries it needs.
        needed: u64,
        /// LUT entries there are.
        limit: u32,
        /// LUT entries that are free.
        free: u32,
        /// Most consecutive ones that are free.
        largest_run: u32,
        /// Bytes an entry translates.
        segment: u64,
        /// What to do.
        remedy: Remedy,
    },
    /// A peer address is not aligned as the adapter needs.
    #[error(
        "peer address {peer_address} is not a multiple of {}, the alignment of the NTB's translation",
        Size(*alignment)
    )]
    Alignment {
        /// The peer address.
        peer_address: PeerAddress,
        /// The required alignment, in bytes.
        alignment: u64,
    },
    /// All requester entries are in use.
    #[error(
        "no requester entry is free for {device}: of requester-entries = {limit}, {reserved} are \
         reserved for CPUs and {used} taken by borrowed devices; return a device or lend through \
         another adapter"
    )]
    Requesters {
        /// The device that wanted one.
        device: String,
        /// Entries there are.
        limit: u32,
        /// Entries used by CPUs.
        reserved: u32,
        /// Entries used by devices.
        used: u32,
    },
    /// A VM's windows would exceed its share.
    #[error(
        "the VM has {used} LUT entries and needs {needed} more; the share of a VM is {limit} \
         (per-vm.lut-entries): raise it, or give the VM less RAM"
    )]
    VmLutEntries {
        /// LUT entries that it has.
        used: u64,
        /// LUT entries that it needs.
        needed: u64,
        /// Its share.
        limit: u32,
    },
    /// A VM's devices would exceed its share.
    #[error(
        "no requester entry for {device}: the VM's other devices have its share of {limit} \
         (per-vm.requester-entries): raise it, or return one of them"
    )]
    VmRequesters {
        /// The device that wanted one.
        device: String,
        /// The VM's share.
        limit: u32,
    },
}

/// The remedy if windows do not fit: a larger BAR (its size in bytes), or, where none is large
/// enough, something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remedy(pub Option<u64>);

impl std::fmt::Display for Remedy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(bar_size) => write!(f, "raise bar-size to {}", Size(bar_size)),
            None => f.write_str("raise lut-entries, give the VM less RAM, or return a device"),
        }
    }
}
