//! Finds the edges of RAM by queries.
//!
//! x86 puts RAM at two well-known places: from 0, and from 4 GiB. From each, the
//! search alternates between a run of RAM and a run of anything else. It first
//! queries the whole remainder, which ends the search if that is uniform. Otherwise
//! it gallops from one page while the answer stays the same, squaring the length
//! each time (1, 2, 4, 16, 256, 65 536… pages), and bisects the last step: first
//! its order of magnitude, then the length. Both "all RAM" and "no RAM" are
//! monotone in the length (a longer range is never *more* uniform), so the edge is
//! found exactly. A run of n pages costs about log2(n) + 2·log2(log2(n)) queries:
//! 40 for 4 TiB.

use std::fmt;

use crate::{Gpa, GpaRange, PAGE_SIZE};

/// Where high memory begins on x86: 4 GiB.
pub const HIGH_MEMORY: Gpa = Gpa::new(4 << 30);

/// How much of a range is guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// Every byte.
    All,
    /// No byte.
    Empty,
    /// Some bytes but not all.
    Partial,
}

/// The guest-physical addresses that are RAM.
///
/// Answers must not change during one [`probe`]. Contradicting answers cause an
/// error or a wrong layout, but no endless search.
pub trait MemoryMap {
    /// How much of `range` resolves to guest RAM.
    fn resolve(&mut self, range: GpaRange) -> Resolution;
}

/// Bounds of a search. They keep a hostile layout from costing more than a few
/// milliseconds and a few pages of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeLimits {
    /// Where to stop looking; a multiple of [`PAGE_SIZE`]. By default 2^52, the
    /// most that x86 can address physically.
    pub end: Gpa,
    /// Maximum number of queries. By default 65 536: about 3 ms.
    pub max_probes: u32,
    /// Most ranges of RAM to find. By default 1024; a PC has about ten, and a
    /// fragmented virtio-mem some hundreds.
    pub max_ranges: usize,
}

impl Default for ProbeLimits {
    fn default() -> Self {
        Self {
            end: Gpa::new(1 << 52),
            max_probes: 65_536,
            max_ranges: 1024,
        }
    }
}

/// Where guest RAM is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// RAM below 4 GiB: maximal ranges, ascending.
    pub low: Vec<GpaRange>,
    /// RAM from 4 GiB: maximal ranges, ascending.
    pub high: Vec<GpaRange>,
    /// Number of queries.
    pub probes: u32,
}

impl Layout {
    /// All ranges of RAM, ascending.
    pub fn ranges(&self) -> impl Iterator<Item = GpaRange> + '_ {
        self.low.iter().chain(&self.high).copied()
    }

    /// Bytes of RAM.
    pub fn ram_bytes(&self) -> u64 {
        self.ranges().map(GpaRange::len).sum()
    }
}

/// Why a layout could not be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeError {
    /// [`ProbeLimits::max_probes`] was reached.
    TooManyProbes {
        /// The limit.
        limit: u32,
        /// How far the search had come.
        at: Gpa,
    },
    /// [`ProbeLimits::max_ranges`] was reached.
    TooManyRanges {
        /// The limit.
        limit: usize,
        /// Where the first range too many begins.
        at: Gpa,
    },
    /// A page is RAM in part only.
    PartialPage {
        /// The page.
        at: Gpa,
    },
    /// The memory map contradicted an earlier answer.
    Inconsistent {
        /// The beginning of the queried range.
        at: Gpa,
    },
    /// [`ProbeLimits::end`] is not a multiple of [`PAGE_SIZE`].
    UnalignedEnd {
        /// The limit as given.
        end: Gpa,
    },
}

impl fmt::Display for ProbeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyProbes { limit, at } => write!(
                f,
                "guest memory is too fragmented: the limit of {limit} probes was reached at GPA {at}"
            ),
            Self::TooManyRanges { limit, at } => write!(
                f,
                "guest memory is too fragmented: more than the limit of {limit} ranges of RAM, \
                 the next one at GPA {at}"
            ),
            Self::PartialPage { at } => write!(
                f,
                "the page at GPA {at} is RAM only in part; \
                 RAM must begin and end at multiples of {PAGE_SIZE} bytes"
            ),
            Self::Inconsistent { at } => {
                write!(
                    f,
                    "answers about guest memory at GPA {at} contradict each other"
                )
            }
            Self::UnalignedEnd { end } => write!(
                f,
                "the end of the search, {end}, is not a multiple of {PAGE_SIZE} bytes"
            ),
        }
    }
}

impl std::error::Error for ProbeError {}

