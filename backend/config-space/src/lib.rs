//! The virtual configuration space of a borrowed function.
//!
//! It is built from the device's own image, which the lender has read once. The guest's
//! accesses to a software model do not reach it, except for
//! [one bit](ConfigSpace::interrupt_status_at) that only the device has. Those to a physical
//! function are [forwarded](ConfigSpace::of_function) for the bits that [`policy`] says are the device's.
//! Each of the others is read-only, read-write or write-1-to-clear as the PCI Express Base
//! Specification (6.0; cited as "PCIe") defines for a type 0 function, and a write
//! returns its effects as values, [`Effect`]s, for the caller to carry out.
//!
//! # Writes in two steps
//!
//! Setting bus-master enable pins and maps the guest's memory, which can fail. So a
//! write can be inspected before it takes effect:
//!
//! ```
//! # use farside_config_space::{ConfigSpace, Edge};
//! # use farside_pci::Description;
//! # let mut config = vec![0; 256];
//! # config[..4].copy_from_slice(&[0x36, 0x1b, 0x10, 0x00]);
//! # let description = Description {
//! #     config, bars: Default::default(), intx: false, msi_vectors: 0, msix_vectors: 0,
//! #     summary: String::new(),
//! # };
//! # fn let_the_device_dma() -> Result<(), ()> { Err(()) }
//! let mut space = ConfigSpace::new(&description)?;
//! let mut staged = space.stage(4, &[0x04, 0x00]); // the guest sets bus-master enable
//! if staged.dma() == Edge::Rising && let_the_device_dma().is_err() {
//!     staged.refuse_bus_master();
//! }
//! let effects = space.commit(staged);
//! assert!(effects.is_empty() && !space.may_dma());
//! # Ok::<(), farside_config_space::ConfigSpaceError>(())
//! ```
//!
//! # Hidden capabilities
//!
//! A capability that controls something outside the guest's reach is unlinked from
//! the list and reads as zero. [`policy`] has the rules with their reasons,
//! [`ConfigSpace::hidden`] returns this device's hidden capabilities. Bytes outside
//! all capabilities are read-only.
//!
//! # Trust
//!
//! The image comes from another host and is untrusted. [`ConfigSpace::new`] fails for
//! lists that loop, structures that overlap or extend past the space, and tables
//! outside their BAR; afterwards no access by the guest can fail.

#![forbid(unsafe_code)]

mod aer;
mod af;
mod ari;
mod bar;
mod builder;
mod effects;
mod error;
mod header;
mod msi;
mod msix;
mod pcie;
mod pm;
mod resizable_bar;
mod walk;

pub use bar::GuestBarAddress;
pub use effects::{Edge, Effect, Effects, ResetCause};
pub use error::ConfigSpaceError;
pub use farside_pci::policy::{self, Hidden};
pub use msi::Msi;
pub use msix::Msix;
pub use pm::PowerState;

use farside_pci::regs::{
    COMMAND, COMMAND_INTX_DISABLE, COMMAND_MASTER, INTERRUPT_PIN, ROM_ADDRESS, ROM_ADDRESS_ENABLE,
    STATUS,
};
use farside_pci::{ConfigImage, Description, Forwarding, Piece, rom};

use bar::BarRegister;
use builder::Builder;
use effects::View;

/// A function's configuration space.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: ConfigImage,
    power_on: ConfigImage,
    /// Read-write bits.
    writable: ConfigImage,
    /// Write-1-to-clear bits.
    clearable: ConfigImage,
    registers: Registers,
    hidden: Vec<Hidden>,
    /// Bits that are the device's, in none of the masks above.
    forwarding: Forwarding,
}

/// Locations of the registers whose values have effects.
#[derive(Clone, Debug, Default)]
struct Registers {
    bars: [Option<BarRegister>; 6],
    pm: Option<pm::Registers>,
    msi: Option<msi::Registers>,
    msix: Option<msix::Registers>,
    pcie: Option<pcie::Registers>,
    af: Option<af::Registers>,
}

