//! A disk whose medium another host has.

use std::{
    fs::File,
    time::{Duration, Instant},
};

use farside_medium::Link;

use super::world::{
    DATA, DISCARD, Driver, FLUSH, IMAGE, OK, READ, WRITE, WRITE_ZEROES, pattern, readable, writable,
};
use crate::{
    Device,
    block::{BlockQueue, DEPTH, EngineChoice, LentMedium, MediumKeeper, Supply, remote_medium},
    test_links::links,
    virtio::{Config, VirtioBlk},
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// More than the device moves at a time.
const LARGE: u32 = 6 << 20;

struct Remote {
    // Dropped first: the device waits until its lender has closed the connection.
    lent: Option<LentMedium>,
    driver: Driver,
    keeper: MediumKeeper,
}

impl Remote {
    fn new() -> Self {
        let (near, far) = links();
        let mut driver = Driver::off(|_| ());
        let (medium, keeper) = remote_medium(IMAGE, near).unwrap();
        let config = Config::new("disk0");
        driver.device = VirtioBlk::with_remote("disk0", &config, medium, (IMAGE, true)).unwrap();
        driver.start();
        Self {
            lent: Some(lend(&driver, far)),
            driver,
            keeper,
        }
    }

    /// Cuts the connection, and has the owner quiesce the device, which must not wait for the lender.
    fn cut_and_quiesce(&mut self) {
        self.lent = None;
        self.driver.poll();
        let deadline = Instant::now() + TIMEOUT;
        while !self.driver.with(|device, bus| device.quiesce(bus)) {
            assert!(Instant::now() < deadline, "the device is not quiet");
        }
    }

    fn reconnect(&mut self) {
        let (near, far) = links();
        self.lent = Some(lend(&self.driver, far));
        self.keeper.supply(Supply::Link(Box::new(near), IMAGE));
    }

    /// Waits for the next request that is returned, with its status.
    fn wait(&mut self) -> (u16, u8) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.driver.poll();
            if let Some((head, _)) = self.driver.take(0) {
                return (head, self.driver.status_of(0, head));
            }
            self.driver.enable_notifications();
            if let Some(lent) = &mut self.lent {
                lent.turn(&mut || ()).unwrap();
            }
            assert!(Instant::now() < deadline, "no request is returned");
        }
    }
}

fn lend(driver: &Driver, link: Link) -> LentMedium {
    let image = File::options().read(true).write(true).open(&driver.image);
    let read_only = false;
    LentMedium::new(
        BlockQueue::open(image.unwrap(), EngineChoice::Threads, DEPTH).unwrap(),
        (IMAGE, read_only),
        ("disk0", link),
    )
    .unwrap()
}

#[test]
fn requests_that_are_given_up_over_a_cut_are_done_again() {
    let mut remote = Remote::new();
    let driver = &mut remote.driver;
    driver.set_disk(8 << 20, &pattern(1 << 20, 3));
    let data = pattern(LARGE as usize, 1);
    driver.memory.put(DATA, &data);
    let range = DATA + u64::from(LARGE);
    let mut heads = vec![driver.request(0, WRITE, 0, &[readable(DATA, LARGE)])];
    for (n, kind) in [DISCARD, WRITE_ZEROES].into_iter().enumerate() {
        // 64 KiB each, of which a discard has two.
        let n = n as u64;
        let sector = (8 << 11) + 256 * n;
        let ranges = [sector, 128, sector + 128, 128];
        let at = range + 64 * n;
        driver.memory.put_qwords(at, ranges);
        let len = if kind == DISCARD { 32 } else { 16 };
        heads.push(driver.request(0, kind, 0, &[readable(at, len)]));
    }
    heads.push(driver.request(0, FLUSH, 0, &[]));
    let to = range + (1 << 20);
    heads.push(driver.request(0, READ, (8 << 11) + 1024, &[writable(to, 4096)]));
    remote.cut_and_quiesce();
    assert_eq!(remote.driver.take(0), None, "a request was answered");
    // More than once.
    remote.driver.with(|device, bus| device.resume(bus));
    remote.driver.poll();
    remote.cut_and_quiesce();
    remote.reconnect();
    remote.driver.with(|device, bus| device.resume(bus));
    let mut returned: Vec<_> = heads.iter().map(|_| remote.wait()).collect();
    returned.sort_unstable();
    let mut expected: Vec<_> = heads.into_iter().map(|head| (head, OK)).collect();
    expected.sort_unstable();
    assert_eq!(returned, expected);
    let driver = &remote.driver;
    assert_eq!(driver.disk(0, LARGE as usize), data);
    assert_eq!(driver.disk(8 << 20, 128 << 10), vec![0; 128 << 10]);
    assert_eq!(
        driver.disk((8 << 20) + (128 << 10), 64 << 10),
        vec![0; 64 << 10]
    );
    let marked = &pattern(1 << 20, 3)[512 << 10..][..4096];
    assert_eq!(driver.memory.get(to, 4096), marked);
    assert_eq!(driver.stat("errors"), 0);
}

#[test]
fn a_reset_forgets_requests_that_were_given_up() {
    let mut remote = Remote::new();
    remote.driver.memory.put(DATA, &pattern(4096, 1));
    let at = [readable(DATA, 4096)];
    remote.driver.request(0, WRITE, 0, &at);
    remote.cut_and_quiesce();
    remote.driver.with(|device, bus| device.resume(bus));
    // By the driver, while the connection is cut.
    remote.driver.start();
    remote.driver.request(0, WRITE, 8, &at);
    remote.cut_and_quiesce();
    // And by the owner.
    remote.driver.with(|device, _| device.reset());
    remote.driver.start();
    remote.reconnect();
    let head = remote.driver.request(0, WRITE, 16, &at);
    assert_eq!(remote.wait(), (head, OK));
    assert_eq!(remote.driver.disk(0, 8192), vec![0; 8192]);
    assert_eq!(remote.driver.disk(8192, 4096), pattern(4096, 1));
}

#[test]
fn a_disk_whose_lender_is_given_up_fails_its_requests() {
    let mut remote = Remote::new();
    let head = remote.driver.request(0, WRITE, 0, &[readable(DATA, 4096)]);
    remote.cut_and_quiesce();
    remote.keeper.supply(Supply::GivenUp);
    remote.driver.with(|device, bus| device.resume(bus));
    let (returned, status) = remote.wait();
    assert_eq!(returned, head);
    assert_ne!(status, OK);
}
