//! Frames.

/// Bytes of a frame before its data.
pub const HEADER: usize = 32;

/// Most bytes of data of a frame, and of a read.
pub const MAX_DATA: usize = 1 << 20;

/// On whose behalf operations on a namespace are that several controllers share: what the controller says of its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostIdentity {
    /// Its Host Identifier. 0: the host of this controller alone, in this session.
    pub id: u128,
    /// The identifier has 128 bits.
    pub extended: bool,
    /// The controller's session, which begins with a reset.
    pub session: u32,
}

/// Reservation notifications of a borrower's host, of a shared namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notifications {
    /// The number up to which the lender has searched for them.
    pub upto: u64,
    /// Older ones may be lost.
    pub lost: bool,
    /// Their types (1 to 3), two bits each; the oldest is in the lowest bits, and zero ends them.
    pub types: u64,
}

/// An operation on the medium, or its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// To the lender: read `len` bytes at `offset`.
    Read {
        /// Identifies the operation until it is [`Frame::Done`].
        tag: u16,
        /// Byte of the medium.
        offset: u64,
        /// At most [`MAX_DATA`].
        len: u32,
    },
    /// To the lender: write the `len` bytes of data at `offset`.
    Write {
        /// As in [`Frame::Read`].
        tag: u16,
        /// Byte of the medium.
        offset: u64,
        /// At most [`MAX_DATA`].
        len: u32,
        /// Done once it is on the medium, rather than in the cache.
        durable: bool,
    },
    /// To the lender: bring all completed writes onto the medium.
    Sync {
        /// As in [`Frame::Read`].
        tag: u16,
    },
    /// To the lender: fallocate(2).
    Allocate {
        /// As in [`Frame::Read`].
        tag: u16,
        /// `FALLOC_FL_KEEP_SIZE` with `FALLOC_FL_PUNCH_HOLE` or `FALLOC_FL_ZERO_RANGE`.
        mode: i32,
        /// Byte of the medium.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// To the lender of a tap interface, whose reads and writes are frames of a network: what the receiver of
    /// these can do.
    Offloads {
        /// As in [`Frame::Read`].
        tag: u16,
        /// `TUN_F_…` of `linux/if_tun.h`.
        bits: u32,
        /// Discard what has come before, for a former receiver.
        discard: bool,
    },
    /// To the lender of a shared namespace: on whose behalf the operations after this frame are. It has no answer, and comes first
    /// over each connection.
    Host(HostIdentity),
    /// To the lender of a shared namespace: execute the request that is the data, which changes registrations or the
    /// reservation.
    Reserve {
        /// As in [`Frame::Read`].
        tag: u16,
        /// Bytes of the request.
        len: u32,
    },
    /// To the lender of a shared namespace: the report on registrations and reservation, answered as a [`Frame::Read`] is.
    Report {
        /// As in [`Frame::Read`].
        tag: u16,
        /// At most [`MAX_DATA`]. What is beyond the end of the report is zeroes.
        len: u32,
        /// With Host Identifiers of 128 bits.
        extended: bool,
    },
    /// To the lender of a shared namespace: all that was in flight at the [`Frame::Fence`] with this number has ended, and is not sent
    /// again. What comes after this frame was started since.
    Fenced {
        /// As in that.
        number: u64,
    },
    /// To the lender of a shared namespace: the borrower has the reservation notifications up to a number, and waits for those
    /// after it.
    Notified {
        /// As in [`Notifications::upto`]; `None`: it waits for those that come from now on, in a session that has begun.
        upto: Option<u64>,
    },
    /// To the lender: the last frame, with which the borrower returns the device.
    Return,
    /// To the borrower: an operation has ended.
    Done {
        /// The operation's.
        tag: u16,
        /// Bytes, or of a [`Frame::Reserve`] its result. Negative: an errno, or if reservations refuse the operation, [`REFUSED`] and the
        /// bits of the command's status. A [`Frame::Read`] has as many bytes of data.
        result: i32,
        /// Bytes of data.
        data: u32,
        /// The medium's condition.
        condition: Condition,
    },
    /// To the borrower: the lender takes the device back.
    Release {
        /// Time for the guest to release it, in milliseconds.
        limit_ms: u64,
    },
    /// To the borrower of a shared namespace: what it has in flight is aborted by another host, and refused until it answers with
    /// [`Frame::Fenced`]. The next one comes after the answer.
    Fence {
        /// Greater than before.
        number: u64,
    },
    /// To the borrower: the medium has grown, to this size.
    Size {
        /// Bytes.
        size: u64,
    },
    /// To the borrower of a shared namespace: the answer to a [`Frame::Notified`], once there are notifications.
    Notifications {
        /// As in the last [`Frame::Host`]: of an earlier session they are void.
        session: u32,
        /// These.
        notifications: Notifications,
    },
    /// In both directions: the sender is there, and has nothing else to send.
    Alive,
}

/// Above any errno.
pub const REFUSED: i32 = 4096;

