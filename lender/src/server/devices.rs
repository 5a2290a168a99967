//! The devices of a running lender: their threads, and their shares of the process's memory maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, sync_channel},
    },
    time::{Duration, Instant, SystemTime},
};

use farside_daemon::{DeviceId, Wakeup, user_name};
use farside_error_chain::Chain;
use farside_fabric::{Budget, SharedQuota, soft::Adapter};
use farside_lender_protocol::{ErrorKind, Generation, Identity, RemoteError, ResizedDevice};

use super::{StartError, threads::Threads};
use crate::{
    access::Access,
    announced::Announced,
    config::{Borrower, Config, DeviceConfig, Source},
    device_loop::{DeviceLoop, InLender, Lendable, Stopped},
    listening,
    open::{OpenedDevice, open_model, open_server},
    refusals::{failed, invalid, limit},
    registry::{DeviceRequest, Registry, Viewer},
    requests::ANSWER_TIMEOUT,
    source::Resized,
    worker::Workers,
};

/// Most devices that an error names as grown: a message is bounded.
const MAX_NAMED: usize = 16;

/// The devices that a lender lends.
pub(crate) struct Devices {
    registry: Arc<Registry>,
    adapter: Adapter,
    stop: Wakeup,
    poll_time: Duration,
    /// The lender's own user.
    operator: u32,
    /// The users that a rule of the configuration names: the socket admits these.
    admitted: BTreeSet<u32>,
    budget: Budget,
    workers: Option<Workers>,
    /// None once the lender stops.
    announced: Mutex<Option<Announced>>,
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    /// None once the lender stops.
    threads: Option<Threads>,
    quotas: BTreeMap<DeviceId, SharedQuota>,
}

impl Devices {
    /// A lender without devices.
    pub(crate) fn new(
        config: &Config,
        registry: Arc<Registry>,
        adapter: Adapter,
        workers: Option<Workers>,
        stop: Wakeup,
    ) -> Self {
        Self {
            registry,
            adapter,
            stop,
            poll_time: Duration::from_micros(config.poll_us),
            operator: rustix::process::geteuid().as_raw(),
            admitted: listening::named(config),
            budget: Budget::of_this_process(),
            workers,
            announced: Mutex::default(),
            running: Mutex::new(Running {
                threads: Some(Threads::default()),
                ..Running::default()
            }),
        }
    }

    /// Lends an open device: starts its thread.
    pub(crate) fn start(&self, opened: OpenedDevice) -> Result<(), StartError> {
        let OpenedDevice {
            id,
            mut device,
            borrowers,
            group,
        } = opened;
        let failed = |source: RemoteError| StartError::Device {
            id: id.clone(),
            source: source.into(),
        };
        let mut running = self.lock();
        let Running { threads, quotas } = &mut *running;
        let threads = threads.as_mut().ok_or_else(|| {
            let stops = io::Error::other("the lender stops");
            StartError::System(stops)
        })?;
        threads.reap();
        let quota = SharedQuota::from(self.budget.shared_by(1));
        let mut all: Vec<_> = quotas.values().cloned().collect();
        all.push(quota.clone());
        if !self.budget.divide_among(&all) {
            return Err(failed(limit(
                "a lease has mapped more memory than its share would be with one device more; wait for its end, or lend this device by another lender",
            )));
        }
        let available = device.available();
        let (kind, described) = (available.kind(), available.described().clone());
        let rom = available.rom();
        let home = InLender::new(id.clone(), Arc::clone(&self.registry));
        let (device_loop, queue) = DeviceLoop::new(
            id.clone(),
            Box::new(home),
            self.stop.clone(),
            self.poll_time,
            quota.clone(),
        )?;
        let access = Access::new(&id, self.operator, borrowers);
        if let Lendable::InWorker(device) = &mut device {
            let lease = device.adopted();
            let borrower = lease.and_then(|it| Some((it.borrower()?, it.lease.vm.clone())));
            let refused = borrower.map(|(identity, vm)| access.may(&identity, Some(&vm)));
            if let Some(Err(error)) = refused {
                device.end_adopted(&error.message);
            }
        }
        self.registry
            .add(&id, kind, described, queue, access, first_generation())
            .map_err(failed)?;
        self.registry.set_rom(&id, rom);
        if let Lendable::InWorker(device) = &device
            && let Some(adopted) = device.adopted()
        {
            let generation = adopted.lease.generation;
            self.registry
                .adopt(&id, adopted.owner(), generation, adopted.began());
        }
        if matches!(&device, Lendable::InWorker(device) if device.runs_on()) {
            self.registry.set_runs_on(&id);
        }
        match device.medium() {
            Some(Ok(medium)) => self.registry.set_medium(&id, medium),
            Some(Err(error)) => log::warn!(
                "device {id}: cannot be lent over the network: its medium cannot be identified: {error}"
            ),
            None => {}
        }
        if let Lendable::InWorker(device) = &device
            && let Some(shared) = device.shared()
        {
            self.registry.set_shared(&id, shared);
        }
        let started = threads.start(format!("dev-{id}"), move || device_loop.run(device));
        if let Err(error) = started {
            // It is not lent.
            let _ = self.registry.remove(&id);
            return Err(error.into());
        }
        if let Some(group) = group {
            self.registry.set_group(&id, group);
        }
        quotas.insert(id, quota);
        Ok(())
    }

