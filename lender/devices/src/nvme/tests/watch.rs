//! What a controller may do to guest and medium, above all after a kill: anything else panics.
//!
//! The watch sees both ends: which commands the driver has in flight, and what reaches the medium and guest memory.
//! It outlives the controller's processes. Forbidden are
//!
//! - an operation of the medium, or its access to guest memory, without a command in flight: that of a command whose
//!   completion the guest has is done a second time, with an effect that the guest can see;
//! - to execute a command twice in one process;
//! - after a kill, to fetch from a queue, or to execute another command, before what was in flight is executed again,
//!   in the order of before;
//! - to execute a Format again;
//! - a second completion of a command;
//! - any DMA while the device is quiet: quiesced, without bus mastering, or reset.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::world::{ADMIN_ENTRIES, ASQ, IMAGE, RINGS};

/// An operation of the medium: offset and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read(u64, u64),
    Write(u64, u64),
    Sync,
    Allocate(u64, u64),
}

/// What a command does to the medium. Ranges of bytes are in use by one command at a time, and so is Flush.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Read(Range<u64>),
    Write(Range<u64>),
    /// And whether it flushes.
    Zero(Range<u64>, bool),
    Trim(Range<u64>),
    Flush,
    /// Everything; no other command is in flight.
    Format,
    None,
}

impl Effect {
    /// Whether its first operation may be this one.
    fn begins_with(&self, access: Access) -> bool {
        let inside = |range: &Range<u64>, offset: u64, len: u64| {
            range.start <= offset && offset + len <= range.end
        };
        match (self, access) {
            (Self::Read(range), Access::Read(offset, len))
            | (Self::Write(range), Access::Write(offset, len))
            | (Self::Zero(range, _), Access::Allocate(offset, len) | Access::Write(offset, len))
            | (Self::Trim(range), Access::Allocate(offset, len)) => inside(range, offset, len),
            (Self::Flush, Access::Sync) => true,
            (Self::Format, Access::Allocate(0, IMAGE)) => true,
            _ => false,
        }
    }

    /// Whether a later one may.
    fn goes_on_with(&self, access: Access) -> bool {
        let ends_durably = matches!(self, Self::Zero(_, true) | Self::Format);
        self.begins_with(access) || ends_durably && access == Access::Sync
    }
}

/// A command: queue and identifier.
pub type Id = (u16, u16);

#[derive(Debug)]
struct InFlight {
    effect: Effect,
    /// When it was executed first, and the last process that did.
    begun: Option<(u64, u64)>,
}

#[derive(Default)]
struct Watched {
    processes: u64,
    time: u64,
    in_flight: BTreeMap<Id, InFlight>,
    /// By the tag of this process.
    tags: BTreeMap<u16, Id>,
    /// What is to be executed before anything else.
    replay: VecDeque<Id>,
    /// Why nothing may be accessed.
    quiet: Option<&'static str>,
    /// Commands that were executed again.
    replayed: u64,
    /// The next flush fails.
    flush_fails: bool,
    /// The last events, for a test that fails.
    story: VecDeque<String>,
}

impl Watched {
    pub fn tell(&mut self, event: String) {
        if self.story.len() == 200 {
            self.story.pop_front();
        }
        self.story.push_back(event);
    }
}

