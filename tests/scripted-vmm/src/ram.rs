//! Guest RAM: one shared memfd with QEMU's layout. Low RAM begins at GPA 0 and file offset
//! 0; the remainder is at GPA 4 GiB, and follows low RAM in the file. For tests of isolation
//! the file may also have gaps, which no device is given.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use crate::pattern::{Checksum, Pattern};

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// GPA of high RAM.
pub const HIGH: u64 = 4 << 30;
/// Upper bound of low RAM: above it are the PCI hole and the interrupt controllers.
pub const LOW_LIMIT: u64 = 0xc000_0000;

const HUGE_PAGE: u64 = 2 << 20;
/// Bytes copied at a time.
const PIECE: usize = 64 << 10;

/// Sizes of a guest's RAM below and above 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes from GPA 0 on.
    pub low: u64,
    /// Bytes from GPA [`HIGH`] on.
    pub high: u64,
    /// Page size.
    pub page: u64,
    /// Bytes of the file before, between and after the blocks.
    pub gap: u64,
}

impl Layout {
    /// `total` bytes, of which at most `low` are low RAM; without `low`, as many as fit.
    ///
    /// # Errors
    /// If a size is not a multiple of the page size, or `low` exceeds [`LOW_LIMIT`].
    pub fn new(total: u64, low: Option<u64>, huge_pages: bool) -> Result<Self> {
        let page = if huge_pages { HUGE_PAGE } else { PAGE };
        let low = low.unwrap_or(LOW_LIMIT).min(total);
        ensure!(
            low <= LOW_LIMIT,
            "{low:#x} bytes of low RAM: at most {LOW_LIMIT:#x} fit below the PCI hole"
        );
        for (what, size) in [("RAM", total), ("low RAM", low)] {
            ensure!(
                size > 0 && size.is_multiple_of(page),
                "{size:#x} bytes of {what} are no whole pages of {page:#x} bytes"
            );
        }
        Ok(Self {
            low,
            high: total - low,
            page,
            gap: 0,
        })
    }

    /// The layout with gaps of that many bytes, whole pages, in the file.
    #[must_use]
    pub fn with_gaps(self, gap: u64) -> Self {
        Self { gap, ..self }
    }

    /// Bytes of the file.
    pub fn file_len(&self) -> u64 {
        let blocks = self.blocks();
        blocks.iter().map(|block| block.len + self.gap).sum::<u64>() + self.gap
    }

    /// Total bytes.
    pub fn total(&self) -> u64 {
        self.low + self.high
    }

    /// The blocks of RAM: one, or two with high RAM.
    pub fn blocks(&self) -> Vec<Block> {
        let low = Block {
            gpa: 0,
            len: self.low,
            offset: self.gap,
        };
        let high = Block {
            gpa: HIGH,
            len: self.high,
            offset: self.gap + self.low + self.gap,
        };
        let mut blocks = vec![low, high];
        blocks.retain(|block| block.len > 0);
        blocks
    }
}

/// A contiguous block of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Guest-physical address.
    pub gpa: u64,
    /// Bytes.
    pub len: u64,
    /// Offset in the file.
    pub offset: u64,
}

impl Block {
    /// Its guest-physical addresses.
    pub fn gpas(&self) -> Range<u64> {
        self.gpa..self.gpa + self.len
    }
}

/// A guest's RAM.
pub struct Ram {
    layout: Layout,
    file: Arc<File>,
    memory: GuestMemoryMmap,
}

