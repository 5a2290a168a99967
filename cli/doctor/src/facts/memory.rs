//! Memory: limits of this process, huge pages, transparent ones, merging; and
//! how many files may be open.

use std::collections::BTreeMap;

use farside_fabric::host_memory::{HostMemory, HugePool, meminfo_bytes};
use rustix::process::{Resource, getrlimit};

use crate::Host;

/// A hugetlbfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) at: String,
    /// Bytes.
    pub(crate) page: u64,
}

/// The limits of guest RAM.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    /// `RLIMIT_MEMLOCK`, bytes; `None` for no limit.
    pub(crate) memlock: Option<u64>,
    /// The hard `RLIMIT_NOFILE`: farside raises the soft one.
    pub(crate) open_files: Option<u64>,
    /// Memory available for guest RAM.
    pub(crate) host: HostMemory,
    /// By size, bytes.
    pub(crate) pools: BTreeMap<u64, HugePool>,
    pub(crate) mounts: Vec<Mount>,
    /// Whether shared memory may have transparent huge pages; what the kernel
    /// has chosen of its list.
    pub(crate) shmem_huge: Option<String>,
    /// Whether the kernel merges equal pages.
    pub(crate) ksm: bool,
}

const TRANSPARENT: &str = "sys/kernel/mm/transparent_hugepage/shmem_enabled";

pub(crate) fn look(host: &Host) -> Memory {
    let default_page = host
        .text("proc/meminfo")
        .and_then(|text| meminfo_bytes(&text, "Hugepagesize"));
    let memory = HostMemory::read_with(|path| host.text(path));
    let mounts = host.text("proc/self/mounts").unwrap_or_default();
    Memory {
        memlock: getrlimit(Resource::Memlock).current,
        open_files: getrlimit(Resource::Nofile).maximum,
        pools: memory.pools().clone(),
        host: memory,
        mounts: hugetlbfs(&mounts, default_page.unwrap_or(2 << 20)),
        shmem_huge: host.text(TRANSPARENT).and_then(|text| chosen(&text)),
        ksm: host.number("sys/kernel/mm/ksm/run") == Some(1),
    }
}

/// The hugetlbfs mounts of `/proc/self/mounts`.
fn hugetlbfs(mounts: &str, default_page: u64) -> Vec<Mount> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (at, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let page = options
            .split(',')
            .find_map(|option| option.strip_prefix("pagesize="));
        (kind == "hugetlbfs").then(|| Mount {
            at: at.to_owned(),
            page: page
                .and_then(|page| farside_fabric::parse_size(page).ok())
                .unwrap_or(default_page),
        })
    });
    mounts.collect()
}

/// The word in brackets.
fn chosen(list: &str) -> Option<String> {
    let (_, rest) = list.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

#[cfg(test)]
pub(crate) fn huge_pool(total: u64, free: u64) -> HugePool {
    let mut pool = HugePool::default();
    (pool.total, pool.free) = (total, free);
    pool
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_read() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        for (path, text) in [
            (
                "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
                "512\n",
            ),
            (
                "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
                "12\n",
            ),
            (
                "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages",
                "0\n",
            ),
            (
                TRANSPARENT,
                "always within_size advise [never] deny force\n",
            ),
            ("sys/kernel/mm/ksm/run", "1\n"),
            (
                "proc/meminfo",
                "MemTotal: 1 kB\nHugepagesize:       1048576 kB\n",
            ),
            (
                "proc/self/mounts",
                "proc /proc proc rw 0 0\nhugetlbfs /dev/hugepages hugetlbfs rw 0 0\n\
                 none /dev/hp2 hugetlbfs rw,relatime,pagesize=2M 0 0\nshort\n",
            ),
        ] {
            let path = host.system(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let memory = look(&host);
        // A pool that is not read whole is none.
        let pool = huge_pool(512, 12);
        assert_eq!(memory.pools, BTreeMap::from([(2 << 20, pool)]));
        let mount = |at: &str, page| Mount {
            at: at.to_owned(),
            page,
        };
        assert_eq!(
            memory.mounts,
            [mount("/dev/hugepages", 1 << 30), mount("/dev/hp2", 2 << 20)]
        );
        assert_eq!(memory.shmem_huge.as_deref(), Some("never"));
        assert!(memory.ksm);
        assert_eq!(
            look(&Host::at(&root.path().join("none"))).pools,
            BTreeMap::new()
        );
    }
}