/// The medium's condition, independent of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Bytes.
    pub size: u64,
    /// Its file system has no free block.
    pub full: bool,
    /// It cannot be written.
    pub read_only: bool,
}

/// A frame that the peer must not send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// No frame has this number.
    #[error("a frame of an unknown kind, {0}")]
    Kind(u8),
    /// More data than a frame may have, or other than it says.
    #[error("a frame of kind {kind} with {len} bytes of data")]
    Data {
        /// The kind.
        kind: u8,
        /// Bytes.
        len: u32,
    },
    /// A field that is zero in frames of this kind is not, or has an undefined value.
    #[error("a frame of kind {0} with an undefined field")]
    Field(u8),
    /// No answer to an operation of this end, or an operation that is not over.
    #[error("a frame that answers no operation: {0:?}")]
    Unexpected(Frame),
}

mod kind {
    pub const READ: u8 = 1;
    pub const WRITE: u8 = 2;
    pub const SYNC: u8 = 3;
    pub const ALLOCATE: u8 = 4;
    pub const RETURN: u8 = 5;
    pub const DONE: u8 = 6;
    pub const RELEASE: u8 = 7;
    pub const ALIVE: u8 = 8;
    pub const OFFLOADS: u8 = 9;
    pub const HOST: u8 = 10;
    pub const RESERVE: u8 = 11;
    pub const REPORT: u8 = 12;
    pub const FENCED: u8 = 13;
    pub const FENCE: u8 = 14;
    pub const SIZE: u8 = 15;
    pub const NOTIFIED: u8 = 16;
    pub const NOTIFICATIONS: u8 = 17;
}

/// Of [`Frame::Write`].
const DURABLE: u8 = 1 << 0;
/// Of [`Frame::Offloads`].
const DISCARD: u8 = 1 << 0;
/// Of [`Frame::Host`] and [`Frame::Report`].
const EXTENDED: u8 = 1 << 0;
/// Of [`Frame::Notified`]: without a number.
const BEGINS: u8 = 1 << 0;
/// Of [`Frame::Notifications`].
const LOST: u8 = 1 << 0;
/// Of [`Frame::Done`].
const FULL: u8 = 1 << 0;
const READ_ONLY: u8 = 1 << 1;

/// The fields of a header.
#[derive(Default, PartialEq, Eq)]
struct Fields {
    data: u32,
    kind: u8,
    flags: u8,
    tag: u16,
    offset: u64,
    len: u64,
    number: i32,
}

impl Fields {
    fn read(header: &[u8; HEADER]) -> Option<Self> {
        let mut rest = &header[..];
        Some(Self {
            data: u32::from_le_bytes(take(&mut rest)?),
            kind: u8::from_le_bytes(take(&mut rest)?),
            flags: u8::from_le_bytes(take(&mut rest)?),
            tag: u16::from_le_bytes(take(&mut rest)?),
            offset: u64::from_le_bytes(take(&mut rest)?),
            len: u64::from_le_bytes(take(&mut rest)?),
            number: i32::from_le_bytes(take(&mut rest)?),
        })
        .filter(|_| rest == [0; 4])
    }

