//! The life of a borrow, as a state machine.
//!
//! ```text
//!                reset, BAR access: Borrow
//!  +-----------+ BME 0->1: Borrow, Open   +--------+ reset, FLR: Reset
//!  | Unleased  |------------------------->| Leased |---+
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
//! - *Unleased*: the device's description is known; nothing is borrowed.
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
//! [`Step::after_refusal`] is where they lead while the lender is still there:
//!
//! - *Borrow* (another VM has the device): to Unleased. The device reads as
//!   absent. A reset or a bus-master enable asks again, a BAR access does not.
//! - *Open*: to Leased, with everything closed. The bus-master bit stays 0.
//! - *Map* (no room for the new memory): to Ready. What was open stays open; the
//!   new memory is out of the device's reach, and the status says so.
//! - *Unmap*: to Leased, with everything closed. The bus-master bit stays 1,
//!   since nobody wrote it: DMA is refused and counted until the guest clears
//!   and sets it, or resets.
//! - *Close*, *Block*, *Stop*, *Reset* (DMA in flight does not drain): to Lost. The
//!   connection is closed, and the lender keeps the device until it has drained.
//!
//! [`Step::after_late`] is where they lead when the lender has not answered in
//! time, as a slow or stopped host does not: to Closing, from where the same
//! lease goes on once it answers. But *Borrow* stays at Unleased, and what
//! memory is taken away by (*Unmap*, *Stop*) cannot stay undone: the lease is
//! broken off.
//!
//! When the lender is gone, every step leads to Lost, but for Borrow, which
//! stays where it was: no lease was held.
//!
//! Firmware takes the same way: SeaBIOS and OVMF set BME for their own use and
//! clear it, or leave the reset to the operating system.
//!
//! This module only decides. [`worker`] holds what each state has and takes the
//! steps, on a thread of its own, while the request that asked for it is held; a
//! device's requests are taken one at a time, so no event finds work half done.

pub(crate) mod bars;
mod error;
pub(crate) mod far;
mod page_pins;
pub(crate) mod path;
pub(crate) mod worker;

use std::{os::fd::OwnedFd, sync::Arc};

pub(crate) use farside_backend_api::BorrowState as State;
use farside_irq_relay::SetIrqs;

use crate::dma_table::{Blocked, DmaTable, Mapping};

/// What happens to a borrow.
#[derive(Clone, Debug)]
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
    MemoryAdded(Mapping),
    /// The client unmaps memory.
    MemoryRemoved(Vec<Mapping>),
    /// The client was refused a mapping, or mapped what no device can reach
    /// where guest RAM is: what it takes for guest RAM is not what we have.
    MemoryRefused(Blocked),
    /// The client is gone, has let the device go, or we are told to stop.
    ClientGone,
    /// The lender closed the register channel, or does not answer there.
    LenderGone,
}

/// What is to be done about it, with what that takes.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Take the lease; the lender resets the device.
    Borrow(Setup),
    /// Pin guest RAM, open windows, let the device master the bus.
    Open(DmaTable),
    /// Stop DMA, close windows, unpin.
    Close,
    /// As `Close`, since DMA is blocked from here on.
    Block(Blocked),
    /// As `Close`, or break the lease off: memory is to be taken away.
    Stop,
    /// As `Close`, and reset the device.
    Reset,
    /// Make new memory reachable.
    Map(Mapping),
    /// Make memory unreachable.
    Unmap(Vec<Mapping>),
    /// As `Close`, and give the device back.
    Return,
    /// Unpin what is pinned: there is nobody left to tell.
    Abandon,
}

/// What a client has set up before the device is borrowed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Setup {
    /// Files of the BARs with mappable areas.
    pub(crate) bar_files: Vec<Arc<OwnedFd>>,
    /// Its interrupts.
    pub(crate) irqs: Vec<SetIrqs>,
    pub(crate) intx_disable: bool,
    /// The memory that it has mapped.
    pub(crate) memory: DmaTable,
}

impl Event {
    /// A mapping that the client was granted.
    pub(crate) fn mapped(mapping: Mapping) -> Self {
        match mapping.is_private_ram() {
            true => Self::MemoryRefused(Blocked::private_ram(&mapping)),
            false => Self::MemoryAdded(mapping),
        }
    }

