//! A network device with several queue pairs.

use super::{
    super::world::{DATA, Driver, NEXT, readable, writable},
    RX, TX,
};
use crate::{
    Device,
    block::{TAP_SIZE, remote_medium},
    test_links::links,
    virtio::{VirtioNet, net::Config},
};

const PAIRS: u16 = 3;
/// Behind the queues of all pairs, and of one.
const CONTROL: usize = 2 * PAIRS as usize;
const CONTROL_OF_ONE: usize = 2;

const OK: u8 = 0;
const ERROR: u8 = 1;

const F_CTRL_VQ: u64 = 1 << 17;
const F_MQ: u64 = 1 << 22;

/// Sets the number of pairs in use.
fn set_pairs(pairs: u16) -> Vec<u8> {
    [&[4, 0], &pairs.to_le_bytes()[..]].concat()
}

fn rx(pair: usize) -> usize {
    RX + 2 * pair
}

fn tx(pair: usize) -> usize {
    TX + 2 * pair
}

/// Running, with buffers in all queues.
fn with_pairs(without: u64) -> Option<Driver<VirtioNet>> {
    let mut driver = Driver::nic_with(|config| config.queues = PAIRS)?;
    driver.queue_count = 2 * PAIRS + 1;
    driver.start_without(without);
    driver.add_buffers_everywhere();
    Some(driver)
}

impl Driver<VirtioNet> {
    fn add_buffers_everywhere(&mut self) {
        (0..PAIRS.into()).for_each(|pair| self.add_buffers_to(rx(pair), 16));
        self.settle();
    }

    /// Executes a command. Returns its result.
    fn command(&mut self, queue: usize, bytes: &[u8]) -> u8 {
        self.memory.put(DATA, bytes);
        self.memory.put(DATA + 64, &[0xee]);
        // Class and number apart from the rest.
        let first = bytes.len().min(2) as u32;
        let rest = bytes.len() as u32 - first;
        let mut parts = vec![readable(DATA, first)];
        parts.extend((rest > 0).then(|| readable(DATA + u64::from(first), rest)));
        parts.push(writable(DATA + 64, 1));
        let head = self.submit(queue, &parts);
        assert_eq!(self.wait(queue), (head, 1));
        self.memory.get(DATA + 64, 1)[0]
    }

    /// The pair by which a datagram is received, and its payload.
    fn wait_anywhere(&mut self) -> (usize, Vec<u8>) {
        let mut taken = None;
        self.until("frame", |driver| {
            for pair in 0..driver.queues.len() / 2 {
                if let Some((_, payload)) = driver.take_frame_of(rx(pair)) {
                    taken = Some((pair, payload));
                }
            }
            taken.is_some()
        });
        taken.unwrap()
    }

    fn sends_and_receives_by(&mut self, pair: usize, text: &[u8]) {
        let head = self.guest_sends_by(tx(pair), DATA, text);
        assert_eq!(self.wait(tx(pair)), (head, 0));
        assert_eq!(self.host_takes(), Some(text.to_vec()));
        self.host_sends(text);
        assert_eq!(self.wait_anywhere(), (pair, text.to_vec()));
    }
}

#[test]
fn a_flow_is_received_by_the_pair_that_has_sent() {
    let Some(mut driver) = with_pairs(0) else {
        return;
    };
    assert_eq!(driver.device.description().msix_vectors, 2 * PAIRS + 2);
    // One until the driver asks for more.
    driver.host_sends(b"first");
    assert_eq!(driver.wait_anywhere(), (0, b"first".to_vec()));
    assert_eq!(driver.command(CONTROL, &set_pairs(PAIRS)), OK);
    for pair in [1, 2, 0, 2] {
        driver.sends_and_receives_by(pair, format!("by {pair}").as_bytes());
    }
    // Fewer: frames that wait for buffers of the others are for the first ones.
    assert_eq!(driver.command(CONTROL, &set_pairs(1)), OK);
    driver.host_sends(b"fewer");
    assert_eq!(driver.wait_anywhere(), (0, b"fewer".to_vec()));
    // Another driver begins with one.
    assert_eq!(driver.command(CONTROL, &set_pairs(2)), OK);
    driver.sends_and_receives_by(1, b"before");
    driver.start();
    driver.add_buffers_everywhere();
    driver.host_sends(b"after");
    assert_eq!(driver.wait_anywhere(), (0, b"after".to_vec()));
    assert!(driver.memory.faults.is_empty());
}

