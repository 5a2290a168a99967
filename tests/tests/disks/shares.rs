//! VMs whose disks are images of one medium, with limits.

use std::{
    sync::{Barrier, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Result;
use farside_scripted_vmm::{
    nvme::{Controller, DRIVER_RAM, Opcode, Transfer},
    ram::PAGE,
};
use farside_tests::{Cluster, MIB};

use crate::boot;

const VMS: usize = 8;

/// Commands per second of a disk.
const IOPS: u32 = 200;

const TIME: Duration = Duration::from_secs(3);

static ALONE: Mutex<()> = Mutex::new(());

/// What a VM gets, in parts of its share, if it does as much as it can once all are ready.
fn share(cluster: &Cluster, n: usize, ready: &Barrier) -> Result<f64> {
    let booted = boot(cluster, &format!("vm{n}"), &format!("disk{n}")).and_then(|mut machine| {
        let controller = Controller::bring_up(&mut machine, 1, 1)?;
        Ok((machine, controller))
    });
    // Also after an error, for which the others wait.
    ready.wait();
    let (mut machine, mut controller) = booted?;
    let (start, mut count) = (Instant::now(), 0u32);
    while start.elapsed() < TIME {
        let transfer = Transfer {
            opcode: if count.is_multiple_of(2) {
                Opcode::Write
            } else {
                Opcode::Read
            },
            offset: u64::from(count) * PAGE % MIB,
            bytes: PAGE,
            address: DRIVER_RAM.end,
        };
        controller.transfer(&mut machine, &transfer)?;
        count += 1;
    }
    let share = f64::from(count) / (f64::from(IOPS) * start.elapsed().as_secs_f64());
    machine.device.close();
    Ok(share)
}

/// Eight VMs that do as much as they can have their shares of disks that `disk` describes, the options of
/// the lender for each.
fn have_their_shares(disk: impl Fn(&Cluster, usize) -> Result<String>) {
    // Sixteen VMs might not have the CPU time.
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::in_memory().unwrap();
    let mut args = Vec::new();
    for n in 0..VMS {
        let disk = disk(&cluster, n).unwrap();
        args.extend(["--nvme".to_owned(), format!("disk{n}={disk},iops={IOPS}")]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let _lender = cluster.lend(&args).unwrap();
    let serve = |n| {
        let serve = cluster.serve(&format!("vm{n}"), &[&format!("disk{n}")]);
        serve.start().unwrap()
    };
    let _backends: Vec<_> = (0..VMS).map(serve).collect();
    let ready = Barrier::new(VMS);
    let shares: Vec<f64> = std::thread::scope(|scope| {
        let (cluster, ready) = (&cluster, &ready);
        let vms: Vec<_> = (0..VMS)
            .map(|n| scope.spawn(move || share(cluster, n, ready).unwrap()))
            .collect();
        vms.into_iter().map(|vm| vm.join().unwrap()).collect()
    });
    println!("of {IOPS} commands a second: {shares:.2?}");
    // With the burst.
    let most = 1.0 + 0.1 / TIME.as_secs_f64() + 0.01;
    assert!(
        shares.iter().all(|share| (0.9..=most).contains(share)),
        "{shares:.2?}"
    );
}

#[test]
fn eight_vms_of_one_medium_have_their_shares() {
    have_their_shares(|cluster, n| {
        let image = cluster.image(&format!("disk{n}"), MIB)?;
        Ok(image.display().to_string())
    });
}

#[test]
fn eight_vms_that_share_a_namespace_have_their_shares() {
    have_their_shares(|cluster, _| {
        let image = cluster.image("shared", MIB)?;
        let reservations = cluster.directory().join("shared.reservations");
        Ok(format!(
            "{},shared={}",
            image.display(),
            reservations.display()
        ))
    });
}
