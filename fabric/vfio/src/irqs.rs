//! Interrupts of a function, through the kernel.
//!
//! A borrower's requests follow `linux/vfio.h`, but expect a little more than
//! vfio-pci does:
//!
//! - vectors can be added where the kernel allocates them all at once (`VFIO_IRQ_INFO_NORESIZE`):
//!   the index is disabled and set up again with what it had. For MSI-X that is spared by asking
//!   for all vectors at first: those without an eventfd stay masked in the device. (Not for MSI,
//!   whose Multiple Message Enable field would let the device use them.)
//! - MSI and MSI-X vectors can be masked, which vfio-pci answers with ENOTTY: a masked vector
//!   signals a private eventfd, whose counter is its pending bit.
//! - an index that is not enabled may be disabled.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use farside_error_chain::Chain;
use farside_irq_relay::{Action, IrqData, IrqEventFd, IrqIndex, IrqInfo, IrqTarget, SetIrqs, wire};
use farside_pci::Bdf;

use crate::VfioError;
use crate::ioctl::{IrqSet, IrqSetData};

/// Executes `VFIO_DEVICE_SET_IRQS`.
pub(crate) trait Kernel {
    fn set_irqs(&self, set: IrqSet<'_>) -> io::Result<()>;
}

/// The current configuration.
#[derive(Debug)]
pub(crate) struct Irqs {
    bdf: Bdf,
    tables: [VectorTable; 5],
    /// The kernel may have enabled one for a process that is gone.
    inherited: bool,
}

/// One interrupt index.
#[derive(Debug)]
struct VectorTable {
    index: IrqIndex,
    /// Vectors that the function has.
    available: usize,
    no_resize: bool,
    /// Vectors that the kernel has enabled; `None` when it has not enabled the
    /// index.
    enabled: Option<usize>,
    /// Those that were ever mentioned since the index was enabled.
    vectors: Vec<Vector>,
}

#[derive(Clone, Debug, Default)]
struct Vector {
    /// Its eventfd.
    trigger: Option<IrqEventFd>,
    /// While masked: what the kernel signals instead.
    parked: Option<IrqEventFd>,
}

impl Vector {
    /// The eventfd for the kernel to signal.
    fn signals(&self) -> Option<BorrowedFd<'_>> {
        let trigger = self.trigger.as_ref()?;
        Some(self.parked.as_ref().unwrap_or(trigger).as_fd())
    }
}

impl Irqs {
    /// Nothing is enabled, unless that is `inherited` from a process that is gone.
    pub(crate) fn new(bdf: Bdf, infos: [IrqInfo; 5], inherited: bool) -> Self {
        let tables = IrqIndex::ALL.map(|index| {
            let info = infos[index as usize];
            VectorTable {
                index,
                available: info.count as usize,
                no_resize: info.flags & wire::INFO_NORESIZE != 0,
                enabled: None,
                vectors: Vec::new(),
            }
        });
        Self {
            bdf,
            tables,
            inherited,
        }
    }

    /// Executes a request. An error rolls back, as far as the kernel allows.
    pub(crate) fn apply(
        &mut self,
        kernel: &dyn Kernel,
        request: &SetIrqs,
    ) -> Result<(), VfioError> {
        let range = request.range();
        let index = range.index();
        if range.count() != 0 && matches!(request.data(), IrqData::Targets(_)) {
            self.disable_inherited(kernel, index);
        }
        let (bdf, table) = (self.bdf, &mut self.tables[index as usize]);
        let start = usize::from(range.start());
        let done = match (request.action(), request.data()) {
            (Action::Trigger, IrqData::None) if range.count() == 0 => table.disable(kernel),
            (Action::Trigger, IrqData::Targets(targets)) => {
                let triggers = (range.vectors().zip(targets))
                    .map(|(vector, target)| match target {
                        None => Ok(None),
                        Some(IrqTarget::EventFd(trigger)) => Ok(Some(trigger.clone())),
                        Some(IrqTarget::Relay(_)) => {
                            Err(VfioError::NotAnEventFd { bdf, index, vector })
                        }
                    })
                    .collect::<Result<Vec<_>, _>>()?;
                table.set_triggers(kernel, start, triggers, self.inherited)
            }
            // A software trigger, to test the path.
            (Action::Trigger, IrqData::None) => {
                let all = IrqSetData::All(range.count().into());
                table.send(kernel, wire::SET_ACTION_TRIGGER, start, all)
            }
            (Action::Trigger, IrqData::Bool(chosen)) => {
                let chosen = IrqSetData::Chosen(chosen);
                table.send(kernel, wire::SET_ACTION_TRIGGER, start, chosen)
            }
            (action @ (Action::Mask | Action::Unmask), data) => {
                let masked = action == Action::Mask;
                let chosen: Vec<usize> = match data {
                    IrqData::None => range.vectors().map(usize::from).collect(),
                    IrqData::Bool(chosen) => (start..)
                        .zip(chosen)
                        .filter_map(|(vector, &chosen)| chosen.then_some(vector))
                        .collect(),
                    // `SetIrqs` lets no eventfd through here.
                    IrqData::Targets(_) => Vec::new(),
                };
                let mut chosen = chosen.into_iter();
                chosen.try_for_each(|vector| table.set_masked(kernel, vector, masked))
            }
        };
        done.map_err(|source| VfioError::Irqs {
            bdf,
            index,
            start: range.start(),
            end: range.vectors().end,
            source,
        })
    }

