//! A network device whose tap interface another host has.

use std::time::{Duration, Instant};

use farside_medium::Link;

use super::{
    super::world::{DATA, Driver, pattern},
    TX, Wire, wire,
};
use crate::{
    block::{BlockQueue, DEPTH, Ended, LentMedium, MediumKeeper, Supply, TAP_SIZE, remote_medium},
    test_links::links,
    virtio::VirtioNet,
};

struct Remote {
    // Dropped first: the device waits until its lender has closed the connection.
    lent: Option<LentMedium>,
    driver: Driver<VirtioNet>,
    keeper: MediumKeeper,
}

fn lend(wire: &Wire, link: Link) -> LentMedium {
    let block = BlockQueue::tap(wire.tap.try_clone().unwrap(), DEPTH).unwrap();
    LentMedium::new(block, (TAP_SIZE, false), ("nic0", link)).unwrap()
}

impl Remote {
    fn new() -> Option<Self> {
        let (wire, config) = wire()?;
        let (near, far) = links();
        let (medium, keeper) = remote_medium(TAP_SIZE, near).unwrap();
        let device = VirtioNet::with_remote("nic0", &config, medium).unwrap();
        let lent = Some(lend(&wire, far));
        let mut remote = Self {
            lent,
            driver: Driver::new(device, wire),
            keeper,
        };
        remote.driver.start();
        remote.driver.add_buffers(32);
        remote.turn_for(20);
        Some(remote)
    }

    fn turn(&mut self) {
        self.driver.poll();
        self.driver.enable_notifications();
        if let Some(lent) = &mut self.lent
            && let Err(ended) = lent.turn(&mut || ())
        {
            panic!("{ended:?}: {:?}", self.keeper.notices.try_recv());
        }
    }

    fn turn_for(&mut self, turns: u32) {
        (0..turns).for_each(|_| self.turn());
    }

    fn until<T>(&mut self, mut done: impl FnMut(&mut Driver<VirtioNet>) -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            self.turn();
            if let Some(found) = done(&mut self.driver) {
                return found;
            }
            assert!(Instant::now() < deadline);
        }
    }
}

#[test]
fn frames_pass_over_a_network_and_after_a_cut() {
    let Some(mut remote) = Remote::new() else {
        return;
    };
    let long = pattern(50_000, 3);
    for round in 0..3 {
        for n in 0..40u8 {
            let payload = [n; 700];
            remote.driver.host_sends(&payload);
            remote.driver.guest_sends(DATA, &payload);
            assert_eq!(remote.until(Driver::take_frame).1, payload);
            remote.until(|driver| driver.take(TX));
            assert_eq!(remote.driver.host_takes().unwrap(), payload);
            remote.driver.add_buffers(1);
        }
        remote.driver.host_sends(&long);
        let (header, payload) = remote.until(Driver::take_frame);
        assert_eq!(payload, long);
        let buffers = u16::from_le_bytes([header[10], header[11]]);
        remote.driver.add_buffers(buffers.into());
        if round < 2 {
            // The connection is cut, with a frame under way.
            remote.lent = None;
            remote.driver.guest_sends(DATA, b"waits");
            remote.turn_for(3);
            assert_eq!(remote.driver.take(TX), None);
            let (near, far) = links();
            remote.lent = Some(lend(&remote.driver.world, far));
            assert!(remote.keeper.supply(Supply::Link(Box::new(near), TAP_SIZE)));
            remote.until(|driver| driver.take(TX));
            assert_eq!(remote.driver.host_takes(), Some(b"waits".to_vec()));
        }
    }
}

#[test]
fn a_device_of_another_host_is_returned_with_frames_under_way() {
    let Some(mut remote) = Remote::new() else {
        return;
    };
    let Remote { driver, .. } = &remote;
    for _ in 0..30 {
        driver.host_sends(&[7; 20_000]);
    }
    // Some of these are in the connection.
    remote.lent.as_mut().unwrap().turn(&mut || ()).unwrap();
    let mut lent = remote.lent.take().unwrap();
    // The device waits until its lender has closed the connection.
    let Remote { driver, keeper, .. } = remote;
    let device = driver.device;
    let device = std::thread::spawn(move || drop(device));
    let deadline = Instant::now() + Duration::from_secs(10);
    let ended = loop {
        match lent.turn(&mut || ()) {
            Ok(_) => assert!(Instant::now() < deadline, "it is not returned"),
            Err(ended) => break ended,
        }
    };
    assert!(matches!(ended, Ended::Returned), "{ended:?}");
    let start = Instant::now();
    drop(lent);
    device.join().unwrap();
    drop(keeper);
    assert!(start.elapsed() < Duration::from_secs(1));
}