    /// The steps that this asks for in `state`, to be taken in their order.
    pub(crate) fn steps(self, state: State, setup: impl FnOnce() -> Setup) -> Vec<Step> {
        use Event as E;
        use State as S;
        match (state, self) {
            (S::Unleased, E::Reset | E::BarAccess) => vec![Step::Borrow(setup())],
            (S::Unleased, E::EnableBusMaster) => {
                let setup = setup();
                let open = Step::Open(setup.memory.clone());
                vec![Step::Borrow(setup), open]
            }
            // A lender that came back is found by a client that starts over.
            (S::Lost, E::Reset) => vec![Step::Borrow(setup())],
            (S::Leased | S::Ready | S::Closing, E::Reset | E::FunctionReset) => vec![Step::Reset],
            (S::Leased, E::EnableBusMaster) => vec![Step::Open(setup().memory)],
            (S::Closing, E::EnableBusMaster) => vec![Step::Close, Step::Open(setup().memory)],
            (S::Ready, E::DisableBusMaster) => vec![Step::Close],
            (S::Ready, E::MemoryRefused(blocked)) => vec![Step::Block(blocked)],
            (S::Ready, E::MemoryAdded(mapping)) => vec![Step::Map(mapping)],
            (S::Ready, E::MemoryRemoved(mappings)) => vec![Step::Unmap(mappings)],
            // Its answer says that no DMA can reach the memory.
            (S::Closing, E::MemoryRemoved(_)) => vec![Step::Stop],
            (S::Leased | S::Ready | S::Closing, E::ClientGone) => vec![Step::Return],
            (S::Leased | S::Ready | S::Closing, E::LenderGone) => vec![Step::Abandon],

            // Nothing is borrowed, so there is nothing to undo.
            (
                S::Unleased,
                E::FunctionReset
                | E::DisableBusMaster
                | E::MemoryAdded(_)
                | E::MemoryRemoved(_)
                | E::MemoryRefused(_)
                | E::ClientGone
                | E::LenderGone,
            ) => vec![],
            // No window is open: memory is recorded only.
            (
                S::Leased,
                E::MemoryAdded(_)
                | E::MemoryRemoved(_)
                | E::MemoryRefused(_)
                | E::DisableBusMaster
                | E::BarAccess,
            ) => vec![],
            (S::Ready, E::EnableBusMaster | E::BarAccess) => vec![],
            // The bit is 0 already, and no memory is added to what closes.
            (
                S::Closing,
                E::MemoryAdded(_) | E::MemoryRefused(_) | E::DisableBusMaster | E::BarAccess,
            ) => vec![],
            // The next client starts over.
            (S::Lost, E::ClientGone) => vec![Step::Return],
            // The lender took everything with it.
            (S::Lost, _) => vec![],
        }
    }
}

impl Step {
    /// The state after it has succeeded.
    pub(crate) fn after(&self) -> State {
        match self {
            Self::Borrow(_) | Self::Close | Self::Block(_) | Self::Stop | Self::Reset => {
                State::Leased
            }
            Self::Open(_) | Self::Map(_) | Self::Unmap(_) => State::Ready,
            Self::Return => State::Unleased,
            Self::Abandon => State::Lost,
        }
    }

    /// The state after the lender, or this machine, refused it and what it had
    /// done was undone.
    pub(crate) fn after_refusal(&self) -> State {
        match self {
            Self::Borrow(_) | Self::Return => State::Unleased,
            Self::Open(_) | Self::Unmap(_) => State::Leased,
            Self::Map(_) => State::Ready,
            // A device that does not stop is given up.
            Self::Close | Self::Block(_) | Self::Stop | Self::Reset | Self::Abandon => State::Lost,
        }
    }

