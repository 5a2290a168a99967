//! A model's controller in the borrower's own process, for a medium in another host.
//!
//! The device thread is that of a lender, and what the borrower sees is a lease within its host: memory
//! by its files, interrupts by eventfds. It parses what the guest writes, in the process that has the VM's
//! other devices, too.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, mpsc::sync_channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, RateLimit, VmName, Wakeup};
use farside_devices::Device;
use farside_fabric::{NtbLimits, SharedQuota, VmShare, soft::Adapter};
use farside_lender_protocol::{
    Availability, BorrowedBy, Channel, DeviceEntry, DeviceStatus, Generation, MAX_REVOKE_LIMIT,
    RemoteError, Secret, Transport,
};

use crate::{
    config::DEFAULT_POLL_US,
    device_loop::{DeviceLoop, Home, Line},
    lease_owner::LeaseOwner,
    model::ModelDevice,
    refusals::internal,
    registry::{DeviceRequest, GrantedChain, Lease, Release, RequestQueue},
    tokens::RegisterTokens,
};

/// The windows of a device that no adapter limits: an entry for each, and any page.
const UNLIMITED: NtbLimits = NtbLimits {
    bar_size: 1 << 50,
    lut_entries: 4096,
    alignment: Some(4096),
    entries_per_window: None,
    requester_entries: 4,
    reserved_requesters: 2,
    per_vm: VmShare::ALL,
};

/// Time limit for a status: the thread that asks has other things to do.
const STATUS_TIMEOUT: Duration = Duration::from_millis(50);

/// A controller, and its lease. Dropping it ends the lease.
#[derive(Debug)]
pub struct Near {
    handle: Handle,
    stop: Wakeup,
    thread: Option<JoinHandle<()>>,
}

/// Where the state of a controller outlives its process.
#[derive(Debug)]
pub struct KeptState {
    /// A sealed file of the size that the lender describes.
    pub file: OwnedFd,
    /// The chain of the lease of the medium.
    pub chain: Secret,
    /// The file has the state of a controller before.
    pub goes_on: bool,
}

/// A handle on the lease of a controller.
#[derive(Clone, Debug)]
pub struct Handle {
    queue: Arc<RequestQueue>,
    generation: Generation,
    entry: DeviceEntry,
}

impl Handle {
    /// Asks the guest to release the device, and ends the lease after `limit`, at most
    /// [`MAX_REVOKE_LIMIT`].
    pub fn release(&self, limit: Duration) {
        let request = DeviceRequest::Revoke {
            generation: self.generation,
            until: Instant::now() + limit.min(MAX_REVOKE_LIMIT),
        };
        // Fails if the lease has ended.
        let _ = self.queue.post(request);
    }

    /// The status of the device, unless its thread does not answer at once.
    pub fn status(&self) -> Option<DeviceStatus> {
        let (reply, report) = sync_channel(1);
        self.queue.post(DeviceRequest::Report(reply)).ok()?;
        let report = report.recv_timeout(STATUS_TIMEOUT).ok()?;
        Some(report.status_of(self.entry.clone()))
    }
}

impl Near {
    /// Starts the controller `device` under a lease, of which the borrower learns through `connection`, as
    /// of one that it has asked a lender for. With `kept` its state outlives this process, or goes on from that of one before.
    ///
    /// # Errors
    /// The system is out of threads or descriptors, or `device` is invalid.
    pub fn start(
        id: &DeviceId,
        vm: &VmName,
        device: Box<dyn Device>,
        generation: Generation,
        connection: Channel,
        (bar_memory, quota): (Vec<OwnedFd>, SharedQuota),
        kept: Option<KeptState>,
    ) -> Result<Self, RemoteError> {
        let entry = DeviceEntry {
            id: id.clone(),
            source: "model".into(),
            summary: device.description().summary.clone(),
            borrowed_by: Some(BorrowedBy {
                vm: vm.clone(),
                generation,
                seconds: 0,
            }),
            fences: Vec::new(),
            problem: None,
            availability: Availability::Available,
            kept: None,
        };
        let adapter = Adapter::new(UNLIMITED).map_err(internal)?;
        let source = Box::new(ModelDevice::new(id, device, adapter)?);
        let stop = Wakeup::new().map_err(internal)?;
        let home = InBorrower {
            tokens: Arc::default(),
            refused: RateLimit::new(),
        };
        let poll_time = Duration::from_micros(DEFAULT_POLL_US);
        let made = DeviceLoop::new(id.clone(), Box::new(home), stop.clone(), poll_time, quota);
        let (device_loop, queue) = made.map_err(internal)?;
        let thread = std::thread::Builder::new()
            .name(format!("near-{id}"))
            .spawn(move || drop(device_loop.run_once(source)))
            .map_err(internal)?;
        let near = Self {
            handle: Handle {
                queue: Arc::new(queue),
                generation,
                entry,
            },
            stop,
            thread: Some(thread),
        };
        let chain = kept.as_ref().map(|kept| GrantedChain {
            secret: kept.chain,
            goes_on: kept.goes_on,
        });
        near.handle.queue.post(DeviceRequest::Lease(Lease {
            owner: LeaseOwner::of(vm.clone(), &connection),
            connection,
            generation,
            transport: Transport::SharedMemory,
            bar_memory,
            state: kept.map(|kept| kept.file),
            chain,
        }))?;
        Ok(near)
    }

    /// A handle on the lease.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a controller's thread has panicked");
        }
    }
}

/// The process of the borrower, which logs what happens to its leases itself.
struct InBorrower {
    /// Unused: the borrower has the other end of the register channel.
    tokens: Arc<RegisterTokens>,
    /// Limits the log lines on refused requests.
    refused: RateLimit,
}

impl Home for InBorrower {
    fn entry(&self) -> Option<DeviceEntry> {
        None
    }

    fn tokens(&self) -> &Arc<RegisterTokens> {
        &self.tokens
    }

    fn released(&self, _generation: Generation, _how: Release) {}

    fn keeps_running(&self, _generation: Generation) -> bool {
        false
    }

    fn end_chain(&self) {}

    fn problem(&self, before: Option<&str>, now: Option<&str>) {
        match (now, before) {
            (Some(now), _) => log::error!("{now}"),
            (None, Some(before)) => log::info!("recovered: {before}"),
            (None, None) => {}
        }
    }

    fn dma_faults(&self, reported: u64) -> u64 {
        reported
    }

    fn line(&self, kind: Line, line: &str) {
        match kind {
            Line::Borrowed | Line::Dropped | Line::Ended => log::debug!("{line}"),
            Line::NotLent | Line::Refused => {
                if let Some(held_back) = self.refused.allow() {
                    log::warn!("{line}{held_back}");
                }
            }
        }
    }
}
