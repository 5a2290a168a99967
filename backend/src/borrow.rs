//! The life of a borrow, as a state machine.
//!
//! ```text
//!                reset, BAR access: Borrow
//!  +-----------+ BME 0->1: Borrow, Open   +--------+ reset, FLR: Reset
//!  | Described |------------------------->| Leased |---+
//!  +-----------+                          +--------+<--+
//!    ^  ^  ^                               |  ^  |
//!    |  |  |   client gone: Return         |  |  |
//!    |  |  +-------------------------------+  |  | BME 0->1: Open
//!    |  |                                     |  | (the write is held)
//!    |  |      BME 1->0, D3hot: Close         |  |
//!    |  |      reset, FLR: Reset              |  v
//!    |  |      (Unmap fails: Close)       +-------+ map: Map, unmap: Unmap
//!    |  |                                 | Ready |---+
//!    |  |      client gone: Return        +-------+<--+
//!    |  +-----------------------------------+  |
//!    |                                         | lender gone (from Leased,
//!    |         client gone: Return             v too): Abandon
//!    |                                     +------+
//!    +-------------------------------------| Lost |--- reset: Borrow ---> Leased
//!                                          +------+
//! ```
//!
//! - *Described*: the device's description is known; nothing is borrowed.
//! - *Leased*: the device is ours and reset; its IOMMU domain is empty. No page
//!   of the VM is mapped or pinned, no window is open.
//! - *Ready*: the device can DMA to guest RAM and to nothing else.
//! - *Closing*: as Leased for the guest, but the lender has not yet answered that
//!   DMA is stopped. What was pinned stays pinned. Every way out of it begins
//!   with the lender's answer, or ends the lease.
//! - *Lost*: the lender is gone. Registers and configuration space read as all
//!   ones, as from a device that was pulled out; the client's socket stays up.
//!
//! "BME 0->1" stands for all that lets the function master the bus: also a
//! function that wakes from D3hot with the bit set.
//!
//! # Steps that fail
//!
//! [`State::after_refusal`] is where they lead while the lender is still there:
//!
//! - *Borrow* (another VM has the device): to Described. The device reads as
//!   absent. A reset or a bus-master enable asks again, a BAR access does not.
//! - *Open*: to Leased, with everything closed. The bus-master bit stays 0.
//! - *Map* (no room for the new memory): to Ready. What was open stays open; the
//!   new memory is out of the device's reach, and the status says so.
//! - *Unmap*: to Leased, with everything closed. The bus-master bit stays 1,
//!   since nobody wrote it: DMA is refused and counted until the guest clears
//!   and sets it, or resets.
//! - *Close*, *Stop*, *Reset* (DMA in flight does not drain): to Lost. The
//!   connection is closed, and the lender keeps the device until it has drained.
//!
//! [`State::after_late`] is where they lead when the lender has not answered in
//! time, as a slow or stopped host does not: to Closing, from where the same
//! lease goes on once it answers. But *Borrow* stays at Described, and what
//! memory is taken away by (*Unmap*, *Stop*) cannot stay undone: the lease is
//! broken off.
//!
//! When the lender is gone, every step leads to Lost, but for Borrow, which
//! stays where it was: no lease was held.
//!
//! Firmware takes the same way: SeaBIOS and OVMF set BME for their own use and
//! clear it, or leave the reset to the operating system.
//!
//! This module only decides. [`worker`] does the work, on a thread of its own,
//! while the request that asked for it is held; a device's requests are taken
//! one at a time, so no event finds work half done.

pub(crate) mod bars;
mod error;
pub(crate) mod far;
mod page_pins;
pub(crate) mod path;
pub(crate) mod worker;

/// Where a borrow stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// Known, not borrowed.
    #[default]
    Described,
    /// Borrowed, without a way to guest memory.
    Leased,
    /// Borrowed, and able to reach guest RAM.
    Ready,
    /// Borrowed; the lender has yet to answer that DMA is stopped.
    Closing,
    /// The lender is gone.
    Lost,
}

