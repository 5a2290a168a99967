//! One device on the event loop: its listener, its client, its worker and its
//! register channel.

use std::{
    os::fd::{AsFd, AsRawFd, RawFd},
    path::Path,
    time::{Duration, Instant},
};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use farside_backend_api::DeviceReport;
use farside_vfio_user::{
    AcceptError, Connection, ConnectionError, Listener, Session, Slot,
    serve::{Pumped, pump},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::timerfd::TimerFd;

use crate::device::{Conclusion, Device, Then};

/// Maximum number of requests of one client processed per round of the event loop.
const BUDGET: usize = 64;

/// Timeout of a register read at the lender. Shorter than a VMM's message timeout of 5 s.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(3);

/// The event sources of a device; the `data` of its events.
#[derive(Clone, Copy)]
enum Source {
    Listener,
    Client,
    Worker,
    Registers,
    Timer,
}

impl Source {
    const ALL: [Source; 5] = [
        Source::Listener,
        Source::Client,
        Source::Worker,
        Source::Registers,
        Source::Timer,
    ];
}

/// A served device.
pub(crate) struct DeviceServer {
    device: Device,
    listener: Listener,
    client: Option<Client>,
    timer: TimerFd,
    /// When the timer expires, if it is armed.
    timed: Option<Instant>,
    /// The current registrations with the event loop.
    watched: [Option<(RawFd, EventSet)>; Source::ALL.len()],
    /// Disconnected clients, kept until the event loop no longer watches them.
    retired: Vec<Client>,
    /// The device accepts no more clients.
    retiring: bool,
}

struct Client {
    connection: Connection,
    session: Session,
}

impl Client {
    fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.connection, PollFlags::empty())];
        let ready = poll(&mut fds, Some(&Timespec::default()));
        ready.is_ok_and(|ready| ready != 0)
    }
}

impl DeviceServer {
    /// `client` is one that the process before has served.
    pub(crate) fn new(
        device: Device,
        listener: Listener,
        client: Option<(Connection, Session)>,
    ) -> std::io::Result<Self> {
        // It may have sent requests, for which its socket does not become readable again.
        if client.is_some() {
            device.worker().wakeup().raise();
        }
        let client = client.map(|(connection, session)| Client {
            connection,
            session,
        });
        Ok(Self {
            device,
            listener,
            client,
            timer: TimerFd::new()?,
            timed: None,
            watched: [None; Source::ALL.len()],
            retired: Vec::new(),
            retiring: false,
        })
    }

    /// The path of the vfio-user socket.
    pub(crate) fn socket(&self) -> &Path {
        self.listener.path()
    }

    /// Whether a client uses the device and has not unplugged it.
    pub(crate) fn in_use(&self) -> bool {
        let stays = |client: &Client| !self.device.is_released() && !client.has_hung_up();
        self.client.as_ref().is_some_and(stays)
    }

    /// Disconnects the client, returns the device and accepts no more clients.
    pub(crate) fn retire(&mut self) {
        self.retiring = true;
        // The event handler does the rest, since it can change the registrations.
        self.device.worker().wakeup().raise();
    }

    /// Whether the device is returned for good.
    pub(crate) fn is_retired(&self) -> bool {
        self.retiring && self.client.is_none() && !self.device.is_busy()
    }

    /// The device's current report.
    pub(crate) fn report(&self) -> DeviceReport {
        self.device.report()
    }

    fn accept(&mut self) {
        // The old client's HUP may be later in this epoll batch. Drop the client now, so that a
        // quick VM restart is not refused.
        if self.client.as_ref().is_some_and(Client::has_hung_up) {
            self.drop_client(&ConnectionError::Closed);
        }
        // A VMM that has unplugged the device may keep the connection while it runs, and hot-plug
        // the device again over a new one.
        if self.client.is_some() && self.device.is_unplugged() {
            self.disconnect();
        }
        let slot = match self.client {
            Some(_) => Slot::Taken,
            None if self.is_leaving() => return,
            None => Slot::Free,
        };
        let accepted = self.listener.accept_stream(slot);
        let connected = |stream| {
            let journal = self.device.journal().map_err(ConnectionError::Journal)?;
            Connection::with(stream, journal).map_err(AcceptError::from)
        };
        match accepted.and_then(|stream| stream.map(connected).transpose()) {
            Ok(Some(connection)) => {
                self.device.client_log.connected(&self.device.name());
                self.client = Some(Client {
                    connection,
                    session: Session::new(),
                });
            }
            Ok(None) => {}
            Err(error) => {
                let name = self.device.name();
                self.device.client_log.not_accepted(&name, &error);
            }
        }
    }

    /// Whether the device is still being returned after the last client. The next client waits in
    /// the backlog.
    fn is_leaving(&self) -> bool {
        self.client.is_none() && self.device.is_busy()
    }

    /// Processes the client's requests until one has to wait.
    fn pump(&mut self) {
        while let Some(client) = &mut self.client {
            if self.device.is_busy() {
                return;
            }
            let Client {
                connection,
                session,
            } = client;
            match pump(connection, session, &mut self.device, BUDGET) {
                Ok(Pumped::Idle | Pumped::Full) => return,
                // Requests may already be buffered, for which the socket does not become readable:
                // wake this handler.
                Ok(Pumped::Budget) => return self.device.worker().wakeup().raise(),
                // The worker's answer may be available already.
                Ok(Pumped::Later) => {}
                Err(error) => return self.drop_client(&error),
            }
        }
    }

    fn drop_client(&mut self, error: &ConnectionError) {
        let name = self.device.name();
        self.device.client_log.ended(&name, error, "");
        self.disconnect();
    }

