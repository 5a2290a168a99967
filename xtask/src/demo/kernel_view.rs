//! The kernel's report on the backend's memory: an independent check of the bytes that the
//! backend reports as pinned.

use std::fs;

use anyhow::{Context, Result};

/// From `/proc/PID/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KernelView {
    /// Bytes locked (`VmLck`).
    pub(super) locked: u64,
    /// Bytes of shared memory mapped and populated (`RssShmem`), which guest RAM is.
    pub(super) shared: u64,
}

impl KernelView {
    /// Of that process.
    pub(super) fn of(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/status");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        Self::parse(&text).with_context(|| format!("malformed {path}"))
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
            Some(kib << 10)
        };
        Some(Self {
            locked: field("VmLck:")?,
            shared: field("RssShmem:")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_found() {
        let text = "Name:\tx\nVmLck:\t      12 kB\nRssAnon:\t 5 kB\nRssShmem:\t     4 kB\n";
        let view = KernelView::parse(text).unwrap();
        assert_eq!((view.locked, view.shared), (12 << 10, 4 << 10));
        assert_eq!(KernelView::parse("VmLck: 1 kB"), None);
        KernelView::of(std::process::id()).unwrap();
    }
}
