//! How long QEMU should wait for an answer.

/// QEMU's own default of `x-msg-timeout`, milliseconds: for all that does not
/// grow with guest RAM.
const BASE_MS: u64 = 5000;
/// Bytes that the host can zero and pin in a millisecond, in the worst case:
/// 4 GB/s (published: 120 GB in 29.7 s, pages not touched before).
const PINNED_PER_MS: u64 = 4_000_000;
/// For hosts that are slower, or busy. A virtual machine as the host, whose own
/// memory is not there yet, was seen to need 10 times as long; a guest whose
/// QEMU does not wait dies, and one that does waits no longer than it takes.
const MARGIN: u64 = 16;

/// `x-msg-timeout` for a VM with `ram` bytes, milliseconds:
///
/// ```text
/// 5 s + 16 × ram / (4 GB/s), rounded up to whole seconds
/// ```
///
/// When the guest lets a device do DMA, the backend pins guest RAM before it
/// answers; QEMU gives the device up when that takes longer than this. In turn
/// a backend that hangs can hold the guest up this long.
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
