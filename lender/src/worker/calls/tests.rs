//! Calls of a worker whose broker was replaced.

use super::*;

/// The lender was restarted so often before.
const BROKERS: u64 = 5;

#[test]
fn a_call_is_sent_once_whatever_former_brokers_have_asked_for() {
    let (ours, mut broker) = Channel::pair().unwrap();
    for _ in 0..BROKERS {
        assert!(broker.try_send(&(0u64, CallReply::Again), &[]).unwrap());
    }
    let calls = Calls::new(ours);
    let worker = std::thread::spawn(move || calls.call(Call::TakeRequester));
    let (number, _) = broker
        .receive::<Numbered<Call>>(CALL_TIMEOUT)
        .map(|(call, _)| call)
        .unwrap();
    broker
        .send(&(number, CallReply::Done), &[], CALL_TIMEOUT)
        .unwrap();
    worker.join().unwrap().unwrap();
    assert!(
        broker.try_receive::<Numbered<Call>>().is_err(),
        "closed, and nothing before"
    );
}

#[test]
fn a_call_is_sent_again_to_the_next_broker() {
    let (ours, mut broker) = Channel::pair().unwrap();
    let calls = Calls::new(ours);
    let worker = std::thread::spawn(move || calls.call(Call::TakeRequester));
    let received = |broker: &mut Channel| {
        let received = broker.receive::<Numbered<Call>>(CALL_TIMEOUT).unwrap();
        received.0.0
    };
    let first = received(&mut broker);
    let send = |broker: &mut Channel, reply: Numbered<CallReply>| {
        broker.send(&reply, &[], CALL_TIMEOUT).unwrap();
    };
    send(&mut broker, (0, CallReply::Again));
    assert_eq!(received(&mut broker), first);
    send(&mut broker, (first, CallReply::Done));
    worker.join().unwrap().unwrap();
}
