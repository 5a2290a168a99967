//! Encodings of frames.

use proptest::prelude::*;

use super::*;

fn frames() -> impl Strategy<Value = Frame> {
    let most = MAX_DATA as u32;
    let condition = (any::<u64>(), any::<bool>(), any::<bool>());
    let condition = condition.prop_map(|(size, full, read_only)| Condition {
        size,
        full,
        read_only,
    });
    prop_oneof![
        (any::<u16>(), any::<u64>(), 0..=most).prop_map(|(tag, offset, len)| Frame::Read {
            tag,
            offset,
            len
        }),
        (any::<u16>(), any::<u64>(), 0..=most, any::<bool>()).prop_map(
            |(tag, offset, len, durable)| Frame::Write {
                tag,
                offset,
                len,
                durable
            }
        ),
        any::<u16>().prop_map(|tag| Frame::Sync { tag }),
        (any::<u16>(), any::<i32>(), any::<u64>(), any::<u64>()).prop_map(
            |(tag, mode, offset, len)| Frame::Allocate {
                tag,
                mode,
                offset,
                len
            }
        ),
        (any::<u16>(), any::<u32>(), any::<bool>())
            .prop_map(|(tag, bits, discard)| Frame::Offloads { tag, bits, discard }),
        (any::<u128>(), any::<bool>(), any::<u32>()).prop_map(|(id, extended, session)| {
            Frame::Host(HostIdentity {
                id,
                extended,
                session,
            })
        }),
        (any::<u16>(), 0..=most).prop_map(|(tag, len)| Frame::Reserve { tag, len }),
        (any::<u16>(), 0..=most, any::<bool>()).prop_map(|(tag, len, extended)| Frame::Report {
            tag,
            len,
            extended
        }),
        any::<u64>().prop_map(|number| Frame::Fenced { number }),
        any::<u64>().prop_map(|number| Frame::Fence { number }),
        any::<u64>().prop_map(|size| Frame::Size { size }),
        any::<Option<u64>>().prop_map(|upto| Frame::Notified { upto }),
        (any::<u32>(), any::<u64>(), any::<bool>(), any::<u64>()).prop_map(
            |(session, upto, lost, types)| Frame::Notifications {
                session,
                notifications: Notifications { upto, lost, types },
            }
        ),
        Just(Frame::Return),
        (any::<u16>(), any::<i32>(), 0..=most, condition).prop_map(
            |(tag, result, data, condition)| Frame::Done {
                tag,
                result,
                data,
                condition
            }
        ),
        any::<u64>().prop_map(|limit_ms| Frame::Release { limit_ms }),
        Just(Frame::Alive),
    ]
}

proptest! {
    #[test]
    fn a_frame_survives_the_encoding(frame in frames()) {
        prop_assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
    }

    /// One encoding of each frame: what is decoded is encoded to the same bytes.
    #[test]
    fn any_header_is_refused_or_a_frame(bytes: [u8; HEADER], frame in frames(), at in 0..HEADER, value: u8) {
        let mut changed = frame.encode();
        changed[at] = value;
        for header in [bytes, changed] {
            if let Ok(frame) = Frame::decode(&header) {
                prop_assert_eq!(frame.encode(), header);
                prop_assert!(frame.data_len() <= MAX_DATA);
            }
        }
    }
}

#[test]
fn data_is_bounded() {
    let mut header = Frame::Alive.encode();
    header[0] = 1;
    assert_eq!(Frame::decode(&header), Err(FrameError::Field(8)));
    let write = Frame::Write {
        tag: 1,
        offset: 0,
        len: MAX_DATA as u32 + 1,
        durable: false,
    };
    assert_eq!(
        Frame::decode(&write.encode()),
        Err(FrameError::Data {
            kind: 2,
            len: MAX_DATA as u32 + 1
        })
    );
    assert_eq!(Frame::decode(&[0; HEADER]), Err(FrameError::Kind(0)));
}