impl Ram {
    /// Zeroed RAM. Pages are allocated when touched, huge pages at once.
    ///
    /// # Errors
    /// If a system call fails; the message names a lack of huge pages.
    pub fn new(layout: Layout) -> Result<Self> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let huge = layout.page != PAGE;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let total = layout.file_len();
        let fd = rustix::fs::memfd_create("guest-ram", flags).context("making guest RAM")?;
        rustix::fs::ftruncate(&fd, total).context("sizing guest RAM")?;
        if huge {
            // Otherwise a missing huge page would raise SIGBUS later.
            rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, total).with_context(|| {
                format!(
                    "guest RAM needs {} free huge pages of 2 MiB: write to /proc/sys/vm/nr_hugepages",
                    total / HUGE_PAGE
                )
            })?;
        }
        rustix::fs::fcntl_add_seals(&fd, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)
            .context("sealing guest RAM")?;
        let file = Arc::new(File::from(fd));
        let ranges = layout.blocks().into_iter().map(|block| {
            let part = FileOffset::from_arc(Arc::clone(&file), block.offset);
            (GuestAddress(block.gpa), block.len as usize, Some(part))
        });
        let memory =
            GuestMemoryMmap::from_ranges_with_files(ranges).context("mapping guest RAM")?;
        Ok(Self {
            layout,
            file,
            memory,
        })
    }

    /// Its layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The memfd behind it.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Copies `data` to `gpa`.
    ///
    /// # Errors
    /// If the range is not all RAM.
    pub fn write(&self, gpa: u64, data: &[u8]) -> Result<()> {
        self.memory
            .write_slice(data, GuestAddress(gpa))
            .with_context(|| format!("writing {:#x} bytes at GPA {gpa:#x}", data.len()))
    }

    /// Reads `data.len()` bytes at `gpa`.
    ///
    /// # Errors
    /// As [`Ram::write`].
    pub fn read(&self, gpa: u64, data: &mut [u8]) -> Result<()> {
        let len = data.len();
        self.memory
            .read_slice(data, GuestAddress(gpa))
            .with_context(|| format!("reading {len:#x} bytes at GPA {gpa:#x}"))
    }

    /// Reads the aligned word at `gpa` once, with acquire ordering.
    ///
    /// # Errors
    /// As [`Ram::write`].
    pub fn load_u32(&self, gpa: u64) -> Result<u32> {
        self.memory
            .load(GuestAddress(gpa), Ordering::Acquire)
            .with_context(|| format!("reading a word at GPA {gpa:#x}"))
    }

    /// Writes the aligned word at `gpa`, with release ordering.
    ///
    /// # Errors
    /// As [`Ram::write`].
    pub fn store_u32(&self, gpa: u64, value: u32) -> Result<()> {
        self.memory
            .store(value, GuestAddress(gpa), Ordering::Release)
            .with_context(|| format!("writing a word at GPA {gpa:#x}"))
    }

    /// Fills a range with the next words of `pattern`.
    ///
    /// # Errors
    /// As [`Ram::write`].
    pub fn fill(&self, gpas: Range<u64>, pattern: &mut Pattern) -> Result<()> {
        let mut piece = vec![0; PIECE];
        for (gpa, len) in pieces(gpas) {
            pattern.fill(&mut piece[..len]);
            self.write(gpa, &piece[..len])?;
        }
        Ok(())
    }

    /// Adds a range to a checksum.
    ///
    /// # Errors
    /// As [`Ram::write`].
    pub fn sum(&self, gpas: Range<u64>, checksum: &mut Checksum) -> Result<()> {
        let mut piece = vec![0; PIECE];
        for (gpa, len) in pieces(gpas) {
            self.read(gpa, &mut piece[..len])?;
            checksum.update(&piece[..len]);
        }
        Ok(())
    }

    /// A copy of a range.
    ///
    /// # Errors
    /// As [`Ram::write`].
    pub fn snapshot(&self, gpas: Range<u64>) -> Result<Snapshot> {
        let mut bytes = vec![0; (gpas.end - gpas.start) as usize];
        self.read(gpas.start, &mut bytes)?;
        Ok(Snapshot { gpas, bytes })
    }

    /// A copy of all of it.
    ///
    /// # Errors
    /// As [`Ram::write`].
    pub fn snapshot_all(&self) -> Result<Vec<Snapshot>> {
        let blocks = self.layout.blocks();
        blocks
            .iter()
            .map(|block| self.snapshot(block.gpas()))
            .collect()
    }

    /// How many bytes outside `except` differ from the snapshots.
    ///
    /// # Errors
    /// As [`Ram::write`].
    pub fn changed_since(&self, snapshots: &[Snapshot], except: &Range<u64>) -> Result<u64> {
        let mut changed = 0;
        let mut piece = vec![0; PIECE];
        for snapshot in snapshots {
            for (gpa, len) in pieces(snapshot.gpas.clone()) {
                let now = &mut piece[..len];
                self.read(gpa, now)?;
                let at = (gpa - snapshot.gpas.start) as usize;
                let before = &snapshot.bytes[at..at + len];
                if now == before {
                    continue;
                }
                let differ = (gpa..)
                    .zip(now.iter().zip(before))
                    .filter(|(gpa, (now, before))| now != before && !except.contains(gpa));
                changed += differ.count() as u64;
            }
        }
        Ok(changed)
    }
}

