//! An operation's frames: where their data is.

use farside_medium::{Frame, FrameError, Link, MAX_DATA, Memory};

use crate::block::{Durability, Tag, engine::RawOp};

/// An operation that has no answer yet.
pub(super) struct Operation {
    pub(super) op: RawOp,
    /// In the order of [`Engine::queue`].
    pub(super) number: u64,
    /// Its frame, by [`Link::posted`]; none has this number while there is no connection.
    pub(super) frame: u64,
}

// SAFETY: only the kernel and the link use the pointers in `op`, to memory that `Engine::queue`'s
// caller keeps valid until the tag is reaped or the engine is dropped.
unsafe impl Send for Operation {}

/// Where the data of a frame belongs; refuses what answers no operation.
pub(super) fn place(
    operations: &[Option<Operation>],
    sent: u64,
    frame: &Frame,
) -> Result<Memory, FrameError> {
    let Frame::Done {
        tag, result, data, ..
    } = *frame
    else {
        return match frame {
            Frame::Release { .. }
            | Frame::Fence { .. }
            | Frame::Size { .. }
            | Frame::Notifications { .. }
            | Frame::Alive => Ok(Memory::NONE),
            other => Err(FrameError::Unexpected(*other)),
        };
    };
    let operation = operations.get(usize::from(tag)).and_then(Option::as_ref);
    // Its memory is in use until it was sent whole, whatever the lender says.
    let operation = operation.filter(|operation| operation.frame < sent);
    let (memory, most, data_len) = match operation.map(|operation| &operation.op) {
        Some(RawOp::Read { iovecs, count, .. } | RawOp::Report { iovecs, count, .. }) => {
            // SAFETY: by the contract of `Engine::queue` the vectors and their memory are valid until
            // the tag is reaped, which is when this frame has arrived, or the engine is dropped with
            // its link. `finish_all` ends the connection first.
            let memory = unsafe { Memory::new(*iovecs, *count as usize) };
            (memory, len(*iovecs, *count), result.max(0))
        }
        Some(RawOp::Write { iovecs, count, .. }) => (Memory::NONE, len(*iovecs, *count), 0),
        Some(RawOp::Reserve { .. }) => (Memory::NONE, u32::MAX, 0),
        Some(RawOp::Sync | RawOp::Allocate { .. } | RawOp::Offloads { .. }) => (Memory::NONE, 0, 0),
        None => return Err(FrameError::Unexpected(*frame)),
    };
    match i64::from(result) <= i64::from(most) && data as i32 == data_len {
        true => Ok(memory),
        false => Err(FrameError::Unexpected(*frame)),
    }
}

/// Bytes of vectors, at most those of a frame; the rest is another operation.
fn len(iovecs: *const libc::iovec, count: u32) -> u32 {
    // SAFETY: `count` valid vectors, by the contract of `Engine::queue`.
    let iovecs = unsafe { std::slice::from_raw_parts(iovecs, count as usize) };
    let len = iovecs
        .iter()
        .fold(0usize, |len, iovec| len.saturating_add(iovec.iov_len));
    len.min(MAX_DATA) as u32
}

pub(super) fn post(link: &mut Link, tag: Tag, op: &RawOp) {
    let (frame, memory) = match *op {
        RawOp::Read {
            iovecs,
            count,
            offset,
        } => {
            let len = len(iovecs, count);
            (Frame::Read { tag, offset, len }, Memory::NONE)
        }
        RawOp::Write {
            iovecs,
            count,
            offset,
            durability,
        } => {
            let frame = Frame::Write {
                tag,
                offset,
                len: len(iovecs, count),
                durable: durability == Durability::Durable,
            };
            // SAFETY: by the contract of `Engine::queue` the vectors and their memory are valid until
            // the tag is reaped: after its answer, which comes after the frame was sent, or when its
            // link has been dropped.
            (frame, unsafe { Memory::new(iovecs, count as usize) })
        }
        RawOp::Reserve { iovecs, count } => {
            let len = len(iovecs, count);
            // SAFETY: as for a write.
            let memory = unsafe { Memory::new(iovecs, count as usize) };
            (Frame::Reserve { tag, len }, memory)
        }
        RawOp::Report {
            iovecs,
            count,
            extended,
        } => {
            let len = len(iovecs, count);
            (Frame::Report { tag, len, extended }, Memory::NONE)
        }
        RawOp::Sync => (Frame::Sync { tag }, Memory::NONE),
        RawOp::Allocate { mode, offset, len } => {
            let frame = Frame::Allocate {
                tag,
                mode,
                offset,
                len,
            };
            (frame, Memory::NONE)
        }
        RawOp::Offloads { bits, discard } => (Frame::Offloads { tag, bits, discard }, Memory::NONE),
    };
    link.post(frame, memory);
}
