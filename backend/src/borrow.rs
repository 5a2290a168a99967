//! The life of a borrow, as a state machine.
//!
//! ```text
//!                     first reset, BAR access or BME
//!      +-----------+        Borrow            +--------+
//!  +-->| Described |------------------------->| Leased |<-----------------+
//!  |   +-----------+                          +--------+                  |
//!  |     ^   ^   |  refused (another VM        |  |  ^                    |
//!  |     |   +---+  has it): stays,            |  |  | BME 1->0, D3hot:   |
//!  |     |          reads as absent            |  |  |   Close            |
//!  |     |                        BME 0->1:    |  |  | reset, FLR: Reset  |
//!  |     |  client gone:            Open       |  |  |                    |
//!  |     |    Return              (write held) v  |  +------------+       |
//!  |     +----------------------+--------------+  |  |   Ready    |-------+
//!  |                            |  failed: stays, |  | windows    |
//!  |                            |  BME stays 0    +->| open, RAM  |
//!  |                            +--------------------| pinned     |
//!  |  client resets again                            +------------+
//!  |   (Borrow anew)          lender gone, from anywhere
//!  +------------------ Lost <---------------
//! ```
//!
//! - *Described*: the device's description is known; nothing is borrowed.
//! - *Leased*: the device is ours and reset; its IOMMU domain is empty. No page
//!   of the VM is mapped or pinned, no window is open.
//! - *Ready*: the device can DMA to guest RAM and to nothing else.
//! - *Lost*: the lender is gone. Registers read as all ones, as a device that
//!   was pulled out; the client's socket stays up.
//!
//! Firmware takes the same way: SeaBIOS and OVMF set BME for their own use and
//! clear it, or leave the reset to the operating system.
//!
//! This module only decides. [`worker`] does the work, on a thread of its own,
//! while the request that asked for it is held; a device's requests are taken
//! one at a time, so no event finds work half done.

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
    /// The guest sets bus-master enable.
    EnableBusMaster,
    /// The guest clears bus-master enable, or puts the function in D3hot.
    DisableBusMaster,
    /// The client maps or unmaps memory.
    MemoryChange,
    /// The client is gone, or we are told to stop.
    ClientGone,
    /// The lender closed the register channel.
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

    /// The state after `step` was refused, with nothing done.
    pub(crate) fn after_refusal(self, step: Step) -> State {
        match step {
            // The lender stops DMA on its own when it is told to and cannot
            // drain it: what is left is a lease to give back.
            Step::Borrow => State::Described,
            Step::Open | Step::Close | Step::Reset | Step::Remap => State::Leased,
            Step::Return => State::Described,
            Step::Abandon => State::Lost,
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
