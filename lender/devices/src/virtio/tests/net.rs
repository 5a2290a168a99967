//! A network device on a tap interface of a network namespace of the test, whose other end is the kernel's.

mod pairs;
mod remote;

use std::{
    io,
    net::UdpSocket,
    process::Command,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, unshare};

use super::{
    crash,
    world::{BASE, DATA, Driver, F_EVENT_IDX, Model, RINGS, SIZE, pattern, readable, writable},
};
use crate::{
    Device, Waiting,
    block::Tap,
    virtio::{VirtioNet, net::Config},
};

const TAP: &str = "tap0";
const HOST: [u8; 4] = [10, 0, 0, 1];
const GUEST: [u8; 4] = [10, 0, 0, 2];
const HOST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const PORT: u16 = 5000;

/// The queues.
const RX: usize = 0;
const TX: usize = 1;

const F_GUEST_CSUM: u32 = 1;
const F_MRG_RXBUF: u32 = 15;

/// Bytes of the header before each frame, and of those of Ethernet, IP and UDP.
const HEADER: usize = 12;
const HEADERS: usize = 14 + 20 + 8;

/// Bytes of a buffer for received frames, at this offset of a request's memory.
const BUFFER: u32 = 2048;
const AT: u64 = 0x1000;

/// The kernel's end of the interface.
pub struct Wire {
    socket: UdpSocket,
    config: Config,
    /// As a keeper has it.
    tap: std::fs::File,
}

impl Model for VirtioNet {
    type World = Wire;

    fn restart(driver: &mut Driver<Self>) {
        crash::after(None);
        driver.kills += 1;
        driver.irq.line = false;
        let tap = driver.tap.try_clone().unwrap();
        driver.device = VirtioNet::with_tap("nic0", &driver.config, tap).unwrap();
        let state = driver.state.clone().unwrap();
        driver.device.set_state(state, true).unwrap();
        crash::after(driver.kill_every);
    }
}

fn ip(line: &str) -> String {
    let done = Command::new("ip").args(line.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {line}: {done:?}");
    String::from_utf8(done.stdout).unwrap()
}

/// A network namespace with a tap interface; `None`, with the reason on standard error, where this user may not have one.
fn wire() -> Option<(Wire, Config)> {
    let refused = match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) => match std::fs::File::open("/dev/net/tun") {
            Ok(_) => None,
            Err(error) => Some(format!("/dev/net/tun: {error}")),
        },
        Err(errno) => Some(format!("a network namespace: {errno}")),
    };
    if let Some(reason) = refused {
        let thread = std::thread::current();
        println!("skipped: {}: {reason}", thread.name().unwrap_or("net"));
        return None;
    }
    // What the kernel sends by itself would come between.
    std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
    ip(&format!("tuntap add {TAP} mode tap"));
    ip(&format!(
        "link set {TAP} address 02:00:00:00:00:01 mtu 65000 up"
    ));
    ip(&format!("addr add 10.0.0.1/24 dev {TAP}"));
    ip(&format!(
        "neigh add 10.0.0.2 lladdr 02:00:00:00:00:02 dev {TAP}"
    ));
    let mut config = Config::new(TAP);
    config.mac = Some("02:00:00:00:00:02".parse().unwrap());
    let (config, tap) = config.open_tap("nic0").unwrap();
    assert_eq!(config.mtu, Some(65000));
    // The kernel loses frames until it has noticed that somebody is attached.
    let deadline = Instant::now() + Duration::from_secs(10);
    while !ip(&format!("link show {TAP}")).contains("state UP") {
        assert!(Instant::now() < deadline, "{}", ip("link"));
    }
    let socket = UdpSocket::bind(("10.0.0.1", PORT)).unwrap();
    socket.set_nonblocking(true).unwrap();
    let wire = Wire {
        socket,
        config: config.clone(),
        tap: tap.file,
    };
    Some((wire, config))
}

impl Driver<VirtioNet> {
    /// Off.
    fn nic() -> Option<Self> {
        Self::nic_with(|_| ())
    }

