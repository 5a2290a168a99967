//! Memory for DMA: locked pages and their guest-physical addresses, and physical memory
//! through `/dev/mem`.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use farside_guest_agent::{Answer, MAX_OUTPUT};
use rustix::mm::MapFlags;

use crate::mapping::Mapping;

const PAGE: u64 = 4096;
const HUGE_PAGE: u64 = 2 << 20;

/// The pages allocated by the host.
#[derive(Default)]
pub struct Pages {
    held: HashMap<u64, Mapping>,
    next: u64,
}

impl Pages {
    /// Allocates `len` contiguous bytes.
    pub fn alloc(&mut self, len: u64) -> Result<Answer> {
        ensure!(
            (1..=HUGE_PAGE).contains(&len),
            "{len} bytes: must be 1 to {HUGE_PAGE}"
        );
        // The kernel may migrate locked pages during compaction, which would make the
        // address stale.
        fs::write("/proc/sys/vm/compact_unevictable_allowed", "0")
            .context("pinning locked pages in place")?;
        let mapping = if len <= PAGE {
            Mapping::anonymous(PAGE as usize, MapFlags::empty())?
        } else {
            add_huge_page()?;
            Mapping::anonymous(HUGE_PAGE as usize, MapFlags::HUGETLB)
                .context("allocating a 2 MiB page")?
        };
        let gpa = physical_address(mapping.address())?;
        let len = mapping.len() as u64;
        let handle = self.next;
        self.next += 1;
        self.held.insert(handle, mapping);
        Ok(Answer::Page { handle, gpa, len })
    }

    /// The memory behind a handle.
    pub fn get(&self, handle: u64) -> Result<&Mapping> {
        self.held
            .get(&handle)
            .with_context(|| format!("no page has the handle {handle}"))
    }

    /// Frees allocated memory.
    pub fn free(&mut self, handle: u64) -> Result<()> {
        self.get(handle)?;
        self.held.remove(&handle);
        Ok(())
    }
}

fn add_huge_page() -> Result<()> {
    let path = "/proc/sys/vm/nr_hugepages";
    let read = || -> Result<u64> { Ok(fs::read_to_string(path)?.trim().parse()?) };
    let before = read().context("reading nr_hugepages")?;
    fs::write(path, (before + 1).to_string()).context("asking for a 2 MiB page")?;
    ensure!(
        read()? > before,
        "the guest has no 2 MiB of contiguous free memory"
    );
    Ok(())
}

/// Looks up the physical address of a mapped page in `/proc/self/pagemap`.
fn physical_address(address: usize) -> Result<u64> {
    let mut entry = [0; 8];
    File::open("/proc/self/pagemap")
        .and_then(|map| map.read_exact_at(&mut entry, address as u64 / PAGE * 8))
        .context("reading /proc/self/pagemap")?;
    let entry = u64::from_ne_bytes(entry);
    let frame = entry & ((1 << 55) - 1);
    ensure!(
        entry >> 63 == 1 && frame != 0,
        "pagemap does not show the frame (entry {entry:#x}); it needs CAP_SYS_ADMIN"
    );
    Ok(frame * PAGE)
}

/// Maps the pages of `/dev/mem` that contain a range; also returns the range's offset in
/// them.
fn map_physical(gpa: u64, len: usize) -> Result<(Mapping, usize)> {
    ensure!(
        len <= MAX_OUTPUT,
        "{len} bytes at once; at most {MAX_OUTPUT}"
    );
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/mem")
        .context("opening /dev/mem")?;
    let start = gpa / PAGE * PAGE;
    let within = (gpa - start) as usize;
    let mapping = Mapping::of_file(&file, start, (within + len).next_multiple_of(PAGE as usize))
        .with_context(|| format!("mapping physical address {gpa:#x} (the kernel refuses RAM)"))?;
    Ok((mapping, within))
}

/// Reads physical memory.
pub fn phys_read(gpa: u64, len: u64) -> Result<Vec<u8>> {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let (mapping, within) = map_physical(gpa, len)?;
    mapping.read_bytes(within, len)
}

/// Writes physical memory.
pub fn phys_write(gpa: u64, data: &[u8]) -> Result<()> {
    let (mapping, within) = map_physical(gpa, data.len())?;
    mapping.write_bytes(within, data)
}
