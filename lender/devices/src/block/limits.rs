//! Limits of a device's rate of I/O, so that the devices of one medium leave each other their shares.
#![deny(unsafe_code)]

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use farside_fabric::{Size, deserialize_optional_size};
use rustix::{
    event::epoll,
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};
use serde::{Deserialize, Serialize};

/// Lowest limits per second. Drivers give a command up after some 30 s, and a thousand may be queued.
pub const LEAST_IOPS: u32 = 100;
/// See [`LEAST_IOPS`]; bytes.
pub const LEAST_BANDWIDTH: u64 = 10 << 20;

/// A device that has been idle for this long, or longer, may do so long a time's I/O at once.
const BURST: Duration = Duration::from_millis(100);

/// Most I/O per second; without a value, as much as the medium can do.
///
/// Each operation on the medium counts, flushes, too; a command with several ranges is several operations. A
/// device takes no command while what it has started is beyond the limits, whatever the command's own size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Limits {
    /// Operations per second.
    #[serde(default)]
    pub iops: Option<u32>,
    /// Bytes per second. Zeroes count on a block device, and where they have to be written.
    #[serde(default, deserialize_with = "deserialize_optional_size")]
    pub bandwidth: Option<u64>,
}

/// A limit that is too low.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// Of operations.
    #[error(
        "limits: iops = {0}: it must be at least {LEAST_IOPS} a second, else drivers give commands up"
    )]
    Iops(u32),
    /// Of bytes.
    #[error(
        "limits: bandwidth = {0}: it must be at least {least} a second, else drivers give commands up",
        least = Size(LEAST_BANDWIDTH)
    )]
    Bandwidth(u64),
}

impl Limits {
    /// Whether there are none.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Checks the values.
    ///
    /// # Errors
    /// One is below [`LEAST_IOPS`] or [`LEAST_BANDWIDTH`].
    pub fn validate(&self) -> Result<(), LimitsError> {
        match (self.iops, self.bandwidth) {
            (Some(iops), _) if iops < LEAST_IOPS => Err(LimitsError::Iops(iops)),
            (_, Some(bytes)) if bytes < LEAST_BANDWIDTH => Err(LimitsError::Bandwidth(bytes)),
            _ => Ok(()),
        }
    }
}

/// One limit, of units per second.
#[derive(Debug)]
struct Pace {
    per_second: u64,
    /// When what was started is within the limit.
    paid: Instant,
}

impl Pace {
    /// Nothing may start for [`BURST`], so that a new process or connection gains nothing.
    fn new(per_second: u64, now: Instant) -> Self {
        Self {
            per_second,
            paid: now + BURST,
        }
    }

    fn spend(&mut self, units: u64, now: Instant) {
        let from = now.checked_sub(BURST).unwrap_or(now).max(self.paid);
        let nanos = u128::from(units) * 1_000_000_000;
        let nanos = nanos.div_ceil(self.per_second.into());
        self.paid = from + Duration::from_nanos(nanos as u64);
    }
}

/// The state of a device's limits.
#[derive(Debug)]
struct Paces {
    iops: Option<Pace>,
    bandwidth: Option<Pace>,
}

impl Paces {
    fn new(limits: Limits, now: Instant) -> Self {
        let iops = limits.iops.map(|iops| Pace::new(iops.into(), now));
        let bandwidth = limits.bandwidth.map(|bytes| Pace::new(bytes, now));
        Self { iops, bandwidth }
    }

    /// When the next command may start.
    fn due(&self) -> Option<Instant> {
        let paid = [&self.iops, &self.bandwidth].map(|pace| pace.as_ref().map(|pace| pace.paid));
        paid.into_iter().max().flatten()
    }

    fn may_start(&self, now: Instant) -> bool {
        self.due().is_none_or(|due| due <= now)
    }

    /// An operation of so many bytes starts.
    fn spend(&mut self, bytes: u64, now: Instant) {
        if let Some(iops) = &mut self.iops {
            iops.spend(1, now);
        }
        if let Some(bandwidth) = &mut self.bandwidth {
            bandwidth.spend(bytes, now);
        }
    }
}

/// Holds back commands that a device with limits has not taken yet.
pub(super) struct Throttle {
    paces: Paces,
    /// Whether the medium writes what it zeroes, as far as is known.
    pub(super) writes_zeroes: bool,
    /// The owner may not take a command.
    held: bool,
    timer: OwnedFd,
    /// When the timer expires; it is readable from then on.
    armed: Option<Instant>,
    /// Readable when the engine's descriptor or the timer is.
    ready: OwnedFd,
}

