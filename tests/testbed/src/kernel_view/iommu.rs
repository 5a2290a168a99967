//! The trace events `iommu:map` and `iommu:unmap`: every change that Linux makes to an
//! IOMMU domain.
//!
//! The events do not name the domain. To observe one device's domain, clear the trace while
//! it is the only one that changes, or distinguish mappings by the memory that they map.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};

/// One line of the trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceEvent {
    /// The thread: name and id, joined by `-`.
    pub task: String,
    /// Time, in microseconds of the VM's clock.
    pub at_us: u64,
    /// The change.
    pub change: Change,
}

/// A change of an IOMMU domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A mapping was added.
    Map(Mapping),
    /// The mappings in a range of IOVA were removed.
    Unmap {
        /// The first IOVA.
        iova: u64,
        /// Bytes.
        len: u64,
    },
}

/// A contiguous range of IOVA mapped to a contiguous host-physical range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// The first IOVA.
    pub iova: u64,
    /// The first host-physical address: RAM, or a device's BAR.
    pub paddr: u64,
    /// Bytes.
    pub len: u64,
}

/// Parses the text of `/sys/kernel/tracing/trace`. Other events are skipped. Fails if the
/// kernel has dropped events: the remainder proves nothing.
pub fn iommu_trace(text: &str) -> Result<Vec<TraceEvent>> {
    let mut events = Vec::new();
    for line in text.lines() {
        if let Some(counts) = line
            .trim()
            .strip_prefix("# entries-in-buffer/entries-written:")
        {
            let (kept, written) = counts
                .split_whitespace()
                .next()
                .and_then(|counts| counts.split_once('/'))
                .with_context(|| format!("trace line `{line}`"))?;
            ensure!(
                kept == written,
                "the kernel kept {kept} of {written} trace events: give it a larger buffer"
            );
        } else if !line.starts_with('#')
            && (line.contains(": map: IOMMU:") || line.contains(": unmap: IOMMU:"))
        {
            events.push(event(line).with_context(|| format!("trace line `{line}`"))?);
        }
    }
    Ok(events)
}

fn event(line: &str) -> Result<TraceEvent> {
    let (head, fields) = line.split_once(" IOMMU: ").context("no `IOMMU:`")?;
    // `TASK-PID [CPU] FLAGS TIME: NAME:`; a task's name may have spaces.
    let (task, rest) = head.rsplit_once(" [").context("no processor")?;
    let mut words = rest.split_whitespace().skip(2);
    let time = words.next().context("no time")?.trim_end_matches(':');
    let (seconds, micros) = time.split_once('.').context("time without a point")?;
    let at_us = seconds.parse::<u64>()? * 1_000_000 + micros.parse::<u64>()?;
    let iova = hex(value(fields, "iova=")?)?;
    let change = match words.next() {
        Some("map:") => Change::Map(Mapping {
            iova,
            paddr: hex(value(fields, "paddr=")?)?,
            len: value(fields, "size=")?.parse()?,
        }),
        Some("unmap:") => Change::Unmap {
            iova,
            len: value(fields, "unmapped_size=")?.parse()?,
        },
        other => bail!("event {other:?}"),
    };
    Ok(TraceEvent {
        task: task.trim().to_owned(),
        at_us,
        change,
    })
}

fn value<'a>(fields: &'a str, name: &str) -> Result<&'a str> {
    fields
        .split_whitespace()
        .find_map(|field| field.strip_prefix(name))
        .with_context(|| format!("no `{name}`"))
}

fn hex(text: &str) -> Result<u64> {
    let digits = text.strip_prefix("0x").context("no 0x")?;
    Ok(u64::from_str_radix(digits, 16)?)
}

/// The mappings after a sequence of changes, as if all applied to one domain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LiveMappings(BTreeMap<u64, Mapping>);

