//! Limits on the shared memory that a process maps for others.
//!
//! A lender maps the memory of all its borrowers into one process. A process that runs out of
//! address space, or of mappings (`vm.max_map_count`), cannot start a thread or allocate, and
//! aborts. So leases get a [`Budget`] well below both limits, in equal shares: a lease at the limit
//! of its share is refused more, and nothing that it does changes what other leases may map.

use std::{
    fs,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{Size, sigbus};

/// Half of the address space of an x86-64 process.
const BYTES: u64 = 1 << 46;

/// Fraction of `vm.max_map_count` for the memory of borrowers. The rest is for threads, allocations
/// and BARs.
const MAPPINGS_FRACTION: usize = 4;

/// The kernel's default of `vm.max_map_count`.
const MAX_MAP_COUNT: usize = 65_530;

/// The shared memory that the leases of one process may map together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes of address space.
    pub bytes: u64,
    /// Mappings.
    pub mappings: usize,
}

impl Budget {
    /// The budget of this process; reads `vm.max_map_count`.
    pub fn of_this_process() -> Self {
        let text = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let limit = text.and_then(|text| text.trim().parse().ok());
        Self::with_max_map_count(limit.unwrap_or(MAX_MAP_COUNT))
    }

    fn with_max_map_count(limit: usize) -> Self {
        Self {
            bytes: BYTES,
            // The SIGBUS handler's table also has the BARs.
            mappings: (limit / MAPPINGS_FRACTION).min(sigbus::SLOTS / 2),
        }
    }

    /// An equal share for each of `leases`.
    pub fn shared_by(self, leases: usize) -> Quota {
        let leases = leases.max(1);
        Quota {
            limit: Self {
                bytes: self.bytes / leases as u64,
                mappings: self.mappings / leases,
            },
            leases,
            used: Self {
                bytes: 0,
                mappings: 0,
            },
        }
    }

    /// Divides the budget anew, in equal shares. Changes nothing and returns false if a lease uses
    /// more than its new share.
    pub fn divide_among(self, quotas: &[SharedQuota]) -> bool {
        let Quota { limit, leases, .. } = self.shared_by(quotas.len());
        let locked = quotas.iter().map(SharedQuota::lock);
        let mut locked: Vec<_> = locked.collect();
        let fits = locked
            .iter()
            .all(|quota| quota.used.bytes <= limit.bytes && quota.used.mappings <= limit.mappings);
        if fits {
            for quota in &mut locked {
                (quota.limit, quota.leases) = (limit, leases);
            }
        }
        fits
    }
}

/// The share of one lease, and how much of it is used. Pure.
#[derive(Debug)]
pub struct Quota {
    limit: Budget,
    leases: usize,
    used: Budget,
}

impl Quota {
    /// Counts a mapping of `bytes`.
    ///
    /// # Errors
    /// [`QuotaError`] if it exceeds the share; it is not counted then.
    pub fn take(&mut self, bytes: u64) -> Result<(), QuotaError> {
        let leases = self.leases;
        if self.used.mappings >= self.limit.mappings {
            return Err(QuotaError::Files {
                limit: self.limit.mappings,
                leases,
            });
        }
        if bytes > self.limit.bytes - self.used.bytes {
            return Err(QuotaError::Bytes {
                bytes,
                used: self.used.bytes,
                limit: self.limit.bytes,
                leases,
            });
        }
        self.used.mappings += 1;
        self.used.bytes += bytes;
        Ok(())
    }

    /// Releases a mapping of `bytes` that [`Quota::take`] has counted.
    pub fn give_back(&mut self, bytes: u64) {
        self.used.mappings -= 1;
        self.used.bytes -= bytes;
    }

    /// The share.
    pub fn limit(&self) -> Budget {
        self.limit
    }

    /// How much of it is used.
    pub fn used(&self) -> Budget {
        self.used
    }
}

/// A mapping that exceeds the share of a lease.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuotaError {
    /// Too many bytes.
    #[error(
        "a memory file of {} exceeds the lease's limit: {} of {} are mapped already (a process has \
         {} for {leases} devices); share files that are no larger than the guest's RAM, or lend fewer \
         devices by one lender",
        Size(*bytes), Size(*used), Size(*limit), Size(BYTES)
    )]
    Bytes {
        /// Bytes of the file.
        bytes: u64,
        /// Bytes mapped for the lease.
        used: u64,
        /// Bytes of its share.
        limit: u64,
        /// Number of shares.
        leases: usize,
    },
    /// Too many files.
    #[error(
        "the lease's limit of {limit} memory files is reached (vm.max_map_count divided among {leases} \
         devices); share guest RAM in fewer files, raise vm.max_map_count, or lend fewer devices \
         by one lender"
    )]
    Files {
        /// Files of its share.
        limit: usize,
        /// Number of shares.
        leases: usize,
    },
}

/// A [`Quota`] that mappings hold on to. Clones share it.
#[derive(Clone, Debug)]
pub struct SharedQuota(Arc<Mutex<Quota>>);

