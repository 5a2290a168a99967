//! A path whose device has another process, or none.

use farside_lender_protocol::Client;

use super::{Adding, OpenPath, window_iova};
use crate::{borrow::error::PathError, dma_table::Mapping};

impl OpenPath {
    /// Opens the same windows onto the same memory, which stays pinned, in another process of the device.
    pub(crate) fn reopen(&mut self, client: &mut Client) -> Result<(), PathError> {
        // A mapping whose addition was cut off is added anew.
        self.adding = Adding::default();
        for window in &mut self.windows {
            let iova = window_iova(window.range.start());
            let len = window.range.len();
            window.lut_entries = client.open_window(iova, window.peer.start(), len)?;
        }
        for segment in self.segments.values() {
            for piece in &segment.pieces {
                let part = piece.of(&segment.memory, segment.range.start());
                let mut done = 0;
                let at = piece.peer_address;
                self.peer_mapper.map(client, at, part, &mut done)?;
            }
        }
        Ok(())
    }

    /// As [`OpenPath::unmap`], of a device that has no process.
    pub(crate) fn forget(&mut self, mapping: &Mapping) {
        let start = mapping.range.start();
        // It may be the one whose addition was cut off.
        self.adding = Adding::default();
        self.unreachable.remove(&start);
        let removed = self.segments.remove(&start);
        let paged = removed.is_some_and(|segment| segment.is_page());
        if !(paged && self.keeps_windows()) {
            let windows = std::mem::take(&mut self.windows);
            let kept = windows.into_iter().filter(|it| !self.is_empty(it));
            self.windows = kept.collect();
        }
    }

    /// Records a mapping that could not be added as unreachable, of a device that has no process.
    pub(crate) fn leave_out(&mut self, mapping: &Mapping) {
        self.adding = Adding::default();
        let start = mapping.range.start();
        self.unreachable.insert(start, mapping.range.len());
    }
}

#[cfg(test)]
mod tests {
    use farside_fabric::MemoryRange;
    use farside_guest_layout::{Gpa, GpaRange};

    use super::{
        super::{
            Segment,
            tests::{open, range},
        },
        *,
    };
    use crate::dma_table::Target;

    #[test]
    fn an_unmap_without_a_process_leaves_no_empty_window_and_nothing_half_added() {
        let mut path = open(&[(0, 0x8000), (0xa000, 0xc000), (0x10000, 0x20000)]);
        let mapping = |start: u64, end: u64| Mapping {
            range: range(start, end),
            target: Target::Private,
            writable: true,
        };
        let segment = |range: GpaRange| Segment {
            range,
            memory: MemoryRange::whole(std::fs::File::open("/dev/null").unwrap(), range.len()),
            pieces: Vec::new(),
            is_bar: false,
            pins: None,
        };
        for part in [range(0, 0x8000), range(0xa000, 0xc000)] {
            path.segments.insert(part.start(), segment(part));
        }
        // The lender has ended while this was being added.
        path.adding.windows.push(Gpa::new(0x10000));
        path.forget(&mapping(0x10000, 0x20000));
        assert!(path.adding.windows.is_empty());
        let starts = |path: &OpenPath| -> Vec<_> {
            path.windows
                .iter()
                .map(|it| it.range.start().get())
                .collect()
        };
        assert_eq!(starts(&path), [0, 0xa000]);
        path.forget(&mapping(0, 0x8000));
        assert_eq!(path.segments.len(), 1);
    }
}
