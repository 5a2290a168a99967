//! Offsets in the common configuration (4.1.4.3).

pub const DEVICE_FEATURE_SELECT: usize = 0;
pub const DEVICE_FEATURE: usize = 4;
pub const DRIVER_FEATURE_SELECT: usize = 8;
pub const DRIVER_FEATURE: usize = 12;
pub const CONFIG_MSIX_VECTOR: usize = 16;
pub const NUM_QUEUES: usize = 18;
pub const DEVICE_STATUS: usize = 20;
pub const CONFIG_GENERATION: usize = 21;
pub const QUEUE_SELECT: usize = 22;
pub const QUEUE_SIZE: usize = 24;
pub const QUEUE_MSIX_VECTOR: usize = 26;
pub const QUEUE_ENABLE: usize = 28;
pub const QUEUE_NOTIFY_OFF: usize = 30;
pub const QUEUE_DESC: usize = 32;
pub const QUEUE_DRIVER: usize = 40;
pub const QUEUE_DEVICE: usize = 48;
