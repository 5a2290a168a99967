//! The vectors of one function, with what each of them signals.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::{
    Action, IrqCounts, IrqData, IrqEvent, IrqIndex, IrqRange, IrqTarget, SetIrqs, SetIrqsError,
    state::{Raised, State},
};

/// A function's interrupts, from the device to the eventfds.
///
/// - INTx, MSI and MSI-X exclude each other. One is *enabled* from the first
///   request that sets triggers of it (even to none: QEMU enables MSI-X so)
///   until it is disabled as a whole.
/// - An MSI or MSI-X vector that is raised while it is masked *or has no
///   trigger* stays pending and fires once when both obstacles are gone. To the
///   guest a vector without trigger is a masked one: QEMU gives the trigger
///   only when the guest unmasks the vector.
/// - INTx fires when the line is asserted and nothing holds it back, and is
///   masked by that; on unmask it fires again if the line is still asserted. A
///   line that fell in between leaves nothing behind.
/// - Error and request interrupts are not masked and not remembered.
///
/// Owned by one thread, the device's; nothing here locks, and raising an
/// interrupt neither allocates nor searches.
#[derive(Debug)]
pub struct Vectors {
    state: State,
    /// By index, by vector.
    slots: [Box<[Slot]>; IrqIndex::ALL.len()],
    /// Raised without an IRQ target.
    dropped: u64,
    /// Fired, but the target refused it.
    failed: u64,
    /// A write to the client's eventfd has blocked: none of its eventfds is written again, so that
    /// it costs the device's thread one such write, not one per vector.
    blocked: bool,
}

#[derive(Clone, Debug, Default)]
struct Slot {
    target: Option<IrqTarget>,
    fired: u64,
}

impl Vectors {
    /// Nothing enabled, nothing masked.
    pub fn new(counts: IrqCounts) -> Self {
        Self {
            state: State::new(counts),
            slots: IrqIndex::ALL
                .map(|index| vec![Slot::default(); counts.count(index).into()].into()),
            dropped: 0,
            failed: 0,
            blocked: false,
        }
    }

    /// What the function has.
    pub fn counts(&self) -> IrqCounts {
        self.state.counts()
    }

    /// Which of INTx, MSI and MSI-X is enabled: the one whose triggers were
    /// set last.
    pub fn enabled(&self) -> Option<IrqIndex> {
        self.state.enabled()
    }

    /// Executes a client's request. On an error nothing is changed.
    ///
    /// A backend that only records, because a lender's `Vectors` does the work,
    /// passes everything here too, except triggers without targets (loopback
    /// tests): those would fire on both sides.
    pub fn apply(&mut self, request: SetIrqs) -> Result<(), SetIrqsError> {
        let (range, action, data) = request.into_parts();
        range.recheck(&self.state.counts())?;
        match (action, data) {
            (Action::Trigger, IrqData::None) if range.count() == 0 => self.disable(range.index()),
            (Action::Trigger, IrqData::Targets(targets)) => self.set_targets(range, targets)?,
            (Action::Trigger, data) => self.loop_back(range, &data)?,
            (Action::Mask, data) => self.set_masked(range, &data, true),
            (Action::Unmask, data) => self.set_masked(range, &data, false),
        }
        Ok(())
    }

    /// Disables every index, as when the client goes away.
    pub fn disable_all(&mut self) {
        for index in IrqIndex::ALL {
            self.disable(index);
        }
        self.blocked = false;
    }

    /// The device sends the message of `vector` (MSI or MSI-X, whichever is
    /// enabled). Without either, or without such a vector, it is counted and
    /// dropped.
    pub fn raise(&mut self, vector: u16) {
        let raised = self.state.raise(vector);
        self.take(raised);
    }

    /// The device drives its INTx line.
    pub fn set_intx(&mut self, asserted: bool) {
        let event = self.state.set_intx(asserted);
        self.perform(event);
    }

    /// Whether the device drives its INTx line: Interrupt Status in the status
    /// register (PCIe 7.5.1.1.4), which neither masks nor INTx disable change.
    pub fn intx_asserted(&self) -> bool {
        self.state.intx_asserted()
    }

