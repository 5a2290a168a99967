//! The jobs for fio.

use std::borrow::Cow;

/// One fio job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Short and stable.
    pub name: Cow<'static, str>,
    /// Reads, writes, where.
    pub pattern: Pattern,
    /// Bytes of a request.
    pub block: u64,
    /// Requests in flight.
    pub depth: u32,
}

/// Which requests, and where on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "they say what they are")]
pub enum Pattern {
    RandomRead,
    RandomWrite,
    SequentialRead,
    SequentialWrite,
    /// Anywhere, 70 of 100 are reads.
    Mixed,
}

const KIB: u64 = 1 << 10;

const fn job(name: &'static str, pattern: Pattern, block: u64, depth: u32) -> Job {
    Job {
        name: Cow::Borrowed(name),
        pattern,
        block,
        depth,
    }
}

/// All jobs. The sequential ones have 8 requests in flight, as a kernel's
/// read-ahead or write-back would.
pub static JOBS: [Job; 7] = [
    job("randread-4k-qd1", Pattern::RandomRead, 4 * KIB, 1),
    job("randread-4k-qd32", Pattern::RandomRead, 4 * KIB, 32),
    job("randwrite-4k-qd1", Pattern::RandomWrite, 4 * KIB, 1),
    job("randwrite-4k-qd32", Pattern::RandomWrite, 4 * KIB, 32),
    job("seqread-128k", Pattern::SequentialRead, 128 * KIB, 8),
    job("seqwrite-128k", Pattern::SequentialWrite, 128 * KIB, 8),
    job("mixed70-4k-qd32", Pattern::Mixed, 4 * KIB, 32),
];

/// The smallest transfer of a sweep: 4 KiB.
const SWEEP_FIRST: u64 = 4 * KIB;
/// The largest: 128 MiB.
const SWEEP_LAST: u64 = 128 << 20;

/// Jobs of one transfer at a time, 4 KiB to 128 MiB, each size `step` times the
/// one before. `step` is a power of two.
pub fn sweep(pattern: Pattern, step: u64) -> Vec<Job> {
    std::iter::successors(Some(SWEEP_FIRST), |size| Some(size * step))
        .take_while(|size| *size <= SWEEP_LAST)
        .map(|block| Job {
            name: format!("sweep-{}-{}k", pattern.fio(), block / KIB).into(),
            pattern,
            block,
            depth: 1,
        })
        .collect()
}

impl Job {
    /// Whether something on the disk is overwritten.
    pub fn writes(&self) -> bool {
        !matches!(self.pattern, Pattern::RandomRead | Pattern::SequentialRead)
    }
}

impl Pattern {
    /// fio's `rw`.
    pub(crate) fn fio(self) -> &'static str {
        match self {
            Self::RandomRead => "randread",
            Self::RandomWrite => "randwrite",
            Self::SequentialRead => "read",
            Self::SequentialWrite => "write",
            Self::Mixed => "randrw",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_the_jobs_do() {
        for job in &JOBS {
            let name = &job.name;
            let reads_only = name.contains("read");
            assert_eq!(reads_only, !job.writes(), "{name}");
            assert!(name.contains(&format!("-{}k", job.block / KIB)), "{name}");
            let sequential = name.starts_with("seq");
            assert_eq!(sequential, !job.pattern.fio().starts_with("rand"), "{name}");
            if !sequential {
                assert!(name.ends_with(&format!("-qd{}", job.depth)), "{name}");
            }
        }
    }

    #[test]
    fn a_sweep_goes_from_4_kib_to_128_mib() {
        let sizes = |step| -> Vec<u64> {
            let jobs = sweep(Pattern::SequentialRead, step);
            jobs.iter().map(|job| job.block).collect()
        };
        let all = sizes(2);
        assert_eq!((all[0], all[15], all.len()), (4096, 128 << 20, 16));
        assert_eq!(
            sizes(8),
            [4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 128 << 20]
        );
    }
}
