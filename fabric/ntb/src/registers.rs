//! Access to registers and windows, for drivers.

/// A BAR, or the part of one that a driver needs.
///
/// Accesses are naturally aligned and in range; others, and those to a removed device, read as all
/// ones and write nothing, as on the bus. Words are in the CPU's byte order; the implementation
/// converts from and to the bus's.
pub trait Registers: Send + Sync {
    /// Loads 32 bits at `offset` bytes.
    fn read32(&self, offset: u64) -> u32;
    /// Stores 32 bits at `offset` bytes.
    fn write32(&self, offset: u64, value: u32);
    /// Loads 64 bits at `offset` bytes, in one access.
    fn read64(&self, offset: u64) -> u64;
    /// Stores 64 bits at `offset` bytes, in one access.
    fn write64(&self, offset: u64, value: u64);
}
