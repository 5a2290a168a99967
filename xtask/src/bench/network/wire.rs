//! A wire with a delay and a rate between two network namespaces, for kernels without netem: it passes
//! packets from the TUN device of one to that of the other. `cargo xtask wire`, a process of its own with
//! real-time priority, so that its delays are those asked for.

use std::{
    collections::VecDeque,
    fs::File,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use tappers::{Interface, linux::Tun};

use crate::args::Wire;

/// The device's name in both namespaces.
pub(super) const DEVICE: &str = "wire";

/// Bytes of the longest packet: a jumbo frame's.
pub(super) const MTU: usize = 9000;

/// Bytes that wait for their turn, at most, in one direction: as much as a switch has. The rest is lost.
const BACKLOG: usize = 16 << 20;

/// Packets that are read before others are sent.
const BURST: usize = 16;

/// Packets in one direction.
struct Lane {
    waiting: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    /// When the last bit of the last packet has been sent.
    free: Instant,
}

impl Lane {
    fn new(now: Instant) -> Self {
        Self {
            waiting: VecDeque::new(),
            bytes: 0,
            free: now,
        }
    }

    fn take(&mut self, packet: &[u8], now: Instant, delay: Duration, bits_per_second: u64) {
        if self.bytes + packet.len() > BACKLOG {
            return;
        }
        let time = Duration::from_nanos(packet.len() as u64 * 8_000_000_000 / bits_per_second);
        self.free = self.free.max(now) + time;
        self.bytes += packet.len();
        self.waiting.push_back((self.free + delay, packet.to_vec()));
    }

    fn arrived(&mut self, now: Instant) -> Option<Vec<u8>> {
        let due = self.waiting.front().is_some_and(|(at, _)| *at <= now);
        let (_, packet) = due.then(|| self.waiting.pop_front()).flatten()?;
        self.bytes -= packet.len();
        Some(packet)
    }
}

/// Passes packets until it is killed.
pub(crate) fn run(args: &Wire) -> Result<()> {
    let ends = [open(&args.namespaces[0])?, open(&args.namespaces[1])?];
    println!("ready");
    let delay = Duration::from_micros(args.delay_us.into()) / 2;
    let bits_per_second = args.mbit * 1_000_000;
    let now = Instant::now();
    let mut lanes = [Lane::new(now), Lane::new(now)];
    let mut packet = vec![0; MTU + 1];
    loop {
        for (from, lane) in lanes.iter_mut().enumerate() {
            for _ in 0..BURST {
                match rustix::io::read(ends[from].as_fd(), &mut packet[..]) {
                    Ok(len) => lane.take(&packet[..len], Instant::now(), delay, bits_per_second),
                    Err(Errno::AGAIN) => break,
                    Err(errno) => return Err(errno).context("receiving a packet"),
                }
            }
            while let Some(packet) = lane.arrived(Instant::now()) {
                // Lost if the host has no room for it.
                let _ = rustix::io::write(ends[1 - from].as_fd(), &packet);
            }
        }
        let next = lanes
            .iter()
            .filter_map(|lane| Some(lane.waiting.front()?.0));
        let left = next
            .min()
            .map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.map(Timespec::try_from).transpose()?;
        let mut fds = ends.each_ref().map(|end| PollFd::new(end, PollFlags::IN));
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).context("waiting for a packet"),
        }
    }
}

/// Makes the device in a namespace. This thread stays there; the device's descriptor works anywhere.
fn open(namespace: &Path) -> Result<Tun> {
    let file = File::open(namespace).with_context(|| format!("opening {}", namespace.display()))?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("entering {}", namespace.display()))?;
    let device = Interface::new(DEVICE).context("naming a TUN device")?;
    let tun = Tun::new_named(device).context("making a TUN device, by /dev/net/tun")?;
    tun.set_nonblocking(true)?;
    Ok(tun)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_arrives_after_its_bits_and_the_delay() {
        let now = Instant::now();
        let delay = Duration::from_micros(25);
        let mut lane = Lane::new(now);
        // 1000 bytes at 8 Gbit/s: 1 µs.
        for _ in 0..2 {
            lane.take(&[0; 1000], now, delay, 8_000_000_000);
        }
        let at = |us| now + Duration::from_micros(us);
        assert!(lane.arrived(at(25)).is_none());
        assert_eq!(lane.arrived(at(26)).unwrap().len(), 1000);
        assert!(lane.arrived(at(26)).is_none());
        assert!(lane.arrived(at(27)).is_some());
        assert_eq!((lane.bytes, lane.waiting.len()), (0, 0));
    }

    #[test]
    fn a_backlog_is_bounded() {
        let now = Instant::now();
        let mut lane = Lane::new(now);
        for _ in 0..BACKLOG / 1000 + 10 {
            lane.take(&[0; 1000], now, Duration::ZERO, 1);
        }
        assert_eq!(lane.waiting.len(), BACKLOG / 1000);
    }
}
