//! What fio does.

/// One fio job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) name: &'static str,
    /// fio's `rw`.
    pub(super) rw: &'static str,
    /// Bytes of a request.
    pub(super) block: u64,
    /// Requests in flight.
    pub(super) depth: u32,
}

const KIB_4: u64 = 4 << 10;
const KIB_128: u64 = 128 << 10;

const fn job(name: &'static str, rw: &'static str, block: u64, depth: u32) -> Job {
    Job {
        name,
        rw,
        block,
        depth,
    }
}

/// All jobs. The sequential ones have 8 requests in flight, as a kernel's
/// read-ahead or write-back would.
pub(super) const JOBS: [Job; 6] = [
    job("randread-4k-qd1", "randread", KIB_4, 1),
    job("randread-4k-qd32", "randread", KIB_4, 32),
    job("randwrite-4k-qd1", "randwrite", KIB_4, 1),
    job("randwrite-4k-qd32", "randwrite", KIB_4, 32),
    job("seqread-128k", "read", KIB_128, 8),
    job("seqwrite-128k", "write", KIB_128, 8),
];

/// Their names.
pub(crate) const NAMES: [&str; JOBS.len()] = {
    let mut names = [""; JOBS.len()];
    let mut at = 0;
    while at < JOBS.len() {
        names[at] = JOBS[at].name;
        at += 1;
    }
    names
};

impl Job {
    /// Whether fio's figures are those of its writes.
    pub(super) fn writes(&self) -> bool {
        self.rw.ends_with("write")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_the_jobs_do() {
        for job in JOBS {
            let (what, size) = (job.name.contains("write"), job.block >> 10);
            assert_eq!(what, job.writes(), "{}", job.name);
            assert!(job.name.contains(&format!("-{size}k")), "{}", job.name);
            let random = job.name.starts_with("rand");
            assert_eq!(random, job.rw.starts_with("rand"), "{}", job.name);
            if random {
                assert!(
                    job.name.ends_with(&format!("-qd{}", job.depth)),
                    "{}",
                    job.name
                );
            }
        }
        assert_eq!(NAMES[5], "seqwrite-128k");
    }
}
