//! Signals on a client's eventfds.

mod common;

use std::sync::Arc;

use common::{all_counts, disable, request, set_masked, set_triggers, taken, vectors};
use farside_irq_relay::{
    Action, IrqData, IrqEvent, IrqEventFd, IrqIndex, IrqTarget, Relay, SetIrqsError, Vectors,
};

#[test]
fn msix_signals_the_eventfd_of_the_vector() {
    let mut vectors = vectors();
    let fds = set_triggers(&mut vectors, IrqIndex::Msix, 2040, 8);
    vectors.raise(2041);
    vectors.raise(2041);
    vectors.raise(2047);
    let counts: Vec<_> = fds.iter().map(taken).collect();
    assert_eq!(counts, [0, 2, 0, 0, 0, 0, 0, 1]);
    assert_eq!(vectors.fired(IrqIndex::Msix, 2041), 2);
    assert_eq!(vectors.status().fired.len(), 2);
}

#[test]
fn a_masked_vector_fires_once_on_unmask_however_often_it_was_raised() {
    let mut vectors = vectors();
    let fds = set_triggers(&mut vectors, IrqIndex::Msix, 0, 2);
    set_masked(&mut vectors, IrqIndex::Msix, 1, true);
    for _ in 0..5 {
        vectors.raise(1);
    }
    assert_eq!(taken(&fds[1]), 0);
    assert!(vectors.is_pending(1));
    assert!(!vectors.is_pending(0));
    assert_eq!(vectors.status().pending, 1);
    set_masked(&mut vectors, IrqIndex::Msix, 1, false);
    assert_eq!(taken(&fds[1]), 1);
    assert!(!vectors.is_pending(1));
    set_masked(&mut vectors, IrqIndex::Msix, 1, false);
    assert_eq!(taken(&fds[1]), 0);
}

#[test]
fn bool_data_masks_the_chosen_vectors_only() {
    let mut vectors = vectors();
    let fds = set_triggers(&mut vectors, IrqIndex::Msi, 0, 4);
    let data = IrqData::Bool(vec![true, false, true]);
    let set = request(IrqIndex::Msi, 1, 3, Action::Mask, data).unwrap();
    vectors.apply(set).unwrap();
    for vector in 0..4 {
        vectors.raise(vector);
    }
    assert_eq!(fds.iter().map(taken).collect::<Vec<_>>(), [1, 0, 1, 0]);
}

#[test]
fn a_vector_raised_before_its_trigger_came_is_not_lost() {
    let mut vectors = vectors();
    // QEMU enables MSI-X with a request that assigns nothing.
    let none = IrqData::Targets(vec![None]);
    let set = request(IrqIndex::Msix, 0, 1, Action::Trigger, none).unwrap();
    vectors.apply(set).unwrap();
    assert_eq!(vectors.enabled(), Some(IrqIndex::Msix));
    vectors.raise(7);
    assert!(vectors.is_pending(7));
    let fds = set_triggers(&mut vectors, IrqIndex::Msix, 7, 1);
    assert_eq!(taken(&fds[0]), 1);
}

#[test]
fn taking_a_trigger_away_holds_the_vector_back() {
    let mut vectors = vectors();
    let fds = set_triggers(&mut vectors, IrqIndex::Msi, 0, 2);
    let none = IrqData::Targets(vec![None]);
    let set = request(IrqIndex::Msi, 1, 1, Action::Trigger, none).unwrap();
    vectors.apply(set).unwrap();
    vectors.raise(0);
    vectors.raise(1);
    assert_eq!((taken(&fds[0]), taken(&fds[1])), (1, 0));
    assert!(vectors.is_pending(1));
}

#[test]
fn disabling_an_index_forgets_its_triggers_masks_and_pending_vectors() {
    let mut vectors = vectors();
    let old = set_triggers(&mut vectors, IrqIndex::Msix, 0, 2);
    set_masked(&mut vectors, IrqIndex::Msix, 0, true);
    vectors.raise(0);
    disable(&mut vectors, IrqIndex::Msix);
    assert_eq!(vectors.enabled(), None);
    vectors.raise(1);
    assert_eq!(vectors.status().dropped, 1);
    let new = set_triggers(&mut vectors, IrqIndex::Msix, 0, 2);
    assert_eq!(taken(&new[0]), 0);
    vectors.raise(0);
    assert_eq!((taken(&new[0]), taken(&old[0])), (1, 0));
    // Disabling a disabled index is not an error: clients do so to be sure.
    disable(&mut vectors, IrqIndex::Msi);
}

