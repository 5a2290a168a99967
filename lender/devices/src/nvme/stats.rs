//! What the controller has done since power-on.

/// Counters; they survive resets, as SMART's do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Admin commands fetched.
    pub admin_commands: u64,
    /// I/O commands fetched.
    pub io_commands: u64,
    /// Read and compare commands.
    pub reads: u64,
    /// Write commands.
    pub writes: u64,
    /// Bytes that reads have moved.
    pub bytes_read: u64,
    /// Bytes that writes have moved.
    pub bytes_written: u64,
    /// Flushes, those of a shutdown included.
    pub flushes: u64,
    /// Doorbell writes that trapped.
    pub doorbell_traps: u64,
    /// Commands that failed.
    pub errors: u64,
}