    /// Disables what is not enabled here, but for a process that is gone, as `index` is about to be enabled: the kernel
    /// enables one of INTx, MSI and MSI-X.
    fn disable_inherited(&self, kernel: &dyn Kernel, index: IrqIndex) {
        let others = self.tables.iter().filter(|table| {
            self.inherited
                && table.is_of_device()
                && table.enabled.is_none()
                && table.index != index
        });
        for table in others {
            // Fails if another one is enabled.
            let _ = table.send(kernel, wire::SET_ACTION_TRIGGER, 0, IrqSetData::All(0));
        }
    }

    /// What was enabled for a process that is gone is disabled, if it was not enabled here since.
    pub(crate) fn settle(&mut self, kernel: &dyn Kernel) {
        self.disable_inherited(kernel, IrqIndex::Req);
        self.inherited = false;
    }

    /// Signals the eventfd of each vector, as if the function had raised it: a masked one becomes pending.
    pub(crate) fn signal_all(&self, kernel: &dyn Kernel) -> Result<(), VfioError> {
        for table in self.tables.iter().filter(|table| table.is_of_device()) {
            let Some(enabled) = table.enabled else {
                continue;
            };
            let all = IrqSetData::All(enabled as u32);
            let sent = table.send(kernel, wire::SET_ACTION_TRIGGER, 0, all);
            sent.map_err(|source| VfioError::Irqs {
                bdf: self.bdf,
                index: table.index,
                start: 0,
                end: enabled as u16,
                source,
            })?;
        }
        Ok(())
    }

    /// Disables every index; logs failures.
    pub(crate) fn disable_all(&mut self, kernel: &dyn Kernel) {
        for table in &mut self.tables {
            if let Err(error) = table.disable(kernel) {
                let (bdf, index) = (self.bdf, table.index);
                log::error!(
                    "{bdf}: cannot disable {index}: {error}",
                    error = Chain(&error)
                );
            }
        }
    }
}

impl VectorTable {
    fn send(
        &self,
        kernel: &dyn Kernel,
        action: u32,
        start: usize,
        data: IrqSetData<'_>,
    ) -> io::Result<()> {
        kernel.set_irqs(IrqSet {
            action,
            index: self.index as u32,
            start: start as u32,
            data,
        })
    }

    /// Whether the function raises them, and not the kernel.
    fn is_of_device(&self) -> bool {
        self.has_messages() || self.index == IrqIndex::Intx
    }

    /// Whether the index is of single vectors that the kernel allocates.
    fn has_messages(&self) -> bool {
        matches!(self.index, IrqIndex::Msi | IrqIndex::Msix)
    }

    fn disable(&mut self, kernel: &dyn Kernel) -> io::Result<()> {
        if self.enabled.is_some() {
            self.send(kernel, wire::SET_ACTION_TRIGGER, 0, IrqSetData::All(0))?;
        }
        self.enabled = None;
        self.vectors.clear();
        Ok(())
    }

