//! Register accesses over the register channel.

use farside_lender_protocol::{
    Channel, ChannelError,
    registers::{Access, Event},
};

use farside_pci::Piece;

use super::register_log::RegisterLog;

/// Size of the next access of a transfer: naturally aligned, 1, 2, 4 or 8 bytes.
pub(crate) fn piece(offset: u64, left: usize) -> usize {
    let aligned = 1 << offset.trailing_zeros().min(3);
    let fits = 1 << left.max(1).ilog2().min(3);
    usize::min(aligned, fits)
}

/// Posts as much of a write as there is room for. Returns the number of bytes sent.
///
/// # Errors
/// The number of bytes sent before, and the channel's error.
pub(crate) fn post_write(
    channel: &mut Channel,
    log: &mut RegisterLog,
    bar: u8,
    offset: u64,
    data: &[u8],
) -> Result<usize, (usize, ChannelError)> {
    let mut done = 0;
    for (access, len) in writes(bar, offset, data) {
        if !log.send(channel, access).map_err(|error| (done, error))? {
            break;
        }
        done += len;
    }
    Ok(done)
}

/// The accesses of a write, with their bytes.
pub(crate) fn writes(bar: u8, offset: u64, data: &[u8]) -> impl Iterator<Item = (Access, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let left = data.get(done..).filter(|left| !left.is_empty())?;
        let at = offset + done as u64;
        let len = piece(at, left.len());
        let mut value = [0; 8];
        value[..len].copy_from_slice(&left[..len]);
        done += len;
        let access = Access::Write {
            bar,
            offset: at,
            len: len as u8,
            value: u64::from_le_bytes(value),
        };
        Some((access, len))
    })
}

/// Requests the next [`piece`] of a read of `left` bytes. Returns false if the channel is full.
pub(crate) fn request_read(
    channel: &mut Channel,
    log: &mut RegisterLog,
    bar: u8,
    offset: u64,
    left: usize,
) -> Result<bool, ChannelError> {
    let access = Access::Read {
        bar,
        offset,
        len: piece(offset, left) as u8,
    };
    log.send(channel, access)
}

/// Asks for Interrupt Status. Returns false if the channel is full.
pub(crate) fn request_interrupt_status(
    channel: &mut Channel,
    log: &mut RegisterLog,
) -> Result<bool, ChannelError> {
    log.send(channel, Access::InterruptStatus)
}

/// Asks for a part of configuration space. Returns false if the channel is full.
pub(crate) fn request_config_read(
    channel: &mut Channel,
    log: &mut RegisterLog,
    Piece { offset, len }: Piece,
) -> Result<bool, ChannelError> {
    log.send(channel, Access::ConfigRead { offset, len })
}

/// Writes a part of configuration space. Returns false if the channel is full.
pub(crate) fn request_config_write(
    channel: &mut Channel,
    log: &mut RegisterLog,
    Piece { offset, len }: Piece,
    value: u32,
) -> Result<bool, ChannelError> {
    log.send(channel, Access::ConfigWrite { offset, len, value })
}

/// The next event, if there is one.
pub(crate) fn next_event(channel: &mut Channel) -> Result<Option<Event>, ChannelError> {
    Ok(channel.try_receive()?.map(|(event, _)| event))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_naturally_aligned_and_cover_the_transfer() {
        for offset in 0..32u64 {
            for len in 1..40usize {
                let (mut at, mut left) = (offset, len);
                while left > 0 {
                    let piece = piece(at, left);
                    assert!(piece <= left && at.is_multiple_of(piece as u64));
                    at += piece as u64;
                    left -= piece;
                }
                assert_eq!(at, offset + len as u64);
            }
        }
        assert_eq!(piece(0x1000, 4), 4);
        assert_eq!(piece(0x1000, 8), 8);
        assert_eq!(piece(0x1001, 8), 1);
    }
}
