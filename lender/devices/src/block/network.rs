//! I/O on a medium in another host.
//!
//! An operation is one frame to the lender and one back. It stays in the engine's table until its
//! answer has come: after a cut, all that are there are sent again over the next connection, in the
//! order in which they were started. A write that was done already is so done twice, which a guest does not see:
//! what it started after its answer was not started before. Others that write to the medium, of a shared namespace, may.

mod frames;
mod notifications;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use farside_medium::{
    Condition, Frame, FrameError, HostIdentity, Link, LinkError, Memory, Notifications,
};
use rustix::{
    buffer::spare_capacity,
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create,
        timerfd_settime,
    },
};

use super::{Engine, RawOp, Tag, eventfd};
use frames::{Operation, place, post};
use notifications::Exchange;

/// Time for operations to end while the owner waits for that, before they are given up: shorter than
/// it waits for DMA in flight.
const HURRY: Duration = Duration::from_secs(2);

/// Time for the lender to flush and to free a device that is returned.
const RETURNED: Duration = Duration::from_secs(3);

/// What is ready in an engine's epoll instance.
const LINK: u64 = 0;
const WAKE: u64 = 1;
const TIMER: u64 = 2;

/// What an engine tells the owner of its connections.
#[derive(Debug)]
pub enum Notice {
    /// The connection has ended: the engine waits for the next.
    Lost {
        /// Why.
        error: LinkError,
        /// I/O has gone on over it: all that had waited for it was answered.
        went_on: bool,
    },
    /// The lender takes the device back, within this time.
    Release(Duration),
}

/// What the owner of the connections answers.
#[derive(Debug)]
pub enum Supply {
    /// The next connection, to a medium of so many bytes.
    Link(Box<Link>, u64),
    /// There will be none: all I/O fails from here on.
    GivenUp,
}

/// A medium in another host, for an engine.
#[derive(Debug)]
pub struct RemoteMedium {
    size: u64,
    first: Link,
    notices: mpsc::Sender<Notice>,
    supply: mpsc::Receiver<Supply>,
    wake: Arc<OwnedFd>,
}

/// The end of a [`RemoteMedium`] that keeps it connected.
#[derive(Debug)]
pub struct MediumKeeper {
    /// Disconnected when the engine has ended.
    pub notices: mpsc::Receiver<Notice>,
    supply: mpsc::Sender<Supply>,
    wake: Arc<OwnedFd>,
}

/// A medium of `size` bytes behind a connection, and what keeps it connected.
///
/// # Errors
/// The system is out of descriptors.
pub fn remote_medium(size: u64, first: Link) -> io::Result<(RemoteMedium, MediumKeeper)> {
    let wake = Arc::new(eventfd()?);
    let (notices, noticed) = mpsc::channel();
    let (supply, supplied) = mpsc::channel();
    let medium = RemoteMedium {
        size,
        first,
        notices,
        supply: supplied,
        wake: Arc::clone(&wake),
    };
    let keeper = MediumKeeper {
        notices: noticed,
        supply,
        wake,
    };
    Ok((medium, keeper))
}

impl MediumKeeper {
    /// Answers [`Notice::Lost`]. Returns false if the engine has ended; a connection is then used to
    /// return the device.
    pub fn supply(&self, supply: Supply) -> bool {
        match self.supply.send(supply) {
            Ok(()) => {
                // Cannot fail: the counter is far below its maximum.
                let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
                true
            }
            Err(mpsc::SendError(supply)) => {
                if let Supply::Link(mut link, _) = supply {
                    return_device(&mut link);
                }
                false
            }
        }
    }
}

/// A lender has aborted what was in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fence {
    /// It waits for the answer to the fence with this number.
    Asked(u64),
    /// Its connection was lost. The next lender asks anew.
    OfFormer,
}

enum State {
    Connected(Box<Link>),
    Waiting,
    GivenUp,
}