/// What happens to a borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The client resets the device (`DEVICE_RESET`).
    Reset,
    /// The guest resets the function (FLR, or D3hot to D0).
    FunctionReset,
    /// The client reads or writes a BAR.
    BarAccess,
    /// The guest sets bus-master enable, or wakes the function with it set.
    EnableBusMaster,
    /// The guest clears bus-master enable, or puts the function in D3hot.
    DisableBusMaster,
    /// The client maps memory.
    MemoryAdded,
    /// The client unmaps memory.
    MemoryRemoved,
    /// The client was refused a mapping, or mapped what no device can reach
    /// where guest RAM is: what it takes for guest RAM is not what we have.
    MemoryRefused,
    /// The client is gone, has let the device go, or we are told to stop.
    ClientGone,
    /// The lender closed the register channel, or does not answer there.
    LenderGone,
}

/// What is to be done about it, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Take the lease; the lender resets the device.
    Borrow,
    /// Pin guest RAM, open windows, let the device master the bus.
    Open,
    /// Stop DMA, close windows, unpin.
    Close,
    /// As `Close`, or break the lease off: memory is to be taken away.
    Stop,
    /// As `Close`, and reset the device.
    Reset,
    /// Make new memory reachable.
    Map,
    /// Make memory unreachable.
    Unmap,
    /// As `Close`, and give the device back.
    Return,
    /// Unpin what is pinned: there is nobody left to tell.
    Abandon,
}

