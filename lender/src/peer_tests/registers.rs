//! Tokens, and the order between the two connections of a lease.

use std::time::Duration;

use farside_lender_protocol::{ErrorKind, Reply, Request, TOKEN_LIFE, registers::Event};

use super::{
    device::{Done, PROBLEM, SCRATCH},
    host::{DEADLINE, DEVICE, Host, until},
    lease::write,
};

#[test]
fn a_token_that_is_guessed_or_used_again_is_refused() {
    let host = Host::new();
    let (mut peer, token) = host.borrow("a");
    let mut guess = token;
    guess.0[0] ^= 1;
    let error = host.registers(guess).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(
        error.message.contains("invalid register-channel token"),
        "{error}"
    );
    // A connection has a single attempt.
    let mut guesser = host.peer();
    guesser
        .call(Request::Registers { token: guess }, 0)
        .unwrap_err();
    guesser.channel.receive::<Reply>(DEADLINE).unwrap_err();

    let mut registers = host.registers(token).unwrap();
    host.registers(token).unwrap_err();
    // Neither has affected the lease.
    registers.send(&write(SCRATCH, 5), &[], DEADLINE).unwrap();
    peer.call(Request::Reset, 1).unwrap();
    assert_eq!(
        host.log(),
        [Done::Begin, Done::Write(5), Done::Close, Done::Reset]
    );
    drop(peer);
    host.wait_until_free();
    host.registers(token).unwrap_err();
}

#[test]
fn a_token_is_no_message_for_a_connection_that_has_said_hello() {
    let host = Host::new();
    let (_peer, token) = host.borrow("a");
    let mut other = host.hello("b");
    let error = other.call(Request::Registers { token }, 0).unwrap_err();
    assert!(error.message.contains("first message"), "{error}");
    // The attempt did not consume the token.
    host.registers(token).unwrap();
}

#[test]
fn a_borrower_that_does_not_come_for_its_registers_is_given_up() {
    let host = Host::new();
    let (mut peer, token) = host.borrow("a");
    // Status requests are answered meanwhile.
    assert_eq!(host.holder().as_deref(), Some("a"));
    let patience = TOKEN_LIFE + DEADLINE;
    peer.channel.receive::<Reply>(patience).unwrap_err();
    host.wait_until_free();
    host.registers(token).unwrap_err();
}

/// The request may arrive first, on its separate connection.
#[test]
fn a_request_waits_for_the_register_accesses_before_it() {
    let host = Host::new();
    let (mut peer, token) = host.borrow("a");
    let mut registers = host.registers(token).unwrap();
    peer.post(Request::Reset, 3);
    for value in [1, 2] {
        registers
            .send(&write(SCRATCH, value), &[], DEADLINE)
            .unwrap();
    }
    // The lender has received both, and has not reset the device.
    let short = Duration::from_millis(50);
    peer.channel.receive::<Reply>(short).unwrap_err();
    registers.send(&write(SCRATCH, 3), &[], DEADLINE).unwrap();
    let (reply, _) = peer.channel.receive::<Reply>(DEADLINE).unwrap();
    assert!(matches!(reply, Reply::Done), "{reply:?}");
    let writes = [1, 2, 3].map(Done::Write);
    let done = [&[Done::Begin][..], &writes, &[Done::Close, Done::Reset]].concat();
    assert_eq!(host.log(), done);
}

#[test]
fn accesses_that_never_come_end_the_lease() {
    let host = Host::new();
    let (mut peer, token) = host.borrow("a");
    let mut registers = host.registers(token).unwrap();
    peer.post(Request::EnableBusMaster, u64::MAX);
    // A disconnect in the meantime makes no difference.
    registers.receive::<Event>(DEADLINE).unwrap_err();
    host.wait_until_free();
    assert!(!host.log().contains(&Done::BusMaster));
}

#[test]
fn a_problem_of_the_device_is_shown_for_as_long_as_it_lasts() {
    let host = Host::new();
    let (_peer, token) = host.borrow("a");
    let mut registers = host.registers(token).unwrap();
    let problem = || {
        let mut tool = host.client("tool");
        let status = tool.status(&DEVICE.parse().unwrap()).unwrap().entry.problem;
        let mut listed = tool.devices().unwrap().into_iter();
        let listed = listed.find(|entry| entry.id == DEVICE).unwrap().problem;
        (status == listed).then_some(status)
    };
    assert_eq!(problem(), Some(None));
    for (value, expected) in [(1, Some("problem 1")), (2, Some("problem 2")), (0, None)] {
        let access = write(PROBLEM, value);
        registers.send(&access, &[], DEADLINE).unwrap();
        let expected = Some(expected.map(str::to_owned));
        until("the problem is shown", || problem() == expected);
    }
}
