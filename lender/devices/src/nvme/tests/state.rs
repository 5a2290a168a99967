//! The table of commands in flight, without a controller.

use std::panic::{AssertUnwindSafe, catch_unwind};

use farside_fabric::memory::{HostSlice, SharedMemory};

use super::crash;
use crate::{
    nvme::saved::{Answered, Saved},
    state::{SIZE, State},
};

fn memory() -> HostSlice {
    let memory = SharedMemory::anonymous(SIZE).unwrap();
    memory.slice(0, SIZE).unwrap()
}

/// A controller was reset with commands in flight, and its process is killed while it records the next one.
#[test]
fn the_place_of_a_command_before_a_reset_is_void_while_it_is_written() {
    let memory = memory();
    let mut state = State::<Saved>::start(memory.clone()).unwrap();
    state.save(Saved::default());
    state.record(1, 7, &[0x11; 64]).unwrap();
    state.new_session();
    state.save(Saved::default());
    for point in 0..2 {
        crash::after(Some(point));
        let record = || state.record(1, 0, &[0x22; 64]);
        assert!(catch_unwind(AssertUnwindSafe(record)).is_err());
        let (_, restored) = State::<Saved>::resume(memory.clone()).unwrap().unwrap();
        assert_eq!(restored.in_flight, []);
    }
}

#[test]
fn no_later_command_gets_the_number_of_the_last_result() {
    let memory = memory();
    let mut state = State::<Saved>::start(memory.clone()).unwrap();
    state.save(Saved::default());
    let entry = state.record(0, 0, &[0; 64]).unwrap();
    let answered = Some(Answered {
        sequence: entry.sequence,
        result: 1,
        status: 0,
    });
    state.save(Saved {
        answered,
        ..Saved::default()
    });
    state.release(entry);
    let (mut state, restored) = State::<Saved>::resume(memory).unwrap().unwrap();
    assert_eq!(
        (restored.in_flight, restored.saved.answered),
        (vec![], answered)
    );
    let next = state.record(0, 1, &[0; 64]).unwrap();
    assert!(next.sequence > entry.sequence);
}
