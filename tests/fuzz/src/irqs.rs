//! A function's interrupts, at the lender and relayed to the borrower, under requests of both forms:
//! vfio-user's, and the lender protocol's.
//!
//! Input: a byte with the function's vectors, then steps, each a byte for the kind; see [`run`].

use std::{os::fd::OwnedFd, sync::Arc};

use farside_irq_relay::{IrqCounts, IrqEvent, IrqIndex, Relay, SetIrqs, SetIrqsMessage, Vectors};
use farside_lender_protocol::IrqUpdate;
use rustix::event::{EventfdFlags, eventfd};

use crate::input::Input;

/// Most descriptors of a request.
const MAX_FDS: u8 = 16;

/// Requests reach the borrower's vectors as QEMU sends them, and the lender's as the backend sends
/// them on, with a relay instead of eventfds.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let shape = input.u8();
    let counts = IrqCounts::new().with_err().with_req();
    let counts = match shape & 1 {
        0 => counts.with_intx(),
        _ => counts,
    };
    let counts = counts.with_msi(u16::from(shape >> 1 & 3) * 8);
    let counts = counts.and_then(|counts| counts.with_msix(u16::from(shape >> 3) * 66));
    let counts = counts.expect("within the limits");
    let relay = Arc::new(Relay::new());
    let (mut borrower, mut lender) = (Vectors::new(counts), Vectors::new(counts));
    while !input.is_empty() {
        match input.u8() % 16 {
            0..=7 => {
                if let Some(request) = request(&mut input, &counts) {
                    let (update, fds) = IrqUpdate::new(&request, true);
                    assert!(fds.is_empty(), "a relayed interrupt has no descriptor");
                    let sent = update.into_request(&counts, Vec::new(), &relay);
                    let sent = sent.expect("the lender takes what a backend has checked");
                    let there = lender.apply(sent).is_ok();
                    let here = borrower.apply(request).is_ok();
                    assert_eq!(there, here, "the ends differ");
                }
            }
            8 | 9 => lender.raise(input.u16()),
            10 => lender.set_intx(input.u8() & 1 != 0),
            11 => {
                let disabled = input.u8() & 1 != 0;
                lender.set_intx_disabled(disabled);
                borrower.set_intx_disabled(disabled);
            }
            12 => match input.u8() & 1 {
                0 => lender.signal_err(),
                // Whether the client has an eventfd for it.
                _ => {
                    lender.signal_req();
                }
            },
            13 => {
                // A peer may send any event.
                let index = IrqIndex::ALL[usize::from(input.u8()) % IrqIndex::ALL.len()];
                if let Some(event) = IrqEvent::new(index, input.u16()) {
                    borrower.deliver(event);
                }
            }
            14 => {
                lender.reset();
                borrower.reset();
            }
            _ => {
                let mut drained = Vec::new();
                relay.drain(|event| drained.push(event));
                assert!(relay.is_empty());
                for event in drained {
                    let vectors = counts.count(event.index());
                    assert!(event.vector() < vectors, "a vector that does not exist");
                    borrower.deliver(event);
                }
            }
        }
        assert_eq!(lender.enabled(), borrower.enabled());
    }
    for vectors in [&mut lender, &mut borrower] {
        // Looks at each vector: after each step, it would take most of the time.
        let _ = vectors.status();
        vectors.disable_all();
        assert_eq!(vectors.enabled(), None);
    }
}

/// A request of a client. Numbers are small, so that most are in range.
fn request(input: &mut Input<'_>, counts: &IrqCounts) -> Option<SetIrqs> {
    let (flags, index) = (input.u8(), input.u8());
    let (start, count) = (input.number() as u32, input.number() as u32);
    let fds = input.u8() % (MAX_FDS + 1);
    let len = input.u8();
    let message = SetIrqsMessage {
        flags: flags.into(),
        index: u32::from(index % 8),
        start,
        count,
        data: input.bytes(len.into()),
        fds: (0..fds).map(|_| descriptor()).collect(),
    };
    SetIrqs::decode(counts, message).ok()
}

fn descriptor() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}
