//! Checks that guest RAM fits in this host's free memory.
//!
//! The kernel hands out more memory than there is and then kills a process, so
//! the numbers are read and compared before memory is populated.
//! [`HostMemory::read`] gets the facts, [`HostMemory::room_for`] only decides.

use std::{collections::BTreeMap, fmt};

use crate::{Size, size::Mib};

/// Reserve for the host: page tables, and allocations of other processes meanwhile.
const RESERVE: u64 = 64 << 20;

/// Sizes of huge pages that Linux has on some architecture, log2 of bytes.
const HUGE_SHIFTS: std::ops::RangeInclusive<u32> = 16..=34;

/// The pages that memory consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Of the base size, taken from the host's free memory.
    Base,
    /// Of a hugetlb pool.
    Huge {
        /// Bytes of a page.
        size: u64,
    },
}

/// The free memory of this host and of this process's cgroups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes that can be used without the OOM killer: `MemAvailable`, and what can
    /// be swapped out. None if the kernel does not report it.
    available: Option<u64>,
    cgroups: Vec<Cgroup>,
    pools: BTreeMap<u64, HugePool>,
}

/// A memory cgroup with a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cgroup {
    path: String,
    limit: u64,
    /// Bytes charged, without page cache that can be dropped.
    used: u64,
}

/// The hugetlb pool of one page size; counts of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugePool {
    /// In the pool.
    pub total: u64,
    /// Not in use; they may be reserved.
    pub free: u64,
    reserved: u64,
    /// Pages that the kernel may still add when the pool is empty.
    surplus: u64,
}

/// Memory does not fit; returned by [`HostMemory::room_for`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} of guest RAM do not fit: {limit}; {}", Mib(*needed), limit.remedy(*needed))]
pub struct TooLarge {
    /// Bytes that were requested.
    pub needed: u64,
    /// The limit that applies.
    pub limit: MemoryLimit,
}

/// The limit on the memory that can be populated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The host's memory.
    Host {
        /// Bytes available.
        available: u64,
    },
    /// A memory cgroup of this process.
    Cgroup {
        /// Its path.
        path: String,
        /// Its limit, bytes.
        limit: u64,
        /// Bytes left below the limit.
        available: u64,
    },
    /// A hugetlb pool.
    HugePages {
        /// Bytes of a page.
        size: u64,
        /// Bytes available.
        available: u64,
    },
}

impl HostMemory {
    /// Reads the facts of this host and this process.
    pub fn read() -> Self {
        Self::read_with(|path| std::fs::read_to_string(format!("/{path}")).ok())
    }

    /// Reads the facts by `text`, which returns the contents of a file below
    /// the root directory (`proc/meminfo`). What it cannot read is no limit.
    pub fn read_with(text: impl Fn(&str) -> Option<String>) -> Self {
        Self {
            available: text("proc/meminfo").and_then(|text| available(&text)),
            cgroups: cgroups(&text),
            pools: HUGE_SHIFTS
                .filter_map(|shift| Some((1 << shift, HugePool::read(1 << shift, &text)?)))
                .collect(),
        }
    }

    /// The hugetlb pools, by the size of their pages in bytes.
    pub fn pools(&self) -> &BTreeMap<u64, HugePool> {
        &self.pools
    }

    /// Without the cgroups of this process: for RAM that another process, in
    /// cgroups of its own, will populate.
    pub fn of_host(mut self) -> Self {
        self.cgroups.clear();
        self
    }

    /// Whether `bytes` more of guest RAM can be populated. Pages that are
    /// resident already are not to be among them.
    ///
    /// # Errors
    /// [`TooLarge`], with the numbers and the remedy.
    pub fn room_for(&self, bytes: u64, pages: Pages) -> Result<(), TooLarge> {
        let limits: Vec<_> = match pages {
            _ if bytes == 0 => return Ok(()),
            Pages::Base => self.base_limits().collect(),
            // A size without a pool is the kernel's to refuse; it does so
            // before a page is taken.
            Pages::Huge { size } => {
                let pool = self.pools.get(&size);
                pool.map(|pool| pool.limit(size)).into_iter().collect()
            }
        };
        match limits.into_iter().find(|limit| limit.available() < bytes) {
            Some(limit) => Err(TooLarge {
                needed: bytes,
                limit,
            }),
            None => Ok(()),
        }
    }

