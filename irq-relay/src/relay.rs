//! Interrupts to be sent to another host.

use std::array;

use rustix::io::Errno;

use crate::{
    IrqEvent, IrqEventFd, IrqIndex,
    sync::{AtomicU64, Ordering},
};

/// 32 words of MSI-X vectors, then one of MSI vectors, then one of the rest.
const MSI_WORD: usize = 32;
const SINGLES_WORD: usize = 33;
const WORDS: usize = 34;

/// A set of interrupts that fired and were not sent yet.
///
/// One thread posts, another drains, neither waits for the other. A vector
/// that fires again before it was drained is sent once, as an eventfd or the
/// interrupt controller itself would merge it; so the set is bounded however
/// fast a device fires.
#[derive(Debug)]
pub struct Relay {
    /// Bit n: `words[n]` may have something.
    summary: AtomicU64,
    words: [AtomicU64; WORDS],
    coalesced: AtomicU64,
    waker: Option<IrqEventFd>,
}

impl Relay {
    /// A relay that its consumer polls.
    pub fn new() -> Self {
        Self {
            summary: AtomicU64::new(0),
            words: array::from_fn(|_| AtomicU64::new(0)),
            coalesced: AtomicU64::new(0),
            waker: None,
        }
    }

    /// A relay that signals `waker` when there is something to drain. The
    /// consumer takes the waker's counter first and drains then.
    pub fn with_waker(waker: IrqEventFd) -> Self {
        Self {
            waker: Some(waker),
            ..Self::new()
        }
    }

    /// Adds an interrupt. The error is the waker's.
    pub fn post(&self, event: IrqEvent) -> Result<(), Errno> {
        let (word, bit) = place(event);
        if self.words[word].fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            self.coalesced.fetch_add(1, Ordering::Relaxed);
        }
        // After the word: the consumer that takes the summary's bit also sees the
        // word's. Even when the word's bit was set already, the drain that clears
        // it may be past this word; only the summary makes it drain again.
        if self.summary.fetch_or(1 << word, Ordering::AcqRel) == 0
            && let Some(waker) = &self.waker
        {
            waker.signal()?;
        }
        Ok(())
    }

    /// Takes all interrupts out and hands them to `send`, MSI-X first, by
    /// vector.
    pub fn drain(&self, mut send: impl FnMut(IrqEvent)) {
        let mut summary = self.summary.swap(0, Ordering::AcqRel);
        while summary != 0 {
            let word = summary.trailing_zeros() as usize;
            summary &= summary - 1;
            let mut bits = self.words[word].swap(0, Ordering::AcqRel);
            while bits != 0 {
                send(event_at(word, bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
    }

    /// Whether nothing waits. A post that runs at the same time may be missed;
    /// one that wakes is not.
    pub fn is_empty(&self) -> bool {
        self.summary.load(Ordering::Acquire) == 0
    }

    /// How often a vector fired while it waited already.
    pub fn coalesced(&self) -> u64 {
        self.coalesced.load(Ordering::Relaxed)
    }
}

impl Default for Relay {
    fn default() -> Self {
        Self::new()
    }
}

/// Word and bit of an interrupt. [`IrqEvent`] keeps the vector within the index.
fn place(event: IrqEvent) -> (usize, u64) {
    let vector = usize::from(event.vector());
    match event.index() {
        IrqIndex::Msix => (vector / 64, 1 << (vector % 64)),
        IrqIndex::Msi => (MSI_WORD, 1 << vector),
        index @ (IrqIndex::Intx | IrqIndex::Err | IrqIndex::Req) => {
            (SINGLES_WORD, 1 << index as u32)
        }
    }
}

fn event_at(word: usize, bit: u32) -> IrqEvent {
    match word {
        MSI_WORD => IrqEvent::at(IrqIndex::Msi, bit as u16),
        SINGLES_WORD => IrqEvent::at(IrqIndex::ALL[bit as usize], 0),
        _ => IrqEvent::at(IrqIndex::Msix, (word * 64) as u16 + bit as u16),
    }
}
