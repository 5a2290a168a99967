//! The log pages of reservation notifications (NVM Express 1.4, 5.14.1.16.1), of which each read returns one.

use std::collections::VecDeque;

use super::{
    namespace::NSID,
    reservations::{Batch, Notification},
    saved::SavedReservationLog,
};

/// Bytes of a page.
const PAGE: usize = 64;

/// Most pages that wait to be read: the oldest are dropped, which the page count shows.
pub const MOST_PAGES: usize = 64;

/// The pages of a controller, since its reset.
#[derive(Debug, Default)]
pub struct ReservationLog {
    /// The number up to which the namespace's notifications were taken; none before the first look.
    pub upto: Option<u64>,
    /// Log Page Count of the newest page.
    count: u64,
    /// The oldest first.
    pages: VecDeque<(u64, Notification)>,
}

impl ReservationLog {
    /// Adds pages for notifications that `mask` leaves. Returns whether there are any.
    pub fn add(&mut self, batch: &Batch, mask: u32) -> bool {
        self.upto = Some(batch.upto);
        if batch.lost {
            self.next_count();
        }
        let wanted = batch.notifications.iter();
        let wanted = wanted.filter(|it| mask >> it.number() & 1 == 0);
        let mut any = false;
        for notification in wanted {
            any = true;
            let count = self.next_count();
            if self.pages.len() == MOST_PAGES {
                self.pages.pop_front();
            }
            self.pages.push_back((count, *notification));
        }
        any
    }

    /// 0 is that of an empty page.
    fn next_count(&mut self) -> u64 {
        self.count = self.count.wrapping_add(1).max(1);
        self.count
    }

    /// The oldest page; without any, an empty one.
    pub fn page(&self) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        if let Some((count, notification)) = self.pages.front() {
            page[..8].copy_from_slice(&count.to_le_bytes());
            page[8] = notification.number();
            // Beside this one.
            page[9] = u8::try_from(self.pages.len() - 1).unwrap_or(u8::MAX);
            page[12..16].copy_from_slice(&NSID.to_le_bytes());
        }
        page
    }

    /// Drops the oldest page, which was read.
    pub fn consume(&mut self) {
        self.pages.pop_front();
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    pub fn saved(&self) -> SavedReservationLog {
        let pages = self.pages.iter();
        SavedReservationLog {
            upto: self.upto,
            count: self.count,
            pages: pages.map(|(count, it)| (*count, it.number())).collect(),
        }
    }

    /// What was [saved](Self::saved), within what [`ReservationLog::add`] adds.
    pub fn restored(saved: &SavedReservationLog) -> Self {
        let pages = saved.pages.iter().take(MOST_PAGES);
        let page = |(count, number): &(u64, u8)| {
            let notification = Notification::from_number(*number)?;
            Some((*count, notification))
        };
        Self {
            upto: saved.upto,
            count: saved.count,
            pages: pages.filter_map(page).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELEASED: Notification = Notification::ReservationReleased;

    fn batch(count: usize) -> Batch {
        Batch {
            notifications: vec![RELEASED; count],
            ..Batch::default()
        }
    }

    #[test]
    fn the_count_is_never_zero_and_shows_what_is_lost() {
        let mut log = ReservationLog {
            count: u64::MAX - 1,
            ..ReservationLog::default()
        };
        assert!(log.add(&batch(2), 0));
        let lost = Batch {
            lost: true,
            ..batch(1)
        };
        assert!(log.add(&lost, 0));
        let counts: Vec<_> = log.pages.iter().map(|(count, _)| *count).collect();
        assert_eq!(counts, [u64::MAX, 1, 3]);
    }

    #[test]
    fn pages_are_bounded_and_the_newest_stay() {
        let mut log = ReservationLog::default();
        for _ in 0..1000 {
            log.add(&batch(32), 0);
        }
        assert_eq!(log.pages.len(), MOST_PAGES);
        assert_eq!(log.page()[..8], (32_000 - 63u64).to_le_bytes());
        assert_eq!(log.page()[8..10], [2, 63]);
        let saved = log.saved();
        let more = SavedReservationLog {
            pages: [(9, 0), (9, 4), (9, 255)]
                .into_iter()
                .chain(saved.pages.iter().cycle().copied().take(500))
                .collect(),
            ..saved.clone()
        };
        assert_eq!(ReservationLog::restored(&saved).saved(), saved);
        assert_eq!(ReservationLog::restored(&more).pages.len(), MOST_PAGES - 3);
    }

    #[test]
    fn a_masked_notification_is_no_page_and_is_not_counted() {
        let mut log = ReservationLog::default();
        assert!(!log.add(&batch(3), 1 << 2));
        assert!((log.is_empty(), log.page()) == (true, vec![0; PAGE]));
        assert!(log.add(&batch(1), 1 << 1 | 1 << 3));
        assert_eq!(
            log.page()[..16],
            [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0]
        );
        log.consume();
        assert_eq!(log.page(), [0; PAGE]);
    }
}