#[test]
fn intx_fires_once_and_is_masked_by_that() {
    let mut vectors = vectors();
    let fd = set_triggers(&mut vectors, IrqIndex::Intx, 0, 1).remove(0);
    vectors.set_intx(true);
    vectors.set_intx(true);
    vectors.set_intx(false);
    vectors.set_intx(true);
    assert_eq!(taken(&fd), 1);
    // Still asserted: signalled again, once.
    set_masked(&mut vectors, IrqIndex::Intx, 0, false);
    assert_eq!(taken(&fd), 1);
    // Acknowledged: nothing is pending, and the next assertion is signalled.
    vectors.set_intx(false);
    set_masked(&mut vectors, IrqIndex::Intx, 0, false);
    assert_eq!(taken(&fd), 0);
    vectors.set_intx(true);
    assert_eq!(taken(&fd), 1);
}

#[test]
fn intx_disable_in_the_command_register_gates_the_line() {
    let mut vectors = vectors();
    let fd = set_triggers(&mut vectors, IrqIndex::Intx, 0, 1).remove(0);
    vectors.set_intx_disabled(true);
    vectors.set_intx(true);
    assert_eq!(taken(&fd), 0);
    vectors.set_intx_disabled(false);
    assert_eq!(taken(&fd), 1);
}

#[test]
fn an_intx_level_from_before_the_trigger_fires_when_it_comes() {
    let mut vectors = vectors();
    let msix = set_triggers(&mut vectors, IrqIndex::Msix, 0, 1).remove(0);
    vectors.set_intx(true);
    disable(&mut vectors, IrqIndex::Msix);
    let intx = set_triggers(&mut vectors, IrqIndex::Intx, 0, 1).remove(0);
    assert_eq!((taken(&msix), taken(&intx)), (0, 1));
}

#[test]
fn messages_are_dropped_while_only_intx_is_enabled() {
    let mut vectors = vectors();
    let fd = set_triggers(&mut vectors, IrqIndex::Intx, 0, 1).remove(0);
    vectors.raise(0);
    assert_eq!(taken(&fd), 0);
    assert_eq!(vectors.status().dropped, 1);
}

#[test]
fn a_vector_that_the_function_lacks_is_dropped_not_a_panic() {
    let mut vectors = vectors();
    set_triggers(&mut vectors, IrqIndex::Msi, 0, 32);
    vectors.raise(32);
    vectors.raise(u16::MAX);
    assert!(!vectors.is_pending(u16::MAX));
    assert_eq!(vectors.status().dropped, 2);
}

#[test]
fn error_and_request_interrupts_stand_beside_the_others() {
    let mut vectors = vectors();
    set_triggers(&mut vectors, IrqIndex::Msix, 0, 1);
    vectors.signal_err();
    assert!(!vectors.signal_req());
    assert_eq!(vectors.status().dropped, 2);
    let err = set_triggers(&mut vectors, IrqIndex::Err, 0, 1).remove(0);
    let req = set_triggers(&mut vectors, IrqIndex::Req, 0, 1).remove(0);
    assert_eq!(vectors.enabled(), Some(IrqIndex::Msix));
    vectors.signal_err();
    assert!(vectors.signal_req());
    assert!(vectors.signal_req());
    assert_eq!((taken(&err), taken(&req)), (1, 2));
}

#[test]
fn intx_msi_and_msix_exclude_each_other() {
    let mut vectors = vectors();
    let fds = set_triggers(&mut vectors, IrqIndex::Intx, 0, 1);
    let data = IrqData::Targets(vec![Some(IrqEventFd::new().unwrap().into())]);
    let set = request(IrqIndex::Msi, 0, 1, Action::Trigger, data).unwrap();
    let error = vectors.apply(set).unwrap_err();
    assert_eq!(
        error.to_string(),
        "MSI cannot be enabled while INTx is: disable that first"
    );
    vectors.set_intx(true);
    assert_eq!(taken(&fds[0]), 1, "INTx works on");
}