    /// Opens and lends the device of a `[[device]]` table.
    pub(crate) fn add(&self, table: &str, identity: &Identity) -> Result<(), RemoteError> {
        let DeviceConfig {
            id,
            source,
            borrowers,
        } = toml::from_str(table)
            .map_err(|error| invalid(format!("the device is invalid: {error}")))?;
        for borrower in &borrowers {
            if let Borrower::User { uid, .. } = borrower
                && !self.is_operator(*uid)
                && !self.admitted.contains(uid)
            {
                let name = user_name(*uid);
                return Err(invalid(format!(
                    "device {id}: this lender's socket does not admit user {name} (uid {uid}): no device named that user in `borrowers` when the lender started; name the user for a device in lender.toml and restart the lender"
                )));
            }
        }
        // Before the medium is opened, which may lock it.
        if self.registry.access(&id).is_ok() {
            return Err(invalid(format!(
                "device {id}: this lender has one of that id; choose another"
            )));
        }
        let workers = self.workers.as_ref();
        let device = match &source {
            Source::Model(model) => open_model(&id, model, &self.adapter, workers, None),
            Source::VfioUser(server) => open_server(&id, server, workers, None).map_err(Into::into),
            Source::Vfio(_) => {
                return Err(invalid(format!(
                    "device {id}: functions of this host cannot be added to a running lender; add it to lender.toml and restart the lender"
                )));
            }
        };
        let mut device = device
            .map_err(|error| invalid(format!("cannot lend device {id}: {}", Chain(&*error))))?;
        let summary = device.available().described().description.summary.clone();
        let opened = OpenedDevice {
            id: id.clone(),
            device,
            borrowers,
            group: None,
        };
        if let Some(announced) = &*self.announced() {
            announced.add(&id).map_err(invalid)?;
        }
        if let Err(error) = self.start(opened) {
            self.withdraw(&id);
            return Err(invalid(Chain(&error).to_string()));
        }
        if let Err(error) = self.make_sizes_equal(&id) {
            // Fails if it has been lent since.
            if let Err(error) = self.remove(&id, ANSWER_TIMEOUT) {
                log::error!("{error}");
            }
            return Err(error);
        }
        log::info!("lending {id} ({summary}), added by {identity}");
        Ok(())
    }

    /// Resizes all controllers of the namespace that the device `id` shares, if they have different sizes: its image has
    /// grown between their openings.
    pub(crate) fn make_sizes_equal(&self, id: &DeviceId) -> Result<(), RemoteError> {
        if !self.registry.sizes_differ(id) {
            return Ok(());
        }
        let why = "as the namespace that it shares";
        self.resize(id, &why).map(drop)
    }