impl LiveMappings {
    /// The mappings after these events.
    pub fn after<'a>(events: impl IntoIterator<Item = &'a TraceEvent>) -> Self {
        let mut live = Self::default();
        for event in events {
            live.apply(event.change);
        }
        live
    }

    /// Applies one more change.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Map(mapping) => {
                self.0.insert(mapping.iova, mapping);
            }
            Change::Unmap { iova, len } => self.remove(iova..iova.saturating_add(len)),
        }
    }

    /// Removes a range; mappings that extend past its ends are trimmed.
    fn remove(&mut self, gone: Range<u64>) {
        let touched: Vec<Mapping> = self
            .0
            .range(..gone.end)
            .rev()
            .map(|(_, mapping)| *mapping)
            .take_while(|mapping| mapping.iova + mapping.len > gone.start)
            .collect();
        for mapping in touched {
            self.0.remove(&mapping.iova);
            let end = mapping.iova + mapping.len;
            for (from, to) in [
                (mapping.iova, gone.start.min(end)),
                (gone.end.max(mapping.iova), end),
            ] {
                if from < to {
                    let kept = Mapping {
                        iova: from,
                        paddr: mapping.paddr + (from - mapping.iova),
                        len: to - from,
                    };
                    self.0.insert(kept.iova, kept);
                }
            }
        }
    }

    /// The mappings, by IOVA.
    pub fn iter(&self) -> impl Iterator<Item = &Mapping> {
        self.0.values()
    }

    /// The number of mappings.
    pub fn count(&self) -> u64 {
        self.0.len() as u64
    }

    /// The number of mapped bytes.
    pub fn bytes(&self) -> u64 {
        self.iter().map(|mapping| mapping.len).sum()
    }

    /// The mapped IOVA ranges; adjacent ones are merged.
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for mapping in self.iter() {
            let end = mapping.iova + mapping.len;
            match ranges.last_mut() {
                Some(last) if last.end == mapping.iova => last.end = end,
                _ => ranges.push(mapping.iova..end),
            }
        }
        ranges
    }

    /// The mappings whose host-physical address satisfies `to`.
    pub fn leading(&self, to: impl Fn(u64) -> bool) -> Self {
        let kept = self.0.iter().filter(|(_, mapping)| to(mapping.paddr));
        Self(kept.map(|(iova, mapping)| (*iova, *mapping)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
# tracer: nop
#
# entries-in-buffer/entries-written: 4/4   #P:2
#
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
#              | |         |   |||||     |         |
              sh-115     [001] .....    10.302526: unmap: IOMMU: iova=0x00000000fffe0000 - 0x00000000ffff0000 size=65536 unmapped_size=65536
 farside io [0]-130     [001] .....    11.826073: map: IOMMU: iova=0x0000000000000000 - 0x0000000000001000 paddr=0x000000005c661000 size=4096
 ld-linux-x86-64-130     [001] .....    11.826641: map: IOMMU: iova=0x0000000000001000 - 0x000000000019e000 paddr=0x000000005c663000 size=1691648
 ld-linux-x86-64-130     [000] d..1.    11.840634: attach_device_to_domain: IOMMU: device=0000:00:04.0
";

    #[test]
    fn a_kernels_trace_is_read() {
        let events = iommu_trace(TRACE).unwrap();
        assert_eq!(events.len(), 3);
        assert_eq!(events[0].task, "sh-115");
        assert_eq!(events[0].at_us, 10_302_526);
        assert_eq!(
            events[0].change,
            Change::Unmap {
                iova: 0xfffe_0000,
                len: 65536
            }
        );
        let live = LiveMappings::after(&events);
        assert_eq!((live.count(), live.bytes()), (2, 0x19e000));
        assert_eq!(live.ranges(), vec![0..0x19e000; 1]);
        let one = live.leading(|paddr| paddr == 0x5c66_3000);
        assert_eq!((one.count(), one.bytes()), (1, 0x19d000));
    }

    #[test]
    fn lost_events_are_an_error() {
        let lost = TRACE.replace("4/4", "4/9");
        let error = iommu_trace(&lost).unwrap_err().to_string();
        assert!(error.contains("4 of 9"), "{error}");
        let cut = &TRACE[..TRACE.len() - 100];
        assert!(iommu_trace(&cut.replace("paddr=", "")).is_err());
    }

    #[test]
    fn an_unmap_cuts_what_reaches_over_its_edges() {
        let map = |iova, len| {
            Change::Map(Mapping {
                iova,
                paddr: 0x10_0000 + iova,
                len,
            })
        };
        let mut live = LiveMappings::default();
        live.apply(map(0x1000, 0x3000));
        live.apply(map(0x4000, 0x1000));
        live.apply(map(0x8000, 0x1000));
        live.apply(Change::Unmap {
            iova: 0x2000,
            len: 0x1000,
        });
        assert_eq!(
            live.ranges(),
            [0x1000..0x2000, 0x3000..0x5000, 0x8000..0x9000]
        );
        let behind = live.iter().find(|mapping| mapping.iova == 0x3000).unwrap();
        assert_eq!(behind.paddr, 0x10_3000);
        live.apply(Change::Unmap {
            iova: 0,
            len: u64::MAX,
        });
        assert_eq!(live, LiveMappings::default());
    }
}