#[test]
fn trigger_without_sinks_tests_the_loop() {
    let mut vectors = vectors();
    let not_yet = request(IrqIndex::Msix, 0, 2, Action::Trigger, IrqData::None).unwrap();
    assert!(matches!(
        vectors.apply(not_yet.clone()),
        Err(SetIrqsError::NotEnabled { .. })
    ));
    let fds = set_triggers(&mut vectors, IrqIndex::Msix, 0, 2);
    vectors.apply(not_yet).unwrap();
    let data = IrqData::Bool(vec![false, true]);
    let set = request(IrqIndex::Msix, 0, 2, Action::Trigger, data).unwrap();
    vectors.apply(set).unwrap();
    assert_eq!((taken(&fds[0]), taken(&fds[1])), (1, 2));
}

#[test]
fn a_loop_test_of_intx_fires_without_the_line() {
    let mut vectors = vectors();
    let fd = set_triggers(&mut vectors, IrqIndex::Intx, 0, 1).remove(0);
    let set = request(IrqIndex::Intx, 0, 1, Action::Trigger, IrqData::None).unwrap();
    vectors.apply(set).unwrap();
    assert_eq!(taken(&fd), 1);
    set_masked(&mut vectors, IrqIndex::Intx, 0, false);
    assert_eq!(taken(&fd), 0);
}

#[test]
fn a_reset_drops_what_is_pending_and_keeps_the_clients_triggers() {
    let mut vectors = vectors();
    let fds = set_triggers(&mut vectors, IrqIndex::Msix, 0, 1);
    set_masked(&mut vectors, IrqIndex::Msix, 0, true);
    vectors.raise(0);
    vectors.reset();
    set_masked(&mut vectors, IrqIndex::Msix, 0, false);
    assert_eq!(taken(&fds[0]), 0);
    vectors.raise(0);
    assert_eq!(taken(&fds[0]), 1);
}

#[test]
fn the_configuration_can_be_replayed_in_small_requests() {
    let mut old = vectors();
    let fds = set_triggers(&mut old, IrqIndex::Msix, 3, 40);
    let err = set_triggers(&mut old, IrqIndex::Err, 0, 1).remove(0);
    set_masked(&mut old, IrqIndex::Msix, 5, true);
    let requests = old.configuration(16);
    assert!(requests.iter().all(|set| match set.data() {
        IrqData::Targets(targets) => targets.len() <= 16,
        _ => true,
    }));

    let mut new = vectors();
    for set in requests {
        new.apply(set).unwrap();
    }
    for vector in 0..43 {
        new.raise(vector);
    }
    new.signal_err();
    let counts: Vec<_> = fds.iter().map(taken).collect();
    let expected: Vec<_> = (3..43).map(|vector| u64::from(vector != 5)).collect();
    assert_eq!(counts, expected);
    assert_eq!(taken(&err), 1);
    set_masked(&mut new, IrqIndex::Msix, 5, false);
    assert_eq!(taken(&fds[2]), 1);
}

#[test]
fn an_enabled_index_without_triggers_is_replayed_too() {
    let mut old = vectors();
    let none = IrqData::Targets(vec![None]);
    let set = request(IrqIndex::Msix, 9, 1, Action::Trigger, none).unwrap();
    old.apply(set).unwrap();
    let mut new = vectors();
    for set in old.configuration(16) {
        new.apply(set).unwrap();
    }
    assert_eq!(new.enabled(), Some(IrqIndex::Msix));
    assert!(vectors().configuration(16).is_empty());
}

/// Lender and borrower connected by a relay, as on two hosts.
struct TwoHosts {
    lender: Vectors,
    relay: Arc<Relay>,
    borrower: Vectors,
}

impl TwoHosts {
    fn new() -> Self {
        Self {
            lender: vectors(),
            relay: Arc::new(Relay::new()),
            borrower: vectors(),
        }
    }

    /// The client's eventfds stay at the borrower; the lender gets the relay.
    fn set_triggers(&mut self, index: IrqIndex, count: u32) -> Vec<IrqEventFd> {
        let targets = vec![Some(IrqTarget::from(Arc::clone(&self.relay))); count as usize];
        let data = IrqData::Targets(targets);
        let set = request(index, 0, count, Action::Trigger, data).unwrap();
        self.lender.apply(set).unwrap();
        set_triggers(&mut self.borrower, index, 0, count)
    }

    fn carry(&mut self) -> Vec<IrqEvent> {
        let mut carried = Vec::new();
        self.relay.drain(|event| carried.push(event));
        for event in &carried {
            self.borrower.deliver(*event);
        }
        carried
    }
}

