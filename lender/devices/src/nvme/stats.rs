//! Statistics since power-on.

/// Counters; preserved across resets, as SMART's are.
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
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Flushes, including those of shutdowns.
    pub flushes: u64,
    /// Doorbell writes that trapped.
    pub doorbell_traps: u64,
    /// Commands that failed.
    pub errors: u64,
}