    /// The guest sets or clears INTx disable (command register, bit 10).
    pub fn set_intx_disabled(&mut self, disabled: bool) {
        let event = self.state.set_intx_disabled(disabled);
        self.perform(event);
    }

    /// The device has failed: notifies the client, if it has set an eventfd.
    pub fn signal_err(&mut self) {
        self.deliver(IrqEvent::at(IrqIndex::Err, 0));
    }

    /// Asks the client to release the device, if it has set an eventfd. Returns whether it has.
    pub fn signal_req(&mut self) -> bool {
        self.deliver(IrqEvent::at(IrqIndex::Req, 0));
        let slot = self.slots[IrqIndex::Req as usize].first();
        slot.is_some_and(|slot| slot.target.is_some())
    }

    /// Passes on what a [`Relay`](crate::Relay) on another host sent. It fires
    /// once; masked vectors stay pending. An INTx interrupt masks the line
    /// here, as it did there. What comes for an index that was disabled in the
    /// meantime is counted and dropped.
    pub fn deliver(&mut self, event: IrqEvent) {
        let raised = self.state.deliver(event);
        self.take(raised);
    }

    /// The function is reset: nothing is pending, the line is low, INTx disable
    /// is clear. Triggers and masks are the client's and stay.
    pub fn reset(&mut self) {
        self.state.reset();
    }

    /// Whether the message of `vector` is held back: its bit in the MSI-X
    /// pending bit array.
    pub fn is_pending(&self, vector: u16) -> bool {
        self.state.is_pending(vector)
    }

    /// How often `vector` of `index` has fired.
    pub fn fired(&self, index: IrqIndex, vector: u16) -> u64 {
        self.slots[index as usize]
            .get(usize::from(vector))
            .map_or(0, |slot| slot.fired)
    }

    /// The number of vectors with an eventfd of the client, and of all vectors.
    pub fn eventfds(&self) -> (usize, usize) {
        let slots = || self.slots.iter().flatten();
        let is_eventfd = |slot: &&Slot| matches!(slot.target, Some(IrqTarget::EventFd(_)));
        (slots().filter(is_eventfd).count(), slots().count())
    }

    /// The figures that people and tests look at.
    pub fn status(&self) -> VectorsStatus {
        let fired = IrqIndex::ALL.into_iter().flat_map(|index| {
            let slots = self.slots[index as usize].iter().zip(0..);
            slots
                .filter(|(slot, _)| slot.fired != 0)
                .map(move |(slot, vector)| VectorCount {
                    index,
                    vector,
                    fired: slot.fired,
                })
        });
        VectorsStatus {
            enabled: self.enabled(),
            fired: fired.collect(),
            pending: self.state.pending(),
            dropped: self.dropped,
            failed: self.failed,
        }
    }

    /// Requests that bring new [`Vectors`] of the same function into the
    /// configuration of these (masks, triggers; not what is pending), in order.
    /// None has more than `max_vectors` targets, except that MSI is never split:
    /// VFIO enables its vectors together.
    pub fn configuration(&self, max_vectors: u16) -> Vec<SetIrqs> {
        let mut requests = Vec::new();
        for index in IrqIndex::ALL {
            let masks = self.state.masks(index);
            if !masks.is_empty() {
                requests.push(self.request(index, 0, Action::Mask, IrqData::Bool(masks)));
            }
            // Triggers last, so that nothing fires that should be masked.
            let slots = &self.slots[index as usize];
            let used = slots.iter().rposition(|slot| slot.target.is_some());
            let used = match used {
                Some(last) => last + 1,
                // Enabled, with no trigger yet.
                None if self.enabled() == Some(index) => 1,
                None => continue,
            };
            let step = match index {
                IrqIndex::Msix => usize::from(max_vectors.max(1)),
                _ => used,
            };
            for (chunk, start) in slots[..used].chunks(step).zip((0..).step_by(step)) {
                let targets = chunk.iter().map(|slot| slot.target.clone()).collect();
                requests.push(self.request(
                    index,
                    start,
                    Action::Trigger,
                    IrqData::Targets(targets),
                ));
            }
        }
        requests
    }

