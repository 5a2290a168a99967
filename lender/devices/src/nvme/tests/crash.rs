//! Kills the process of a controller, as far as its memory can tell: unwinds out of a store.

use std::{cell::Cell, panic::resume_unwind};

thread_local! {
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The payload of the unwinding.
pub struct Killed;

/// Kills at the point number `points` from now, if that is reached.
pub fn after(points: Option<u64>) {
    LEFT.set(points);
}

/// Whether it is still to come.
pub fn is_due() -> bool {
    LEFT.get().is_some()
}

pub fn point() {
    match LEFT.get() {
        None => {}
        Some(0) => {
            LEFT.set(None);
            resume_unwind(Box::new(Killed));
        }
        Some(left) => LEFT.set(Some(left - 1)),
    }
}

/// Kills at no point until [`after`] is called with what this returns.
pub fn take() -> Option<u64> {
    LEFT.take()
}