#[test]
fn frames_that_wait_for_buffers_of_a_pair_go_to_another_when_it_is_not_used_any_more() {
    let Some(mut driver) = Driver::nic_with(|config| config.queues = PAIRS) else {
        return;
    };
    driver.queue_count = 2 * PAIRS + 1;
    driver.start();
    assert_eq!(driver.command(CONTROL, &set_pairs(2)), OK);
    driver.add_buffers_to(rx(0), 4);
    driver.settle();
    driver.guest_sends_by(tx(1), DATA, b"there");
    driver.wait(tx(1));
    driver.host_sends(b"back");
    driver.settle();
    assert!(driver.take_frame_of(rx(0)).is_none());
    assert_eq!(driver.command(CONTROL, &set_pairs(1)), OK);
    assert_eq!(driver.wait_anywhere(), (0, b"back".to_vec()));
}

#[test]
fn frames_in_a_queue_that_is_not_used_any_more_are_sent() {
    let Some(mut driver) = with_pairs(0) else {
        return;
    };
    assert_eq!(driver.command(CONTROL, &set_pairs(2)), OK);
    let head = driver.guest_sends_by(tx(1), DATA + 4096, b"last");
    assert_eq!(driver.command(CONTROL, &set_pairs(1)), OK);
    assert_eq!(driver.wait(tx(1)), (head, 0));
    assert_eq!(driver.host_takes(), Some(b"last".to_vec()));
}

#[test]
fn a_lender_that_offers_no_or_too_many_pairs_is_refused() {
    let mut config = Config::new("tap0");
    for queues in [0, 65, u16::MAX] {
        config.queues = queues;
        let (near, _far) = links();
        let (medium, _keeper) = remote_medium(TAP_SIZE, near).unwrap();
        let error = VirtioNet::with_remote("nic0", &config, medium).err();
        let error = error.expect("refused").to_string();
        assert!(error.contains("1 to 64 pairs"), "{error}");
    }
}

#[test]
fn a_killed_device_goes_on_with_its_pairs() {
    let Some(mut driver) = with_pairs(0) else {
        return;
    };
    driver.keep_state();
    driver.start();
    driver.add_buffers_everywhere();
    assert_eq!(driver.command(CONTROL, &set_pairs(PAIRS)), OK);
    driver.sends_and_receives_by(2, b"before");
    driver.restart();
    for pair in [1, 2] {
        driver.sends_and_receives_by(pair, b"after");
    }
    assert_eq!(driver.command(CONTROL, &set_pairs(2)), OK);
    driver.restart();
    driver.sends_and_receives_by(1, b"again");
    assert_eq!(driver.device.problem(), None);
}

#[test]
fn what_is_no_command_is_refused() {
    let Some(mut driver) = with_pairs(0) else {
        return;
    };
    for bytes in [
        set_pairs(0),
        set_pairs(PAIRS + 1),
        set_pairs(u16::MAX),
        vec![4, 1, 1, 0],
        vec![0, 0, 1, 0],
        vec![4],
        vec![4, 0, 1],
        vec![4, 0, 1, 0, 0],
    ] {
        assert_eq!(driver.command(CONTROL, &bytes), ERROR, "{bytes:?}");
    }
    // Nowhere to put the result.
    driver.memory.put(DATA, &set_pairs(2));
    let head = driver.submit(CONTROL, &[readable(DATA, 4)]);
    assert_eq!(driver.wait(CONTROL), (head, 0));
    driver.sends_and_receives_by(1, b"two");
    driver.submit(CONTROL, &[readable(super::BASE - 64, 4)]);
    driver.wait_for_failure();
}

