//! Transfers that end in any order, and are looked at in the order in which they were started.

use std::collections::VecDeque;

use crate::block::Tag;

#[derive(Debug)]
pub(super) struct InOrder<T> {
    /// Tags are `base` to `base + most`, in turn.
    base: Tag,
    most: Tag,
    /// The next one's, less `base`.
    next: Tag,
    items: VecDeque<T>,
    /// How many of `items` the medium has.
    in_flight: usize,
}

impl<T> InOrder<T> {
    pub(super) fn new(base: Tag, most: Tag) -> Self {
        Self {
            base,
            most,
            next: 0,
            items: VecDeque::with_capacity(most.into()),
            in_flight: 0,
        }
    }

    /// Whether another one can be started.
    pub(super) fn has_room(&self) -> bool {
        self.items.len() < usize::from(self.most)
    }

    /// How many have not ended.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The tag of the next one.
    pub(super) fn tag(&self) -> Tag {
        self.base + self.next
    }

    /// The next one is started.
    pub(super) fn push(&mut self, item: T) {
        self.next = (self.next + 1) % self.most;
        self.in_flight += 1;
        self.items.push_back(item);
    }

    /// That with this tag has ended.
    pub(super) fn ended(&mut self, tag: Tag) -> Option<&mut T> {
        let first = self.next + self.most - self.items.len() as Tag;
        let behind = (tag + self.most - self.base - first % self.most) % self.most;
        self.in_flight -= 1;
        self.items.get_mut(usize::from(behind))
    }

    /// The first.
    pub(super) fn first(&self) -> Option<(Tag, &T)> {
        let item = self.items.front()?;
        let first = self.next + self.most - self.items.len() as Tag;
        Some((self.base + first % self.most, item))
    }

    /// All, in order.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.items.iter_mut()
    }

    /// Removes the first, which has ended.
    pub(super) fn pop(&mut self) {
        self.items.pop_front();
    }

    /// Removes all, none of which is in flight.
    pub(super) fn clear(&mut self) {
        self.items.clear();
        (self.next, self.in_flight) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_end_in_any_order_and_leave_in_theirs() {
        let mut all = InOrder::new(10, 3);
        let start = |all: &mut InOrder<_>, name| {
            let tag = all.tag();
            all.push((name, false));
            tag
        };
        let (a, b, c) = (
            start(&mut all, 'a'),
            start(&mut all, 'b'),
            start(&mut all, 'c'),
        );
        assert_eq!((a, b, c), (10, 11, 12));
        assert!(!all.has_room());
        all.ended(c).unwrap().1 = true;
        all.ended(a).unwrap().1 = true;
        assert_eq!(all.first(), Some((a, &('a', true))));
        all.pop();
        assert_eq!(start(&mut all, 'd'), a);
        assert_eq!(all.first(), Some((b, &('b', false))));
        assert_eq!(all.in_flight(), 2);
        all.ended(b).unwrap().1 = true;
        all.pop();
        assert_eq!(all.first(), Some((c, &('c', true))));
        all.pop();
        assert_eq!(all.first(), Some((a, &('d', false))));
        all.ended(a).unwrap();
        all.clear();
        assert_eq!((all.first(), all.tag()), (None, 10));
    }
}
