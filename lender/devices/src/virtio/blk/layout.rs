//! The device's features and configuration (virtio 1.2, 5.2.3 and 5.2.4).

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};

use super::Config;

/// Bytes of a sector, the unit of requests.
pub(super) const SECTOR: u64 = 512;

/// Most buffers of a request's data.
pub(super) const SEG_MAX: usize = 254;
/// Most ranges of a discard.
pub(super) const MAX_DISCARD_RANGES: usize = 64;
/// Most sectors of a range to discard: 4 GiB.
pub(super) const MAX_DISCARD_SECTORS: u32 = 1 << 23;
/// Most sectors of a range to zero: 256 MiB. There is one range.
pub(super) const MAX_ZERO_SECTORS: u32 = 1 << 19;

/// Offset of the capacity, in sectors.
pub(super) const CAPACITY: usize = 0;
/// Bytes of the configuration.
pub(super) const CONFIG_LEN: usize = 60;
/// Offset of the cache mode.
pub(super) const WRITEBACK: usize = 32;

/// Bytes of a page: the unit in which the host stores an image.
const PAGE: u32 = 4096;

/// Features beside the transport's.
pub(super) fn features(config: &Config) -> u64 {
    let mut features = 1 << VIRTIO_BLK_F_SEG_MAX
        | 1 << VIRTIO_BLK_F_BLK_SIZE
        | 1 << VIRTIO_BLK_F_FLUSH
        | 1 << VIRTIO_BLK_F_TOPOLOGY
        | 1 << VIRTIO_BLK_F_CONFIG_WCE;
    if config.queues > 1 {
        features |= 1 << VIRTIO_BLK_F_MQ;
    }
    features
        | match config.read_only {
            true => 1 << VIRTIO_BLK_F_RO,
            false => 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES,
        }
}

/// The configuration of a disk of `sectors`, whose discarded blocks read as zeroes if it `punches_holes`.
pub(super) fn configuration(
    config: &Config,
    sectors: u64,
    punches_holes: bool,
) -> [u8; CONFIG_LEN] {
    let mut bytes = [0; CONFIG_LEN];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(CAPACITY, &sectors.to_le_bytes());
    put(12, &(SEG_MAX as u32).to_le_bytes());
    put(20, &config.block_size.to_le_bytes());
    // Physical blocks of 4096 bytes, aligned; no preferred sizes.
    let exponent = (PAGE / config.block_size).trailing_zeros();
    put(24, &[exponent as u8]);
    put(26, &1u16.to_le_bytes());
    put(WRITEBACK, &[1]);
    put(34, &config.queues.to_le_bytes());
    if !config.read_only {
        put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
        put(40, &(MAX_DISCARD_RANGES as u32).to_le_bytes());
        put(44, &(PAGE / SECTOR as u32).to_le_bytes());
        put(48, &MAX_ZERO_SECTORS.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[punches_holes.into()]);
    }
    bytes
}
