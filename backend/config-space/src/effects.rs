//! Effects of a write, as values for the caller to carry out.

use farside_pci::ConfigImage;
use farside_pci::regs::{
    COMMAND, COMMAND_INTX_DISABLE, COMMAND_IO, COMMAND_MASTER, COMMAND_MEMORY,
};

use super::bar::GuestBarAddress;
use super::{Msi, Msix, PowerState, Registers};

/// How a bit changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// No change.
    Steady,
    /// From 0 to 1.
    Rising,
    /// From 1 to 0.
    Falling,
}

impl Edge {
    /// The change from `before` to `after`.
    pub fn between(before: bool, after: bool) -> Self {
        match (before, after) {
            (false, true) => Self::Rising,
            (true, false) => Self::Falling,
            _ => Self::Steady,
        }
    }
}

/// Why the function is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetCause {
    /// The guest initiated a function level reset (PCIe 6.6.2).
    FunctionLevel,
    /// The function went from D3hot to D0, and No_Soft_Reset is clear (PCIe 5.3.1.4).
    LeftD3hot,
}

/// One effect of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Bits of the command register changed.
    CommandChanged {
        /// Bus-master enable.
        bus_master: Edge,
        /// Memory space enable.
        memory: Edge,
        /// I/O space enable.
        io: Edge,
        /// INTx disable.
        intx_disable: Edge,
    },
    /// [`ConfigSpace::bar_address`](super::ConfigSpace::bar_address) of this
    /// BAR changed: it moved, or its decoding was enabled or disabled. May report a
    /// transient address: some guests size a BAR (write all ones) without disabling
    /// decoding first.
    BarMoved(u8),
    /// The power state changed to this one.
    PowerState(PowerState),
    /// MSI was enabled, disabled, masked or given another address or data.
    MsiChanged(Msi),
    /// MSI-X was enabled, disabled or masked as a whole.
    MsixChanged(Msix),
    /// The PCI Express device control register (PCIe 7.5.3.4) changed to this
    /// value.
    PcieControl(u16),
    /// The function must be reset. Comes last, after the changes by the reset, of which
    /// the end of bus mastering is the first.
    Reset(ResetCause),
}

/// Effects of a write, in the order to carry them out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects(Vec<Effect>);

impl Effects {
    /// Whether the write has no effect outside the configuration space.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The effects, in order.
    pub fn iter(&self) -> impl Iterator<Item = Effect> + '_ {
        self.0.iter().copied()
    }

    /// How the bus-master bit changes.
    pub fn bus_master(&self) -> Edge {
        self.iter()
            .find_map(|effect| match effect {
                Effect::CommandChanged { bus_master, .. } => Some(bus_master),
                _ => None,
            })
            .unwrap_or(Edge::Steady)
    }

    /// The cause of the reset, if the function must be reset.
    pub fn reset(&self) -> Option<ResetCause> {
        self.iter().find_map(|effect| match effect {
            Effect::Reset(cause) => Some(cause),
            _ => None,
        })
    }

    pub(super) fn between(before: &View, after: &View, reset: Option<ResetCause>) -> Self {
        let mut effects = Vec::new();
        let edge = |bit: u16| Edge::between(before.command & bit != 0, after.command & bit != 0);
        let bits = [
            edge(COMMAND_MASTER),
            edge(COMMAND_MEMORY),
            edge(COMMAND_IO),
            edge(COMMAND_INTX_DISABLE),
        ];
        if bits.iter().any(|edge| *edge != Edge::Steady) {
            let [bus_master, memory, io, intx_disable] = bits;
            effects.push(Effect::CommandChanged {
                bus_master,
                memory,
                io,
                intx_disable,
            });
        }
        for (bar, (old, new)) in (0..).zip(before.bars.iter().zip(&after.bars)) {
            if old != new {
                effects.push(Effect::BarMoved(bar));
            }
        }
        if before.power != after.power {
            effects.push(Effect::PowerState(after.power));
        }
        if let Some(msi) = after.msi.filter(|_| before.msi != after.msi) {
            effects.push(Effect::MsiChanged(msi));
        }
        if let Some(msix) = after.msix.filter(|_| before.msix != after.msix) {
            effects.push(Effect::MsixChanged(msix));
        }
        if let Some(control) = after
            .pcie_control
            .filter(|_| before.pcie_control != after.pcie_control)
        {
            effects.push(Effect::PcieControl(control));
        }
        effects.extend(reset.map(Effect::Reset));
        Self(effects)
    }
}

impl IntoIterator for Effects {
    type Item = Effect;
    type IntoIter = std::vec::IntoIter<Effect>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// The decoded registers.
pub struct View {
    pub command: u16,
    pub bars: [Option<GuestBarAddress>; 6],
    pub power: PowerState,
    pub msi: Option<Msi>,
    pub msix: Option<Msix>,
    pub pcie_control: Option<u16>,
}

impl View {
    pub fn of(registers: &Registers, image: &ConfigImage) -> Self {
        let command = image.u16(COMMAND);
        let power = registers
            .pm
            .as_ref()
            .map_or(PowerState::D0, |pm| pm.state(image));
        let mut bars = [None; 6];
        for (index, bar) in registers.bars.iter().enumerate() {
            bars[index] = bar
                .as_ref()
                .filter(|bar| power == PowerState::D0 && bar.decoded(command))
                .map(|bar| bar.address(index, image));
        }
        Self {
            command,
            bars,
            power,
            msi: registers.msi.as_ref().map(|msi| msi.state(image)),
            msix: registers.msix.as_ref().map(|msix| msix.state(image)),
            pcie_control: registers
                .pcie
                .as_ref()
                .map(|pcie| pcie.device_control(image)),
        }
    }

    pub fn may_dma(&self) -> bool {
        self.command & COMMAND_MASTER != 0 && self.power == PowerState::D0
    }
}