    fn request(&self, index: IrqIndex, start: u32, action: Action, data: IrqData) -> SetIrqs {
        let count = match &data {
            IrqData::None => 0,
            IrqData::Bool(chosen) => chosen.len(),
            IrqData::Targets(targets) => targets.len(),
        };
        IrqRange::new(&self.counts(), index as u32, start, count as u32)
            .and_then(|range| SetIrqs::new(range, action, data))
            .expect("our own configuration is within our own counts")
    }

    fn disable(&mut self, index: IrqIndex) {
        self.state.disable(index);
        for slot in &mut self.slots[index as usize] {
            slot.target = None;
        }
        // INTx can be enabled again only by a request: nothing fires here.
    }

    fn set_targets(
        &mut self,
        range: IrqRange,
        targets: Vec<Option<IrqTarget>>,
    ) -> Result<(), SetIrqsError> {
        let index = range.index();
        self.state.enable(index)?;
        for (vector, target) in range.vectors().zip(targets) {
            let present = target.is_some();
            // The target first: setting the trigger may fire what was pending.
            self.slots[index as usize][usize::from(vector)].target = target;
            let event = self.state.set_trigger(index, vector, present);
            self.perform(event);
        }
        Ok(())
    }

    fn loop_back(&mut self, range: IrqRange, data: &IrqData) -> Result<(), SetIrqsError> {
        let index = range.index();
        let single = matches!(index, IrqIndex::Err | IrqIndex::Req);
        if !single && self.enabled() != Some(index) {
            return Err(SetIrqsError::NotEnabled { index });
        }
        for vector in chosen(range, data) {
            self.deliver(IrqEvent::at(index, vector));
        }
        Ok(())
    }

    fn set_masked(&mut self, range: IrqRange, data: &IrqData, masked: bool) {
        for vector in chosen(range, data) {
            let event = self.state.set_masked(range.index(), vector, masked);
            self.perform(event);
        }
    }

    fn take(&mut self, raised: Raised) {
        match raised {
            Raised::Event(event) => self.perform(Some(event)),
            Raised::Held => {}
            Raised::Dropped => self.dropped += 1,
        }
    }

    fn perform(&mut self, event: Option<IrqEvent>) {
        let Some(event) = event else { return };
        let slot = &mut self.slots[event.index() as usize][usize::from(event.vector())];
        slot.fired += 1;
        let target = slot.target.as_ref().filter(|_| !self.blocked);
        match target.map(|target| target.signal(event)) {
            Some(Ok(())) => return,
            Some(Err(Errno::TIMEDOUT)) => {
                self.blocked = true;
                log::error!(
                    "the client gets no more interrupts: the eventfd of {} vector {} is full and in blocking mode",
                    event.index(),
                    event.vector()
                );
            }
            Some(Err(_)) | None => {}
        }
        self.failed += 1;
    }
}

/// The vectors of `range` that `data` means.
fn chosen(range: IrqRange, data: &IrqData) -> impl Iterator<Item = u16> {
    range
        .vectors()
        .enumerate()
        .filter(move |(entry, _)| match data {
            IrqData::None => true,
            IrqData::Bool(chosen) => chosen[*entry],
            IrqData::Targets(_) => false,
        })
        .map(|(_, vector)| vector)
}

/// What a function's interrupts have come to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VectorsStatus {
    /// Which of INTx, MSI and MSI-X is enabled.
    pub enabled: Option<IrqIndex>,
    /// Every vector that fired, and how often.
    pub fired: Vec<VectorCount>,
    /// Vectors that are held back now.
    pub pending: u32,
    /// Interrupts that were raised without an IRQ target.
    pub dropped: u64,
    /// Interrupts that fired, but whose eventfd could not be written.
    pub failed: u64,
}

/// How often one vector fired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VectorCount {
    /// The kind of interrupt.
    pub index: IrqIndex,
    /// The vector.
    pub vector: u16,
    /// How often.
    pub fired: u64,
}
