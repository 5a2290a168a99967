//! Reservation notifications of a shared namespace (NVM Express 1.4, 8.8), by host. Pure.
//!
//! The table keeps the last ones of all hosts, numbered consecutively. Each controller remembers up to which number it has
//! taken those of its host, so that a process that follows a killed one misses none and takes none twice.

use farside_medium::Notifications as Packed;
use serde::{Deserialize, Serialize};

use super::table::Host;

/// Most notifications that the table keeps: the oldest go. One command makes up to 31.
const MOST_KEPT: usize = 64;

/// Most notifications of a [`Batch`]: two bits each in [`Packed::types`].
const MOST_IN_BATCH: usize = 32;

/// The type of a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notification {
    RegistrationPreempted,
    ReservationReleased,
    ReservationPreempted,
}

impl Notification {
    /// Reservation Notification Log Page Type (5.14.1.16.1), which is also the bit of the mask (5.21.1.26).
    pub fn number(self) -> u8 {
        self as u8 + 1
    }

    /// The type of that number.
    pub fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::RegistrationPreempted),
            2 => Some(Self::ReservationReleased),
            3 => Some(Self::ReservationPreempted),
            _ => None,
        }
    }
}

/// Notifications of one host, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The number up to which those of all hosts were searched.
    pub upto: u64,
    /// Older ones were dropped before they were taken, maybe of this host.
    pub lost: bool,
    pub notifications: Vec<Notification>,
}

impl Batch {
    /// There may be more.
    pub fn is_full(&self) -> bool {
        self.notifications.len() == MOST_IN_BATCH
    }

    /// As a frame has it.
    pub fn packed(&self) -> Packed {
        let types = self.notifications.iter().rev();
        Packed {
            upto: self.upto,
            lost: self.lost,
            types: types.fold(0, |types, it| types << 2 | u64::from(it.number())),
        }
    }
}

impl From<Packed> for Batch {
    fn from(Packed { upto, lost, types }: Packed) -> Self {
        let numbers = (0..MOST_IN_BATCH).map(|n| (types >> (2 * n) & 3) as u8);
        Self {
            upto,
            lost,
            notifications: numbers.map_while(Notification::from_number).collect(),
        }
    }
}

/// The last notifications of all hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notifications {
    /// The number of the last one.
    last: u64,
    kept: Vec<(Host, Notification)>,
}

impl Notifications {
    pub fn push(&mut self, host: Host, notification: Notification) {
        self.last = self.last.wrapping_add(1);
        self.kept.push((host, notification));
        let excess = self.kept.len().saturating_sub(MOST_KEPT);
        self.kept.drain(..excess);
    }

    /// Those of `host` after that number; none of a controller that begins now.
    pub fn of(&self, host: Host, after: Option<u64>) -> Batch {
        let Some(after) = after else {
            return Batch {
                upto: self.last,
                ..Batch::default()
            };
        };
        // Of a table that is not ours, more than have a number.
        let excess = (self.kept.len() as u64).saturating_sub(self.last);
        let before = self.last - (self.kept.len() as u64 - excess);
        // A table that has lost power, or was written by a farside without notifications, counts from a lower number.
        let lost = !(before..=self.last).contains(&after);
        let from = if lost { before } else { after };
        let mut batch = Batch {
            upto: from,
            lost,
            notifications: Vec::new(),
        };
        for (of, notification) in self.kept.iter().skip((excess + from - before) as usize) {
            if batch.is_full() {
                break;
            }
            if *of == host {
                batch.notifications.push(*notification);
            }
            batch.upto += 1;
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Host = Host::Named(1, true);
    const OTHER: Host = Host::Named(2, true);
    const TYPES: [Notification; 3] = [
        Notification::RegistrationPreempted,
        Notification::ReservationReleased,
        Notification::ReservationPreempted,
    ];

    fn with(count: usize) -> Notifications {
        let mut all = Notifications::default();
        for n in 0..count {
            all.push(OTHER, TYPES[0]);
            all.push(HOST, TYPES[n % 3]);
        }
        all
    }

    #[test]
    fn a_host_gets_its_own_once_and_in_order() {
        let all = with(3);
        let batch = all.of(HOST, Some(0));
        assert_eq!((batch.upto, batch.lost), (6, false));
        assert_eq!(batch.notifications, TYPES);
        assert_eq!(all.of(HOST, Some(2)).notifications, TYPES[1..]);
        let none = |upto| Batch {
            upto,
            ..Batch::default()
        };
        assert_eq!(all.of(HOST, Some(6)), none(6));
        assert_eq!(all.of(HOST, None), none(6));
        assert_eq!(all.of(Host::Named(1, false), Some(0)), none(6));
    }

    #[test]
    fn the_oldest_are_lost_and_that_is_known() {
        let all = with(40);
        assert_eq!(all.kept.len(), MOST_KEPT);
        assert_eq!(all.last, 80);
        for (after, lost) in [
            (0, true),
            (15, true),
            (16, false),
            (81, true),
            (u64::MAX, true),
        ] {
            let batch = all.of(HOST, Some(after));
            assert_eq!((batch.lost, batch.upto), (lost, 80), "{after}");
            assert_eq!(batch.notifications.len(), 32);
        }
    }

    #[test]
    fn more_than_a_batch_comes_in_several() {
        let mut all = Notifications::default();
        for _ in 0..40 {
            all.push(HOST, TYPES[2]);
        }
        let first = all.of(HOST, Some(0));
        assert_eq!((first.upto, first.is_full()), (32, true));
        let second = all.of(HOST, Some(first.upto));
        assert_eq!((second.upto, second.is_full()), (40, false));
        assert_eq!(second.notifications, [TYPES[2]; 8]);
    }

    #[test]
    fn a_batch_survives_a_frame() {
        for count in 0..=MOST_IN_BATCH {
            let batch = Batch {
                upto: 7,
                lost: count % 2 == 0,
                notifications: (0..count).map(|n| TYPES[n % 3]).collect(),
            };
            assert_eq!(Batch::from(batch.packed()), batch);
        }
    }

    /// A worker that was taken over writes any table.
    #[test]
    fn numbers_that_cannot_be_are_harmless() {
        for last in [0, 3, 31, 32, 40, 63, 64, 199, u64::MAX] {
            let mut all = Notifications {
                last,
                kept: vec![(HOST, TYPES[0]); 200],
            };
            for after in [0, 3, 100, u64::MAX] {
                let mut after = after;
                let batches = std::iter::from_fn(|| {
                    let batch = all.of(HOST, Some(after));
                    let is_news = batch.upto != after;
                    after = batch.upto;
                    is_news.then_some(batch)
                });
                let batches: Vec<_> = batches.take(10).collect();
                let full = |batch: &Batch| batch.notifications.len() <= MOST_IN_BATCH;
                assert!(batches.iter().all(full));
                assert!(batches.len() < 10 && after == last, "{last}: never ends");
            }
            all.push(HOST, TYPES[1]);
            assert_eq!(all.kept.len(), MOST_KEPT);
        }
    }
}
