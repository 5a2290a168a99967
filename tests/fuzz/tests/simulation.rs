//! The simulations on random steps: leases, fences and rights of a lender whose peers and devices
//! act in any order and that crashes anywhere, and migrations cut off at any call.
//!
//! `FARSIDE_SEED` repeats a run; `FARSIDE_SIMULATIONS` is the number of simulations of each kind
//! that have a random seed (default 50).

use std::{env, time::Instant};

/// Simulations with the same seeds in each run.
const FIXED: u64 = 50;

fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is not a number")),
    )
}

/// Steps of SplitMix64.
fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    });
    let mut bytes: Vec<u8> = words
        .take(len.div_ceil(8))
        .flat_map(u64::to_le_bytes)
        .collect();
    bytes.truncate(len);
    bytes
}

fn simulate(target: &str, len: usize) {
    let seed = number("FARSIDE_SEED").unwrap_or_else(|| getrandom::u64().unwrap());
    let random = number("FARSIDE_SIMULATIONS").unwrap_or(50);
    println!("FARSIDE_SEED={seed} repeats this run");
    let began = Instant::now();
    let seeds = (0..FIXED).chain((0..random).map(|n| seed.wrapping_add(n)));
    for seed in seeds {
        // Printed where the test fails.
        println!("simulation {seed}");
        farside_fuzz::run(target, &random_bytes(seed, len));
    }
    println!("{} simulations in {:?}", FIXED + random, began.elapsed());
}

#[test]
fn leases_fences_and_rights_hold_in_any_order_of_steps() {
    simulate("leases", 3000);
}

#[test]
fn migrations_end_at_one_host_whatever_is_cut_off() {
    simulate("migrations", 100);
}