pub(super) struct Network {
    state: State,
    notices: mpsc::Sender<Notice>,
    supply: mpsc::Receiver<Supply>,
    wake: Arc<OwnedFd>,
    /// By tag: not answered.
    operations: Box<[Option<Operation>]>,
    outstanding: usize,
    number: u64,
    /// Operations below this number have waited for this connection.
    waited: u64,
    /// This connection has answered an operation.
    has_answered: bool,
    finished: Vec<(Tag, i32)>,
    /// Of a shared namespace: on whose behalf the operations are.
    host: Option<HostIdentity>,
    /// A fence that has no answer.
    fence: Option<Fence>,
    /// The owner may not know of it yet.
    is_news: bool,
    /// The frame of the last answer.
    fenced: Option<u64>,
    notifications: Exchange,
    condition: Condition,
    /// The size that the lender has reported, until the owner takes it.
    reported: Option<u64>,
    /// Since when the owner waits for everything in flight.
    hurried: Option<Instant>,
    /// The lender has asked for the device over this connection.
    release_asked: bool,
    /// The engine is about to be dropped, and answers to reads may be under way.
    reads_cancelled: bool,
    /// Frames may be left that no descriptor reports.
    more: bool,
    epoll: OwnedFd,
    timer: OwnedFd,
}

