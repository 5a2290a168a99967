//! Interrupt requests, from the protocol's terms to the relay's.

use farside_irq_relay::{
    Action, IrqCounts, IrqData, IrqRange, SetIrqs, SetIrqsError, Sink, TriggerFd,
};
use farside_vfio_user::{self as wire, IrqAction, IrqFlags, IrqIndex, IrqInfo};

/// A client's request, checked against what a port has.
pub(crate) fn request(
    counts: &IrqCounts,
    wire: wire::SetIrqs<'_>,
) -> Result<SetIrqs, SetIrqsError> {
    let range = IrqRange::new(counts, wire.index.index(), wire.start, wire.count)?;
    let action = match wire.action {
        IrqAction::Mask => Action::Mask,
        IrqAction::Unmask => Action::Unmask,
        IrqAction::Trigger => Action::Trigger,
    };
    let data = match wire.data {
        wire::IrqData::None => IrqData::None,
        wire::IrqData::Bool(chosen) => {
            IrqData::Bool(chosen.iter().map(|byte| *byte != 0).collect())
        }
        wire::IrqData::Eventfds(fds) if fds.is_empty() => {
            IrqData::Sinks(vec![None; range.count().into()])
        }
        wire::IrqData::Eventfds(fds) => {
            let sinks = fds
                .into_iter()
                .map(|fd| TriggerFd::try_from(fd).map(|trigger| Some(Sink::EventFd(trigger))));
            IrqData::Sinks(sinks.collect::<Result<_, _>>()?)
        }
    };
    SetIrqs::new(range, action, data)
}

/// The answer to `DEVICE_GET_IRQ_INFO`.
pub(crate) fn info(counts: &IrqCounts, index: IrqIndex) -> IrqInfo {
    let kind = farside_irq_relay::IrqIndex::ALL[index.index() as usize];
    let info = counts.info(kind);
    IrqInfo {
        index,
        flags: IrqFlags::from_bits_truncate(info.flags),
        count: info.count,
    }
}
