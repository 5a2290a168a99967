//! The mmap-able memory of a physical device's BARs.

use std::{os::fd::OwnedFd, sync::Arc};

use farside_fabric::PeerAddress;
use farside_lender_protocol::BarMemory;
use farside_ntb::{Adapter, BarWindow, NtbError};
use farside_pci::Description;

/// Memory that a client maps for a BAR.
#[derive(Clone, Debug)]
pub(crate) struct BarFile {
    pub(crate) file: Arc<OwnedFd>,
    /// Offset of the BAR in the file, in bytes.
    pub(crate) offset: u64,
    /// The BAR's peer address, if the file is a window of this host's NTB onto it.
    pub(crate) exported: Option<PeerAddress>,
}

/// The memory to map for each BAR with sparse mmap areas.
#[derive(Default)]
pub(crate) struct LeasedBars {
    pub(crate) files: Vec<Option<BarFile>>,
    /// The VM's CPUs access the peer host through it. Open for the duration of the lease.
    pub(crate) window: Option<BarWindow>,
}

impl LeasedBars {
    /// Combines the lender's description, `bars`, and its descriptors, `files`, into memory that a
    /// client can map. Both have one entry for each BAR with sparse mmap areas, and each file.
    pub(crate) fn new(
        description: &Description,
        ntb: Option<&Adapter>,
        bars: &[BarMemory],
        files: Vec<OwnedFd>,
    ) -> Result<Self, NtbError> {
        let with_areas = description.bars.iter().flatten();
        let with_areas = with_areas.filter(|bar| !bar.mappable.is_empty());
        let at_peer = with_areas
            .zip(bars)
            .filter_map(|(bar, memory)| match memory {
                BarMemory::Peer { address } => Some((*address, address.checked_add(bar.size)?)),
                _ => None,
            });
        let span = at_peer.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
        let through = match (span, ntb) {
            (Some((start, end)), Some(ntb)) => {
                Some(Through::open(ntb, start, end.get() - start.get())?)
            }
            _ => None,
        };
        let mut sent = files.into_iter();
        let files = bars.iter().map(|memory| match memory {
            BarMemory::File { offset } => Some(BarFile {
                file: Arc::new(sent.next()?),
                offset: *offset,
                exported: None,
            }),
            BarMemory::Peer { address } => through.as_ref()?.file(*address),
            BarMemory::Borrowers | BarMemory::Trapped => None,
        });
        Ok(Self {
            files: files.collect(),
            window: through.map(|through| through.window),
        })
    }
}

/// A window of this host's NTB onto BARs at the peer host.
struct Through {
    window: BarWindow,
    /// The file to map; its window BAR begins at `file_offset`.
    file: Arc<OwnedFd>,
    file_offset: u64,
}

impl Through {
    fn open(ntb: &Adapter, peer_address: PeerAddress, len: u64) -> Result<Self, NtbError> {
        let window = ntb.open_bar_window(peer_address, len)?;
        let (file, file_offset) = ntb.bar_file()?;
        Ok(Self {
            window,
            file: Arc::new(file),
            file_offset,
        })
    }

    /// The file and offset to map the BAR at peer address `address`.
    fn file(&self, address: PeerAddress) -> Option<BarFile> {
        let skip = address.offset_from(self.window.peer_address())?;
        Some(BarFile {
            file: Arc::clone(&self.file),
            offset: self.file_offset + self.window.offset() + skip,
            exported: Some(address),
        })
    }
}
