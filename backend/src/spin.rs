//! Whether to look for the next request before sleeping.
//!
//! A guest that reads registers asks again as soon as it has its answer. A sleeping
//! thread is woken for each question, which takes longer than answering does; one
//! that looks for a moment finds most. Looking takes a processor, though, and where
//! none is free it keeps the very client waiting whose question it looks for. So a
//! look that finds nothing puts the next one off, twice as far each time, and only many
//! finds in a row bring it nearer: where looking does not pay, it is one look in a
//! thousand events.

use std::time::Duration;

/// How long one look takes at most: a client's answer, its wake-up, its next
/// question.
const LOOK: Duration = Duration::from_micros(50);
/// Events between two looks, at most.
const RAREST: u32 = 1023;
/// Finds in a row that are worth one look in vain.
const WORTH: u32 = 32;

/// When to look.
#[derive(Debug)]
pub(crate) struct Spin {
    allowed: bool,
    /// Events to let pass before the next look.
    skip: u32,
    /// What a look in vain makes of `skip`.
    penalty: u32,
    /// Finds since the last look in vain.
    finds: u32,
}

impl Spin {
    /// Never looks where there is only one processor.
    pub(crate) fn new(processors: usize) -> Self {
        Self {
            allowed: processors > 1,
            skip: 0,
            penalty: 0,
            finds: 0,
        }
    }

    /// After an event: how long to look for the next one.
    pub(crate) fn look(&mut self) -> Option<Duration> {
        if !self.allowed {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        Some(LOOK)
    }

    /// How a look ended.
    pub(crate) fn looked(&mut self, found: bool) {
        match found {
            true => {
                self.finds += 1;
                if self.finds == WORTH {
                    self.finds = 0;
                    self.penalty /= 2;
                }
            }
            false => {
                self.finds = 0;
                self.penalty = (self.penalty * 2 + 1).min(RAREST);
                self.skip = self.penalty;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks of a thread that has `events`, each after a look that would have
    /// found it or not.
    fn looks(spin: &mut Spin, events: impl IntoIterator<Item = bool>) -> usize {
        let look = |soon| {
            let looks = spin.look().is_some();
            if looks {
                spin.looked(soon);
            }
            looks
        };
        events.into_iter().map(look).filter(|looks| *looks).count()
    }

    #[test]
    fn a_busy_client_is_looked_for_each_time() {
        assert_eq!(looks(&mut Spin::new(2), [true; 100]), 100);
    }

    #[test]
    fn where_looking_is_in_vain_it_is_rare() {
        let mut spin = Spin::new(2);
        assert!(looks(&mut spin, [false; 1024]) <= 11);
        assert!(looks(&mut spin, [false; 10_240]) <= 11);
        // And it comes back once it pays.
        looks(&mut spin, [true; 2048]);
        assert_eq!(looks(&mut spin, [true; 100]), 100);
    }

    #[test]
    fn a_find_now_and_then_does_not_make_up_for_looks_in_vain() {
        let events = [true, false].iter().cycle().copied();
        let mut spin = Spin::new(2);
        assert!(looks(&mut spin, events.take(20_000)) <= 100);
    }

    #[test]
    fn the_ends_of_long_bursts_do_not_stop_it() {
        let burst = |n| n % 100 != 99;
        let mut spin = Spin::new(2);
        assert!(looks(&mut spin, (0..20_000).map(burst)) >= 19_000);
    }

    #[test]
    fn one_processor_is_left_to_the_client() {
        assert_eq!(looks(&mut Spin::new(1), [true; 100]), 0);
    }
}