    fn write(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[0..4].copy_from_slice(&self.data.to_le_bytes());
        header[4] = self.kind;
        header[5] = self.flags;
        header[6..8].copy_from_slice(&self.tag.to_le_bytes());
        header[8..16].copy_from_slice(&self.offset.to_le_bytes());
        header[16..24].copy_from_slice(&self.len.to_le_bytes());
        header[24..28].copy_from_slice(&self.number.to_le_bytes());
        header
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

impl Frame {
    /// Bytes of data after the header.
    pub fn data_len(&self) -> usize {
        match *self {
            Self::Write { len, .. } | Self::Reserve { len, .. } | Self::Done { data: len, .. } => {
                len as usize
            }
            _ => 0,
        }
    }

    fn fields(&self) -> Fields {
        match *self {
            Self::Read { tag, offset, len } => Fields {
                kind: kind::READ,
                tag,
                offset,
                len: len.into(),
                ..Fields::default()
            },
            Self::Write {
                tag,
                offset,
                len,
                durable,
            } => Fields {
                kind: kind::WRITE,
                data: len,
                flags: if durable { DURABLE } else { 0 },
                tag,
                offset,
                ..Fields::default()
            },
            Self::Sync { tag } => Fields {
                kind: kind::SYNC,
                tag,
                ..Fields::default()
            },
            Self::Allocate {
                tag,
                mode,
                offset,
                len,
            } => Fields {
                kind: kind::ALLOCATE,
                tag,
                offset,
                len,
                number: mode,
                ..Fields::default()
            },
            Self::Offloads { tag, bits, discard } => Fields {
                kind: kind::OFFLOADS,
                flags: if discard { DISCARD } else { 0 },
                tag,
                len: bits.into(),
                ..Fields::default()
            },
            Self::Host(HostIdentity {
                id,
                extended,
                session,
            }) => Fields {
                kind: kind::HOST,
                flags: if extended { EXTENDED } else { 0 },
                offset: id as u64,
                len: (id >> 64) as u64,
                number: session.cast_signed(),
                ..Fields::default()
            },
            Self::Reserve { tag, len } => Fields {
                kind: kind::RESERVE,
                data: len,
                tag,
                ..Fields::default()
            },
            Self::Report { tag, len, extended } => Fields {
                kind: kind::REPORT,
                flags: if extended { EXTENDED } else { 0 },
                tag,
                len: len.into(),
                ..Fields::default()
            },
            Self::Fenced { number } => Fields {
                kind: kind::FENCED,
                offset: number,
                ..Fields::default()
            },
            Self::Fence { number } => Fields {
                kind: kind::FENCE,
                offset: number,
                ..Fields::default()
            },
            Self::Size { size } => Fields {
                kind: kind::SIZE,
                offset: size,
                ..Fields::default()
            },
            Self::Notified { upto } => Fields {
                kind: kind::NOTIFIED,
                flags: if upto.is_none() { BEGINS } else { 0 },
                offset: upto.unwrap_or(0),
                ..Fields::default()
            },
            Self::Notifications {
                session,
                notifications: Notifications { upto, lost, types },
            } => Fields {
                kind: kind::NOTIFICATIONS,
                flags: if lost { LOST } else { 0 },
                offset: upto,
                len: types,
                number: session.cast_signed(),
                ..Fields::default()
            },
            Self::Return => Fields {
                kind: kind::RETURN,
                ..Fields::default()
            },
            Self::Done {
                tag,
                result,
                data,
                condition,
            } => Fields {
                kind: kind::DONE,
                data,
                flags: [(condition.full, FULL), (condition.read_only, READ_ONLY)]
                    .iter()
                    .fold(0, |flags, (set, flag)| flags | if *set { *flag } else { 0 }),
                tag,
                offset: condition.size,
                number: result,
                ..Fields::default()
            },
            Self::Release { limit_ms } => Fields {
                kind: kind::RELEASE,
                len: limit_ms,
                ..Fields::default()
            },
            Self::Alive => Fields {
                kind: kind::ALIVE,
                ..Fields::default()
            },
        }
    }

    /// The header.
    pub fn encode(&self) -> [u8; HEADER] {
        self.fields().write()
    }

    /// The frame of a header.
    ///
    /// # Errors
    /// A [`FrameError`] unless it is one that [`Frame::encode`] makes.
    pub fn decode(header: &[u8; HEADER]) -> Result<Self, FrameError> {
        let undefined = FrameError::Field(header[4]);
        let fields = Fields::read(header).ok_or(undefined)?;
        let Fields {
            data,
            kind,
            flags,
            tag,
            offset,
            len,
            number,
        } = fields;
        if data as usize > MAX_DATA {
            return Err(FrameError::Data { kind, len: data });
        }
        let asked = || match u32::try_from(len) {
            Ok(len) if len as usize <= MAX_DATA => Ok(len),
            _ => Err(undefined),
        };
        let frame = match kind {
            kind::READ => Self::Read {
                tag,
                offset,
                len: asked()?,
            },
            kind::WRITE => Self::Write {
                tag,
                offset,
                len: data,
                durable: flags & DURABLE != 0,
            },
            kind::SYNC => Self::Sync { tag },
            kind::ALLOCATE => Self::Allocate {
                tag,
                mode: number,
                offset,
                len,
            },
            kind::OFFLOADS => Self::Offloads {
                tag,
                bits: u32::try_from(len).map_err(|_| undefined)?,
                discard: flags & DISCARD != 0,
            },
            kind::HOST => Self::Host(HostIdentity {
                id: u128::from(len) << 64 | u128::from(offset),
                extended: flags & EXTENDED != 0,
                session: number.cast_unsigned(),
            }),
            kind::RESERVE => Self::Reserve { tag, len: data },
            kind::REPORT => Self::Report {
                tag,
                len: asked()?,
                extended: flags & EXTENDED != 0,
            },
            kind::FENCED => Self::Fenced { number: offset },
            kind::FENCE => Self::Fence { number: offset },
            kind::SIZE => Self::Size { size: offset },
            kind::NOTIFIED => Self::Notified {
                upto: (flags & BEGINS == 0).then_some(offset),
            },
            kind::NOTIFICATIONS => Self::Notifications {
                session: number.cast_unsigned(),
                notifications: Notifications {
                    upto: offset,
                    lost: flags & LOST != 0,
                    types: len,
                },
            },
            kind::RETURN => Self::Return,
            kind::DONE => Self::Done {
                tag,
                result: number,
                data,
                condition: Condition {
                    size: offset,
                    full: flags & FULL != 0,
                    read_only: flags & READ_ONLY != 0,
                },
            },
            kind::RELEASE => Self::Release { limit_ms: len },
            kind::ALIVE => Self::Alive,
            kind => return Err(FrameError::Kind(kind)),
        };
        // What the frame does not have is zero.
        match frame.fields() == fields {
            true => Ok(frame),
            false => Err(undefined),
        }
    }
}

#[cfg(test)]
mod tests;
