//! `farside status --json`, with the fields used here.

use farside_backend_api::{DeviceReport, Status};
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
pub(crate) fn fired((index, vector, count): (u8, u16, u64)) -> String {
    match index {
        0 => format!("INTx: {count}"),
        1 => format!("MSI {vector}: {count}"),
        2 => format!("MSI-X {vector}: {count}"),
        _ => format!("interrupt {index}.{vector}: {count}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_have_the_specifications_names() {
        let shown = [(0, 0, 8), (1, 3, 2), (2, 1, 40), (7, 0, 1)].map(fired);
        assert_eq!(
            shown,
            ["INTx: 8", "MSI 3: 2", "MSI-X 1: 40", "interrupt 7.0: 1"]
        );
    }
}
