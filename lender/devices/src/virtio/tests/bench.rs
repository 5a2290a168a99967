//! Requests per second of the model, with a state and without. Run with `cargo test --release -p farside-devices --
//! --ignored --nocapture virtio_data_path`.

use std::time::{Duration, Instant};

use super::world::{DATA, Driver, IMAGE, OK, READ, WRITE, readable, writable};

const RUN: Duration = Duration::from_millis(200);

fn model(driver: &mut Driver, kind: u32, depth: u64) -> f64 {
    let start = Instant::now();
    let (mut submitted, mut done) = (0u64, 0u64);
    while start.elapsed() < RUN || done < submitted {
        while submitted - done < depth && start.elapsed() < RUN {
            let sector = submitted.wrapping_mul(2_654_435_761) % (IMAGE / 4096) * 8;
            let page = DATA + submitted % 64 * 4096;
            let data = match kind {
                READ => writable(page, 4096),
                _ => readable(page, 4096),
            };
            driver.request(0, kind, sector, &[data]);
            submitted += 1;
        }
        driver.poll();
        while let Some((head, _)) = driver.take(0) {
            assert_eq!(driver.status_of(0, head), OK);
            done += 1;
        }
    }
    done as f64 / start.elapsed().as_secs_f64()
}

/// Rounds alternate, so that other load of the host affects both alike.
#[test]
#[ignore = "a measurement"]
fn virtio_data_path() {
    const ROUNDS: usize = 15;
    const JOBS: [(u32, u64); 4] = [(READ, 1), (READ, 16), (WRITE, 1), (WRITE, 16)];
    let mut drivers = [false, true].map(|has_state| {
        let mut driver = Driver::off(|_| {});
        if has_state {
            driver.keep_state();
        }
        driver.start();
        driver.set_disk(0, &vec![1; IMAGE as usize]);
        driver
    });
    for (kind, depth) in JOBS {
        let mut figures = [const { Vec::new() }; 2];
        for _ in 0..ROUNDS {
            for (driver, figures) in drivers.iter_mut().zip(&mut figures) {
                figures.push(model(driver, kind, depth));
            }
        }
        let median = figures.map(|mut of| {
            of.sort_by(f64::total_cmp);
            of[ROUNDS / 2]
        });
        let kind = if kind == READ { "read" } else { "write" };
        println!(
            "4 KiB {kind}, depth {depth}: {:.0}/s, with a state {:.0}/s",
            median[0], median[1]
        );
    }
}