    fn disconnect(&mut self) {
        if let Some(mut client) = self.client.take() {
            client.connection.end();
            self.retired.push(client);
        }
        self.device.client_gone();
    }

    fn on_client(&mut self, events: EventSet) {
        let gone = EventSet::HANG_UP | EventSet::ERROR;
        let Some(client) = &mut self.client else {
            return;
        };
        if events.intersects(gone) && self.device.is_busy() {
            return self.drop_client(&ConnectionError::Closed);
        }
        if events.intersects(gone | EventSet::READ_HANG_UP) {
            client.connection.on_peer_shutdown();
        }
        if let Err(error) = client.connection.flush() {
            self.drop_client(&error);
        }
    }

    /// Sends the answer to the held request, if `by` completes it.
    fn conclude(&mut self, by: impl FnOnce(&mut Device) -> Option<Conclusion<'_>>) {
        let Some(Conclusion { to, reply, then }) = by(&mut self.device) else {
            return;
        };
        let Some(client) = &mut self.client else {
            return;
        };
        match (client.connection.send(to, reply), then) {
            (Ok(()), Then::GoOn) => {}
            (Ok(()), Then::HangUp) => self.disconnect(),
            (Err(error), _) => self.drop_client(&error),
        }
    }

    fn on_timer(&mut self) {
        // Only that it expired matters. It has, so this does not block.
        let _ = self.timer.wait();
        self.timed = None;
        self.conclude(Device::on_time);
        let since = self.device.register_read_since();
        if since.is_some_and(|since| since.elapsed() >= REGISTER_TIMEOUT) {
            self.conclude(|device| device.on_register_timeout(REGISTER_TIMEOUT));
        }
    }

    /// Arms the timer while a register read is pending, or the device waits for a process. It stays armed after the
    /// answer to a read: setting it for each one would cost a system call.
    fn set_timer(&mut self) {
        let read = self.device.register_read_since();
        let due = read.map(|since| since + REGISTER_TIMEOUT);
        let due = due.into_iter().chain(self.device.next_attempt()).min();
        let Some(due) = due.filter(|due| self.timed.is_none_or(|timed| *due < timed)) else {
            return;
        };
        // Zero would stop it.
        let left = due
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        match self.timer.reset(left, None) {
            Ok(()) => self.timed = Some(due),
            Err(errno) => log::error!("{}: timer: {errno}", self.device.name()),
        }
    }

    /// Updates the registrations with the event loop.
    fn watch(&mut self, ops: &mut EventOps) {
        for source in Source::ALL {
            let wanted = self.wanted(source);
            let watched = &mut self.watched[source as usize];
            if *watched == wanted {
                continue;
            }
            let events = |(fd, set)| Events::with_data_raw(fd, source as u32, set);
            let same_fd = matches!((&*watched, &wanted), (Some((a, _)), Some((b, _))) if a == b);
            let result = match (*watched, wanted) {
                (_, Some(wanted)) if same_fd => ops.modify(events(wanted)),
                (before, now) => before
                    .map_or(Ok(()), |before| ops.remove(events(before)))
                    .and_then(|()| now.map_or(Ok(()), |now| ops.add(events(now)))),
            };
            *watched = wanted;
            if let Err(error) = result {
                log::error!("{}: event loop: {error}", self.device.name());
            }
        }
    }

    fn wanted(&self, source: Source) -> Option<(RawFd, EventSet)> {
        match source {
            Source::Listener => {
                let fd = self.listener.as_fd().as_raw_fd();
                let waits = self.retiring || self.is_leaving();
                (!waits).then_some((fd, EventSet::IN))
            }
            Source::Client => self.client.as_ref().map(|client| {
                // Level-triggered, the kernel would poll the socket again at each wait. Unread data
                // is reported again when the set changes, or read by `pump`.
                let mut set = EventSet::EDGE_TRIGGERED;
                // While a request is held, further ones stay in the socket; a hang-up is reported
                // nevertheless.
                let input = EventSet::IN | EventSet::READ_HANG_UP;
                set.set(input, !self.device.is_busy());
                set.set(EventSet::OUT, client.connection.wants_write());
                (client.connection.as_fd().as_raw_fd(), set)
            }),
            Source::Worker => Some((self.device.worker().wakeup().as_raw_fd(), EventSet::IN)),
            Source::Registers => self.device.registers().map(|channel| {
                let mut set = EventSet::IN;
                let waits = channel.wants_write() || self.device.wants_register_room();
                set.set(EventSet::OUT, waits);
                (channel.as_fd().as_raw_fd(), set)
            }),
            Source::Timer => Some((self.timer.as_raw_fd(), EventSet::IN)),
        }
    }
}

impl MutEventSubscriber for DeviceServer {
    fn init(&mut self, ops: &mut EventOps) {
        self.watch(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match Source::ALL.get(events.data() as usize) {
            Some(Source::Listener) if self.retiring => {}
            Some(Source::Listener) => self.accept(),
            Some(Source::Client) => self.on_client(events.event_set()),
            Some(Source::Worker) => self.conclude(Device::on_worker),
            Some(Source::Registers) => self.conclude(Device::on_registers),
            Some(Source::Timer) => self.on_timer(),
            None => {}
        }
        if self.retiring && self.client.is_some() {
            self.disconnect();
        }
        self.pump();
        self.set_timer();
        self.watch(ops);
        // Close descriptors only after the event loop has stopped watching them.
        self.retired.clear();
        self.device.drop_retired();
    }
}