    fn base_limits(&self) -> impl Iterator<Item = MemoryLimit> {
        let cgroups = self.cgroups.iter().map(|cgroup| MemoryLimit::Cgroup {
            path: cgroup.path.clone(),
            limit: cgroup.limit,
            available: cgroup.limit.saturating_sub(cgroup.used),
        });
        let host = self.available.map(|available| MemoryLimit::Host {
            available: available.saturating_sub(RESERVE),
        });
        cgroups.chain(host)
    }
}

/// Bytes that can be used without the OOM killer, by `/proc/meminfo`.
fn available(meminfo: &str) -> Option<u64> {
    let bytes = |name| meminfo_bytes(meminfo, name);
    let anonymous = [bytes("Active(anon)"), bytes("Inactive(anon)")];
    let swappable = anonymous.into_iter().flatten().sum();
    let swap = bytes("SwapFree").unwrap_or(0).min(swappable);
    bytes("MemAvailable")?.checked_add(swap)
}

/// Bytes of an entry of `/proc/meminfo`, such as `MemAvailable`.
pub fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let mut entries = meminfo.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = entries.find(|(entry, _)| *entry == name)?;
    let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The memory cgroups with a limit that this process is in, from its own to
/// the root.
fn cgroups(text: &impl Fn(&str) -> Option<String>) -> Vec<Cgroup> {
    let mut found = Vec::new();
    for line in text("proc/self/cgroup").unwrap_or_default().lines() {
        // "ID:CONTROLLERS:PATH", version 2 with no controllers.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let read = match controllers {
            "" => Cgroup::read_v2,
            list if list.split(',').any(|name| name == "memory") => Cgroup::read_v1,
            _ => continue,
        };
        // A path that begins outside of a container is not there: its root is.
        let mut path = path.trim_end_matches('/');
        loop {
            found.extend(read(path, text));
            match path.rfind('/') {
                Some(end) => path = &path[..end],
                None => break,
            }
        }
    }
    found
}

impl Cgroup {
    fn read_v2(path: &str, text: &impl Fn(&str) -> Option<String>) -> Option<Self> {
        let directory = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
            .map(|mount| format!("{mount}{path}"))
            .into_iter()
            .find(|directory| text(&format!("{directory}/memory.max")).is_some())?;
        let file = |name: &str| text(&format!("{directory}/{name}"));
        let cache = ["inactive_file", "active_file", "slab_reclaimable"];
        Self::new(
            path,
            // "max" is no limit.
            file("memory.max")?.trim().parse().ok()?,
            file("memory.current")?.trim().parse().ok()?,
            &file("memory.stat").unwrap_or_default(),
            &cache,
        )
    }

    fn read_v1(path: &str, text: &impl Fn(&str) -> Option<String>) -> Option<Self> {
        let file = |name: &str| text(&format!("sys/fs/cgroup/memory{path}/{name}"));
        let limit = file("memory.limit_in_bytes")?.trim().parse().ok()?;
        // The largest multiple of a page is no limit.
        (limit < i64::MAX as u64 & !0xffff).then_some(())?;
        let cache = ["total_inactive_file", "total_active_file"];
        Self::new(
            path,
            limit,
            file("memory.usage_in_bytes")?.trim().parse().ok()?,
            &file("memory.stat").unwrap_or_default(),
            &cache,
        )
    }

    fn new(path: &str, limit: u64, usage: u64, stat: &str, cache: &[&str]) -> Option<Self> {
        let cached = stat.lines().filter_map(|line| {
            let (name, bytes) = line.split_once(' ')?;
            cache.contains(&name).then(|| bytes.parse::<u64>().ok())?
        });
        Some(Self {
            path: if path.is_empty() { "/" } else { path }.to_owned(),
            limit,
            used: usage.saturating_sub(cached.sum()),
        })
    }
}

