//! MSI and MSI-X of a device at its server.

use std::{collections::BTreeSet, ops::Range};

use farside_irq_relay::{Action, IrqData, IrqIndex, SetIrqs};
use farside_pci::{
    ConfigImage,
    regs::{CAP_ID_MSI, CAP_ID_MSIX, MSI_FLAGS, MSI_FLAGS_ENABLE, MSIX_FLAGS, MSIX_FLAGS_ENABLE},
};

/// What the borrower has set up.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// The type, and how many of its vectors.
    set_up: Option<(IrqIndex, u16)>,
    /// Vectors of MSI-X that are masked.
    masked: BTreeSet<u16>,
}

impl Messages {
    /// The type that is set up, and how many of its vectors.
    pub(super) fn set_up(&self) -> Option<(IrqIndex, u16)> {
        self.set_up
    }

    /// Records a request that was carried out.
    pub(super) fn note(&mut self, request: &SetIrqs) {
        let range = request.range();
        let (index, vectors) = (range.index(), range.vectors());
        if !matches!(index, IrqIndex::Msi | IrqIndex::Msix) {
            return;
        }
        match (request.action(), request.data()) {
            (Action::Trigger, IrqData::Targets(_)) => {
                let before = self.set_up.filter(|(of, _)| *of == index);
                let before = before.map_or(0, |(_, vectors)| vectors);
                self.set_up = Some((index, before.max(vectors.end)));
            }
            (Action::Trigger, IrqData::None) if range.count() == 0 => {
                self.set_up = self.set_up.filter(|(of, _)| *of != index);
            }
            (action @ (Action::Mask | Action::Unmask), data) if index == IrqIndex::Msix => {
                let chosen = |n: usize| match data {
                    IrqData::Bool(chosen) => chosen.get(n).copied().unwrap_or_default(),
                    _ => true,
                };
                for vector in vectors.enumerate().filter(|(n, _)| chosen(*n)) {
                    match action {
                        Action::Mask => self.masked.insert(vector.1),
                        _ => self.masked.remove(&vector.1),
                    };
                }
            }
            _ => {}
        }
    }

    /// What to unmask of MSI-X at the server once `vectors` are set up: masks are the borrower's. QEMU's server has a table of
    /// its own, whose vectors are masked after a reset, and takes the end of a range for its length (10.2), so the range begins
    /// with vector 0, unless one of them is masked.
    pub(super) fn to_unmask(&self, vectors: Range<u16>) -> Vec<Range<u16>> {
        let whole = 0..vectors.end;
        if self.masked.range(whole.clone()).next().is_none() {
            return Vec::from([whole]);
        }
        let wanted = vectors.filter(|vector| !self.masked.contains(vector));
        wanted.map(|vector| vector..vector + 1).collect()
    }
}

/// Least bytes of a configuration space.
const CONFIG_SPACE: usize = 256;

/// Where MSI and MSI-X are enabled in `config`.
pub(super) fn enable_bits(config: &[u8]) -> Vec<(IrqIndex, u64, u16)> {
    if config.len() < CONFIG_SPACE {
        return Vec::new();
    }
    let image = ConfigImage::from(config.to_vec());
    let kinds = [
        (IrqIndex::Msi, CAP_ID_MSI, MSI_FLAGS, MSI_FLAGS_ENABLE),
        (IrqIndex::Msix, CAP_ID_MSIX, MSIX_FLAGS, MSIX_FLAGS_ENABLE),
    ];
    let found = kinds.into_iter().filter_map(|(index, id, flags, bit)| {
        let at = image.find_capability(id, flags + 2)?;
        Some((index, (at + flags) as u64, bit))
    });
    found.collect()
}
