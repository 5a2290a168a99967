//! Many guests at once on a host that is too slow for them.

use std::time::Duration;

use anyhow::{Context, ensure};
use farside_tests::{BorrowState, Cluster, MIB};
use libtest_mimic::Completion;

use crate::passed;

const ROUNDS: usize = 5;
const GUESTS: usize = 20;
/// Emulated, on two CPUs, they take minutes to boot.
const ALL_BOOT: Duration = Duration::from_secs(900);

/// All waits take longer, and no device is lost.
pub fn twenty_guests_started_at_once_have_their_disks(
    cluster: &Cluster,
) -> anyhow::Result<Completion> {
    let ids: Vec<String> = (0..GUESTS).map(|n| format!("disk{n}")).collect();
    let mut args = Vec::new();
    for id in &ids {
        let image = cluster.image(id, 16 * MIB)?;
        args.extend(["--nvme".to_owned(), format!("{id}={}", image.display())]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let _lender = cluster.lend(&args)?;
    for round in 0..ROUNDS {
        let vms: Vec<String> = (0..GUESTS).map(|n| format!("r{round}-{n}")).collect();
        let mut backends = Vec::new();
        let mut guests = Vec::new();
        for (vm, id) in vms.iter().zip(&ids) {
            let serve = cluster.serve(vm, &[id]).args(&["--open-timeout", "1"]);
            backends.push(serve.start()?);
        }
        for vm in &vms {
            guests.push(cluster.guest(vm).memory(256 * MIB).start()?);
        }
        for ((guest, vm), id) in guests.iter().zip(&vms).zip(&ids) {
            guest
                .wait_agent(ALL_BOOT)
                .with_context(|| format!("round {round}, {vm}"))?;
            guest.wait_disk()?;
            let borrow = cluster.status()?.borrow(vm, id)?;
            ensure!(
                borrow.state == BorrowState::Ready,
                "round {round}, {vm}: {borrow:?}"
            );
            println!(
                "round {round}, {vm}: ready {} ms after bus-master enable",
                borrow.bme_to_ready_us / 1000
            );
        }
        drop(guests);
        drop(backends);
        for id in &ids {
            cluster.wait_free(id)?;
        }
    }
    passed()
}
