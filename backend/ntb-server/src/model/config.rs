//! Sizes of a port.

use super::regs::{
    ADDRESS_ALIGN_SHIFT, DEFAULT_LUT_ENTRIES, DEFAULT_WINDOW_SIZE, MAX_LUT_ENTRIES,
    MAX_WINDOW_SIZE, MIN_WINDOW_SIZE, caps,
};

/// Sizes of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// Bytes of the window BAR: a power of two, [`MIN_WINDOW_SIZE`] to
    /// [`MAX_WINDOW_SIZE`].
    pub window_size: u64,
    /// LUT entries, one for each segment of the window: a power of two, 1 to
    /// [`MAX_LUT_ENTRIES`]. A segment has at least 4 KiB.
    pub lut_entries: u32,
}

impl Default for PortConfig {
    fn default() -> Self {
        Self {
            window_size: DEFAULT_WINDOW_SIZE,
            lut_entries: DEFAULT_LUT_ENTRIES,
        }
    }
}

impl PortConfig {
    /// Checks the sizes.
    ///
    /// # Errors
    ///
    /// [`ConfigError`], which names the limits.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Self {
            window_size,
            lut_entries,
        } = *self;
        if !window_size.is_power_of_two()
            || !(MIN_WINDOW_SIZE..=MAX_WINDOW_SIZE).contains(&window_size)
        {
            return Err(ConfigError::WindowSize(window_size));
        }
        if !lut_entries.is_power_of_two() || lut_entries > MAX_LUT_ENTRIES {
            return Err(ConfigError::LutEntries(lut_entries));
        }
        if self.segment_shift() < ADDRESS_ALIGN_SHIFT {
            return Err(ConfigError::Segment {
                window_size,
                lut_entries,
                most: window_size >> ADDRESS_ALIGN_SHIFT,
            });
        }
        Ok(())
    }

    /// log2 of the bytes of a segment. Requires checked sizes.
    pub(super) fn segment_shift(&self) -> u32 {
        let window_shift = self.window_size.trailing_zeros();
        window_shift.saturating_sub(self.lut_entries.trailing_zeros())
    }

    /// The register `CAPS`. Requires checked sizes.
    pub(super) fn caps(&self) -> u32 {
        caps::pack(
            self.window_size.trailing_zeros(),
            self.lut_entries.trailing_zeros(),
            ADDRESS_ALIGN_SHIFT,
        )
    }
}

/// Invalid sizes of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum ConfigError {
    /// The window BAR.
    #[error(
        "invalid window size {0:#x}: use a power of two from {MIN_WINDOW_SIZE:#x} to {MAX_WINDOW_SIZE:#x}"
    )]
    WindowSize(u64),
    /// The LUT.
    #[error("invalid number of LUT entries {0}: use a power of two from 1 to {MAX_LUT_ENTRIES}")]
    LutEntries(u32),
    /// The segments are too small.
    #[error(
        "{lut_entries} LUT entries for a window of {window_size:#x} bytes make segments below 4 KiB: use at most {most} entries"
    )]
    Segment {
        window_size: u64,
        lut_entries: u32,
        most: u64,
    },
}