impl SharedQuota {
    /// Counts a mapping of `bytes` until the returned value is dropped.
    pub(crate) fn take(&self, bytes: u64) -> Result<Charge, QuotaError> {
        self.with(|quota| quota.take(bytes))?;
        Ok(Charge {
            quota: self.clone(),
            bytes,
        })
    }

    /// How much is used, and the limit.
    pub fn used_of(&self) -> (Budget, Budget) {
        self.with(|quota| (quota.used(), quota.limit()))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Quota) -> T) -> T {
        act(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Quota> {
        // `Quota` checks before it changes anything.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<Quota> for SharedQuota {
    fn from(quota: Quota) -> Self {
        Self(Arc::new(Mutex::new(quota)))
    }
}

/// A counted mapping.
#[derive(Debug)]
pub(crate) struct Charge {
    quota: SharedQuota,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.quota.with(|quota| quota.give_back(self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIB: u64 = 1 << 40;

    #[test]
    fn the_budget_is_far_below_the_limits_of_a_process() {
        for (limit, mappings) in [(65_530, 16_382), (1 << 20, sigbus::SLOTS / 2), (100, 25)] {
            let budget = Budget::with_max_map_count(limit);
            assert_eq!((budget.bytes, budget.mappings), (64 * TIB, mappings));
        }
    }

    #[test]
    fn a_large_guest_fits_beside_many_devices() {
        let mut quota = Budget::with_max_map_count(MAX_MAP_COUNT).shared_by(60);
        quota.take(TIB).unwrap();
        // Blocks of hot-plugged memory: QEMU has 256 slots.
        (0..256).for_each(|_| quota.take(128 << 20).unwrap());
    }

    #[test]
    fn refusals_name_value_and_limit() {
        let mut quota = Budget::with_max_map_count(16).shared_by(2);
        quota.take(31 * TIB).unwrap();
        let error = quota.take(2 * TIB).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "a memory file of 2 TiB exceeds the lease's limit: 31 TiB of 32 TiB are mapped \
                 already (a process has 64 TiB for 2 devices); "
            ),
            "{error}"
        );
        quota.take(TIB).unwrap();
        let error = quota.take(0).unwrap_err().to_string();
        assert!(
            error.starts_with("the lease's limit of 2 memory files"),
            "{error}"
        );
        assert_eq!(quota.used(), quota.limit());
    }

    #[test]
    fn a_mapping_counts_until_it_is_dropped() {
        let quota = SharedQuota::from(Budget::with_max_map_count(16).shared_by(4));
        let held = quota.take(TIB).unwrap();
        quota.take(TIB).unwrap_err();
        drop(held);
        assert_eq!(quota.used_of().0.bytes, 0);
        quota.take(16 * TIB).unwrap();
    }

    #[test]
    fn the_budget_is_divided_anew_unless_a_lease_uses_more_than_its_new_share() {
        let budget = Budget::with_max_map_count(32);
        let quota = || SharedQuota::from(budget.shared_by(1));
        let mut quotas = vec![quota()];
        let held = quotas[0].take(33 * TIB).unwrap();
        quotas.push(quota());
        let limits = |quotas: &[SharedQuota]| -> Vec<u64> {
            let limit = |quota: &SharedQuota| quota.used_of().1.bytes / TIB;
            quotas.iter().map(limit).collect()
        };
        assert!(!budget.divide_among(&quotas));
        assert_eq!(limits(&quotas), [64, 64]);
        drop(held);
        assert!(budget.divide_among(&quotas));
        assert_eq!(limits(&quotas), [32, 32]);
        quotas[1].take(33 * TIB).unwrap_err();
        quotas.truncate(1);
        assert!(budget.divide_among(&quotas));
        assert_eq!(limits(&quotas), [64]);
    }

    proptest! {
        /// Whatever one lease does, the shares of the others stay whole, and all together stay
        /// within the budget.
        #[test]
        fn leases_do_not_affect_each_other(
            leases in 1usize..40,
            requests in prop::collection::vec((0usize..40, 0..BYTES, any::<bool>()), 0..200),
        ) {
            let budget = Budget::with_max_map_count(MAX_MAP_COUNT);
            let mut quotas: Vec<_> = (0..leases).map(|_| budget.shared_by(leases)).collect();
            let mut held: Vec<Vec<u64>> = vec![Vec::new(); leases];
            for (lease, bytes, give_back) in requests {
                let lease = lease % leases;
                let bytes = bytes / leases as u64 / 3;
                match give_back.then(|| held[lease].pop()).flatten() {
                    Some(bytes) => quotas[lease].give_back(bytes),
                    None => {
                        let used: u64 = held[lease].iter().sum();
                        let fits = used + bytes <= budget.bytes / leases as u64;
                        prop_assert_eq!(quotas[lease].take(bytes).is_ok(), fits);
                        if fits {
                            held[lease].push(bytes);
                        }
                    }
                }
                let used: u64 = quotas.iter().map(|quota| quota.used().bytes).sum();
                prop_assert_eq!(used, held.iter().flatten().sum::<u64>());
                prop_assert!(used <= budget.bytes);
            }
        }
    }
}
