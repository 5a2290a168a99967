//! The relay of interrupts under loom, which runs a test in every order of its threads' atomic
//! accesses that C11 allows. The other state that threads share is behind locks: the registry, its
//! tokens, the fabric's tables.

#![cfg(test)]

/// The atomics of loom, instead of those in `irq-relay/src/lib.rs`.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[path = "../../../irq-relay/src"]
#[allow(dead_code, unused_imports, reason = "the crate uses the rest")]
mod irq_relay {
    pub(crate) mod bits;
    pub(crate) mod index;
    pub(crate) mod relay;
    pub(crate) mod set_irqs;
    pub(crate) mod state;
    pub(crate) mod trigger;
    pub(crate) mod watch;
}
use irq_relay::{
    bits,
    index::{IrqCounts, IrqIndex, IrqRange},
    relay::Relay,
    set_irqs::{SetIrqsError, wire},
    state::IrqEvent,
    trigger::{IrqTarget, IrqEventFd},
    watch,
};
use loom::{sync::Arc, thread};
use sync::{AtomicU64, Ordering};

fn msix(vector: u16) -> IrqEvent {
    IrqEvent::new(IrqIndex::Msix, vector).unwrap()
}

fn drain(relay: &Relay) -> Vec<u16> {
    let mut vectors = Vec::new();
    relay.drain(|event| vectors.push(event.vector()));
    vectors
}

/// A vector that is posted again while it is drained is sent once more, or was sent after the second
/// post: the DMA before each post is visible to a drain that returns it.
#[test]
fn an_interrupt_comes_after_the_dma_before_it_however_often_it_is_posted() {
    loom::model(|| {
        let relay = Arc::new(Relay::new());
        let memory = Arc::new(AtomicU64::new(0));
        let device = thread::spawn({
            let (relay, memory) = (Arc::clone(&relay), Arc::clone(&memory));
            move || {
                for count in 1..=2 {
                    memory.store(count, Ordering::Relaxed);
                    relay.post(msix(3)).unwrap();
                }
            }
        });
        let mut last_seen = 0;
        for vector in drain(&relay) {
            assert_eq!(vector, 3);
            last_seen = memory.load(Ordering::Relaxed);
            assert!(last_seen >= 1, "the interrupt overtook the DMA");
        }
        device.join().unwrap();
        let rest = drain(&relay);
        assert!(
            last_seen == 2 || rest == [3],
            "the second interrupt is lost"
        );
        assert!(relay.is_empty() && drain(&relay).is_empty());
    });
}

#[test]
fn each_vector_is_sent_once_for_each_post() {
    loom::model(|| {
        let relay = Arc::new(Relay::new());
        // Two of one word, and one of another.
        let device = thread::spawn({
            let relay = Arc::clone(&relay);
            move || [1, 2, 70].map(|vector| relay.post(msix(vector)).unwrap())
        });
        let mut sent = drain(&relay);
        device.join().unwrap();
        sent.extend(drain(&relay));
        sent.sort_unstable();
        assert_eq!(sent, [1, 2, 70]);
    });
}

#[test]
fn two_devices_and_a_drain_lose_nothing() {
    loom::model(|| {
        let relay = Arc::new(Relay::new());
        let devices = [5, 6].map(|vector| {
            let relay = Arc::clone(&relay);
            thread::spawn(move || relay.post(msix(vector)).unwrap())
        });
        let mut sent = drain(&relay);
        for device in devices {
            device.join().unwrap();
        }
        sent.extend(drain(&relay));
        sent.sort_unstable();
        assert_eq!(sent, [5, 6]);
    });
}
