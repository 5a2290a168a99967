//! Throughput of the data path, compared with a plain loop of `preadv` on the same
//! file. Run with `cargo test --release -p farside-devices -- --ignored
//! --nocapture data_path`.

use std::{
    fs::File,
    io::IoSliceMut,
    os::{fd::AsFd, unix::fs::FileExt},
    time::{Duration, Instant},
};

use super::world::{DATA, Driver, ENGINES, IMAGE, OK, Sqe};
use crate::Device;

const RUN: Duration = Duration::from_millis(200);

fn plain(driver: &Driver) -> f64 {
    let file = File::open(&driver.image).unwrap();
    let mut buffer = vec![0; 4096];
    let start = Instant::now();
    let mut done = 0u64;
    while start.elapsed() < RUN {
        for _ in 0..64 {
            let at = done.wrapping_mul(2_654_435_761) % (IMAGE / 4096) * 4096;
            let mut slices = [IoSliceMut::new(&mut buffer)];
            assert_eq!(
                rustix::io::preadv(file.as_fd(), &mut slices, at).unwrap(),
                4096
            );
            done += 1;
        }
    }
    done as f64 / start.elapsed().as_secs_f64()
}

fn plain_write(driver: &Driver) -> f64 {
    let file = File::options().write(true).open(&driver.image).unwrap();
    let buffer = vec![1; 4096];
    let start = Instant::now();
    let mut done = 0u64;
    while start.elapsed() < RUN {
        for _ in 0..64 {
            let at = done.wrapping_mul(2_654_435_761) % (IMAGE / 4096) * 4096;
            file.write_all_at(&buffer, at).unwrap();
            done += 1;
        }
    }
    done as f64 / start.elapsed().as_secs_f64()
}

fn model(driver: &mut Driver, opcode: u8, depth: u64) -> f64 {
    let start = Instant::now();
    let mut submitted = 0u64;
    let mut done = 0u64;
    while start.elapsed() < RUN || done < submitted {
        while submitted - done < depth && start.elapsed() < RUN {
            let block = submitted.wrapping_mul(2_654_435_761) % (IMAGE / 4096) * 8;
            let page = DATA + submitted % 64 * 4096;
            let sqe = Sqe::new(opcode).nsid(1).prp(page, 0).blocks(block, 8);
            driver.submit(1, sqe);
            submitted += 1;
        }
        driver.with(|nvme, bus| nvme.poll(bus));
        while let Some(cqe) = driver.take(1) {
            assert_eq!(cqe.status, OK);
            done += 1;
        }
    }
    done as f64 / start.elapsed().as_secs_f64()
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Rounds alternate between the engines and the plain loops, so that other load of the
/// host affects all alike.
#[test]
#[ignore = "a measurement"]
fn data_path() {
    const ROUNDS: usize = 9;
    let kinds = [(ENGINES[0], false), (ENGINES[1], false), (ENGINES[0], true)];
    let mut drivers = kinds.map(|(engine, has_state)| {
        let mut driver = Driver::off(|config| config.engine = engine);
        if has_state {
            driver.keep_state();
        }
        driver.enable();
        driver.create_pair(1, 64);
        driver.set_disk(0, &vec![1; IMAGE as usize]);
        driver.configure_doorbells();
        driver
    });
    let mut figures = vec![Vec::new(); 14];
    for _ in 0..ROUNDS {
        figures[0].push(plain(&drivers[0]));
        figures[1].push(plain_write(&drivers[0]));
        for (at, driver) in drivers.iter_mut().enumerate() {
            for (job, (opcode, depth)) in [(2, 1), (2, 32), (1, 1), (1, 32)].into_iter().enumerate()
            {
                figures[2 + at * 4 + job].push(model(driver, opcode, depth));
            }
        }
    }
    let figures: Vec<f64> = figures.into_iter().map(median).collect();
    println!("4 KiB commands/s, median of {ROUNDS} rounds");
    println!(
        "plain loop: preadv {:.0}, pwrite {:.0}",
        figures[0], figures[1]
    );
    for (at, (engine, has_state)) in kinds.iter().enumerate() {
        let of = &figures[2 + at * 4..];
        let state = if *has_state { ", with state" } else { "" };
        println!(
            "{engine:?}{state}: read QD1 {:.0}, QD32 {:.0}; write QD1 {:.0}, QD32 {:.0}",
            of[0], of[1], of[2], of[3]
        );
    }
}