impl Network {
    pub(super) fn start(medium: RemoteMedium, depth: u16) -> io::Result<Self> {
        let RemoteMedium {
            size,
            first,
            notices,
            supply,
            wake,
        } = medium;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let tick = Timespec::try_from(Link::TICK).map_err(io::Error::other)?;
        let every = Itimerspec {
            it_interval: tick,
            it_value: tick,
        };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &every)?;
        for (fd, ready) in [(timer.as_fd(), TIMER), (wake.as_fd(), WAKE)] {
            let data = epoll::EventData::new_u64(ready);
            epoll::add(&epoll, fd, data, epoll::EventFlags::IN)?;
        }
        watch(&epoll, &first)?;
        Ok(Self {
            state: State::Connected(Box::new(first)),
            notices,
            supply,
            wake,
            operations: (0..depth).map(|_| None).collect(),
            outstanding: 0,
            number: 0,
            waited: 0,
            has_answered: false,
            finished: Vec::with_capacity(depth.into()),
            host: None,
            fence: None,
            is_news: false,
            fenced: None,
            notifications: Exchange::default(),
            condition: Condition {
                size,
                full: false,
                read_only: false,
            },
            reported: None,
            hurried: None,
            release_asked: false,
            reads_cancelled: false,
            more: false,
            epoll,
            timer,
        })
    }

    /// Ends the connection.
    fn lose(&mut self, error: LinkError) {
        let mut unanswered = self.operations.iter().flatten();
        let went_on = self.has_answered && unanswered.all(|it| it.number >= self.waited);
        // Its descriptor leaves the epoll instance as it is closed.
        self.state = State::Waiting;
        if let LinkError::Memory(frame) = &error {
            let tag = match *frame {
                Frame::Write { tag, .. } | Frame::Done { tag, .. } => Some(tag),
                _ => None,
            };
            tag.into_iter()
                .for_each(|tag| self.finish(tag, -libc::EFAULT));
        }
        // Fails if nobody keeps the connection any more: then the process is about to end.
        if self.notices.send(Notice::Lost { error, went_on }).is_err() {
            self.give_up();
        }
    }

    fn finish(&mut self, tag: Tag, result: i32) {
        let operation = self.operations.get_mut(usize::from(tag));
        if operation.and_then(Option::take).is_some() {
            self.outstanding -= 1;
            self.finished.push((tag, result));
        }
    }

    fn finish_all(&mut self, result: i32) {
        for tag in 0..self.operations.len() as Tag {
            self.finish(tag, result);
        }
    }

    fn give_up(&mut self) {
        self.state = State::GivenUp;
        self.finish_all(-libc::ENODEV);
    }

    /// Takes the next connection, and sends over it what has no answer.
    fn reconnect(&mut self, mut link: Box<Link>) {
        (self.waited, self.has_answered) = (self.number, false);
        self.fence = self.fence.map(|_| Fence::OfFormer);
        self.fenced = None;
        if let Err(error) = watch(&self.epoll, &link) {
            return self.lose(LinkError::System(error));
        }
        let mut again: Vec<_> = (0..)
            .zip(&self.operations)
            .filter_map(|(tag, operation)| Some((operation.as_ref()?, tag)))
            .collect();
        again.sort_unstable_by_key(|(operation, _)| operation.number);
        if let Some(host) = self.host {
            link.post(Frame::Host(host), Memory::NONE);
        }
        if let Some(frame) = self.notifications.ask(link.posted()) {
            link.post(frame, Memory::NONE);
        }
        let mut frames = Vec::with_capacity(again.len());
        for (operation, tag) in again {
            frames.push((tag, link.posted()));
            post(&mut link, tag, &operation.op);
        }
        for (tag, frame) in frames {
            if let Some(operation) = &mut self.operations[usize::from(tag)] {
                operation.frame = frame;
            }
        }
        self.release_asked = false;
        self.state = State::Connected(link);
        self.flush();
    }

    fn flush(&mut self) {
        if let State::Connected(link) = &mut self.state
            && let Err(error) = link.flush()
        {
            self.lose(error);
        }
    }

    /// Takes what has arrived; with `until_empty`, until no descriptor reports more.
    fn receive(&mut self, until_empty: bool) {
        self.more = false;
        for _ in 0..self.operations.len() {
            let State::Connected(link) = &mut self.state else {
                return;
            };
            let (operations, sent) = (&self.operations, link.sent());
            let cancelled = self.reads_cancelled;
            let place = |frame: &Frame| match (place(operations, sent, frame), frame) {
                (Err(_), Frame::Done { .. }) if cancelled => Ok(Memory::DISCARD),
                (placed, _) => placed,
            };
            let received = match until_empty {
                true => link.receive(place),
                false => link.receive_some(place),
            };
            match received {
                Ok(Some(frame)) => self.take(frame),
                Ok(None) => return,
                Err(error) => return self.lose(error),
            }
        }
        self.more = true;
    }

    /// How many frames the socket has taken.
    fn sent(&self) -> u64 {
        match &self.state {
            State::Connected(link) => link.sent(),
            State::Waiting | State::GivenUp => 0,
        }
    }

    fn take(&mut self, frame: Frame) {
        match frame {
            Frame::Done {
                tag,
                result,
                condition,
                ..
            } => {
                self.condition = condition;
                self.has_answered = true;
                self.finish(tag, result);
            }
            Frame::Fence { number } => {
                // The next one comes after the answer.
                let is_asked = matches!(self.fence, Some(Fence::Asked(_)));
                if is_asked || self.fenced.is_some_and(|frame| frame >= self.sent()) {
                    return self.lose(FrameError::Unexpected(frame).into());
                }
                (self.fence, self.is_news) = (Some(Fence::Asked(number)), true);
            }
            Frame::Size { size } => (self.reported, self.is_news) = (Some(size), true),
            Frame::Notifications {
                session,
                notifications,
            } => match self
                .notifications
                .answered(session, notifications, self.sent())
            {
                Some(is_news) => self.is_news |= is_news,
                None => self.lose(FrameError::Unexpected(frame).into()),
            },
            // Once for a connection: a lender that repeats it uses no memory.
            Frame::Release { limit_ms } if !self.release_asked => {
                self.release_asked = true;
                let limit = Duration::from_millis(limit_ms);
                // Fails if the process is about to end.
                let _ = self.notices.send(Notice::Release(limit));
            }
            _ => {} // That it came is all.
        }
    }

    /// Looks at all descriptors, and clears their readiness.
    fn look(&mut self) {
        let mut events = Vec::with_capacity(4);
        let now = Timespec::default();
        // After an error, such as an interruption, everything is as before.
        let _ = epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&now));
        let mut ticked = false;
        for event in events {
            let fd = match event.data.u64() {
                WAKE => self.wake.as_fd(),
                TIMER => {
                    ticked = true;
                    self.timer.as_fd()
                }
                _ => continue,
            };
            // EAGAIN: cleared already.
            let _ = rustix::io::read(fd, &mut [0u8; 8]);
        }
        while let Ok(supply) = self.supply.try_recv() {
            match (supply, &self.state) {
                (Supply::Link(link, size), State::Waiting) => {
                    self.reported = Some(size);
                    self.is_news = true;
                    self.reconnect(link);
                }
                (Supply::GivenUp, _) => self.give_up(),
                (Supply::Link(..), _) => {}
            }
        }
        if let State::Connected(link) = &mut self.state
            && ticked
            && let Err(error) = link.tick(true)
        {
            self.lose(error);
        }
        self.flush();
        self.receive(true);
    }
}

