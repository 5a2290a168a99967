//! How fast the data path is, beside a plain loop of `preadv` on the same
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

const RUN: Duration = Duration::from_millis(700);

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

#[test]
#[ignore = "a measurement"]
fn data_path() {
    for engine in ENGINES {
        let mut driver = Driver::ready(engine);
        driver.set_disk(0, &vec![1; IMAGE as usize]);
        driver.configure_doorbells();
        for round in 0..3 {
            println!(
                "{engine:?} round {round}: preadv {:.0}/s, model QD1 {:.0}/s, QD32 {:.0}/s, writes: pwrite {:.0}/s, model QD1 {:.0}/s, QD32 {:.0}/s",
                plain(&driver),
                model(&mut driver, 2, 1),
                model(&mut driver, 2, 32),
                plain_write(&driver),
                model(&mut driver, 1, 1),
                model(&mut driver, 1, 32),
            );
        }
    }
}
