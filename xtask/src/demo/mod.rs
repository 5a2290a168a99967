//! The demo: a guest uses a borrowed NVMe device, and everything is returned.
//!
//! [`guest`] is the part in the guest, [`kill`] what happens to processes meanwhile if that is asked for,
//! [`outside`] an independent proof, [`facts`] the measurements and their conditions, [`report`] the output. If a condition does not hold,
//! the exit status is non-zero.

mod facts;
mod guest;
mod kernel_view;
mod kill;
mod outside;
mod report;

use std::{
    fs::{self, File},
    path::Path,
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use farside_backend_api::BorrowState;
use farside_testbed::{Progress, Testbed};

use crate::{
    args::Demo,
    cargo::{self, Profile},
    interrupt,
    scene::{self, BOOT, DEVICE, Guest, Scene, Size},
};
use facts::{Facts, Seen};
use kernel_view::KernelView;

/// Name of the VM.
const VM: &str = "demo";
/// CPUs of the VM.
const CPUS: u32 = 2;
/// Size of the NVMe namespace. The image is sparse.
const DRIVE: u64 = 1 << 30;

pub(crate) fn run(args: &Demo) -> Result<ExitCode> {
    let start = Instant::now();
    let program = cargo::build_product(Profile::Dev)?;
    let progress = Progress::auto();
    let testbed = Testbed::prepare(&progress)?;
    interrupt::watch()?;

    let size = Size {
        memory_mib: args.memory,
        cpus: CPUS,
    };
    let images = tempfile::Builder::new()
        .prefix("farside-demo-")
        .tempdir()
        .context("creating a directory for the image")?;
    let image = images.path().join(format!("{DEVICE}.img"));
    File::create(&image)
        .and_then(|file| file.set_len(DRIVE))
        .with_context(|| format!("making {}", image.display()))?;
    let keeper: &[&str] = if args.kill { &["--keeper"] } else { &[] };
    let mut scene = Scene::start(program, scene::directory(VM)?, &image, VM, keeper)?;

    let mut facts = Facts {
        memory: size.memory_mib << 20,
        qemu: testbed.qemu_version().to_owned(),
        accel: format!("{:?}", testbed.accel()).to_uppercase(),
        ..Facts::default()
    };
    play(
        &mut scene, &testbed, &size, &progress, args.kill, &mut facts,
    )
    .map_err(|error| error.context(format!("the demo failed{}", scene.last_words())))?;
    facts.sockets_left = scene.stop()?;
    prove(&testbed, &image, &progress, &mut facts)?;
    facts.wall = start.elapsed();

    print!("{}", report::text(&facts));
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report::Document::from(&facts))?;
        fs::write(path, json + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(match facts.checks().iter().all(|check| check.holds) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// From the VM's start to its end.
fn play(
    scene: &mut Scene,
    testbed: &Testbed,
    size: &Size,
    progress: &Progress,
    kill: bool,
    facts: &mut Facts,
) -> Result<()> {
    let guest = boot(scene, testbed, size, progress, facts)?;
    facts.guest = match kill {
        false => guest::use_drive(&guest.vm, progress, false)?,
        // Children end with the thread that has started them, so this one starts lenders.
        true => thread::scope(|threads| {
            let user = threads.spawn(|| guest::use_drive(&guest.vm, progress, true));
            let kills = kill::kill(scene, progress, || user.is_finished());
            let used = user.join();
            facts.kills = Some(kills?);
            used.map_err(|_| anyhow::anyhow!("the thread that uses the disk panicked"))?
        })?,
    };
    facts.running = Some(look(scene)?);

    let task = progress.spinner("Shutting the guest down");
    guest.shutdown()?;
    facts.qemu_survived = true;
    scene.wait_for("the disk's return to the lender", |scene| {
        let (borrow, lent) = scene.device()?;
        Ok(lent.is_free() && borrow.state == BorrowState::Unleased)
    })?;
    facts.after = Some(look(scene)?);
    task.done();
    Ok(())
}

/// Starts the VM, examines the device before the first instruction, and lets the VM boot.
fn boot(
    scene: &Scene,
    testbed: &Testbed,
    size: &Size,
    progress: &Progress,
    facts: &mut Facts,
) -> Result<Guest> {
    let task = progress.bar("Booting the guest", 4);
    let guest = scene.launch(testbed, size, &[], &[])?;
    facts.typed.clone_from(&guest.typed);
    task.set(1);
    task.detail("QEMU is started, with the guest paused");
    facts.paused = Some(look(scene)?);

    guest.vm.qmp().execute("cont", serde_json::json!({}))?;
    task.set(2);
    task.detail("firmware and kernel");
    let booted = AtomicBool::new(false);
    thread::scope(|threads| {
        // For display only: failures of the look-up are ignored.
        threads.spawn(|| {
            while !booted.load(Ordering::Relaxed) {
                if scene
                    .device()
                    .is_ok_and(|(borrow, _)| borrow.dma_windows > 0)
                {
                    task.set(3);
                    task.detail("the disk can reach guest RAM");
                    break;
                }
                thread::sleep(Duration::from_millis(200));
            }
        });
        let result = guest.vm.wait_agent(BOOT);
        booted.store(true, Ordering::Relaxed);
        result
    })?;
    task.set(4);
    task.done();
    Ok(guest)
}

/// The device's state at both sides, and the kernel's view of the backend.
fn look(scene: &Scene) -> Result<Seen> {
    let (borrow, lent) = scene.device()?;
    Ok(Seen {
        borrow,
        lent,
        kernel: KernelView::of(scene.serving_pid()?)?,
    })
}

/// The bytes in the lender's image, after its last use.
fn prove(testbed: &Testbed, image: &Path, progress: &Progress, facts: &mut Facts) -> Result<()> {
    let task = progress.spinner("Looking into the lender's image");
    facts.outside = outside::examine(testbed, image, guest::FILE)?;
    task.done();
    Ok(())
}
