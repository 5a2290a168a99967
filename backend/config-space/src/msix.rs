//! MSI-X (PCIe 7.7.2). Table and pending bits are in a BAR; this module only checks
//! their location.

use farside_pci::ConfigImage;
use farside_pci::regs::*;

use super::ConfigSpaceError;
use super::bar::BarRegister;
use super::builder::Builder;

/// The state of MSI-X.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Msix {
    /// MSI-X enable.
    pub enabled: bool,
    /// Function mask: masks all vectors.
    pub function_mask: bool,
}

#[derive(Clone, Debug)]
pub struct Registers {
    at: usize,
}

impl Registers {
    /// `described` is the description's number of vectors.
    pub fn build(
        builder: &mut Builder,
        at: usize,
        described: u16,
        bars: &[Option<BarRegister>; 6],
    ) -> Result<Self, ConfigSpaceError> {
        let size = builder.image.u16(at + MSIX_FLAGS) & MSIX_FLAGS_QSIZE;
        let in_config = size + 1;
        if in_config != described {
            return Err(ConfigSpaceError::Vectors {
                name: "MSI-X",
                in_config,
                described,
            });
        }
        let parts = ["table", "pending bit array"].into_iter();
        for (part, (bar, offset, length)) in parts.zip(builder.image.msix_areas(at)) {
            let inside = bars
                .get(usize::from(bar))
                .and_then(Option::as_ref)
                .is_some_and(|bar| bar.holds_memory(offset, length));
            if !inside {
                return Err(ConfigSpaceError::MsixOutside { part, bar, offset });
            }
        }
        builder.image.set_u16(at + MSIX_FLAGS, size);
        builder
            .writable
            .set_u16(at + MSIX_FLAGS, MSIX_FLAGS_ENABLE | MSIX_FLAGS_MASKALL);
        Ok(Self { at })
    }

    pub fn state(&self, image: &ConfigImage) -> Msix {
        let control = image.u16(self.at + MSIX_FLAGS);
        Msix {
            enabled: control & MSIX_FLAGS_ENABLE != 0,
            function_mask: control & MSIX_FLAGS_MASKALL != 0,
        }
    }
}