    /// Ends the thread of a device that is not lent, and forgets it.
    pub(crate) fn remove(&self, id: &DeviceId, patience: Duration) -> Result<(), RemoteError> {
        let closed = self.registry.remove(id)?;
        self.withdraw(id);
        let mut running = self.lock();
        running.quotas.remove(id);
        let rest: Vec<_> = running.quotas.values().cloned().collect();
        // Larger shares always fit.
        self.budget.divide_among(&rest);
        drop(running);
        // Nothing is sent: fails with `Disconnected` when the device is closed.
        if closed.recv_timeout(patience) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            return Err(RemoteError {
                kind: ErrorKind::Internal,
                message: format!(
                    "device {id} is no longer lent, but its medium has not closed within {patience:?}"
                ),
            });
        }
        Ok(())
    }

    /// Has the disk of a device grow to the size of its medium, and each other device that has the same one. Logs each,
    /// `why`.
    ///
    /// # Errors
    /// One or more cannot be resized: the message names those that are.
    pub(crate) fn resize(
        &self,
        id: &DeviceId,
        why: &dyn Display,
    ) -> Result<Vec<ResizedDevice>, RemoteError> {
        let cannot = |id: &DeviceId, error: RemoteError| {
            let message = format!("cannot resize device {id}: {}", error.message);
            RemoteError { message, ..error }
        };
        let until = Instant::now() + ANSWER_TIMEOUT;
        let order = |id: DeviceId| {
            let (reply, resized) = sync_channel(1);
            let queue = self.registry.queue(&id);
            let posted = queue.and_then(|queue| queue.post(DeviceRequest::TakeSize(reply)));
            (id, posted.map(|()| resized))
        };
        let wait = |resized: Receiver<Result<Resized, RemoteError>>| {
            let left = until.saturating_duration_since(Instant::now());
            let late = |_| {
                Err(failed(format_args!(
                    "it does not answer within {ANSWER_TIMEOUT:?}: repeat the command"
                )))
            };
            resized.recv_timeout(left).unwrap_or_else(late)
        };
        let devices = self.registry.on_medium_of(id)?;
        let ordered: Vec<_> = devices.into_iter().map(order).collect();
        let (mut resized, mut failures) = (Vec::new(), Vec::new());
        for (device, posted) in ordered {
            match posted.and_then(wait) {
                Ok(Resized { from, to, summary }) => {
                    log::info!("device {device}: its disk has {to} bytes, and had {from}, {why}");
                    self.registry.set_size(&device, to, summary);
                    resized.push(ResizedDevice { device, from, to });
                }
                Err(error) => {
                    let error = cannot(&device, error);
                    log::warn!("{error}");
                    failures.push(error);
                }
            }
        }
        let others = failures.len().saturating_sub(1);
        let Some(mut error) = failures.into_iter().next() else {
            return Ok(resized);
        };
        let grown = resized.iter().filter(|it| it.from != it.to);
        for ResizedDevice { device, to, .. } in grown.take(MAX_NAMED) {
            let grown = format!("; device {device} has grown to {to} bytes");
            error.message.push_str(&grown);
        }
        if others > 0 {
            let others = format!("; the lender's log names {others} more that cannot be resized");
            error.message.push_str(&others);
        }
        Err(error)
    }

    /// Refuses other peers than root and the lender's own user, and connections of a VM.
    pub(crate) fn check_operator(&self, asking: &Viewer<'_>) -> Result<(), RemoteError> {
        match asking.identity {
            Identity::User { uid, .. } if self.is_operator(*uid) => asking.names_no_vm(
                "`farside revoke`, `farside lend` and `farside devices` change what a lender lends",
            ),
            other => Err(RemoteError {
                kind: ErrorKind::Denied,
                message: format!(
                    "{other} may not operate this lender: only root and its own user ({}) may revoke, add, remove and resize devices and set their availability, at its UNIX socket",
                    user_name(self.operator)
                ),
            }),
        }
    }

    fn is_operator(&self, uid: u32) -> bool {
        [0, self.operator].contains(&uid)
    }

    /// Waits for the threads to end, up to `timeout`.
    pub(super) fn join(&self, timeout: Duration) -> Stopped {
        let threads = self.lock().threads.take();
        threads.map_or(Stopped::Closed, |threads| threads.join(timeout))
    }

    /// Sets how the devices are announced.
    pub(super) fn set_announced(&self, announced: Announced) {
        *self.announced() = Some(announced);
    }

    /// Takes the announcements, to end them.
    pub(super) fn take_announced(&self) -> Option<Announced> {
        self.announced().take()
    }

    fn withdraw(&self, id: &DeviceId) {
        if let Some(announced) = &*self.announced() {
            announced.remove(id);
        }
    }

    fn announced(&self) -> MutexGuard<'_, Option<Announced>> {
        // A panic leaves it as it was.
        self.announced
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
        // A panic leaves at most a share unused.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Larger than any generation issued before, by this run or an earlier one, whose borrowers may still
/// exist: a run issues fewer than one per microsecond.
fn first_generation() -> Generation {
    let since = SystemTime::UNIX_EPOCH.elapsed();
    Generation(since.map_or(0, |since| since.as_micros() as u64))
}

#[cfg(test)]
mod tests;