#[test]
fn a_driver_of_one_pair_has_its_control_queue_behind_that() {
    let Some(mut driver) = Driver::nic_with(|config| config.queues = PAIRS) else {
        return;
    };
    driver.queue_count = 3;
    driver.start_without(F_MQ);
    driver.add_buffers(4);
    driver.settle();
    assert_eq!(driver.command(CONTROL_OF_ONE, &set_pairs(2)), ERROR);
    assert_eq!(driver.command(CONTROL_OF_ONE, &set_pairs(1)), OK);
    driver.host_sends(b"one");
    assert_eq!(driver.wait_anywhere(), (0, b"one".to_vec()));
    // And with none.
    driver.start_without(F_MQ | F_CTRL_VQ);
    driver.add_buffers(4);
    driver.settle();
    driver.sends_and_receives_by(0, b"plain");
    // A device of one pair offers neither.
    drop(driver);
    let Some(mut driver) = Driver::nic() else {
        return;
    };
    assert_eq!(driver.offered() & (F_MQ | F_CTRL_VQ), 0);
}

/// Lets `act` break the control queue; the device needs a reset then, and works after one.
fn breaks_control(what: &str, act: impl Fn(&mut Driver<VirtioNet>)) {
    let Some(mut driver) = with_pairs(0) else {
        return;
    };
    assert_eq!(driver.command(CONTROL, &set_pairs(2)), OK);
    act(&mut driver);
    driver.until(what, |driver| driver.status() == 0x4f);
    driver.start();
    driver.add_buffers_everywhere();
    assert_eq!(driver.command(CONTROL, &set_pairs(3)), OK, "{what}");
    driver.sends_and_receives_by(2, what.as_bytes());
}

#[test]
fn control_rings_and_chains_that_no_driver_should_make() {
    breaks_control("an index that jumps", |driver| {
        let queue = driver.queues[CONTROL].clone();
        let next = queue.next.wrapping_add(queue.size + 1);
        driver.memory.put(queue.available + 2, &next.to_le_bytes());
    });
    breaks_control("a head outside of the table", |driver| {
        driver.offer(CONTROL, 0xffff);
    });
    breaks_control("a loop", |driver| {
        let table = driver.queues[CONTROL].descriptors;
        driver.describe(table, 9, readable(DATA, 2), NEXT, 10);
        driver.describe(table, 10, readable(DATA, 2), NEXT, 9);
        driver.offer(CONTROL, 9);
    });
    breaks_control("more descriptors than any command has", |driver| {
        let mut parts = vec![readable(DATA, 1); 32];
        parts.push(writable(DATA + 64, 1));
        driver.submit(CONTROL, &parts);
    });
    breaks_control("a result that cannot be written", |driver| {
        driver.memory.put(DATA, &set_pairs(2));
        driver.submit(CONTROL, &[readable(DATA, 4), writable(0, 1)]);
    });
    breaks_control("more than 4 GiB", |driver| {
        driver.submit(CONTROL, &[readable(DATA, !0), writable(DATA + 64, 1)]);
    });
}

/// The device's thread serves the other queues between the commands of a driver that never stops.
#[test]
fn a_flood_of_commands_holds_no_frame_up() {
    let Some(mut driver) = with_pairs(0) else {
        return;
    };
    driver.memory.put(DATA, &set_pairs(1));
    let flood = |driver: &mut Driver<VirtioNet>| {
        while driver.free(CONTROL).len() > 2 {
            driver.submit(CONTROL, &[readable(DATA, 4), writable(DATA + 64, 1)]);
        }
    };
    flood(&mut driver);
    let head = driver.guest_sends_by(tx(0), DATA + 4096, b"through");
    let (mut commands, mut sent) = (0, None);
    while sent.is_none() {
        driver.poll();
        commands += std::iter::from_fn(|| driver.take(CONTROL)).count();
        flood(&mut driver);
        sent = driver.take(tx(0));
        assert!(commands <= 16, "{commands} commands before a frame");
    }
    assert_eq!(sent, Some((head, 0)));
    assert_eq!(driver.host_takes(), Some(b"through".to_vec()));
}