impl Throttle {
    /// For an engine whose descriptor is `engine`.
    pub(super) fn new(
        limits: Limits,
        writes_zeroes: bool,
        engine: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [engine, timer.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&ready, fd, data, epoll::EventFlags::IN)?;
        }
        Ok(Self {
            paces: Paces::new(limits, Instant::now()),
            writes_zeroes,
            held: false,
            timer,
            armed: None,
            ready,
        })
    }

    /// Whether the owner may take a command. If not, [`Throttle::ready`] becomes readable when it may, once
    /// [`Throttle::is_due`] was called.
    pub(super) fn may_take(&mut self) -> bool {
        self.held = !self.paces.may_start(Instant::now());
        !self.held
    }

    pub(super) fn is_held(&self) -> bool {
        self.held
    }

    /// An operation of so many bytes starts.
    pub(super) fn start(&mut self, bytes: u64) {
        self.paces.spend(bytes, Instant::now());
    }

    /// Bytes that an operation has moved beyond what it started with.
    pub(super) fn charge(&mut self, bytes: u64) {
        if let (Some(bandwidth), 1..) = (&mut self.paces.bandwidth, bytes) {
            bandwidth.spend(bytes, Instant::now());
        }
    }

    /// Whether the owner was held back, and may take a command now. Returns that once: an owner whose driver
    /// has turned it off meanwhile takes none.
    pub(super) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        if self.held && self.paces.may_start(now) {
            self.held = false;
            return true;
        }
        self.arm(self.paces.due().filter(|_| self.held));
        false
    }

    /// Has the timer that has expired be readable no more: its owner is awake.
    pub(super) fn notice(&mut self) {
        if self.armed.is_some_and(|at| at <= Instant::now()) {
            self.arm(None);
        }
    }

    fn arm(&mut self, due: Option<Instant>) {
        if due != self.armed {
            let now = Instant::now();
            // Zero disarms it.
            let after = due.map_or(Duration::ZERO, |due| {
                (due - now).max(Duration::from_nanos(1))
            });
            let value = Itimerspec {
                it_interval: Timespec::default(),
                it_value: Timespec::try_from(after).unwrap_or_default(),
            };
            // Fails for no value of a monotonic clock.
            let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value);
            self.armed = due;
        }
    }

    /// Readable when a command may be taken, or the engine's descriptor is.
    pub(super) fn ready(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// That could start something now for [`BURST`] already.
    fn paces(iops: Option<u32>, bandwidth: Option<u64>) -> (Paces, Instant) {
        let start = Instant::now();
        let paces = Paces::new(Limits { iops, bandwidth }, start);
        (paces, start + BURST)
    }

    /// Commands of `bytes` that are started within 10 s, each as soon as it may.
    fn started(iops: Option<u32>, bandwidth: Option<u64>, bytes: u64) -> u64 {
        let (mut paces, mut now) = paces(iops, bandwidth);
        let end = now + Duration::from_secs(10);
        let mut count = 0;
        while now < end {
            assert!(paces.may_start(now));
            paces.spend(bytes, now);
            count += 1;
            now = now.max(paces.due().expect("a limit"));
        }
        count
    }

    #[test]
    fn the_lower_limit_counts() {
        let (iops, bandwidth) = (Some(1000), Some(4 << 20));
        assert_eq!(started(iops, None, 4096), 10_000);
        assert_eq!(started(None, bandwidth, 4096), 10_240);
        let both = [512, 64 << 10].map(|bytes| started(iops, bandwidth, bytes));
        assert_eq!(both, [10_000, 640]);
    }

    #[test]
    fn a_new_process_waits_at_first() {
        let start = Instant::now();
        let limits = Limits {
            iops: Some(1000),
            ..Limits::default()
        };
        let paces = Paces::new(limits, start);
        assert!(!paces.may_start(start + BURST - Duration::from_nanos(1)));
        assert!(paces.may_start(start + BURST));
    }

    #[test]
    fn what_was_not_used_is_worth_a_tenth_of_a_second() {
        let (mut paces, start) = paces(Some(1000), None);
        let later = start + Duration::from_secs(3600);
        let mut burst = 0;
        while paces.may_start(later) {
            paces.spend(0, later);
            burst += 1;
        }
        assert_eq!(burst, 101);
    }

    #[test]
    fn a_large_command_is_paid_for_afterwards() {
        let (mut paces, start) = paces(None, Some(1 << 20));
        let later = start + BURST;
        paces.spend(128 << 20, later);
        assert_eq!(paces.due(), Some(start + Duration::from_secs(128)));
    }

    #[test]
    fn what_is_charged_later_holds_the_next_command_back() {
        let limits = Limits {
            bandwidth: Some(10 << 20),
            ..Limits::default()
        };
        let engine = super::super::eventfd().unwrap();
        let mut throttle = Throttle::new(limits, false, engine.as_fd()).unwrap();
        // That could start something now for a minute already.
        let before = Instant::now() - Duration::from_secs(60);
        throttle.paces = Paces::new(limits, before);
        assert!(throttle.may_take());
        throttle.charge(0);
        assert!(throttle.may_take());
        throttle.charge(100 << 20);
        assert!(!throttle.may_take());
        let due = throttle.paces.due().unwrap() - Instant::now();
        assert!((8..=10).contains(&due.as_secs()), "{due:?}");
    }

    #[test]
    fn values_are_read_with_units_and_checked() {
        let read = |text| toml::from_str::<Limits>(text);
        let limits = read("iops = 500\nbandwidth = \"20 MiB\"").unwrap();
        assert_eq!((limits.iops, limits.bandwidth), (Some(500), Some(20 << 20)));
        assert_eq!(limits.validate(), Ok(()));
        let json = serde_json::to_string(&read("iops = 500").unwrap()).unwrap();
        let again: Limits = serde_json::from_str(&json).unwrap();
        assert_eq!((again.iops, again.bandwidth), (Some(500), None));
        assert!(read("ipos = 1").is_err());
        for (text, parts) in [
            ("bandwidth = \"512 KiB\"", ["bandwidth = 524288", "10 MiB"]),
            ("bandwidth = 0", ["bandwidth = 0", "10 MiB"]),
            ("iops = 99", ["iops = 99", "100"]),
        ] {
            let said = read(text).unwrap().validate().unwrap_err().to_string();
            assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        }
    }
}