    /// The state after the lender has not answered to it, or to its being
    /// undone, in time.
    pub(crate) fn after_late(&self) -> State {
        match self {
            Self::Borrow(_) | Self::Return => State::Unleased,
            Self::Open(_) | Self::Map(_) | Self::Close | Self::Block(_) | Self::Reset => {
                State::Closing
            }
            Self::Stop | Self::Unmap(_) | Self::Abandon => State::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use farside_guest_layout::{Gpa, GpaRange, PAGE_SIZE};

    use super::{Event::*, State::*, *};
    use crate::dma_table::DmaError;

    const STATES: [State; 5] = [Unleased, Leased, Ready, Closing, Lost];

    fn events() -> [Event; 10] {
        let mapping = Mapping {
            range: GpaRange::new(Gpa::new(0), PAGE_SIZE).unwrap(),
            backing: None,
            writable: true,
        };
        [
            Reset,
            FunctionReset,
            BarAccess,
            EnableBusMaster,
            DisableBusMaster,
            MemoryAdded(mapping.clone()),
            MemoryRemoved(vec![mapping]),
            MemoryRefused(Blocked::Refused(DmaError::TooMany)),
            ClientGone,
            LenderGone,
        ]
    }

    fn steps(state: State, event: &Event) -> Vec<Step> {
        event.clone().steps(state, Setup::default)
    }

    fn after_all(state: State, event: &Event) -> State {
        steps(state, event).last().map_or(state, Step::after)
    }

    #[test]
    fn guest_memory_is_reachable_after_bus_master_enable_only() {
        for state in STATES {
            for event in events() {
                if after_all(state, &event) == Ready {
                    assert!(
                        state == Ready || matches!(event, EnableBusMaster),
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
            MemoryRefused(Blocked::Refused(DmaError::TooMany)),
            ClientGone,
        ] {
            assert_ne!(after_all(Ready, &event), Ready, "{event:?}");
        }
    }

    #[test]
    fn a_client_that_goes_leaves_nothing_borrowed() {
        for state in STATES {
            assert_eq!(after_all(state, &ClientGone), Unleased);
        }
    }

    /// Every step that some event asks for, with the state that it is taken in.
    fn all_steps() -> impl Iterator<Item = (State, Event, Step)> {
        let pairs = STATES
            .into_iter()
            .flat_map(|state| events().map(|event| (state, event)));
        pairs.flat_map(|(state, event)| {
            let mut at = state;
            steps(state, &event).into_iter().map(move |step| {
                let before = std::mem::replace(&mut at, step.after());
                (before, event.clone(), step)
            })
        })
    }

    #[test]
    fn no_failure_makes_guest_memory_reachable() {
        for (state, event, step) in all_steps() {
            // Only what was open before stays open, and only beside new memory.
            let stays = state == Ready && matches!((&step, event), (Step::Map(_), MemoryAdded(_)));
            assert_eq!(step.after_refusal() == Ready, stays, "{state:?} {step:?}");
            assert_ne!(step.after_late(), Ready, "{state:?} {step:?}");
        }
    }

    #[test]
    fn a_late_answer_costs_no_lease_but_where_memory_is_taken_away() {
        for (state, event, step) in all_steps() {
            let leased = matches!(state, Leased | Ready | Closing);
            if leased && !matches!(event, MemoryRemoved(_) | ClientGone | LenderGone) {
                assert_eq!(step.after_late(), Closing, "{state:?} {step:?}");
            }
        }
    }

    #[test]
    fn nothing_is_done_while_an_answer_is_awaited_but_to_await_it() {
        for event in events() {
            let steps = steps(Closing, &event);
            assert!(
                matches!(
                    steps.first(),
                    None | Some(
                        Step::Close | Step::Stop | Step::Reset | Step::Return | Step::Abandon
                    )
                ),
                "{event:?}"
            );
        }
        // Memory is not taken away before the answer has come.
        let removed = MemoryRemoved(Vec::new());
        assert_eq!(after_all(Closing, &removed), Leased);
        for step in steps(Closing, &removed) {
            assert_eq!(step.after_late(), Lost);
        }
    }

    #[test]
    fn a_device_is_opened_only_under_a_lease() {
        for (state, _, step) in all_steps() {
            if matches!(step, Step::Open(_)) {
                assert_eq!(state, Leased);
            }
        }
    }

    #[test]
    fn a_lender_that_came_back_is_found_by_a_reset_only() {
        assert_eq!(after_all(Lost, &Reset), Leased);
        for event in events() {
            if matches!(event, Reset | ClientGone) {
                continue;
            }
            assert_eq!(after_all(Lost, &event), Lost);
        }
    }

    #[test]
    fn steps_are_taken_only_in_states_that_have_what_they_change() {
        for (state, event, step) in all_steps() {
            match step {
                Step::Borrow(_) => assert!(matches!(state, Unleased | Lost), "{event:?}"),
                Step::Map(_) | Step::Unmap(_) => assert_eq!(state, Ready, "{event:?}"),
                _ => {}
            }
        }
    }
}
