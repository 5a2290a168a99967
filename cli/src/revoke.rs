//! `farside revoke`.

use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args as ClapArgs;
use farside_daemon::{DeviceId, paths};
use farside_lender_protocol::{Address, Client, Revocation};

use crate::waiting::Waiting;

/// Time for the lender to stop the device's DMA, flush it and end the lease, after the limit.
const END: Duration = Duration::from_secs(10);

/// Take a lent device back from the VM that borrows it
///
/// Its guest is asked to release it, as by `farside detach`. If the guest does not within the
/// limit, the lender ends the lease, and the guest finds the device gone. Then no VM can
/// borrow the device until `farside devices --available DEVICE`. A device that is kept for a VM
/// whose connection was cut is kept no longer.
///
/// Only root and the lender's own user can do this, on the lender's host. A revocation goes on if
/// this command is killed; the same command waits for it again, and with a shorter limit ends it
/// sooner.
#[derive(Debug, ClapArgs)]
pub(crate) struct Revoke {
    /// Id of the device.
    #[arg(value_name = "DEVICE")]
    device: DeviceId,
    /// Time limit for the guest to release the device, in seconds, at most 3600. 0: it is not
    /// asked.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    limit: u64,
    /// Socket of the lender [default: this host's].
    #[arg(long, value_name = "ADDRESS")]
    lender: Option<Address>,
}

pub(crate) fn run(args: &Revoke) -> anyhow::Result<()> {
    let Revoke {
        device,
        limit,
        lender,
    } = args;
    let lender = lender.clone();
    let lender = lender.unwrap_or_else(|| paths::lender_socket().into());
    let mut client = Client::connect(&lender, None)?;
    let devices = client.devices()?;
    let entry = devices.into_iter().find(|entry| entry.id == *device);
    let (vm, kept) = entry.map_or((None, None), |entry| {
        let borrower = entry.borrowed_by.map(|by| by.vm);
        (borrower, entry.kept.map(|kept| kept.vm))
    });
    let vm = vm.map_or(String::new(), |vm| format!(" of VM {vm}"));
    let (begin, limit) = (Instant::now(), Duration::from_secs(*limit));
    let waiting = Waiting::new(format!(
        "waiting for the guest{vm} to release {device} (at most {limit:?})"
    ));
    let revocation = loop {
        let left = limit.saturating_sub(begin.elapsed());
        match client.revoke(device, left)? {
            Revocation::Pending if begin.elapsed() < limit + END => {}
            Revocation::Pending => {
                let problem = client.status(device)?.entry.problem;
                bail!(
                    "the lender has not ended the lease of {device} within {END:?} after the limit{}; it goes on trying",
                    problem.map_or(String::new(), |problem| format!(": {problem}"))
                );
            }
            ended => break ended,
        }
    };
    drop(waiting);
    let took = begin.elapsed().as_secs_f64();
    let how = match (revocation, kept) {
        (Revocation::Ended, Some(kept)) => format!("{device} is no longer kept for VM {kept}"),
        (Revocation::Pending | Revocation::NotLent, _) => format!("{device} was not lent"),
        (Revocation::Released, _) => {
            format!("{device} is back: the guest{vm} released it in {took:.1} s")
        }
        (Revocation::Ended, None) => format!(
            "{device} is back: the guest{vm} did not release it, and the lender ended the lease after {took:.1} s"
        ),
    };
    println!("{how}; it is unavailable until `farside devices --available {device}`");
    Ok(())
}