/// A write that has not taken effect, from [`ConfigSpace::stage`].
#[derive(Debug)]
#[must_use = "a staged write has no effect until it is committed"]
pub struct Staged {
    offset: u64,
    data: Vec<u8>,
    bus_master_refused: bool,
    effects: Effects,
    dma: Edge,
    forwarded: Vec<(Piece, u32)>,
}

impl Staged {
    /// The effects that the write would have on the current state.
    pub fn effects(&self) -> &Effects {
        &self.effects
    }

    /// Whether the write enables or disables DMA. Depends on the power state as well
    /// as on bus-master enable: only a function in D0 may master the bus.
    pub fn dma(&self) -> Edge {
        self.dma
    }

    /// What the device is to be written, in order. A write that resets the function forwards nothing.
    pub fn forwarded(&self) -> &[(Piece, u32)] {
        &self.forwarded
    }

    /// Leaves the bus-master bit clear when the write is committed.
    pub fn refuse_bus_master(&mut self) {
        self.bus_master_refused = true;
    }
}

impl ConfigSpace {
    /// Builds the guest's view of a software model: nothing is forwarded.
    ///
    /// # Errors
    ///
    /// Fails if the description contradicts itself or the specification; see
    /// [`ConfigSpaceError`].
    pub fn new(description: &Description) -> Result<Self, ConfigSpaceError> {
        Self::with(description, None)
    }

    /// Builds the guest's view of a physical function, whose own bits are forwarded: the caller reads
    /// [`reads`](Self::reads) from the device and [merges](Self::merge) them, and writes what a staged write
    /// [forwards](Staged::forwarded).
    ///
    /// # Errors
    ///
    /// As [`ConfigSpace::new`].
    pub fn of_function(description: &Description) -> Result<Self, ConfigSpaceError> {
        Self::with(description, Some(Forwarding::of(&description.config)))
    }

    /// Gives it a BAR for an expansion ROM of `len` bytes, at most [`rom::MAX`](farside_pci::rom::MAX).
    pub fn add_rom(&mut self, len: usize) {
        let size = rom::bar_size(len.min(rom::MAX)) as u32;
        if size != 0 {
            self.writable
                .set_u32(ROM_ADDRESS, !(size - 1) | ROM_ADDRESS_ENABLE);
        }
    }

    fn with(
        description: &Description,
        forwarding: Option<Forwarding>,
    ) -> Result<Self, ConfigSpaceError> {
        let mut builder = Builder::new(&description.config, forwarding)?;
        let bars = bar::build(&mut builder, &description.bars)?;
        header::build(&mut builder, description)?;
        let mut registers = Registers {
            bars,
            ..Registers::default()
        };
        let hidden = walk::build(&mut builder, description, &mut registers)?;
        let forwarding = builder.forwarding.take();
        let forwarding = forwarding.unwrap_or_else(|| Forwarding::none(builder.image.len()));
        builder.leave(forwarding.read_mask());
        Ok(Self {
            bytes: builder.image.clone(),
            power_on: builder.image,
            writable: builder.writable,
            clearable: builder.clearable,
            registers,
            hidden,
            forwarding,
        })
    }

    /// Bytes of the space: 256 or 4096.
    pub fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The device's hidden capabilities.
    pub fn hidden(&self) -> &[Hidden] {
        &self.hidden
    }