    fn nic_with(configure: impl FnOnce(&mut Config)) -> Option<Self> {
        let (mut wire, mut config) = wire()?;
        configure(&mut config);
        wire.config = config.clone();
        let device = VirtioNet::with_tap("nic0", &config, wire.tap.try_clone().unwrap());
        Some(Self::new(device.unwrap(), wire))
    }

    /// Running without `features`, and with so many buffers for frames.
    fn with_buffers(without: u64, count: usize) -> Option<Self> {
        let mut driver = Self::nic()?;
        driver.start_without(without);
        driver.add_buffers(count);
        driver.settle();
        Some(driver)
    }

    fn add_buffers(&mut self, count: usize) {
        self.add_buffers_to(RX, count);
    }

    fn add_buffers_to(&mut self, queue: usize, count: usize) {
        for _ in 0..count {
            let head = *self.free(queue).last().unwrap();
            let at = self.memory_of(queue, head) + AT;
            assert_eq!(self.submit(queue, &[writable(at, BUFFER)]), head);
        }
    }

    /// Until the device sleeps.
    fn settle(&mut self) {
        while self.poll() || !self.enable_notifications() {}
    }

    /// The kernel sends a datagram to the guest.
    fn host_sends(&self, payload: &[u8]) {
        let to = (std::net::Ipv4Addr::from(GUEST), PORT);
        assert_eq!(self.socket.send_to(payload, to).unwrap(), payload.len());
    }

    /// The next frame that the driver has received: its header and its payload.
    fn take_frame(&mut self) -> Option<(Vec<u8>, Vec<u8>)> {
        self.take_frame_of(RX)
    }

    fn take_frame_of(&mut self, queue: usize) -> Option<(Vec<u8>, Vec<u8>)> {
        let (head, len) = self.take(queue)?;
        let at = |driver: &Self, head| driver.memory_of(queue, head) + AT;
        let mut bytes = self.memory.get(at(self, head), len as usize);
        let count = u16::from_le_bytes([bytes[10], bytes[11]]);
        for _ in 1..count {
            let (head, len) = self.take(queue).expect("all buffers of a frame at once");
            bytes.extend(self.memory.get(at(self, head), len as usize));
        }
        let payload = bytes.split_off(HEADER + HEADERS);
        Some((bytes, payload))
    }

    fn wait_frame(&mut self) -> (Vec<u8>, Vec<u8>) {
        let mut taken = None;
        self.until("frame", |driver| {
            taken = driver.take_frame();
            taken.is_some()
        });
        taken.unwrap()
    }

    /// The driver sends a frame, in two parts. Returns the request's head.
    fn guest_sends(&mut self, at: u64, payload: &[u8]) -> u16 {
        self.guest_sends_by(TX, at, payload)
    }

    fn guest_sends_by(&mut self, queue: usize, at: u64, payload: &[u8]) -> u16 {
        let frame = frame(payload);
        self.memory.put(at, &frame);
        let parts = [
            readable(at, HEADER as u32),
            readable(at + HEADER as u64, (frame.len() - HEADER) as u32),
        ];
        self.submit(queue, &parts)
    }

