//! `SET_IRQS` requests to the lender.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use farside_irq_relay::{
    Action, IrqCounts, IrqCountsError, IrqData, IrqEventFd, IrqRange, IrqTarget, Relay, SetIrqs,
    SetIrqsError,
};
use farside_pci::Description;
use serde::{Deserialize, Serialize};

/// One change to a function's interrupts (VFIO's `SET_IRQS`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IrqUpdate {
    index: u8,
    start: u16,
    count: u16,
    action: Action,
    vectors: IrqVectors,
}

/// The vectors of an [`IrqUpdate`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum IrqVectors {
    /// All of them.
    All,
    /// The vectors whose element is true.
    Some(Vec<bool>),
    /// Signal these eventfds: the next descriptor for each true, nothing for
    /// each false.
    EventFds(Vec<bool>),
    /// Send an event on the register channel for each true, nothing for each
    /// false.
    Relay(Vec<bool>),
}

impl IrqUpdate {
    /// The message for `request`, and its descriptors: the eventfds, or none if
    /// interrupts are `relayed`.
    pub fn new(request: &SetIrqs, relayed: bool) -> (Self, Vec<BorrowedFd<'_>>) {
        let range = request.range();
        let mut fds = Vec::new();
        let vectors = match request.data() {
            IrqData::None => IrqVectors::All,
            IrqData::Bool(chosen) => IrqVectors::Some(chosen.clone()),
            IrqData::Targets(targets) => {
                let present = targets.iter().map(Option::is_some).collect();
                if relayed {
                    IrqVectors::Relay(present)
                } else {
                    let triggers = targets.iter().flatten().filter_map(IrqTarget::trigger);
                    fds.extend(triggers.map(IrqEventFd::as_fd));
                    IrqVectors::EventFds(present)
                }
            }
        };
        let update = Self {
            index: range.index() as u8,
            start: range.start(),
            count: range.count(),
            action: request.action(),
            vectors,
        };
        (update, fds)
    }

    /// Number of descriptors that the message must have.
    pub fn descriptors(&self) -> usize {
        match &self.vectors {
            IrqVectors::EventFds(present) => present.iter().filter(|present| **present).count(),
            IrqVectors::All | IrqVectors::Some(_) | IrqVectors::Relay(_) => 0,
        }
    }

    /// The request, checked against the function. Relayed vectors use `relay`.
    pub fn into_request(
        self,
        counts: &IrqCounts,
        fds: Vec<OwnedFd>,
        relay: &Arc<Relay>,
    ) -> Result<SetIrqs, SetIrqsError> {
        let range = IrqRange::new(
            counts,
            self.index.into(),
            self.start.into(),
            self.count.into(),
        )?;
        let data = match self.vectors {
            IrqVectors::All => IrqData::None,
            IrqVectors::Some(chosen) => IrqData::Bool(chosen),
            IrqVectors::Relay(present) => IrqData::Targets(
                present
                    .into_iter()
                    .map(|present| present.then(|| IrqTarget::Relay(Arc::clone(relay))))
                    .collect(),
            ),
            IrqVectors::EventFds(present) => {
                let wrong_count = SetIrqsError::WrongCount {
                    index: range.index(),
                    vectors: present.iter().filter(|present| **present).count() as u16,
                    entries: fds.len(),
                };
                let mut fds = fds.into_iter();
                let mut targets = Vec::with_capacity(present.len());
                for present in present {
                    targets.push(match (present, present.then(|| fds.next()).flatten()) {
                        (false, _) => None,
                        (true, Some(fd)) => Some(IrqTarget::EventFd(IrqEventFd::try_from(fd)?)),
                        (true, None) => return Err(wrong_count),
                    });
                }
                if fds.next().is_some() {
                    return Err(wrong_count);
                }
                IrqData::Targets(targets)
            }
        };
        SetIrqs::new(range, self.action, data)
    }
}

/// The interrupts of a function: those in its description, and the error and request
/// interrupts, which farside adds for the client.
pub fn irq_counts(description: &Description) -> Result<IrqCounts, IrqCountsError> {
    let mut counts = IrqCounts::new()
        .with_msi(description.msi_vectors)?
        .with_msix(description.msix_vectors)?
        .with_err()
        .with_req();
    if description.intx {
        counts = counts.with_intx();
    }
    Ok(counts)
}