/// The former contents of a range of RAM.
pub struct Snapshot {
    gpas: Range<u64>,
    bytes: Vec<u8>,
}

/// Splits a range into pieces: (address, length).
fn pieces(gpas: Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    let end = gpas.end;
    gpas.step_by(PIECE)
        .map(move |gpa| (gpa, (end - gpa).min(PIECE as u64) as usize))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn ram_is_laid_out_as_qemu_does() {
        let layout = Layout::new(256 * MIB, Some(128 * MIB), false).unwrap();
        let low = Block {
            gpa: 0,
            len: 128 * MIB,
            offset: 0,
        };
        let high = Block {
            gpa: HIGH,
            len: 128 * MIB,
            offset: 128 * MIB,
        };
        assert_eq!(layout.blocks(), [low, high]);
        let layout = Layout::new(64 * MIB, None, false).unwrap();
        assert_eq!((layout.low, layout.high), (64 * MIB, 0));
        let layout = Layout::new(8 << 30, None, false).unwrap();
        assert_eq!((layout.low, layout.high), (3 << 30, 5 << 30));
    }

    #[test]
    fn impossible_layouts_are_refused() {
        for (total, low, huge) in [
            (0, None, false),
            (MIB + 1, None, false),
            (4 * MIB, Some(0), false),
            (4 * MIB, Some(MIB), true),
            (8 << 30, Some(4 << 30), false),
        ] {
            assert!(Layout::new(total, low, huge).is_err(), "{total} {low:?}");
        }
    }

    #[test]
    fn a_change_is_found_to_the_byte() {
        let ram = Ram::new(Layout::new(4 * MIB, Some(2 * MIB), false).unwrap()).unwrap();
        ram.fill(HIGH..HIGH + 2 * MIB, &mut Pattern::new(1))
            .unwrap();
        let before = ram.snapshot_all().unwrap();
        let nothing = 0..0;
        assert_eq!(ram.changed_since(&before, &nothing).unwrap(), 0);
        ram.write(0x1000, &[1; 16]).unwrap();
        let mut last = [0];
        ram.read(HIGH + 2 * MIB - 1, &mut last).unwrap();
        ram.write(HIGH + 2 * MIB - 1, &[!last[0]]).unwrap();
        assert_eq!(ram.changed_since(&before, &nothing).unwrap(), 17);
        assert_eq!(ram.changed_since(&before, &(0x1000..0x100e)).unwrap(), 3);
        assert!(
            ram.write(2 * MIB - 1, &[0; 2]).is_err(),
            "the hole is no RAM"
        );
    }

    /// Without huge pages, checks the message that explains how to reserve them.
    #[test]
    fn huge_pages_are_there_before_they_are_touched() {
        match Ram::new(Layout::new(4 * MIB, Some(2 * MIB), true).unwrap()) {
            Ok(ram) => {
                ram.write(HIGH + 2 * MIB - 1, &[1]).unwrap();
                assert_eq!(ram.layout().page, 2 * MIB);
            }
            Err(error) => {
                let error = format!("{error:#}");
                assert!(error.contains("2 free huge pages"), "{error}");
                // For `cargo xtask test`: libtest shows `println!` only of failed tests.
                let test = "ram::tests::huge_pages_are_there_before_they_are_touched";
                let line = format!("skipped: {test}: {error}\n");
                std::io::stdout().write_all(line.as_bytes()).unwrap();
            }
        }
    }
}
