//! Which queue pair a frame is for: that by which its flow's last frame was sent (virtio 1.2, 5.1.6.5.5.1).

/// Bytes of a frame that say of which flow it is: Ethernet's header with a VLAN tag, that of IPv6, and ports.
pub(super) const HEADERS: usize = 18 + 40 + 4;

const VLAN: [u8; 2] = [0x81, 0x00];
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Flows by a hash, which is the same in both directions.
#[derive(Debug)]
pub(super) struct Flows([Option<u16>; 256]);

impl Flows {
    pub(super) const NONE: Self = Self([None; 256]);

    /// A frame that begins so was sent by this pair.
    pub(super) fn sent(&mut self, frame: &[u8], pair: u16) {
        if let Some(hash) = hash(frame) {
            self.0[usize::from(hash)] = Some(pair);
        }
    }

    /// The pair, of so many, for a frame that begins so.
    pub(super) fn pair_of(&self, frame: &[u8], pairs: u16) -> u16 {
        let Some(hash) = hash(frame) else {
            return 0;
        };
        let known = self.0[usize::from(hash)].filter(|pair| *pair < pairs);
        known.unwrap_or(u16::from(hash) % pairs)
    }
}

/// A hash of addresses, protocol and ports of an IP packet.
fn hash(frame: &[u8]) -> Option<u8> {
    let mut rest = frame.get(12..)?;
    if let Some(tagged) = rest.strip_prefix(&VLAN) {
        rest = tagged.get(2..)?;
    }
    let (kind, packet) = rest.split_first_chunk::<2>()?;
    let (addresses, protocol, ports) = match *kind {
        IPV4 => {
            let header = usize::from(packet.first()? & 0xf) * 4;
            // Only the first fragment has ports.
            let is_whole = packet.get(6)? & 0x3f == 0 && *packet.get(7)? == 0;
            let ports = is_whole.then(|| packet.get(header..)).flatten();
            (packet.get(12..20)?, *packet.get(9)?, ports)
        }
        IPV6 => (packet.get(8..40)?, *packet.get(6)?, packet.get(40..)),
        _ => return None,
    };
    let ports = ports.filter(|_| matches!(protocol, TCP | UDP));
    let ports = ports.and_then(|it| it.get(..4)).unwrap_or_default();
    let mut sum = u32::from(protocol);
    for fields in [addresses, ports] {
        // Source and destination.
        let (from, to) = fields.split_at(fields.len() / 2);
        for (from, to) in from.iter().zip(to) {
            sum = sum.wrapping_mul(31).wrapping_add(u32::from(from ^ to));
        }
    }
    // Its upper bits depend on all.
    Some((sum.wrapping_mul(0x9e37_79b1) >> 24) as u8)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A frame of UDP over IPv4 or IPv6, and the one in the other direction.
    fn both(v6: bool, tag: bool, [a, b]: [u8; 2], [p, q]: [u16; 2]) -> [Vec<u8>; 2] {
        [((a, p), (b, q)), ((b, q), (a, p))].map(|((from, source), (to, destination))| {
            let mut frame = vec![2; 12];
            if tag {
                frame.extend([0x81, 0, 0, 7]);
            }
            if v6 {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, UDP, 64]);
                frame.extend([[from; 16], [to; 16]].concat());
            } else {
                frame.extend([8, 0, 0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, UDP, 0, 0]);
                frame.extend([[from; 4], [to; 4]].concat());
            }
            frame.extend([source.to_be_bytes(), destination.to_be_bytes()].concat());
            frame
        })
    }

    proptest! {
        #[test]
        fn a_flow_is_for_the_pair_that_has_sent(
            v6: bool, tag: bool, addresses: [u8; 2], ports: [u16; 2], pair in 0..8u16, fewer in 1..8u16,
        ) {
            let [there, back] = both(v6, tag, addresses, ports);
            prop_assert!(there.len() <= HEADERS);
            let mut flows = Flows::NONE;
            let before = flows.pair_of(&back, 8);
            prop_assert_eq!(before, flows.pair_of(&there, 8));
            flows.sent(&there, pair);
            prop_assert_eq!(flows.pair_of(&back, 8), pair);
            prop_assert!(flows.pair_of(&back, fewer) < fewer);
        }

        /// Frames of no flow, or cut anywhere.
        #[test]
        fn any_bytes_are_for_some_pair(bytes in proptest::collection::vec(any::<u8>(), 0..HEADERS), v6: bool, cut in 0..62usize) {
            let [mut frame, _] = both(v6, false, [1, 2], [3, 4]);
            frame.truncate(cut);
            for frame in [bytes, frame] {
                let mut flows = Flows::NONE;
                flows.sent(&frame, 3);
                prop_assert!(flows.pair_of(&frame, 2) < 2);
            }
        }
    }

    #[test]
    fn flows_are_spread() {
        let flows = Flows::NONE;
        let mut counts = [0; 4];
        for port in 1000..1400u16 {
            let [frame, _] = both(false, false, [1, 2], [port, 80]);
            counts[usize::from(flows.pair_of(&frame, 4))] += 1;
        }
        assert!(counts.iter().all(|count| *count > 50), "{counts:?}");
        // Later fragments have no ports: what they have there does not count.
        let fragment = |port: u16| {
            let [mut frame, _] = both(false, false, [1, 2], [port, 80]);
            frame[14 + 6] = 0x20;
            hash(&frame)
        };
        assert_eq!(fragment(1), fragment(2));
    }
}
