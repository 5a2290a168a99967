//! A physical function's interrupts.
//!
//! In the direct form the kernel signals the VMM's eventfds itself. In the relayed form it signals
//! the lender's eventfds, and the device thread forwards the interrupts.

use std::{
    collections::BTreeMap,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use farside_host_pci::{HostPci, IrqKind};
use farside_irq_relay::{
    Action, IrqCounts, IrqData, IrqEvent, IrqEventFd, IrqIndex, IrqRange, IrqTarget, Relay,
    SetIrqs, VectorCount,
};
use farside_lender_protocol::{IrqUpdate, RemoteError, irq_counts};
use farside_pci::regs::{COMMAND_INTX_DISABLE, STATUS, STATUS_INTERRUPT};
use farside_pci::{Bdf, Description};
use farside_vfio::Function;
use rustix::event::{Timespec, epoll};

use super::config_space::ConfigAccess;
use crate::{
    refusals::{internal, invalid_irqs},
    source::Irqs,
};

/// Maximum number of vectors per `epoll_wait`.
const READY: usize = 64;

/// What raises the interrupts: a function, or a server that has one.
pub(crate) trait Raises: ConfigAccess + Send + Sync {
    /// The interrupts that it raises.
    fn counts(&self) -> IrqCounts;

    /// Sets targets or masks.
    fn set_irqs(&self, request: &SetIrqs) -> Result<(), RemoteError>;
}

impl Raises for Function {
    fn counts(&self) -> IrqCounts {
        self.irq_counts()
    }

    fn set_irqs(&self, request: &SetIrqs) -> Result<(), RemoteError> {
        Function::set_irqs(self, request).map_err(internal)
    }
}

/// The interrupt targets of a function.
pub(crate) struct FunctionIrqs<F: Raises> {
    function: Arc<F>,
    /// The vector counts reported to the borrower.
    counts: IrqCounts,
    relay: Arc<Relay>,
    /// The lender's eventfds, by index and vector.
    ours: BTreeMap<(IrqIndex, u16), IrqEventFd>,
    /// Readable when one of `ours` is.
    epoll: OwnedFd,
}

impl<F: Raises> FunctionIrqs<F> {
    pub(crate) fn new(description: &Description, function: Arc<F>) -> Result<Self, RemoteError> {
        Ok(Self {
            function,
            counts: irq_counts(description).map_err(internal)?,
            relay: Arc::default(),
            ours: BTreeMap::new(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(internal)?,
        })
    }

    /// Creates an eventfd for each vector to relay.
    #[allow(clippy::type_complexity)]
    fn with_ours(
        &self,
        range: IrqRange,
        targets: Vec<Option<IrqTarget>>,
    ) -> Result<(IrqData, Vec<(u16, IrqEventFd)>), RemoteError> {
        let mut ours = Vec::new();
        let mut triggers = Vec::with_capacity(targets.len());
        for (vector, target) in range.vectors().zip(targets) {
            triggers.push(match target {
                Some(IrqTarget::Relay(_)) => {
                    let trigger = IrqEventFd::new().map_err(internal)?;
                    ours.push((vector, trigger.clone()));
                    Some(IrqTarget::EventFd(trigger))
                }
                other => other,
            });
        }
        Ok((IrqData::Targets(triggers), ours))
    }

    fn adopt(&mut self, index: IrqIndex, ours: Vec<(u16, IrqEventFd)>) -> Result<(), RemoteError> {
        for (vector, trigger) in ours {
            let data = epoll::EventData::new_u64(key(index, vector));
            epoll::add(&self.epoll, &trigger, data, epoll::EventFlags::IN).map_err(internal)?;
            self.ours.insert((index, vector), trigger);
        }
        Ok(())
    }

    fn forget(&mut self, which: impl Fn((IrqIndex, u16)) -> bool) {
        self.ours.retain(|at, trigger| {
            let goes = which(*at);
            if goes && let Err(error) = epoll::delete(&self.epoll, trigger) {
                log::error!("cannot stop looking at an interrupt: {error}");
            }
            !goes
        });
    }

    /// Posts raised vectors to the relay. Returns whether there were any.
    pub(crate) fn poll(&mut self) -> bool {
        if self.ours.is_empty() {
            return false;
        }
        let mut ready = [const { MaybeUninit::uninit() }; READY];
        let now = Timespec::default();
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut ready, Some(&now)) else {
            // Interrupted: nothing found.
            return false;
        };
        for event in &*ready {
            let (index, vector) = unkey(event.data.u64());
            let fired = self
                .ours
                .get(&(index, vector))
                .is_some_and(|trigger| matches!(trigger.take(), Ok(Some(_))));
            if fired {
                // Posting to a bit set cannot fail.
                let _ = IrqEvent::new(index, vector).map(|event| self.relay.post(event));
            }
        }
        !ready.is_empty()
    }

    /// Readable when [`FunctionIrqs::poll`] has work.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl<F: Raises> Irqs for FunctionIrqs<F> {
    fn set(&mut self, update: IrqUpdate, fds: Vec<OwnedFd>) -> Result<(), RemoteError> {
        let request = update
            .into_request(&self.counts, fds, &self.relay)
            .map_err(invalid_irqs)?;
        let (range, action, data) = request.into_parts();
        if self.function.counts().count(range.index()) == 0 {
            // Error and request interrupts are reported to every borrower, but this function raises
            // none.
            return Ok(());
        }
        let (data, ours) = match data {
            IrqData::Targets(targets) => {
                let (data, ours) = self.with_ours(range, targets)?;
                (data, Some(ours))
            }
            other => (other, None),
        };
        let disables = action == Action::Trigger && range.count() == 0;
        let request = SetIrqs::new(range, action, data).map_err(invalid_irqs)?;
        self.function.set_irqs(&request)?;
        if disables {
            self.forget(|(index, _)| index == range.index());
        }
        if let Some(ours) = ours {
            self.forget(|(index, vector)| {
                index == range.index() && range.vectors().contains(&vector)
            });
            self.adopt(range.index(), ours)?;
        }
        Ok(())
    }

    fn set_intx_disable(&mut self, disabled: bool) -> Result<(), RemoteError> {
        let (set, clear) = match disabled {
            true => (COMMAND_INTX_DISABLE, 0),
            false => (0, COMMAND_INTX_DISABLE),
        };
        self.function.set_command(set, clear)
    }

    /// Read from the function's register: Interrupt Status stays set when the kernel masks a
    /// received interrupt, which it does by INTx disable.
    fn intx_status(&mut self) -> bool {
        let mut low = [0];
        match self.function.config_read(STATUS as u64, &mut low) {
            Ok(()) => u16::from(low[0]) & STATUS_INTERRUPT != 0,
            Err(error) => {
                log::debug!("INTx: {error}");
                false
            }
        }
    }

    fn relay(&self) -> &Relay {
        &self.relay
    }
}

fn key(index: IrqIndex, vector: u16) -> u64 {
    (index as u64) << 16 | u64::from(vector)
}

fn unkey(key: u64) -> (IrqIndex, u16) {
    (
        IrqIndex::ALL[(key >> 16) as usize % IrqIndex::ALL.len()],
        key as u16,
    )
}

/// The interrupts that the kernel has received from the function.
pub(super) fn counts(host: &HostPci, bdf: Bdf) -> Vec<VectorCount> {
    let counts = host.interrupt_counts(&bdf).unwrap_or_default();
    let counts = counts.into_iter().map(|count| {
        let index = match count.kind {
            IrqKind::Intx => IrqIndex::Intx,
            IrqKind::Msi => IrqIndex::Msi,
            IrqKind::Msix => IrqIndex::Msix,
        };
        VectorCount {
            index,
            vector: count.vector as u16,
            fired: count.count,
        }
    });
    counts.filter(|count| count.fired != 0).collect()
}