impl State {
    /// The steps that `event` asks for in this state.
    pub(crate) fn on(self, event: Event) -> &'static [Step] {
        use Event as E;
        use State as S;
        match (self, event) {
            (S::Described, E::Reset | E::BarAccess) => &[Step::Borrow],
            (S::Described, E::EnableBusMaster) => &[Step::Borrow, Step::Open],
            // A lender that came back is found by a client that starts over.
            (S::Lost, E::Reset) => &[Step::Borrow],
            (S::Leased | S::Ready | S::Closing, E::Reset | E::FunctionReset) => &[Step::Reset],
            (S::Leased, E::EnableBusMaster) => &[Step::Open],
            (S::Closing, E::EnableBusMaster) => &[Step::Close, Step::Open],
            (S::Ready, E::DisableBusMaster | E::MemoryRefused) => &[Step::Close],
            (S::Ready, E::MemoryAdded) => &[Step::Map],
            (S::Ready, E::MemoryRemoved) => &[Step::Unmap],
            // Its answer says that no DMA can reach the memory.
            (S::Closing, E::MemoryRemoved) => &[Step::Stop],
            (S::Leased | S::Ready | S::Closing, E::ClientGone) => &[Step::Return],
            (S::Leased | S::Ready | S::Closing, E::LenderGone) => &[Step::Abandon],

            // Nothing is borrowed, so there is nothing to undo.
            (
                S::Described,
                E::FunctionReset
                | E::DisableBusMaster
                | E::MemoryAdded
                | E::MemoryRemoved
                | E::MemoryRefused
                | E::ClientGone
                | E::LenderGone,
            ) => &[],
            // No window is open: memory is recorded only.
            (
                S::Leased,
                E::MemoryAdded
                | E::MemoryRemoved
                | E::MemoryRefused
                | E::DisableBusMaster
                | E::BarAccess,
            ) => &[],
            (S::Ready, E::EnableBusMaster | E::BarAccess) => &[],
            // The bit is 0 already, and no memory is added to what closes.
            (
                S::Closing,
                E::MemoryAdded | E::MemoryRefused | E::DisableBusMaster | E::BarAccess,
            ) => &[],
            // The next client starts over.
            (S::Lost, E::ClientGone) => &[Step::Return],
            // The lender took everything with it.
            (S::Lost, _) => &[],
        }
    }

    /// The state after `step` has succeeded.
    pub(crate) fn after(self, step: Step) -> State {
        match step {
            Step::Borrow | Step::Close | Step::Stop | Step::Reset => State::Leased,
            Step::Open | Step::Map | Step::Unmap => State::Ready,
            Step::Return => State::Described,
            Step::Abandon => State::Lost,
        }
    }

    /// The state after the lender, or this machine, refused `step` and what it
    /// had done was undone.
    pub(crate) fn after_refusal(self, step: Step) -> State {
        match step {
            Step::Borrow | Step::Return => State::Described,
            Step::Open | Step::Unmap => State::Leased,
            Step::Map => State::Ready,
            // A device that does not stop is given up.
            Step::Close | Step::Stop | Step::Reset | Step::Abandon => State::Lost,
        }
    }

    /// The state after the lender has not answered to `step`, or to its being
    /// undone, in time.
    pub(crate) fn after_late(self, step: Step) -> State {
        match step {
            Step::Borrow | Step::Return => State::Described,
            Step::Open | Step::Map | Step::Close | Step::Reset => State::Closing,
            Step::Stop | Step::Unmap | Step::Abandon => State::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Event::*, State::*, *};

    const STATES: [State; 5] = [Described, Leased, Ready, Closing, Lost];
    const EVENTS: [Event; 10] = [
        Reset,
        FunctionReset,
        BarAccess,
        EnableBusMaster,
        DisableBusMaster,
        MemoryAdded,
        MemoryRemoved,
        MemoryRefused,
        ClientGone,
        LenderGone,
    ];

    fn after_all(state: State, event: Event) -> State {
        state
            .on(event)
            .iter()
            .fold(state, |state, step| state.after(*step))
    }

    #[test]
    fn guest_memory_is_reachable_after_bus_master_enable_only() {
        for state in STATES {
            for event in EVENTS {
                let next = after_all(state, event);
                if next == Ready {
                    assert!(
                        state == Ready || event == EnableBusMaster,
                        "{state:?} {event:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_ends_dma_leaves_ready() {
        for event in [
            Reset,
            FunctionReset,
            DisableBusMaster,
            MemoryRefused,
            ClientGone,
        ] {
            assert_ne!(after_all(Ready, event), Ready, "{event:?}");
        }
    }

    #[test]
    fn a_client_that_goes_leaves_nothing_borrowed() {
        for state in STATES {
            assert_eq!(after_all(state, ClientGone), Described);
        }
    }

    /// Every step that some event asks for, with the state that it is taken in.
    fn all_steps() -> impl Iterator<Item = (State, Event, Step)> {
        let pairs = STATES
            .into_iter()
            .flat_map(|state| EVENTS.map(|event| (state, event)));
        pairs.flat_map(|(state, event)| {
            let mut at = state;
            state.on(event).iter().map(move |step| {
                let before = at;
                at = at.after(*step);
                (before, event, *step)
            })
        })
    }

    #[test]
    fn no_failure_makes_guest_memory_reachable() {
        for (state, event, step) in all_steps() {
            // Only what was open before stays open, and only beside new memory.
            let stays = state == Ready && step == Step::Map && event == MemoryAdded;
            assert_eq!(
                state.after_refusal(step) == Ready,
                stays,
                "{state:?} {step:?}"
            );
            assert_ne!(state.after_late(step), Ready, "{state:?} {step:?}");
        }
    }

    #[test]
    fn a_late_answer_costs_no_lease_but_where_memory_is_taken_away() {
        for (state, event, step) in all_steps() {
            let leased = matches!(state, Leased | Ready | Closing);
            if leased && !matches!(event, MemoryRemoved | ClientGone | LenderGone) {
                assert_eq!(state.after_late(step), Closing, "{state:?} {step:?}");
            }
        }
    }

    #[test]
    fn nothing_is_done_while_an_answer_is_awaited_but_to_await_it() {
        for event in EVENTS {
            let first = Closing.on(event).first();
            assert!(
                matches!(
                    first,
                    None | Some(
                        Step::Close | Step::Stop | Step::Reset | Step::Return | Step::Abandon
                    )
                ),
                "{event:?}"
            );
        }
        // Memory is not taken away before the answer has come.
        assert_eq!(after_all(Closing, MemoryRemoved), Leased);
        for step in Closing.on(MemoryRemoved) {
            assert_eq!(Closing.after_late(*step), Lost);
        }
    }

    #[test]
    fn a_device_is_opened_only_under_a_lease() {
        for state in STATES {
            for event in EVENTS {
                let mut at = state;
                for step in state.on(event) {
                    if *step == Step::Open {
                        assert_eq!(at, Leased);
                    }
                    at = at.after(*step);
                }
            }
        }
    }

    #[test]
    fn a_lender_that_came_back_is_found_by_a_reset_only() {
        assert_eq!(after_all(Lost, Reset), Leased);
        for event in EVENTS {
            if matches!(event, Reset | ClientGone) {
                continue;
            }
            assert_eq!(after_all(Lost, event), Lost);
        }
    }
}
