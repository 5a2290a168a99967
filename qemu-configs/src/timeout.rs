//! QEMU's request timeout.

use crate::Vm;

/// QEMU's default of `x-msg-timeout`, in milliseconds: for work that does not grow with guest RAM.
const BASE_MS: u64 = 5000;
/// Bytes that the host can zero and pin in a millisecond, in the worst case:
/// 4 GB/s (published: 120 GB in 29.7 s, pages not touched before).
const PINNED_PER_MS: u64 = 4_000_000;
/// Safety factor for slow or loaded hosts. A VM as the host, with its own memory not yet populated,
/// needed 10 times as long. Too short a timeout is fatal for the guest; a longer one does not delay
/// it.
const MARGIN: u64 = 16;

/// `x-msg-timeout` for a VM with `ram` bytes, milliseconds:
///
/// ```text
/// 5 s + 16 × ram / (4 GB/s), rounded up to whole seconds
/// ```
///
/// When the guest enables bus mastering, the backend pins guest RAM before it answers; QEMU
/// abandons the device if that takes longer than this. A hanging backend can block the guest for
/// this long.
///
/// ```
/// use farside_qemu_configs::message_timeout_ms;
/// assert_eq!(message_timeout_ms(1 << 30), 10_000);
/// assert_eq!(message_timeout_ms(120_000_000_000), 485_000);
/// ```
pub fn message_timeout_ms(ram: u64) -> u32 {
    let pinning = ram.div_ceil(PINNED_PER_MS).saturating_mul(MARGIN);
    let ms = (BASE_MS.saturating_add(pinning))
        .div_ceil(1000)
        .saturating_mul(1000);
    // The property has 32 bits.
    u32::try_from(ms).unwrap_or(u32::MAX)
}

impl Vm {
    /// `x-msg-timeout` of its devices, milliseconds: [`message_timeout_ms`], or five fourths of
    /// [`open_timeout`](Self::open_timeout) if that is longer. The last fifth is for the lender's answer and a rollback.
    pub fn message_timeout_ms(&self) -> u32 {
        let ms = self.open_timeout.unwrap_or_default().as_millis() * 5 / 4;
        message_timeout_ms(self.ram).max(u32::try_from(ms).unwrap_or(u32::MAX))
    }
}
