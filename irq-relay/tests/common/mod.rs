//! Short notations for a client's requests.
#![allow(dead_code, reason = "each test file uses what it needs")]

use farside_irq_relay::{
    Action, IrqCounts, IrqData, IrqEventFd, IrqIndex, IrqRange, IrqTarget, SetIrqs, SetIrqsError,
    Vectors,
};

/// Every interrupt a function can have: INTx, 32 MSI, 2048 MSI-X, error,
/// request.
pub fn all_counts() -> IrqCounts {
    IrqCounts::new()
        .with_intx()
        .with_msi(32)
        .and_then(|counts| counts.with_msix(2048))
        .unwrap()
        .with_err()
        .with_req()
}

pub fn vectors() -> Vectors {
    Vectors::new(all_counts())
}

pub fn request(
    index: IrqIndex,
    start: u32,
    count: u32,
    action: Action,
    data: IrqData,
) -> Result<SetIrqs, SetIrqsError> {
    let range = IrqRange::new(&all_counts(), index as u32, start, count)?;
    SetIrqs::new(range, action, data)
}

/// Sets new eventfds as the triggers of `start..start + count`.
pub fn set_triggers(
    vectors: &mut Vectors,
    index: IrqIndex,
    start: u32,
    count: u32,
) -> Vec<IrqEventFd> {
    let triggers: Vec<_> = (0..count).map(|_| IrqEventFd::new().unwrap()).collect();
    let targets = triggers.iter().cloned().map(|fd| Some(IrqTarget::from(fd)));
    let data = IrqData::Targets(targets.collect());
    let set = request(index, start, count, Action::Trigger, data).unwrap();
    vectors.apply(set).unwrap();
    triggers
}

pub fn set_masked(vectors: &mut Vectors, index: IrqIndex, vector: u32, masked: bool) {
    let action = if masked { Action::Mask } else { Action::Unmask };
    let set = request(index, vector, 1, action, IrqData::None).unwrap();
    vectors.apply(set).unwrap();
}

pub fn disable(vectors: &mut Vectors, index: IrqIndex) {
    let set = request(index, 0, 0, Action::Trigger, IrqData::None).unwrap();
    vectors.apply(set).unwrap();
}

/// How often the eventfd was signalled since the last query.
pub fn taken(trigger: &IrqEventFd) -> u64 {
    trigger.take().unwrap().unwrap_or(0)
}