    /// Reads `data.len()` bytes at `offset`. Bytes past the end read as all ones, as of
    /// a function that does not respond.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let source = usize::try_from(offset)
            .ok()
            .and_then(|at| self.bytes.get(at..));
        let source = source.unwrap_or_default();
        let (inside, outside) = data.split_at_mut(source.len().min(data.len()));
        inside.copy_from_slice(&source[..inside.len()]);
        outside.fill(0xff);
    }

    /// The parts of a read that the device is to be asked for.
    pub fn reads(&self, offset: u64, len: usize) -> impl Iterator<Item = Piece> {
        self.forwarding.reads(offset, len)
    }

    /// Puts what the device returned for a part into what the guest reads at `offset`.
    pub fn merge(&self, piece: Piece, value: u32, offset: u64, data: &mut [u8]) {
        let part = usize::from(piece.offset).checked_sub(offset as usize);
        let part = part.and_then(|at| data.get_mut(at..));
        self.forwarding
            .merge(piece, value, part.unwrap_or_default());
    }

    /// All registers, of which [`restore`](Self::restore) makes the same state.
    pub fn registers(&self) -> &[u8] {
        &self.bytes
    }

    /// Takes over the registers of the same function, as another process has left them. Returns whether they are of the
    /// right size; if not, nothing is changed.
    #[must_use]
    pub fn restore(&mut self, registers: &[u8]) -> bool {
        let fits = registers.len() == self.bytes.len();
        if fits {
            self.bytes.copy_from_slice(registers);
        }
        fits
    }

    /// [Stages](Self::stage) and [commits](Self::commit) a write.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effects {
        let staged = self.stage(offset, data);
        self.commit(staged)
    }

    /// Computes the effects of a write of any length and alignment. Bytes past the end
    /// are ignored.
    pub fn stage(&self, offset: u64, data: &[u8]) -> Staged {
        let before = View::of(&self.registers, &self.bytes);
        let outcome = self.outcome(offset, data);
        let after = View::of(&self.registers, &outcome.bytes);
        let forwarded = match outcome.reset {
            None => self.forwarded(offset, data),
            Some(_) => Vec::new(),
        };
        Staged {
            forwarded,
            offset,
            data: data.to_vec(),
            bus_master_refused: false,
            dma: Edge::between(before.may_dma(), after.may_dma()),
            effects: Effects::between(&before, &after, outcome.reset),
        }
    }

    /// Carries out a staged write and returns its effects. It acts on the current state,
    /// which other writes and resets may have changed since it was staged.
    pub fn commit(&mut self, staged: Staged) -> Effects {
        let before = View::of(&self.registers, &self.bytes);
        let outcome = self.outcome(staged.offset, &staged.data);
        self.bytes = outcome.bytes;
        if staged.bus_master_refused {
            self.bytes[COMMAND] &= !(COMMAND_MASTER as u8);
        }
        let after = View::of(&self.registers, &self.bytes);
        Effects::between(&before, &after, outcome.reset)
    }

    /// Restores the values after power-on, as a conventional reset does. Returns the
    /// effects, without an [`Effect::Reset`].
    pub fn reset(&mut self) -> Effects {
        let before = View::of(&self.registers, &self.bytes);
        self.bytes.copy_from_slice(&self.power_on);
        let after = View::of(&self.registers, &self.bytes);
        Effects::between(&before, &after, None)
    }

    /// The address of BAR `bar` while the function decodes it: memory or I/O space is
    /// enabled and the function is in D0. `None` also for the upper half of a 64-bit BAR
    /// and for an unimplemented BAR.
    pub fn bar_address(&self, bar: u8) -> Option<GuestBarAddress> {
        let view = View::of(&self.registers, &self.bytes);
        view.bars.get(usize::from(bar)).copied().flatten()
    }

    /// Whether the function may master the bus: bus-master enable is set and the function
    /// is in D0.
    pub fn may_dma(&self) -> bool {
        View::of(&self.registers, &self.bytes).may_dma()
    }

    /// Whether the bus-master bit is set.
    pub fn bus_master(&self) -> bool {
        self.command() & COMMAND_MASTER != 0
    }

    /// Whether INTx disable is set.
    pub fn intx_disabled(&self) -> bool {
        self.command() & COMMAND_INTX_DISABLE != 0
    }

    /// Index of the byte with [Interrupt Status](farside_pci::regs::STATUS_INTERRUPT) in
    /// a read of `len` bytes at `offset`. `None` if the read does not cover it or INTx is
    /// not in use: the function lacks the pin, or MSI or MSI-X is enabled. The caller
    /// reads the bit from the device; [`read`](Self::read) returns 0 for it.
    pub fn interrupt_status_at(&self, offset: u64, len: usize) -> Option<usize> {
        let at = usize::try_from((STATUS as u64).checked_sub(offset)?).ok()?;
        let in_use = || {
            let registers = &self.registers;
            let msi = registers.msi.as_ref().map(|msi| msi.state(&self.bytes));
            let msix = registers.msix.as_ref().map(|msix| msix.state(&self.bytes));
            self.bytes[INTERRUPT_PIN] != 0
                && !msi.is_some_and(|msi| msi.enabled)
                && !msix.is_some_and(|msix| msix.enabled)
        };
        (at < len && in_use()).then_some(at)
    }

    /// The function's power state; D0 if it has no power management.
    pub fn power_state(&self) -> PowerState {
        View::of(&self.registers, &self.bytes).power
    }

    /// The state of MSI, if the function has it.
    pub fn msi(&self) -> Option<Msi> {
        View::of(&self.registers, &self.bytes).msi
    }

    /// The state of MSI-X, if the function has it.
    pub fn msix(&self) -> Option<Msix> {
        View::of(&self.registers, &self.bytes).msix
    }

    fn forwarded(&self, offset: u64, data: &[u8]) -> Vec<(Piece, u32)> {
        let pieces = self.forwarding.writes(offset, data.len());
        let with_value = pieces.filter_map(|piece| {
            let at = usize::from(piece.offset).checked_sub(usize::try_from(offset).ok()?)?;
            let mut value = [0; 4];
            let bytes = data.get(at..at + usize::from(piece.len))?;
            value[..bytes.len()].copy_from_slice(bytes);
            let value = u32::from_le_bytes(value) & self.forwarding.writable(piece)?;
            Some((piece, value))
        });
        with_value.collect()
    }

    fn command(&self) -> u16 {
        self.bytes.u16(COMMAND)
    }

    /// Index in the space of byte `at` of an access at `offset`, if it is inside.
    fn index(&self, offset: u64, at: u64) -> Option<usize> {
        let index = usize::try_from(offset.checked_add(at)?).ok()?;
        (index < self.bytes.len()).then_some(index)
    }

    /// The registers after a write. Applies each byte with its masks, and so handles
    /// partial and straddling writes.
    fn outcome(&self, offset: u64, data: &[u8]) -> Outcome {
        let mut bytes = self.bytes.clone();
        let mut reset = None;
        for (at, &data) in (0..).zip(data) {
            let Some(index) = self.index(offset, at) else {
                break;
            };
            let old = self.bytes[index];
            let (writable, clearable) = (self.writable[index], self.clearable[index]);
            bytes[index] =
                (old & !(writable | clearable)) | (data & writable) | (old & clearable & !data);
            if self.registers.starts_flr(index, data) {
                reset = Some(ResetCause::FunctionLevel);
            }
        }
        if let Some(pm) = &self.registers.pm {
            pm.discard_unsupported(&self.bytes, &mut bytes);
            if reset.is_none() && pm.resets(&self.bytes, &bytes) {
                reset = Some(ResetCause::LeftD3hot);
            }
        }
        if reset.is_some() {
            bytes.copy_from_slice(&self.power_on);
        }
        Outcome { bytes, reset }
    }
}

struct Outcome {
    bytes: ConfigImage,
    reset: Option<ResetCause>,
}

impl Registers {
    /// Whether writing `data` to the byte at `index` initiates a function level reset.
    /// The Initiate FLR bits read as 0 and are in neither mask.
    fn starts_flr(&self, index: usize, data: u8) -> bool {
        let bits = [
            self.pcie.as_ref().and_then(pcie::Registers::flr_bit),
            self.af.as_ref().and_then(af::Registers::flr_bit),
        ];
        bits.into_iter()
            .flatten()
            .any(|(at, bit)| at == index && data & bit != 0)
    }
}

#[cfg(test)]
mod tests;