    fn set_triggers(
        &mut self,
        kernel: &dyn Kernel,
        start: usize,
        triggers: Vec<Option<IrqEventFd>>,
        inherited: bool,
    ) -> io::Result<()> {
        let end = start + triggers.len();
        let before = self.vectors.clone();
        if self.vectors.len() < end {
            self.vectors.resize(end, Vector::default());
        }
        for (vector, trigger) in self.vectors[start..end].iter_mut().zip(triggers) {
            vector.trigger = trigger;
        }
        let result = match self.enabled {
            Some(enabled) if self.no_resize && end > enabled => self.enable_again(kernel, &before),
            Some(enabled) => self.tell(kernel, start, end, enabled),
            None => match self.enable(kernel) {
                // For a process that is gone, with fewer vectors.
                Err(_) if inherited => {
                    // Fails if it was not.
                    let _ = self.send(kernel, wire::SET_ACTION_TRIGGER, 0, IrqSetData::All(0));
                    self.enable(kernel)
                }
                enabled => enabled,
            },
        };
        if result.is_err() {
            self.vectors = before;
        }
        result
    }

    /// Sets the kernel's eventfds of the vectors `start..end`.
    fn tell(
        &mut self,
        kernel: &dyn Kernel,
        start: usize,
        end: usize,
        enabled: usize,
    ) -> io::Result<()> {
        let fds: Vec<_> = (start..end)
            .map(|at| self.vectors.get(at).and_then(Vector::signals))
            .collect();
        let data = IrqSetData::EventFds(&fds);
        self.send(kernel, wire::SET_ACTION_TRIGGER, start, data)?;
        // The error and request interrupts are enabled by having an eventfd.
        let gone =
            matches!(self.index, IrqIndex::Err | IrqIndex::Req) && fds.iter().all(Option::is_none);
        self.enabled = (!gone).then_some(enabled.max(end));
        Ok(())
    }

    /// Enables the index with all vectors that were mentioned.
    fn enable(&mut self, kernel: &dyn Kernel) -> io::Result<()> {
        let mentioned = self.vectors.len();
        let spare = self.no_resize && self.index == IrqIndex::Msix;
        if spare && self.available > mentioned {
            // The host may not have as many free vectors.
            let all = self.tell(kernel, 0, self.available, 0);
            if all.is_ok() {
                return all;
            }
        }
        self.tell(kernel, 0, mentioned, 0)
    }

    /// Enables more vectors than the kernel can add. When it refuses, those of
    /// `before` are enabled again.
    fn enable_again(&mut self, kernel: &dyn Kernel, before: &[Vector]) -> io::Result<()> {
        self.send(kernel, wire::SET_ACTION_TRIGGER, 0, IrqSetData::All(0))?;
        self.enabled = None;
        let result = self.enable(kernel);
        if result.is_err() {
            self.vectors = before.to_vec();
            if let Err(error) = self.enable(kernel) {
                log::error!(
                    "cannot enable {} as it was: {error}",
                    self.index,
                    error = Chain(&error)
                );
            }
        }
        result
    }

    fn set_masked(&mut self, kernel: &dyn Kernel, at: usize, masked: bool) -> io::Result<()> {
        if !self.has_messages() {
            // The kernel masks INTx itself. Nothing to mask while disabled.
            let action = match masked {
                true => wire::SET_ACTION_MASK,
                false => wire::SET_ACTION_UNMASK,
            };
            return match self.enabled {
                Some(_) => self.send(kernel, action, at, IrqSetData::All(1)),
                None => Ok(()),
            };
        }
        if self.vectors.len() <= at {
            if !masked {
                return Ok(());
            }
            self.vectors.resize(at + 1, Vector::default());
        }
        let vector = &mut self.vectors[at];
        if vector.parked.is_some() == masked {
            return Ok(());
        }
        let new = if masked {
            Some(IrqEventFd::new()?)
        } else {
            None
        };
        let old = std::mem::replace(&mut vector.parked, new);
        let signalled = vector.trigger.is_some();
        if signalled
            && let Some(enabled) = self.enabled.filter(|&enabled| at < enabled)
            && let Err(error) = self.tell(kernel, at, at + 1, enabled)
        {
            self.vectors[at].parked = old;
            return Err(error);
        }
        // The kernel signals the new eventfd by now, and no longer the old one.
        if let (Some(parked), Some(trigger)) = (old, &self.vectors[at].trigger)
            && parked.take()?.is_some()
        {
            trigger.signal()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