/// Watches a connection, edge-triggered: it is read until it is empty, and written until it is full.
fn watch(epoll: &OwnedFd, link: &Link) -> io::Result<()> {
    let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
    let data = epoll::EventData::new_u64(LINK);
    Ok(epoll::add(epoll, link, data, flags)?)
}

impl Engine for Network {
    unsafe fn queue(&mut self, tag: Tag, op: RawOp) {
        self.hurried = None;
        let frame = match &mut self.state {
            State::Connected(link) => {
                let frame = link.posted();
                post(link, tag, &op);
                frame
            }
            State::Waiting => u64::MAX,
            State::GivenUp => return self.finished.push((tag, -libc::ENODEV)),
        };
        let number = self.number;
        self.number += 1;
        self.operations[usize::from(tag)] = Some(Operation { op, number, frame });
        self.outstanding += 1;
    }

    fn submit(&mut self) -> bool {
        self.flush();
        // What the socket does not take is sent when it has room.
        true
    }

    fn reap(&mut self, done: &mut Vec<(Tag, i32)>) {
        if self.outstanding > 0 {
            self.receive(false);
        }
        done.append(&mut self.finished);
    }

    fn has_finished(&mut self) -> bool {
        self.look();
        // Its owner looks once.
        let is_news = std::mem::take(&mut self.is_news);
        !self.finished.is_empty() || self.more || is_news
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn wait(&mut self) {
        if !self.has_finished() {
            // An interrupted wait is only shorter.
            let _ = poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], None);
        }
    }

    fn condition(&self) -> Condition {
        self.condition
    }

    /// The lender does this when the lease ends.
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn is_connected(&self) -> bool {
        matches!(self.state, State::Connected(_))
    }

    fn set_host(&mut self, host: HostIdentity) {
        self.notifications.set_session(host.session);
        if self.host.replace(host) != Some(host)
            && let State::Connected(link) = &mut self.state
        {
            link.post(Frame::Host(host), Memory::NONE);
            // With it, a reservation may end for which others wait.
            self.flush();
        }
    }

    fn take_size(&mut self) -> Option<u64> {
        self.reported.take()
    }

    fn set_notified(&mut self, upto: Option<u64>) {
        if self.notifications.set_notified(upto)
            && let State::Connected(link) = &mut self.state
            && let Some(frame) = self.notifications.ask(link.posted())
        {
            link.post(frame, Memory::NONE);
            self.flush();
        }
    }

    fn take_notifications(&mut self) -> Option<Notifications> {
        self.notifications.take()
    }

    fn wants_fence(&self) -> bool {
        self.fence.is_some()
    }

    fn fence(&mut self) {
        let asked = self.fence.take();
        if let (Some(Fence::Asked(number)), State::Connected(link)) = (asked, &mut self.state) {
            self.fenced = Some(link.posted());
            link.post(Frame::Fenced { number }, Memory::NONE);
        }
        self.flush();
    }

    fn cancel_reads(&mut self) {
        for tag in 0..self.operations.len() {
            let is_read = |it: &Operation| matches!(it.op, RawOp::Read { .. });
            if self.operations[tag].as_ref().is_some_and(is_read) {
                self.finish(tag as Tag, -libc::ECANCELED);
            }
        }
        // Of a frame that has come in part, the rest has no memory any more.
        if let State::Connected(link) = &mut self.state {
            link.discard_incoming();
        }
        self.reads_cancelled = true;
    }

    fn hurry(&mut self, now: bool) {
        if self.outstanding == 0 {
            return;
        }
        // What is not sent is not answered.
        self.flush();
        let since = *self.hurried.get_or_insert_with(Instant::now);
        let connected = self.is_connected();
        if now || !connected || since.elapsed() >= HURRY {
            if connected {
                // What was sent may be done at the lender until the next connection is there, and what
                // was not is never done.
                self.lose(LinkError::Closed);
            }
            self.finish_all(-libc::ECANCELED);
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let State::Connected(link) = &mut self.state
            && self.outstanding == 0
        {
            return_device(link);
        }
    }
}

/// Returns the device, and waits until it is free: until its lender closes the connection.
fn return_device(link: &mut Link) {
    link.post(Frame::Return, Memory::NONE);
    // The device is kept for this VM for a while if the lender does not receive this.
    let _ = link.flush();
    link.shut_down();
    link.wait_closed(RETURNED);
}

#[cfg(test)]
mod tests;