#[test]
fn a_relayed_vector_reaches_the_peers_eventfd_and_repeats_are_merged() {
    let mut hosts = TwoHosts::new();
    let fds = hosts.set_triggers(IrqIndex::Msix, 2048);
    for vector in [0, 63, 64, 2047, 64, 64] {
        hosts.lender.raise(vector);
    }
    assert_eq!(hosts.carry().len(), 4);
    assert_eq!(hosts.relay.coalesced(), 2);
    assert!(hosts.relay.is_empty());
    for vector in [0, 63, 64, 2047] {
        assert_eq!(taken(&fds[vector]), 1, "vector {vector}");
    }
    assert_eq!(hosts.borrower.status().fired.len(), 4);
}

#[test]
fn a_relayed_intx_is_masked_on_both_sides_until_the_client_unmasks() {
    let mut hosts = TwoHosts::new();
    let fd = hosts.set_triggers(IrqIndex::Intx, 1).remove(0);
    hosts.lender.set_intx(true);
    hosts.carry();
    hosts.lender.set_intx(true);
    assert!(hosts.carry().is_empty());
    assert_eq!(taken(&fd), 1);
    set_masked(&mut hosts.borrower, IrqIndex::Intx, 0, false);
    set_masked(&mut hosts.lender, IrqIndex::Intx, 0, false);
    hosts.carry();
    assert_eq!(taken(&fd), 1, "the line is still asserted");
    hosts.lender.set_intx(false);
    set_masked(&mut hosts.borrower, IrqIndex::Intx, 0, false);
    set_masked(&mut hosts.lender, IrqIndex::Intx, 0, false);
    hosts.carry();
    assert_eq!(taken(&fd), 0);
}

#[test]
fn a_message_that_meets_a_mask_on_arrival_waits_there() {
    let mut hosts = TwoHosts::new();
    let fds = hosts.set_triggers(IrqIndex::Msi, 4);
    hosts.lender.raise(3);
    set_masked(&mut hosts.borrower, IrqIndex::Msi, 3, true);
    hosts.carry();
    assert_eq!(taken(&fds[3]), 0);
    set_masked(&mut hosts.borrower, IrqIndex::Msi, 3, false);
    assert_eq!(taken(&fds[3]), 1);
}

#[test]
fn a_message_that_comes_after_the_disable_is_dropped() {
    let mut hosts = TwoHosts::new();
    hosts.set_triggers(IrqIndex::Msix, 4);
    hosts.lender.raise(3);
    disable(&mut hosts.borrower, IrqIndex::Msix);
    hosts.carry();
    assert_eq!(hosts.borrower.status().dropped, 1);
}

#[test]
fn a_hostile_message_names_no_vector_beyond_pci() {
    assert_eq!(IrqEvent::new(IrqIndex::Msix, 2048), None);
    assert_eq!(IrqEvent::new(IrqIndex::Msi, 32), None);
    assert_eq!(IrqEvent::new(IrqIndex::Intx, 1), None);
    let counts = all_counts().with_msix(4).unwrap();
    let mut vectors = Vectors::new(counts);
    set_triggers(&mut vectors, IrqIndex::Msix, 0, 4);
    vectors.deliver(IrqEvent::new(IrqIndex::Msix, 2047).unwrap());
    assert_eq!(vectors.status().dropped, 1);
}

#[test]
fn no_interrupt_is_lost_between_two_threads() {
    const ROUNDS: u64 = 20_000;
    let waker = IrqEventFd::new().unwrap();
    let relay = Arc::new(Relay::with_waker(waker.clone()));
    let event = |vector| IrqEvent::new(IrqIndex::Msix, vector).unwrap();
    let poster = std::thread::spawn({
        let relay = Arc::clone(&relay);
        move || {
            for round in 0..ROUNDS {
                relay.post(event((round % 200) as u16)).unwrap();
            }
            relay.post(event(2000)).unwrap();
        }
    });
    let mut carried = 0;
    let mut last = false;
    while !last {
        // Only the eventfd ends the wait: a missed wake-up hangs here.
        while waker.take().unwrap().is_none() {
            std::thread::yield_now();
        }
        relay.drain(|event| {
            last |= event.vector() == 2000;
            carried += 1;
        });
    }
    poster.join().unwrap();
    relay.drain(|_| carried += 1);
    assert_eq!(carried + relay.coalesced(), ROUNDS + 1);
}
