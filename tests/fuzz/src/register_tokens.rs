//! The lender's tokens for register channels, against a list of what each is worth.
//!
//! Input: steps, each a byte for the kind and a byte for the token or the time, and one for the host
//! that presents the token.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use farside_lender_protocol::{Channel, Identity, RegisterToken, TOKEN_LIFE};

use crate::{
    input::Input,
    tokens::{Awaited, RegisterTokens},
};

/// Most tokens at a time.
const MAX_TOKENS: usize = 16;

struct Issued {
    token: RegisterToken,
    holder: Identity,
    until: Instant,
    awaited: Option<Awaited>,
    redeemed: bool,
}

/// One of two hosts with certificates, or a peer without.
fn peer(choice: u8) -> Identity {
    let address = ([10, 0, 0, 1], 4000).into();
    match choice % 8 {
        0..=4 => Identity::Host {
            name: "rack1-a".into(),
            address,
        },
        5 | 6 => Identity::Host {
            name: "rack1-b".into(),
            address,
        },
        _ => Identity::Network { address },
    }
}

/// A token is valid once, for the host that it was issued to, until it expires or its lease has ended.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    let tokens = Arc::new(RegisterTokens::default());
    let mut now = Instant::now();
    let mut issued: Vec<Issued> = Vec::new();
    while !input.is_empty() {
        let (kind, choice) = (input.u8() % 8, input.u8());
        let at = usize::from(choice).checked_rem(issued.len());
        match (kind, at) {
            (0 | 1, _) if issued.len() < MAX_TOKENS => {
                let holder = peer(choice);
                let awaited = tokens.issue(holder.clone(), now).expect("an eventfd");
                let token = awaited.token();
                assert!(issued.iter().all(|issued| issued.token != token));
                issued.push(Issued {
                    token,
                    holder,
                    until: now + TOKEN_LIFE,
                    awaited: Some(awaited),
                    redeemed: false,
                });
            }
            (2, _) => now += Duration::from_millis(u64::from(choice) * 16),
            (3, Some(at)) => issued[at].awaited = None,
            (4, Some(at)) => {
                let mut guess = issued[at].token;
                guess.0[usize::from(choice >> 4)] ^= 1;
                let known = issued.iter().any(|issued| issued.token == guess);
                assert!(
                    known || tokens.redeem(guess, &peer(choice), now).is_none(),
                    "a guess"
                );
            }
            (_, Some(at)) => {
                let issued = &mut issued[at];
                let peer = peer(input.u8());
                let is_holder = issued.holder == peer;
                let valid = issued.awaited.is_some() && !issued.redeemed && now < issued.until;
                let redeemed = tokens.redeem(issued.token, &peer, now);
                assert_eq!(redeemed.is_some(), valid && is_holder);
                // Another host does not use it up.
                issued.redeemed |= is_holder;
                if let Some(redeemed) = redeemed {
                    let (_ours, theirs) = Channel::pair().expect("a pair of sockets");
                    redeemed.hand_over(theirs);
                    let came = issued.awaited.as_ref().and_then(Awaited::take);
                    assert!(came.is_some(), "the connection was lost");
                }
            }
            _ => {}
        }
    }
}
