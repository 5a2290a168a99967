//! The devices that a backend serves, which may come and go while it runs.
//!
//! The list is shared by those who look at it (status) and who change it
//! (control); only [`Served::apply`], between two rounds of the event loop,
//! brings subscribers there and takes them away.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use event_manager::{EventManager, SubscriberId, SubscriberOps};
use farside_backend_api::{DeviceReport, admin};

use crate::{backend::Subscriber, server::DeviceServer};

/// All of them. Clones are handles to the same list.
#[derive(Clone, Default)]
pub(crate) struct Served(Arc<Shared>);

#[derive(Default)]
struct Shared {
    devices: Mutex<Vec<Entry>>,
    /// There is something for [`Served::apply`]: looked at in each round.
    pending: AtomicBool,
}

struct Entry {
    id: String,
    socket: PathBuf,
    server: Arc<Mutex<DeviceServer>>,
    /// None until the event loop has it.
    subscriber: Option<SubscriberId>,
    /// It came after the backend's start.
    attached: bool,
    /// What to do when it has been given back.
    leaving: Option<Gone>,
}

/// Called, on a thread of its own, when a device is given back.
pub(crate) type Gone = Box<dyn FnOnce() + Send>;

/// How a device stands in the list.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Unknown,
    /// Served here.
    At(PathBuf),
    /// On its way out.
    Leaving,
}

/// Why a device does not go.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stays {
    Unknown,
    Leaving,
    InUse,
}

impl Served {
    pub(crate) fn add(&self, id: &str, server: DeviceServer, attached: bool) {
        let entry = Entry {
            id: id.to_owned(),
            socket: server.socket().to_owned(),
            server: Arc::new(Mutex::new(server)),
            subscriber: None,
            attached,
            leaving: None,
        };
        self.lock().push(entry);
        self.0.pending.store(true, Ordering::Relaxed);
    }

    pub(crate) fn standing(&self, id: &str) -> Standing {
        match self.lock().iter().find(|entry| entry.id == id) {
            None => Standing::Unknown,
            Some(entry) if entry.leaving.is_some() => Standing::Leaving,
            Some(entry) => Standing::At(entry.socket.clone()),
        }
    }

    /// Has a device given back and forgotten. A client that has not let go of
    /// it keeps it, unless `force`.
    pub(crate) fn remove(&self, id: &str, force: bool, gone: Gone) -> Result<(), Stays> {
        let mut devices = self.lock();
        let entry = devices.iter_mut().find(|entry| entry.id == id);
        let entry = entry.ok_or(Stays::Unknown)?;
        if entry.leaving.is_some() {
            return Err(Stays::Leaving);
        }
        let mut server = lock(&entry.server);
        if !force && server.in_use() {
            return Err(Stays::InUse);
        }
        server.retire();
        entry.leaving = Some(gone);
        self.0.pending.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Brings new devices to the event loop, and takes those away that are
    /// given back.
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
            if entry.leaving.is_none() || !lock(&entry.server).is_retired() {
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
        let waits = devices.iter().any(|entry| entry.leaving.is_some());
        if waits {
            self.0.pending.store(true, Ordering::Relaxed);
        }
    }

    /// What there is to say about them now.
    pub(crate) fn reports(&self) -> Vec<DeviceReport> {
        let reports = |entry: &Entry| DeviceReport {
            attached: entry.attached,
            ..lock(&entry.server).report()
        };
        self.lock().iter().map(reports).collect()
    }

    /// The same in short.
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

    /// The devices that a client has and has not released.
    pub(crate) fn in_use(&self) -> Vec<String> {
        let devices = self.lock();
        let in_use = devices.iter().filter(|entry| lock(&entry.server).in_use());
        in_use.map(|entry| entry.id.clone()).collect()
    }

    /// Ids and sockets.
    pub(crate) fn sockets(&self) -> Vec<(String, PathBuf)> {
        let pair = |entry: &Entry| (entry.id.clone(), entry.socket.clone());
        self.lock().iter().map(pair).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        lock(&self.0.devices)
    }
}

/// Drops a device where it holds nobody up: its worker has to end first.
fn forget(entry: Entry) {
    let Entry {
        id,
        server,
        leaving,
        ..
    } = entry;
    let name = format!("forget-{id}");
    let forget = move || {
        drop(server);
        log::info!("device {id}: served no longer");
        if let Some(gone) = leaving {
            gone();
        }
    };
    if let Err(error) = std::thread::Builder::new().name(name).spawn(forget) {
        log::error!("no thread to forget a device on: {error}");
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
