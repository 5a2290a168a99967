//! The devices that a backend serves; they can be attached and detached at run time.
//!
//! The status and control sockets share the list; only [`Served::apply`], between two rounds of the
//! event loop, adds and removes subscribers.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use event_manager::{EventManager, SubscriberId, SubscriberOps};
use farside_backend_api::{DeviceReport, admin};
use farside_daemon::DeviceId;

use crate::{backend::Subscriber, server::DeviceServer};

/// The list of served devices. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Served(Arc<Shared>);

#[derive(Default)]
struct Shared {
    devices: Mutex<Vec<Entry>>,
    /// [`Served::apply`] has work; checked in each round.
    pending: AtomicBool,
}

struct Entry {
    id: DeviceId,
    socket: PathBuf,
    server: Arc<Mutex<DeviceServer>>,
    /// `None` until added to the event loop.
    subscriber: Option<SubscriberId>,
    /// Attached after the backend's start.
    attached: bool,
    /// Set while it is being detached.
    on_detached: Option<OnDetached>,
}

/// Called on its own thread when a device has been returned.
pub(crate) type OnDetached = Box<dyn FnOnce() + Send>;

/// Whether a device is served.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ServedState {
    NotServed,
    /// Served at this socket.
    Served(PathBuf),
    Detaching,
}

/// The reason that a device cannot be detached.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DetachError {
    NotServed,
    Detaching,
    InUse,
}

impl Served {
    pub(crate) fn add(&self, id: &DeviceId, server: DeviceServer, attached: bool) {
        let entry = Entry {
            id: id.to_owned(),
            socket: server.socket().to_owned(),
            server: Arc::new(Mutex::new(server)),
            subscriber: None,
            attached,
            on_detached: None,
        };
        self.lock().push(entry);
        self.0.pending.store(true, Ordering::Relaxed);
    }

    pub(crate) fn state(&self, id: &DeviceId) -> ServedState {
        match self.lock().iter().find(|entry| entry.id == *id) {
            None => ServedState::NotServed,
            Some(entry) if entry.on_detached.is_some() => ServedState::Detaching,
            Some(entry) => ServedState::Served(entry.socket.clone()),
        }
    }

    /// Returns a device and removes it from the list. Fails while a client uses it, unless `force`.
    pub(crate) fn remove(
        &self,
        id: &DeviceId,
        force: bool,
        on_detached: OnDetached,
    ) -> Result<(), DetachError> {
        let mut devices = self.lock();
        let entry = devices.iter_mut().find(|entry| entry.id == *id);
        let entry = entry.ok_or(DetachError::NotServed)?;
        if entry.on_detached.is_some() {
            return Err(DetachError::Detaching);
        }
        let mut server = lock(&entry.server);
        if !force && server.in_use() {
            return Err(DetachError::InUse);
        }
        server.retire();
        entry.on_detached = Some(on_detached);
        self.0.pending.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Adds new devices to the event loop, and removes returned ones.
    pub(crate) fn apply(&self, manager: &mut EventManager<Subscriber>) {
        if !self.0.pending.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut devices = self.lock();
        for entry in devices.iter_mut() {
            if entry.subscriber.is_none() {
                let subscriber = Arc::clone(&entry.server) as Subscriber;
                entry.subscriber = Some(manager.add_subscriber(subscriber));
            }
        }
        let mut at = 0;
        while let Some(entry) = devices.get(at) {
            if entry.on_detached.is_none() || !lock(&entry.server).is_retired() {
                at += 1;
                continue;
            }
            let entry = devices.remove(at);
            if let Some(subscriber) = entry.subscriber
                && let Err(error) = manager.remove_subscriber(subscriber)
            {
                log::error!("device {}: event loop: {error}", entry.id);
            }
            forget(entry);
        }
        let waits = devices.iter().any(|entry| entry.on_detached.is_some());
        if waits {
            self.0.pending.store(true, Ordering::Relaxed);
        }
    }

    /// The reports of all devices.
    pub(crate) fn reports(&self) -> Vec<DeviceReport> {
        let reports = |entry: &Entry| DeviceReport {
            attached: entry.attached,
            ..lock(&entry.server).report()
        };
        self.lock().iter().map(reports).collect()
    }

    /// Summaries of all devices.
    pub(crate) fn list(&self) -> Vec<admin::Served> {
        let served = |entry: &Entry| {
            let server = lock(&entry.server);
            admin::Served {
                device: entry.id.clone(),
                socket: entry.socket.clone(),
                in_use: server.in_use(),
                attached: entry.attached,
                last_error: server.report().last_error,
            }
        };
        self.lock().iter().map(served).collect()
    }

    /// The devices in use by a client.
    pub(crate) fn in_use(&self) -> Vec<DeviceId> {
        let devices = self.lock();
        let in_use = devices.iter().filter(|entry| lock(&entry.server).in_use());
        in_use.map(|entry| entry.id.clone()).collect()
    }

    /// Ids and sockets.
    pub(crate) fn sockets(&self) -> Vec<(DeviceId, PathBuf)> {
        let pair = |entry: &Entry| (entry.id.clone(), entry.socket.clone());
        self.lock().iter().map(pair).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        lock(&self.0.devices)
    }
}

/// Drops a device on its own thread, because that waits for its worker to end.
fn forget(entry: Entry) {
    let Entry {
        id,
        server,
        on_detached,
        ..
    } = entry;
    let name = format!("forget-{id}");
    let forget = move || {
        drop(server);
        log::info!("device {id}: no longer served");
        if let Some(on_detached) = on_detached {
            on_detached();
        }
    };
    if let Err(error) = std::thread::Builder::new().name(name).spawn(forget) {
        log::error!("cannot start the thread that drops a device: {error}");
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
