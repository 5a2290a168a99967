//! A hostile guest against canaries: a VM drives its NVMe and DMA test devices with random
//! addresses, lengths and lists, through a real backend, lender and workers, while canaries
//! fill the memory that they may not reach. No guest is booted.
//!
//! The canaries: the rest of the files of which the VM's RAM is a part, RAM that is unmapped
//! for a while, and the RAM of a second VM with the same lender. They are neither changed nor
//! copied to where the guest could read them. The DMA test device reports a fault exactly if a
//! naive model of the mappings has one.
//!
//! The seed is printed; `FARSIDE_SEED` repeats a run.

mod canary;
mod random;
mod stage;

use std::time::Duration;

use stage::Stage;

/// Operations in the suite; `cargo xtask soak` does a million.
const OPERATIONS: u64 = 10_000;

/// Operations between two checks of the canaries.
const ROUND: u64 = 1000;

/// Timeout of a command.
const TIMEOUT: Duration = Duration::from_secs(20);

fn seed() -> u64 {
    let seed = match std::env::var("FARSIDE_SEED") {
        Ok(text) => text.parse().expect("a number in FARSIDE_SEED"),
        Err(_) => std::time::SystemTime::UNIX_EPOCH
            .elapsed()
            .unwrap()
            .as_nanos() as u64,
    };
    eprintln!("FARSIDE_SEED={seed}");
    seed
}

fn storm(operations: u64) {
    let mut stage = Stage::new(seed());
    for round in 0..operations / ROUND {
        // High RAM is taken from the devices in every other round.
        match round % 2 {
            0 => stage.map_high(),
            _ => stage.unmap_high(),
        }
        for _ in 0..ROUND / 80 {
            stage.nvme_commands(60);
            (0..20).for_each(|_| stage.dma_command());
        }
        (0..ROUND % 80).for_each(|_| stage.dma_command());
        if let Err(error) = stage.check() {
            panic!("round {round}: {error}");
        }
    }
    let done = stage.finish();
    eprintln!("{done:?}");
    assert_eq!(done.succeeded + done.refused, operations);
    // Both kinds are tested.
    assert!(done.succeeded > operations / 20, "{done:?}");
    assert!(done.refused > operations / 20, "{done:?}");
}

#[test]
fn random_dma_changes_and_reads_nothing_else() {
    storm(OPERATIONS);
}

#[test]
#[ignore = "takes minutes; `cargo xtask soak` runs it"]
fn a_million_random_operations_change_and_read_nothing_else() {
    storm(1_000_000);
}

/// Verifies that the checks can fail.
#[test]
fn a_canary_that_dma_reaches_is_noticed() {
    for mapped in [Stage::map_canary_and_write, Stage::map_canary_and_read] {
        let mut stage = Stage::new(1);
        stage.check().unwrap();
        mapped(&mut stage);
        let error = stage.check().unwrap_err();
        assert!(error.contains("beside the spare RAM"), "{error}");
    }
}
