//! What a client sends, and is answered.

use farside_keeper::MAX_FDS;

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn new() -> Self {
        let seed = match std::env::var("FARSIDE_SEED") {
            Ok(text) => text.parse().expect("a number in FARSIDE_SEED"),
            Err(_) => std::time::SystemTime::UNIX_EPOCH
                .elapsed()
                .unwrap()
                .as_nanos() as u64,
        };
        eprintln!("FARSIDE_SEED={seed}");
        Self(seed)
    }

    pub(crate) fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % most
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Mostly small.
    pub(crate) fn size(&mut self) -> usize {
        let most = match self.below(100) {
            0 => 1 << 20,
            1..3 => 200 << 10,
            3..10 => 20 << 10,
            _ => 100,
        };
        self.below(most) as usize
    }
}

/// A message, and its answer.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    pub(crate) body: usize,
    pub(crate) fds: usize,
    /// Its body is discarded as it arrives.
    pub(crate) is_refused: bool,
    pub(crate) answer: Option<usize>,
    pub(crate) answer_fd: bool,
}

pub(crate) fn exchanges(random: &mut Random, count: usize) -> Vec<Exchange> {
    let exchange = |_| {
        let answer = (!random.one_in(5)).then(|| random.size());
        Exchange {
            body: random.size(),
            fds: match random.below(20) {
                0 => MAX_FDS,
                1..5 => random.below(4) as usize,
                _ => 0,
            },
            is_refused: random.one_in(30),
            answer,
            answer_fd: answer.is_some() && random.one_in(10),
        }
    };
    (0..count).map(exchange).collect()
}

/// Bytes of a header: the length of the body, and the number.
pub(crate) const HEADER: usize = 16;

pub(crate) fn encoded(number: u64, body: usize) -> Vec<u8> {
    let mut bytes = (body as u64).to_le_bytes().to_vec();
    bytes.extend(number.to_le_bytes());
    bytes.extend((0..body).map(|at| (at as u64 * 7 + at as u64 / 256 + number) as u8));
    bytes
}

pub(crate) fn header(bytes: &[u8]) -> Option<(usize, u64)> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (number, _) = rest.split_first_chunk()?;
    Some((
        u64::from_le_bytes(*len) as usize,
        u64::from_le_bytes(*number),
    ))
}