impl HugePool {
    fn read(size: u64, text: &impl Fn(&str) -> Option<String>) -> Option<Self> {
        let number = |file: &str| -> Option<u64> {
            let kib = size >> 10;
            text(&format!(
                "sys/kernel/mm/hugepages/hugepages-{kib}kB/{file}_hugepages"
            ))?
            .trim()
            .parse()
            .ok()
        };
        let overcommit = number("nr_overcommit").unwrap_or(0);
        Some(Self {
            total: number("nr").unwrap_or(0),
            free: number("free")?,
            reserved: number("resv").unwrap_or(0),
            surplus: overcommit.saturating_sub(number("surplus").unwrap_or(0)),
        })
    }

    fn limit(&self, size: u64) -> MemoryLimit {
        let unreserved = self.free.saturating_sub(self.reserved);
        let pages = unreserved.saturating_add(self.surplus);
        MemoryLimit::HugePages {
            size,
            available: pages.saturating_mul(size),
        }
    }
}

impl MemoryLimit {
    /// Bytes available below the limit.
    pub fn available(&self) -> u64 {
        match self {
            Self::Host { available }
            | Self::Cgroup { available, .. }
            | Self::HugePages { available, .. } => *available,
        }
    }

    fn remedy(&self, needed: u64) -> String {
        let less = "give the VM less memory";
        match self {
            Self::Host { .. } => format!("{less}, or stop what else uses this host's"),
            Self::Cgroup { .. } => format!("{less}, or raise the cgroup's limit"),
            Self::HugePages { size, available } => {
                let more = needed.saturating_sub(*available).div_ceil(*size);
                let kib = size >> 10;
                format!(
                    "{less}, or add {more} to /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"
                )
            }
        }
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let available = Mib(self.available());
        match self {
            Self::Host { .. } => write!(f, "the host has {available} of memory available"),
            Self::Cgroup { path, limit, .. } => write!(
                f,
                "the memory limit of cgroup {path} is {}, of which {available} are left",
                Mib(*limit)
            ),
            Self::HugePages { size, .. } => write!(
                f,
                "the pool of {} huge pages has {available} available",
                Size(*size)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const MIB: u64 = 1 << 20;
    const MEMINFO: &str = "MemTotal: 24684096 kB\nMemFree: 1 kB\nMemAvailable: 1024000 kB\n\
                           Active(anon): 2048 kB\nInactive(anon): 2048 kB\nSwapFree: 0 kB\n";

    fn host(files: &[(&str, &str)]) -> HostMemory {
        let files: HashMap<_, _> = files.iter().copied().collect();
        HostMemory::read_with(|path| files.get(path).map(|text| (*text).to_owned()))
    }

    fn refusal(host: &HostMemory, bytes: u64, pages: Pages) -> String {
        host.room_for(bytes, pages).unwrap_err().to_string()
    }

    #[test]
    fn the_hosts_memory_bounds_it() {
        let host = host(&[("proc/meminfo", MEMINFO)]);
        assert_eq!(host.room_for(936 * MIB, Pages::Base), Ok(()));
        assert_eq!(
            refusal(&host, 937 * MIB, Pages::Base),
            "937 MiB of guest RAM do not fit: the host has 936 MiB of memory available; give the \
             VM less memory, or stop what else uses this host's"
        );
    }

    #[test]
    fn swap_counts_as_far_as_there_is_something_to_swap_out() {
        let swap = MEMINFO.replace("SwapFree: 0", "SwapFree: 99999999");
        let host = host(&[("proc/meminfo", &swap)]);
        assert_eq!(host.room_for(940 * MIB, Pages::Base), Ok(()));
        assert!(host.room_for(941 * MIB, Pages::Base).is_err());
    }

    #[test]
    fn a_cgroup_or_its_parent_bounds_it() {
        let own = "sys/fs/cgroup/vms.slice/a.service";
        let v2 = |own_limit, parent_limit| {
            host(&[
                ("proc/meminfo", MEMINFO),
                ("proc/self/cgroup", "0::/vms.slice/a.service\n"),
                (&format!("{own}/memory.max"), own_limit),
                (&format!("{own}/memory.current"), "104857600\n"),
                (
                    &format!("{own}/memory.stat"),
                    "anon 1\nactive_file 52428800\n",
                ),
                ("sys/fs/cgroup/vms.slice/memory.max", parent_limit),
                ("sys/fs/cgroup/vms.slice/memory.current", "209715200\n"),
            ])
        };
        assert_eq!(
            v2("max\n", "max\n").room_for(936 * MIB, Pages::Base),
            Ok(())
        );
        let limited = v2("314572800\n", "max\n");
        assert_eq!(limited.room_for(250 * MIB, Pages::Base), Ok(()));
        assert_eq!(
            refusal(&limited, 251 * MIB, Pages::Base),
            "251 MiB of guest RAM do not fit: the memory limit of cgroup /vms.slice/a.service is \
             300 MiB, of which 250 MiB are left; give the VM less memory, or raise the cgroup's \
             limit"
        );
        assert_eq!(limited.of_host().room_for(251 * MIB, Pages::Base), Ok(()));
        let parent = v2("max\n", "314572800\n");
        assert!(refusal(&parent, 101 * MIB, Pages::Base).contains("cgroup /vms.slice is 300 MiB"));
    }

    #[test]
    fn a_version_1_cgroup_or_its_parent_bounds_it() {
        let v1 = |limit| {
            host(&[
                (
                    "proc/self/cgroup",
                    "9:cpu:/x\n4:hugetlb,memory:/outside/x\n0::/\n",
                ),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", limit),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "104857600\n"),
                (
                    "sys/fs/cgroup/memory/memory.stat",
                    "inactive_file 4\ntotal_inactive_file 52428800\n",
                ),
            ])
        };
        let none = v1("9223372036854771712\n");
        assert_eq!(none.room_for(1 << 50, Pages::Base), Ok(()));
        let limited = v1("209715200\n");
        assert_eq!(limited.room_for(150 * MIB, Pages::Base), Ok(()));
        assert!(refusal(&limited, 151 * MIB, Pages::Base).contains("cgroup / is 200 MiB"));
    }

    #[test]
    fn a_pool_of_huge_pages_bounds_it() {
        let pool = "sys/kernel/mm/hugepages/hugepages-2048kB";
        let host = host(&[
            ("proc/meminfo", MEMINFO),
            (&format!("{pool}/free_hugepages"), "100\n"),
            (&format!("{pool}/resv_hugepages"), "60\n"),
            (&format!("{pool}/nr_overcommit_hugepages"), "5\n"),
            (&format!("{pool}/surplus_hugepages"), "3\n"),
        ]);
        let huge = Pages::Huge { size: 2 * MIB };
        assert_eq!(host.room_for(84 * MIB, huge), Ok(()));
        assert_eq!(
            refusal(&host, 90 * MIB, huge),
            "90 MiB of guest RAM do not fit: the pool of 2 MiB huge pages has 84 MiB available; \
             give the VM less memory, or add 3 to \
             /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
        );
        // More than the host's other memory.
        assert!(host.room_for(1 << 40, Pages::Base).is_err());
    }

    #[test]
    fn what_is_unknown_is_no_limit() {
        assert_eq!(host(&[]).room_for(1 << 50, Pages::Base), Ok(()));
        let huge = Pages::Huge { size: 2 * MIB };
        assert_eq!(host(&[]).room_for(1 << 50, huge), Ok(()));
        assert_eq!(host(&[]).room_for(0, Pages::Base), Ok(()));
    }

    #[test]
    fn this_host_has_room_for_a_page_and_none_for_an_exbibyte() {
        let here = HostMemory::read();
        assert_eq!(here.room_for(4096, Pages::Base), Ok(()));
        assert!(here.room_for(1 << 60, Pages::Base).is_err());
    }
}