    /// The next datagram that the kernel has received.
    fn host_takes(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; 65536];
        match self.socket.recv(&mut bytes) {
            Ok(len) => Some(bytes[..len].to_vec()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A datagram in a frame, with the header before it.
fn frame(payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; HEADER];
    frame.extend(HOST_MAC);
    frame.extend(GUEST_MAC);
    frame.extend([8, 0]);
    let len = (20 + 8 + payload.len()) as u16;
    let mut ip = vec![0x45, 0];
    ip.extend(len.to_be_bytes());
    ip.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    ip.extend(GUEST);
    ip.extend(HOST);
    let words = ip
        .chunks(2)
        .map(|it| u32::from(it[0]) << 8 | u32::from(it[1]));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    frame.extend(ip);
    frame.extend(PORT.to_be_bytes());
    frame.extend(PORT.to_be_bytes());
    frame.extend((len - 20).to_be_bytes());
    // No checksum.
    frame.extend([0, 0]);
    frame.extend(payload);
    frame
}

#[test]
fn frames_pass_both_ways_in_order() {
    for without in [0, 1 << F_EVENT_IDX, 1 << F_MRG_RXBUF, 1 << F_GUEST_CSUM] {
        for indirect in [false, true] {
            let Some(mut driver) = Driver::with_buffers(without, 32) else {
                return;
            };
            driver.indirect = indirect;
            for n in 0..300u64 {
                let payload = pattern(1 + (n as usize * 37) % 1400, n);
                driver.host_sends(&payload);
                let (header, received) = driver.wait_frame();
                assert_eq!(received, payload);
                assert_eq!(header[HEADER..HEADER + 6], GUEST_MAC);
                // Complete unless the driver completes it.
                assert_eq!(header[0] & 1 != 0, without >> F_GUEST_CSUM & 1 == 0);
                driver.add_buffers(1);
                let sent = driver.guest_sends(DATA, &payload);
                assert_eq!(driver.wait(TX), (sent, 0));
                assert_eq!(driver.host_takes(), Some(payload));
            }
            assert!(driver.memory.faults.is_empty());
            assert_eq!(
                (driver.stat("frames_sent"), driver.stat("frames_received")),
                (300, 300)
            );
            assert_eq!(driver.stat("frames_dropped"), 0);
        }
    }
}

#[test]
fn a_burst_is_in_order() {
    let Some(mut driver) = Driver::with_buffers(0, 60) else {
        return;
    };
    for n in 0..50u8 {
        driver.host_sends(&[n; 100]);
    }
    for n in 0..50u8 {
        assert_eq!(driver.wait_frame().1, [n; 100]);
        let at = DATA + u64::from(n) * 4096;
        driver.guest_sends(at, &[n; 100]);
        if n % 25 == 24 {
            for _ in 0..25 {
                driver.wait(TX);
            }
        }
    }
    for n in 0..50u8 {
        assert_eq!(driver.host_takes(), Some(vec![n; 100]));
    }
    assert!(driver.kicks < 100, "{} notifications", driver.kicks);
}

#[test]
fn a_long_frame_takes_as_many_buffers_as_it_needs_and_waits_for_them() {
    let Some(mut driver) = Driver::with_buffers(0, 10) else {
        return;
    };
    let long = pattern(60_000, 1);
    driver.host_sends(&long);
    driver.host_sends(b"behind");
    driver.settle();
    assert!(driver.take_frame().is_none(), "it does not fit");
    driver.add_buffers(10);
    driver.settle();
    assert!(driver.take_frame().is_none(), "nor now");
    driver.add_buffers(11);
    let (header, payload) = driver.wait_frame();
    assert_eq!(payload, long);
    let buffers = (HEADER + HEADERS + long.len()).div_ceil(BUFFER as usize);
    assert_eq!(u16::from_le_bytes([header[10], header[11]]), buffers as u16);
    assert_eq!(driver.wait_frame().1, b"behind");
    // To the kernel.
    driver.guest_sends(DATA, &long);
    driver.wait(TX);
    assert_eq!(driver.host_takes(), Some(long));
}

#[test]
fn a_frame_that_fits_into_no_queue_is_lost() {
    let Some(mut driver) = Driver::nic() else {
        return;
    };
    driver.queue_size = 16;
    driver.start();
    driver.add_buffers(16);
    driver.settle();
    driver.host_sends(&[1; 40_000]);
    driver.host_sends(b"short");
    assert_eq!(driver.wait_frame().1, b"short");
    assert_eq!(driver.stat("frames_dropped"), 1);
}

#[test]
fn a_frame_that_does_not_fit_into_one_buffer_is_lost_without_merging() {
    let Some(mut driver) = Driver::with_buffers(1 << F_MRG_RXBUF, 8) else {
        return;
    };
    driver.host_sends(&[1; 3000]);
    driver.host_sends(b"short");
    assert_eq!(driver.wait_frame().1, b"short");
    assert_eq!(driver.stat("frames_dropped"), 1);
}

#[test]
fn what_came_before_the_driver_is_not_for_it() {
    let Some(mut driver) = Driver::nic() else {
        return;
    };
    driver.host_sends(b"early");
    driver.start();
    driver.add_buffers(4);
    driver.settle();
    driver.host_sends(b"first");
    assert_eq!(driver.wait_frame().1, b"first");
    // Another driver. What waits for buffers of the former one is not for it, either.
    for n in 0..8u8 {
        driver.host_sends(&[n; 10]);
    }
    driver.settle();
    while driver.take_frame().is_some() {}
    driver.host_sends(b"late");
    driver.poll();
    driver.start();
    driver.add_buffers(4);
    driver.settle();
    driver.host_sends(b"second");
    assert_eq!(driver.wait_frame().1, b"second");
}

#[test]
fn what_is_no_frame_is_returned_and_not_sent() {
    let Some(mut driver) = Driver::with_buffers(0, 4) else {
        return;
    };
    for parts in [
        vec![readable(DATA, 11)],
        vec![readable(DATA, 12)],
        vec![readable(DATA, 64), writable(DATA, 64)],
        vec![readable(DATA, 66_000)],
        vec![readable(DATA, u32::MAX)],
    ] {
        let head = driver.submit(TX, &parts);
        assert_eq!(driver.wait(TX), (head, 0), "{parts:?}");
    }
    assert_eq!(driver.stat("frames_dropped"), 5);
    assert_eq!(driver.device.problem(), None);
    // A header that the kernel does not accept.
    let mut bad = frame(b"bad");
    bad[1] = 77;
    driver.memory.put(DATA, &bad);
    let head = driver.submit(TX, &[readable(DATA, bad.len() as u32)]);
    assert_eq!(driver.wait(TX), (head, 0));
    assert_eq!(driver.stat("frames_dropped"), 6);
    assert_eq!(driver.device.problem(), None);
    driver.guest_sends(DATA, b"good");
    driver.wait(TX);
    assert_eq!(driver.host_takes(), Some(b"good".to_vec()));
}

#[test]
fn a_frame_outside_of_memory_needs_a_reset() {
    let outside = BASE + SIZE as u64;
    let Some(mut driver) = Driver::with_buffers(0, 4) else {
        return;
    };
    driver.submit(TX, &[readable(outside - 64, 128)]);
    driver.wait_for_failure();
    // Longer than any chain may be.
    driver.start();
    driver.submit(TX, &[readable(DATA, u32::MAX), readable(DATA, u32::MAX)]);
    driver.wait_for_failure();
    driver.start();
    driver.submit(RX, &[writable(outside, 2048)]);
    driver.settle();
    driver.host_sends(b"lost");
    driver.wait_for_failure();
    // The rings.
    driver.start();
    driver.submit(RX, &[writable(RINGS, 2048)]);
    driver.settle();
    driver.host_sends(b"there");
    driver.until("answer", |driver| {
        driver.take(RX).is_some() || driver.status() & 0x40 != 0
    });
    driver.start();
    driver.add_buffers(1);
    driver.settle();
    driver.host_sends(b"again");
    assert_eq!(driver.wait_frame().1, b"again");
}

#[test]
fn a_quiesced_device_moves_nothing_and_loses_nothing() {
    let Some(mut driver) = Driver::with_buffers(0, 8) else {
        return;
    };
    assert!(driver.with(|device, bus| device.quiesce(bus)));
    driver.host_sends(b"waits");
    driver.guest_sends(DATA, b"too");
    driver.memory.unmapped = true;
    for _ in 0..10 {
        driver.poll();
    }
    assert!(driver.memory.faults.is_empty());
    driver.memory.unmapped = false;
    driver.with(|device, bus| device.resume(bus));
    assert_eq!(driver.wait_frame().1, b"waits");
    driver.wait(TX);
    assert_eq!(driver.host_takes(), Some(b"too".to_vec()));
}

#[test]
fn interrupts_are_raised_again_when_bus_mastering_is_enabled_again() {
    let Some(mut driver) = Driver::with_buffers(0, 8) else {
        return;
    };
    assert!(driver.with(|device, bus| device.quiesce(bus)));
    driver.memory.bus_master = false;
    driver.with(|device, bus| device.resume(bus));
    driver.irq.raised.clear();
    driver.poll();
    assert!(driver.irq.raised.is_empty(), "{:?}", driver.irq.raised);
    driver.memory.bus_master = true;
    driver.poll();
    assert_eq!(driver.irq.raised, [1u16, 2], "queues");
}

#[test]
fn an_interface_that_is_down_is_a_problem_and_costs_the_guest_frames() {
    let Some(mut driver) = Driver::with_buffers(0, 8) else {
        return;
    };
    ip(&format!("link set {TAP} down"));
    driver.guest_sends(DATA, b"lost");
    driver.wait(TX);
    let problem = driver.device.problem().unwrap();
    assert_eq!(
        problem,
        "tap tap0: writes fail: Input/output error (os error 5)"
    );
    ip(&format!("link del {TAP}"));
    driver.guest_sends(DATA, b"lost, too");
    driver.wait(TX);
    driver.settle();
    assert_eq!(driver.stat("frames_dropped"), 2);
}

#[test]
fn an_idle_device_sleeps_while_no_buffers_are_there() {
    let Some(mut driver) = Driver::with_buffers(0, 0) else {
        return;
    };
    // More than the device keeps.
    for n in 0..200u8 {
        driver.host_sends(&[n; 10]);
    }
    driver.settle();
    assert!(!driver.poll(), "no work");
    assert!(driver.enable_notifications(), "it can sleep");
    assert_eq!(driver.device.waiting(), Waiting::Block, "at once");
    for n in 0..200u8 {
        driver.add_buffers(1);
        assert_eq!(driver.wait_frame().1, [n; 10]);
    }
    driver.add_buffers(1);
    driver.settle();
    assert_eq!(driver.device.waiting(), Waiting::BusyPoll);
}

/// A device that is killed at any instruction loses no frame that waits, and repeats what was being sent: one frame here.
#[test]
fn a_killed_device_goes_on() {
    // A process must get as far as sending a frame.
    for every in (60..150).step_by(2) {
        let Some(mut driver) = Driver::with_buffers(0, 16) else {
            return;
        };
        driver.keep_state();
        driver.memory.on_translate = Some(Box::new(|_| crash::point()));
        driver.kill_every = Some(every);
        crash::after(driver.kill_every);
        for n in 0..20u8 {
            driver.guest_sends(DATA, &[n; 64]);
            driver.wait(TX);
        }
        crash::after(None);
        driver.kill_every = None;
        let mut expected = 0;
        while let Some(datagram) = driver.host_takes() {
            let n = datagram[0];
            assert!(
                n == expected || n + 1 == expected,
                "frame {n} after {expected}"
            );
            expected = n + 1;
        }
        assert_eq!(expected, 20, "killed every {every} points");
        assert!(driver.kills > 0, "{} kills", driver.kills);
        // Frames that came while no process was there.
        driver.host_sends(b"meanwhile");
        driver.restart();
        assert_eq!(driver.wait_frame().1, b"meanwhile");
    }
}

#[test]
fn errors_name_the_interface_and_the_remedy() {
    let Some((wire, _)) = wire() else {
        return;
    };
    let error = |name: &str| Tap::open(name).unwrap_err().to_string();
    assert!(
        error("tap9").contains("`ip tuntap add tap9 mode tap"),
        "{}",
        error("tap9")
    );
    assert!(error("a/b").contains("1 to 15 characters"));
    assert!(
        error("lo").contains("interface lo is no tap interface"),
        "{}",
        error("lo")
    );
    assert!(error(TAP).contains("in use by another process"));
    drop(wire);
    ip("tuntap add tap2 mode tap multi_queue");
    assert!(error("tap2").contains("multi_queue"), "{}", error("tap2"));
    let tap = Tap::open(TAP).unwrap();
    assert!(Tap::is_at(&tap.file, TAP) && !Tap::is_at(&tap.file, "tap2"));
}
