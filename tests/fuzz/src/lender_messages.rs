//! Bytes that may be messages of the lender's protocol, from either side.
//!
//! Input: a byte that selects the type, then the message.

use std::{fmt::Debug, sync::Arc};

use farside_irq_relay::{IrqCounts, Relay, Vectors};
use farside_lender_protocol::{
    Envelope, Reply, Request,
    registers::{Access, Event},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::input::Input;

/// Decodes the message of `input`. An interrupt update is applied to a function without
/// descriptors.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    match input.u8() % 4 {
        0 => {
            if let Some(envelope) = decoded::<Envelope>(input.0)
                && let Request::SetIrqs(update) = envelope.request
            {
                let counts = IrqCounts::new().with_intx().with_err();
                let counts = counts
                    .with_msi(32)
                    .and_then(|counts| counts.with_msix(2048));
                let counts = counts.expect("within the limits");
                let needs = update.descriptors();
                let relay = Arc::new(Relay::new());
                if let Ok(request) = update.into_request(&counts, Vec::new(), &relay) {
                    assert_eq!(needs, 0, "accepted without its descriptors");
                    let _ = Vectors::new(counts).apply(request);
                }
            }
        }
        1 => drop(decoded::<Reply>(input.0)),
        2 => drop(decoded::<Access>(input.0)),
        _ => {
            if let Some(Event::Interrupt(event)) = decoded(input.0) {
                let relay = Relay::new();
                relay.post(event).expect("a relay has no descriptor");
                let mut drained = Vec::new();
                relay.drain(|event| drained.push(event));
                assert_eq!(drained, [event]);
            }
        }
    }
}

/// Decodes a message, which then survives encoding.
fn decoded<T: Debug + Serialize + DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let message: T = postcard::from_bytes(bytes).ok()?;
    let again = postcard::to_stdvec(&message).expect("it was decoded");
    let same: T = postcard::from_bytes(&again).expect("it was encoded");
    assert_eq!(format!("{message:?}"), format!("{same:?}"));
    Some(message)
}