/// Finds guest RAM from 0 up to 4 GiB, and from 4 GiB up to `limits.end`.
///
/// RAM that crosses 4 GiB is found as two ranges, one low and one high.
pub fn probe(map: &mut impl MemoryMap, limits: &ProbeLimits) -> Result<Layout, ProbeError> {
    if !limits.end.is_page_aligned() {
        return Err(ProbeError::UnalignedEnd { end: limits.end });
    }
    let mut search = Search {
        map,
        limits,
        probes: 0,
        found: 0,
    };
    let low = search.zone(Gpa::new(0), limits.end.min(HIGH_MEMORY))?;
    let high = search.zone(HIGH_MEMORY, limits.end)?;
    Ok(Layout {
        low,
        high,
        probes: search.probes,
    })
}

struct Search<'a, O> {
    map: &'a mut O,
    limits: &'a ProbeLimits,
    probes: u32,
    found: usize,
}

impl<O: MemoryMap> Search<'_, O> {
    /// The ranges of RAM in `start..end`; nothing when that is empty.
    fn zone(&mut self, start: Gpa, end: Gpa) -> Result<Vec<GpaRange>, ProbeError> {
        let mut ranges = Vec::new();
        let Ok(mut rest) = GpaRange::between(start, end) else {
            return Ok(ranges);
        };
        let mut answer = self.ask(rest)?;
        let mut run = match Run::of(answer) {
            Some(run) => run,
            None => {
                let page = prefix(rest, 1)?;
                Run::of(self.ask(page)?).ok_or(ProbeError::PartialPage { at: start })?
            }
        };
        // Here the rest begins with `run`, and `answer` is about all of it.
        while answer == Resolution::Partial {
            let head = self.run(rest, run)?;
            if run == Run::Ram {
                self.push(&mut ranges, head)?;
            }
            rest = GpaRange::between(head.end(), rest.end())
                .map_err(|_| ProbeError::Inconsistent { at: head.end() })?;
            run = run.other();
            answer = self.ask(rest)?;
        }
        if answer != run.answer() {
            return Err(ProbeError::Inconsistent { at: rest.start() });
        }
        if run == Run::Ram {
            self.push(&mut ranges, rest)?;
        }
        Ok(ranges)
    }

    /// The longest beginning of `rest` that is all of kind `run`. All of
    /// `rest` is known not to be.
    fn run(&mut self, rest: GpaRange, run: Run) -> Result<GpaRange, ProbeError> {
        let mut good = 0;
        let mut bad = rest.len() / PAGE_SIZE;
        let mut last = Resolution::Partial;
        let mut next = 1;
        while next < bad {
            last = self.ask(prefix(rest, next)?)?;
            if last == run.answer() {
                good = next;
                next = if next == 1 {
                    2
                } else {
                    next.saturating_mul(next)
                };
            } else {
                bad = next;
            }
        }
        if good == 0 {
            // The run before ended here, so this page had to be the other kind.
            let at = rest.start();
            return Err(match last {
                Resolution::Partial => ProbeError::PartialPage { at },
                _ => ProbeError::Inconsistent { at },
            });
        }
        while bad - good > 1 {
            let middle = match (bad / good).ilog2() {
                0 | 1 => good + (bad - good) / 2,
                magnitudes => good << (magnitudes / 2),
            };
            if self.ask(prefix(rest, middle)?)? == run.answer() {
                good = middle;
            } else {
                bad = middle;
            }
        }
        prefix(rest, good)
    }

    fn ask(&mut self, range: GpaRange) -> Result<Resolution, ProbeError> {
        if self.probes >= self.limits.max_probes {
            return Err(ProbeError::TooManyProbes {
                limit: self.limits.max_probes,
                at: range.start(),
            });
        }
        self.probes += 1;
        Ok(self.map.resolve(range))
    }

    fn push(&mut self, ranges: &mut Vec<GpaRange>, range: GpaRange) -> Result<(), ProbeError> {
        if self.found >= self.limits.max_ranges {
            return Err(ProbeError::TooManyRanges {
                limit: self.limits.max_ranges,
                at: range.start(),
            });
        }
        self.found += 1;
        ranges.push(range);
        Ok(())
    }
}

/// What a run of pages is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Run {
    Ram,
    Hole,
}

impl Run {
    fn of(answer: Resolution) -> Option<Self> {
        match answer {
            Resolution::All => Some(Self::Ram),
            Resolution::Empty => Some(Self::Hole),
            Resolution::Partial => None,
        }
    }

    /// The resolution of a uniform run.
    fn answer(self) -> Resolution {
        match self {
            Self::Ram => Resolution::All,
            Self::Hole => Resolution::Empty,
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Ram => Self::Hole,
            Self::Hole => Self::Ram,
        }
    }
}

/// The first `pages` pages of `rest`, which has at least as many.
fn prefix(rest: GpaRange, pages: u64) -> Result<GpaRange, ProbeError> {
    let at = rest.start();
    let len = pages.checked_mul(PAGE_SIZE);
    len.and_then(|len| GpaRange::new(at, len).ok())
        .ok_or(ProbeError::Inconsistent { at })
}
