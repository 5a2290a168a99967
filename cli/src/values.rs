//! Values that flags of several verbs take.

use clap::ValueEnum;
use farside_qemu_configs::{Accel, HugePages, Machine};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MachineArg {
    /// PCI Express.
    Q35,
    /// Conventional PCI (i440FX).
    Pc,
}

impl MachineArg {
    pub(crate) fn machine(self) -> Machine {
        match self {
            Self::Pc => Machine::I440fx,
            Self::Q35 => Machine::Q35,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum AccelArg {
    /// KVM, or TCG if KVM is not available.
    Auto,
    /// KVM only.
    Kvm,
    /// Emulation (TCG).
    Tcg,
}

impl AccelArg {
    pub(crate) fn accel(self) -> Accel {
        match self {
            Self::Auto => Accel::Auto,
            Self::Kvm => Accel::Kvm,
            Self::Tcg => Accel::Tcg,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum HugePagesArg {
    /// 2 MiB
    #[value(name = "2M")]
    Of2MiB,
    /// 1 GiB
    #[value(name = "1G")]
    Of1GiB,
}

impl HugePagesArg {
    pub(crate) fn pages(self) -> HugePages {
        match self {
            Self::Of2MiB => HugePages::Of2MiB,
            Self::Of1GiB => HugePages::Of1GiB,
        }
    }
}
