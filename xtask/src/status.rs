//! `farside status --json`, with the fields used here.

use farside_backend_api::{DeviceReport, Status};
use farside_irq_relay::{IrqIndex, VectorCount};
use farside_lender_protocol::DeviceStatus;

/// The reports on `device` of its backend and of its lender.
pub(crate) fn device<'a>(
    status: &'a Status,
    device: &str,
) -> (Option<&'a DeviceReport>, Option<&'a DeviceStatus>) {
    let mut backends = status.backends.iter();
    let borrow = backends.find_map(|backend| backend.device(device));
    (borrow, status.lent(device))
}

/// One entry of [`DeviceStatus::interrupts`] as text.
pub(crate) fn fired(count: &VectorCount) -> String {
    let VectorCount {
        index,
        vector,
        fired,
    } = count;
    match index {
        IrqIndex::Msi | IrqIndex::Msix => format!("{index} {vector}: {fired}"),
        IrqIndex::Intx | IrqIndex::Err | IrqIndex::Req => format!("{index}: {fired}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_have_the_specifications_names() {
        let shown = [
            (IrqIndex::Intx, 0, 8),
            (IrqIndex::Msi, 3, 2),
            (IrqIndex::Msix, 1, 40),
            (IrqIndex::Req, 0, 1),
        ]
        .map(|(index, vector, count)| {
            fired(&VectorCount {
                index,
                vector,
                fired: count,
            })
        });
        assert_eq!(shown, ["INTx: 8", "MSI 3: 2", "MSI-X 1: 40", "request: 1"]);
    }
}