/// A clone watches the same device.
#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<Watched>>);

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Watched> {
        // A panic is the test's end.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note(&self, event: String) {
        self.lock().tell(event);
    }

    /// What has happened at last.
    pub fn story(&self) -> String {
        let it = self.lock();
        let events: Vec<_> = it.story.iter().map(String::as_str).collect();
        events.join("\n")
    }

    /// Has the medium fail the next flush, of whichever process.
    pub fn fail_flush(&self) {
        self.lock().flush_fails = true;
    }

    pub fn takes_flush_failure(&self) -> bool {
        std::mem::take(&mut self.lock().flush_fails)
    }

    pub fn replayed(&self) -> u64 {
        self.lock().replayed
    }

    /// The driver is about to submit a command.
    pub fn submitted(&self, id: Id, effect: Effect) {
        let mut it = self.lock();
        it.tell(format!("submitted {id:?}: {effect:?}"));
        let command = InFlight {
            effect,
            begun: None,
        };
        let before = it.in_flight.insert(id, command);
        assert!(before.is_none(), "the driver uses {id:?} twice");
    }

    /// The driver has taken a completion.
    pub fn completed(&self, id: Id) {
        let mut it = self.lock();
        it.tell(format!("completed {id:?}"));
        let known = it.in_flight.remove(&id);
        // The driver may use the identifier for another one.
        it.tags.retain(|_, of| *of != id);
        assert!(known.is_some(), "forbidden: a second completion of {id:?}");
    }

    /// The controller has begun anew: none of its commands is in flight.
    pub fn reset(&self) {
        let mut it = self.lock();
        it.tell("reset".to_owned());
        it.in_flight.clear();
        it.tags.clear();
        it.replay.clear();
    }

    pub fn set_quiet(&self, why: Option<&'static str>) {
        self.lock().quiet = why;
    }

    /// A process was killed, and another one goes on. The guest can see the completions of `done`.
    pub fn restarted(&self, done: &[Id]) {
        let mut it = self.lock();
        it.processes += 1;
        it.tell(format!("killed; the guest has completions of {done:?}"));
        it.tags.clear();
        it.quiet = None;
        for (n, id) in done.iter().enumerate() {
            let is_known = it.in_flight.contains_key(id) && !done[..n].contains(id);
            assert!(is_known, "forbidden: a second completion of {id:?}");
        }
        let mut order: Vec<_> = it
            .in_flight
            .iter()
            .filter(|(id, command)| !done.contains(id) && command.effect != Effect::Format)
            .filter_map(|(id, command)| Some((command.begun?.0, *id)))
            .collect();
        order.sort_unstable();
        it.replay = order.into_iter().map(|(_, id)| id).collect();
        // What is done is so for good.
        for id in done {
            if let Some(command) = it.in_flight.get_mut(id) {
                command.effect = Effect::None;
            }
        }
    }

    /// An operation is queued at the medium.
    pub fn begin(&self, tag: u16, access: &Access) {
        let mut it = self.lock();
        it.tell(format!("queued {access:?}, tag {tag}"));
        let of_tag = it.tags.get(&tag).and_then(|id| it.in_flight.get(id));
        if of_tag.is_some_and(|command| command.effect.goes_on_with(*access)) {
            return;
        }
        it.tags.remove(&tag);
        let process = it.processes;
        let is_it = |command: &InFlight| {
            let is_new = command.begun.is_none_or(|(_, by)| by != process);
            is_new && command.effect.begins_with(*access)
        };
        let found = it.in_flight.iter().find(|(_, command)| is_it(command));
        let Some(id) = found.map(|(id, _)| *id) else {
            panic!("forbidden: {access:?} without a command in flight");
        };
        if let Some(next) = it.replay.pop_front() {
            assert_eq!(
                next,
                id,
                "forbidden: {access:?} before {:?}, which was in flight",
                it.in_flight.get(&next)
            );
            it.replayed += 1;
        }
        it.time += 1;
        let time = it.time;
        if let Some(command) = it.in_flight.get_mut(&id) {
            let is_again = command.begun.is_some();
            let is_format = command.effect == Effect::Format;
            assert!(
                !(is_format && is_again),
                "forbidden: Format is executed again"
            );
            let first = command.begun.map_or(time, |(first, _)| first);
            command.begun = Some((first, process));
        }
        it.tags.insert(tag, id);
    }

    /// The medium accesses guest memory, or changes.
    pub fn touch(&self, tag: u16, access: &Access) {
        let mut it = self.lock();
        it.tell(format!("done {access:?}, tag {tag}"));
        if let Some(why) = it.quiet {
            panic!("forbidden: {access:?} of a device that is {why}");
        }
        let of_tag = it.tags.get(&tag).and_then(|id| it.in_flight.get(id));
        let is_known = of_tag.is_some_and(|command| command.effect.goes_on_with(*access));
        assert!(is_known, "forbidden: {access:?} after its command's end");
    }

    /// The medium has flushed: that ends each command.
    pub fn flushed(&self, tag: u16) {
        self.lock().tags.remove(&tag);
    }

    /// The device translates an address.
    pub fn dma(&self) {
        if let Some(why) = self.lock().quiet {
            panic!("forbidden: DMA by a device that is {why}");
        }
    }

    /// The controller translates an address.
    pub fn translate(&self, iova: u64) {
        self.dma();
        let it = self.lock();
        let is_admin = (ASQ..ASQ + u64::from(ADMIN_ENTRIES) * 64).contains(&iova);
        let is_io = (RINGS..RINGS + 0x20_0000).contains(&iova) && iova & 0x1_0000 == 0;
        assert!(
            !(is_admin || is_io) || it.replay.is_empty(),
            "forbidden: a fetch at {iova:#x} before {:?} are executed again, {:?}",
            it.replay,
            it.in_flight
        );
    }
}
