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
//!    |  |      (Remap fails: Close)       +-------+ map, unmap: Remap
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
//! - *Open*, *Remap*: to Leased, with everything closed. After Open the
//!   bus-master bit stays 0. After Remap it stays 1, since nobody wrote it: DMA is
//!   refused and counted until the guest clears and sets it, or resets.
//! - *Close*, *Reset* (DMA in flight does not drain): to Lost. The connection
//!   is closed, and the lender keeps the device until it has drained.
//!
//! When the lender is gone, every step leads to Lost, but for Borrow, which
//! stays where it was: nothing was lost that we had.
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
pub(crate) mod path;
pub(crate) mod worker;

use serde::Serialize;

/// Where a borrow stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    /// Known, not borrowed.
    #[default]
    Described,
    /// Borrowed, without a way to guest memory.
    Leased,
    /// Borrowed, and able to reach guest RAM.
    Ready,
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
    /// The client maps or unmaps memory, or was refused to.
    MemoryChange,
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
    /// As `Close`, and reset the device.
    Reset,
    /// Change the open windows.
    Remap,
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
            (S::Leased | S::Ready, E::Reset | E::FunctionReset) => &[Step::Reset],
            (S::Leased, E::EnableBusMaster) => &[Step::Open],
            (S::Ready, E::DisableBusMaster) => &[Step::Close],
            (S::Ready, E::MemoryChange) => &[Step::Remap],
            (S::Leased | S::Ready, E::ClientGone) => &[Step::Return],
            (S::Leased | S::Ready, E::LenderGone) => &[Step::Abandon],

            // Nothing is borrowed, so there is nothing to undo.
            (
                S::Described,
                E::FunctionReset
                | E::DisableBusMaster
                | E::MemoryChange
                | E::ClientGone
                | E::LenderGone,
            ) => &[],
            // No window is open: memory is recorded only.
            (S::Leased, E::MemoryChange | E::DisableBusMaster | E::BarAccess) => &[],
            (S::Ready, E::EnableBusMaster | E::BarAccess) => &[],
            // The next client starts over.
            (S::Lost, E::ClientGone) => &[Step::Return],
            // The lender took everything with it.
            (S::Lost, _) => &[],
        }
    }

    /// The state after `step` has succeeded.
    pub(crate) fn after(self, step: Step) -> State {
        match step {
            Step::Borrow | Step::Close | Step::Reset => State::Leased,
            Step::Open | Step::Remap => State::Ready,
            Step::Return => State::Described,
            Step::Abandon => State::Lost,
        }
    }

    /// The state after the lender, or this machine, refused `step` and what it
    /// had done was undone.
    pub(crate) fn after_refusal(self, step: Step) -> State {
        match step {
            Step::Borrow | Step::Return => State::Described,
            Step::Open | Step::Remap => State::Leased,
            // A device that does not stop is given up.
            Step::Close | Step::Reset | Step::Abandon => State::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Event::*, State::*, *};

    const STATES: [State; 4] = [Described, Leased, Ready, Lost];
    const EVENTS: [Event; 8] = [
        Reset,
        FunctionReset,
        BarAccess,
        EnableBusMaster,
        DisableBusMaster,
        MemoryChange,
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
        for event in [Reset, FunctionReset, DisableBusMaster, ClientGone] {
            assert_ne!(after_all(Ready, event), Ready, "{event:?}");
        }
    }

    #[test]
    fn a_client_that_goes_leaves_nothing_borrowed() {
        for state in STATES {
            assert_eq!(after_all(state, ClientGone), Described);
        }
    }

    #[test]
    fn no_refusal_leaves_guest_memory_reachable() {
        for state in STATES {
            for step in EVENTS.iter().flat_map(|event| state.on(*event)) {
                assert_ne!(state.after_refusal(*step), Ready, "{state:?} {step:?}");
            }
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
