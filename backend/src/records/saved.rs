//! The snapshot of a device.

use std::{
    collections::BTreeMap,
    fs::File,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    sync::Arc,
};

use farside_guest_layout::Gpa;
use farside_irq_relay::{
    Action, IrqCounts, IrqData, IrqEventFd, IrqIndex, IrqRange, IrqTarget, SetIrqs,
};
use farside_keeper::Kept;
use farside_lender_protocol::{BarOwner, Described, Transport};
use farside_pci::Description;
use farside_vfio_user::Negotiated;
use serde::{Deserialize, Serialize};

use crate::dma_table::{Backing, DmaTable, Target};

/// The state of a device, encoded by position: fields are appended, and zero means that they are absent. A change of it, or
/// of a structure in it, is a new [version](farside_keeper::RECORDS).
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) device: String,
    pub(crate) lender: String,
    pub(crate) described: SavedDescription,
    pub(crate) transport: Transport,
    pub(crate) negotiated: Option<Negotiated>,
    pub(crate) config: Vec<u8>,
    pub(crate) memory: Vec<SavedMapping>,
    /// Address and length of each mapping that was refused.
    pub(crate) refused: Vec<(u64, u64)>,
    pub(crate) irqs: Vec<SavedIrqs>,
    pub(crate) bars: Vec<RawFd>,
    pub(crate) state: Option<RawFd>,
    pub(crate) absent: bool,
    pub(crate) unplugged: bool,
    pub(crate) ram_taken: bool,
    /// Bytes of its expansion ROM. Since version 2.
    pub(crate) rom: u32,
    /// First addresses of the mappings that are BARs. Since version 2.
    pub(crate) peer_bars: Vec<u64>,
    /// Where the guest has BARs 0 to 5; 0 for none. Since version 2.
    pub(crate) placed: Vec<u64>,
}

/// A [`Described`] as version 1 has it. What it has got since is beside it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedDescription {
    pub(crate) description: Description,
    pub(crate) bars: BarOwner,
    pub(crate) state: u64,
}

impl SavedDescription {
    /// With [`Saved::rom`].
    pub(crate) fn of(described: &Described) -> (Self, u32) {
        let Described {
            description,
            bars,
            state,
            rom,
        } = described.clone();
        let saved = Self {
            description,
            bars,
            state,
        };
        (saved, rom)
    }
}

impl Saved {
    /// The device, as the client sees it.
    pub(crate) fn described(&self) -> Described {
        let SavedDescription {
            description,
            bars,
            state,
        } = &self.described;
        Described {
            description: description.clone(),
            bars: *bars,
            state: *state,
            rom: self.rom,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedMapping {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) writable: bool,
    /// Descriptor and offset.
    pub(super) backing: Option<(RawFd, u64)>,
}

/// A request that sets vectors up.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedIrqs {
    pub(super) index: IrqIndex,
    pub(super) start: u16,
    pub(super) action: Action,
    pub(super) data: SavedIrqData,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum SavedIrqData {
    Masks(Vec<bool>),
    Targets(Vec<Option<RawFd>>),
}

/// The part of [`Saved`] that has descriptors.
impl Saved {
    pub(crate) fn mappings(memory: &DmaTable) -> Vec<SavedMapping> {
        let saved = memory.iter().map(|mapping| SavedMapping {
            start: mapping.range.start().get(),
            len: mapping.range.len(),
            writable: mapping.writable,
            backing: mapping
                .target
                .backing()
                .map(|backing| (backing.file.as_raw_fd(), backing.offset)),
        });
        saved.collect()
    }

    pub(crate) fn peer_bars(memory: &DmaTable) -> Vec<u64> {
        let bars = memory.iter().filter(|mapping| mapping.is_bar());
        bars.map(|mapping| mapping.range.start().get()).collect()
    }

    pub(crate) fn refused(memory: &DmaTable) -> Vec<(u64, u64)> {
        let refused = memory.refused();
        refused.map(|(start, len)| (start.get(), len)).collect()
    }

    pub(crate) fn files<'a>(files: impl IntoIterator<Item = &'a Arc<OwnedFd>>) -> Vec<RawFd> {
        files.into_iter().map(|file| file.as_raw_fd()).collect()
    }

    pub(crate) fn irqs(requests: &[SetIrqs]) -> Vec<SavedIrqs> {
        let fd = |target: &Option<IrqTarget>| Some(target.as_ref()?.trigger()?.as_fd().as_raw_fd());
        let saved = requests.iter().map(|request| SavedIrqs {
            index: request.range().index(),
            start: request.range().start(),
            action: request.action(),
            data: match request.data() {
                IrqData::None => SavedIrqData::Masks(Vec::new()),
                IrqData::Bool(masks) => SavedIrqData::Masks(masks.clone()),
                IrqData::Targets(targets) => {
                    SavedIrqData::Targets(targets.iter().map(fd).collect())
                }
            },
        });
        saved.collect()
    }

    /// Claims the descriptors of the memory.
    pub(crate) fn claim_memory(&self, kept: &Kept) -> Option<DmaTable> {
        let mut table = DmaTable::default();
        let mut files = BTreeMap::<RawFd, Arc<File>>::new();
        for mapping in &self.memory {
            let target = match mapping.backing {
                None => Target::Private,
                Some((fd, offset)) => {
                    let known = files.get(&fd).cloned();
                    let file = known.or_else(|| Some(Arc::new(kept.claim(fd)?.into())))?;
                    files.insert(fd, Arc::clone(&file));
                    let memory = Backing { file, offset };
                    match self.peer_bars.contains(&mapping.start) {
                        true => Target::Bar(memory),
                        false => Target::Ram(memory),
                    }
                }
            };
            let start = Gpa::new(mapping.start);
            table
                .map(start, mapping.len, mapping.writable, target)
                .ok()?;
        }
        for (start, len) in &self.refused {
            table.refuse(Gpa::new(*start), *len);
        }
        Some(table)
    }

    /// Claims the descriptors of the interrupts.
    pub(crate) fn claim_irqs(&self, counts: &IrqCounts, kept: &Kept) -> Option<Vec<SetIrqs>> {
        let mut requests = Vec::new();
        for saved in &self.irqs {
            let (count, data) = match &saved.data {
                SavedIrqData::Masks(masks) => (masks.len(), IrqData::Bool(masks.clone())),
                SavedIrqData::Targets(fds) => {
                    let mut targets = Vec::new();
                    for fd in fds {
                        targets.push(match fd {
                            None => None,
                            Some(fd) => Some(IrqEventFd::try_from(kept.claim(*fd)?).ok()?.into()),
                        });
                    }
                    (targets.len(), IrqData::Targets(targets))
                }
            };
            let (index, start) = (saved.index as u32, saved.start.into());
            let range = IrqRange::new(counts, index, start, count as u32).ok()?;
            requests.push(SetIrqs::new(range, saved.action, data).ok()?);
        }
        Some(requests)
    }

    /// Claims the files of the BARs and of the state, in the order of [`Setup::files`].
    pub(crate) fn claim_files(&self, kept: &Kept) -> Option<(Vec<OwnedFd>, Option<OwnedFd>)> {
        let bars = self.bars.iter().map(|fd| kept.claim(*fd));
        let bars = bars.collect::<Option<_>>()?;
        let state = match self.state {
            None => None,
            Some(fd) => Some(kept.claim(fd)?),
        };
        Some((bars, state))
    }
}
