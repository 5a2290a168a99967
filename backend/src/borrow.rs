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
//! - *Leased*: the device is leased and reset, and its IOMMU domain is empty. No page of the VM is
//!   mapped or pinned, no window is open.
//! - *Ready*: the device can DMA to guest RAM, and to BARs of the VM's devices, only.
//! - *Closing*: as Leased for the guest, but the lender has not yet confirmed that DMA is stopped.
//!   Pinned memory stays pinned. Every transition out of it begins with the lender's answer, or
//!   ends the lease.
//! - *Lost*: the lender is gone. Registers and configuration space read as all ones, as after a
//!   surprise removal; the client's socket stays up.
//!
//! "BME 0->1" includes a wake-up from D3hot with the bit already set.
//!
//! # Failed steps
//!
//! [`Step::after_refusal`] is the state after a failure while the lender is connected:
//!
//! - *Borrow* (another VM has the device): to Unleased. The device reads as absent. A reset or a
//!   bus-master enable retries, a BAR access does not.
//! - *Open*: to Leased, with everything closed. The bus-master bit stays 0.
//! - *Map* (no room for the new memory): to Ready. Open windows stay open; the device cannot reach
//!   the new memory, and the status reports it.
//! - *Unmap*: to Leased, with everything closed. The bus-master bit stays 1, since the guest did
//!   not write it: DMA is refused and counted until the guest clears and sets it, or resets.
//! - *Close*, *Block*, *Stop*, *Reset* (DMA in flight does not drain): to Lost. The
//!   connection is closed, and the lender keeps the device until it has drained.
//!
//! [`Step::after_late`] is the state after the lender has missed its deadline: Closing, from which
//! the same lease goes on once the lender answers. Two exceptions: *Borrow* stays at Unleased, and
//! for *Unmap* and *Stop*, which must not leave memory reachable, the lease is terminated.
//!
//! When the lender is gone, every step leads to Lost, except Borrow, which leaves the state
//! unchanged: no lease was held.
//!
//! Firmware causes the same transitions: SeaBIOS and OVMF set BME for their own use and clear it,
//! or leave the reset to the operating system.
//!
//! This module only decides. [`worker`] holds the resources of each state and executes the steps,
//! on its own thread, while the request that caused them is held. A device's requests are processed
//! one at a time, so no event finds a step half done.

pub(crate) mod bars;
mod error;
pub(crate) mod memory_limit;
pub(crate) mod network;
mod page_pins;
pub(crate) mod path;
pub(crate) mod peer_mapper;
pub(crate) mod vm_memory;
pub(crate) mod worker;

use std::{os::fd::OwnedFd, sync::Arc};

pub(crate) use farside_backend_api::BorrowState as State;
use farside_fabric::memory::HostSlice;
use farside_irq_relay::SetIrqs;

use crate::dma_table::{Blocked, DmaTable, Mapping};

/// An event in the life of a borrow.
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
    /// The client was refused a mapping, or mapped guest RAM that no device can reach: its view of
    /// guest RAM differs from the table.
    MemoryRefused(Blocked),
    /// The client is gone or has released the device, or the backend is stopping.
    ClientGone,
    /// The lender closed the register channel, or does not answer there.
    LenderGone,
}

/// An action in response to an [`Event`], with its inputs.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Take the lease; the lender resets the device.
    Borrow(Setup),
    /// Pin guest RAM, open windows, enable bus mastering.
    Open(DmaTable),
    /// Stop DMA, close windows, unpin.
    Close,
    /// As `Close`; DMA is blocked from here on.
    Block(Blocked),
    /// As `Close`, or terminate the lease: memory is about to be unmapped.
    Stop,
    /// As `Close`, and reset the device.
    Reset,
    /// Make new memory reachable.
    Map(Mapping),
    /// Make memory unreachable.
    Unmap(Vec<Mapping>),
    /// As `Close`, and return the device.
    Return,
    /// Unpin without a call: the lender is gone.
    Abandon,
}

/// The client's setup from before the device is borrowed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Setup {
    /// Files of the BARs with sparse mmap areas.
    pub(crate) bar_files: Vec<Arc<OwnedFd>>,
    /// The file in which the device's state outlives its process.
    pub(crate) state: Option<Arc<OwnedFd>>,
    /// Its first page.
    pub(crate) state_page: Option<HostSlice>,
    /// Its interrupt configuration.
    pub(crate) irqs: Vec<SetIrqs>,
    pub(crate) intx_disable: bool,
    /// Its DMA mappings.
    pub(crate) memory: DmaTable,
    /// The guest has enabled bus mastering.
    pub(crate) may_dma: bool,
}

impl Setup {
    /// The files for a lease that goes on, in the order of the request.
    pub(crate) fn files(&self) -> Vec<Arc<OwnedFd>> {
        self.bar_files.iter().chain(&self.state).cloned().collect()
    }
}

impl Event {
    /// The event for an accepted `DMA_MAP`.
    pub(crate) fn mapped(mapping: Mapping) -> Self {
        match mapping.is_private_ram() {
            true => Self::MemoryRefused(Blocked::private_ram(&mapping)),
            false => Self::MemoryAdded(mapping),
        }
    }

    /// The steps that this event requires in `state`, in order.
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
            // A client that resets may find the lender back.
            (S::Lost, E::Reset) => vec![Step::Borrow(setup())],
            (S::Leased | S::Ready | S::Closing, E::Reset | E::FunctionReset) => vec![Step::Reset],
            (S::Leased, E::EnableBusMaster) => vec![Step::Open(setup().memory)],
            (S::Closing, E::EnableBusMaster) => vec![Step::Close, Step::Open(setup().memory)],
            (S::Ready, E::DisableBusMaster) => vec![Step::Close],
            (S::Ready, E::MemoryRefused(blocked)) => vec![Step::Block(blocked)],
            (S::Ready, E::MemoryAdded(mapping)) => vec![Step::Map(mapping)],
            (S::Ready, E::MemoryRemoved(mappings)) => vec![Step::Unmap(mappings)],
            // The lender's answer confirms that no DMA can reach the memory.
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
            // The bit is 0 already, and a closing path takes no new memory.
            (
                S::Closing,
                E::MemoryAdded(_) | E::MemoryRefused(_) | E::DisableBusMaster | E::BarAccess,
            ) => vec![],
            // The next client starts from Unleased.
            (S::Lost, E::ClientGone) => vec![Step::Return],
            // The lease ended with the lender.
            (S::Lost, _) => vec![],
        }
    }
}

impl Step {
    /// The state after success.
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

    /// The state after the lender or this host refused the step and it was rolled back.
    pub(crate) fn after_refusal(&self) -> State {
        match self {
            Self::Borrow(_) | Self::Return => State::Unleased,
            Self::Open(_) | Self::Unmap(_) => State::Leased,
            Self::Map(_) => State::Ready,
            // A device whose DMA does not stop is abandoned.
            Self::Close | Self::Block(_) | Self::Stop | Self::Reset | Self::Abandon => State::Lost,
        }
    }

    /// The state after the lender has not answered the step, or its rollback, in time.
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
    use crate::dma_table::{DmaError, Target};

    const STATES: [State; 5] = [Unleased, Leased, Ready, Closing, Lost];

    fn events() -> [Event; 10] {
        let mapping = Mapping {
            range: GpaRange::new(Gpa::new(0), PAGE_SIZE).unwrap(),
            target: Target::Private,
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

    /// Every step that some event requires, with its initial state.
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
            // A path stays open only if it was open before, and only when new memory failed.
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
        // Memory is not unmapped before the answer arrives.
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
