//! The broker's part of a device that workers serve.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, PipeReader},
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use farside_daemon::DeviceId;
use farside_devices::{Device, dma_test, nvme};
use farside_fabric::soft::Adapter;
use farside_lender_protocol::{
    BarOwner, Channel, ChannelError, Described, DeviceEntry, RamRange, RemoteError, Route,
};
use rustix::{
    fd::BorrowedFd,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::messages::{Model, Order, Start};
use crate::{
    config,
    model::{check_model, not_flushed},
    registry::Lease,
    source::{Available, Report},
};

/// Timeout for handing the lease to a new worker, whose queue is empty.
const START_TIMEOUT: Duration = Duration::from_secs(2);

/// The variable that selects log lines.
const LOG_LEVELS: &str = "FARSIDE_LOG";

/// The program that serves a lease: it calls [`super::run`] with its standard input.
#[derive(Clone, Debug)]
pub struct Program {
    /// The executable.
    pub path: OsString,
    /// Its arguments, before the device and the VM, which are for `ps`.
    pub args: Vec<OsString>,
}

/// A software model whose leases are served by workers.
pub(crate) struct WorkerDevice {
    id: DeviceId,
    program: Program,
    model: config::Model,
    /// Locked while it is open.
    image: Option<nvme::Image>,
    described: Described,
    pub(crate) adapter: Adapter,
    /// Of the leases before the current one.
    last: Report,
}

impl WorkerDevice {
    pub(crate) fn open(
        id: &DeviceId,
        model: config::Model,
        adapter: Adapter,
        program: Program,
    ) -> Result<Self, nvme::ConfigError> {
        let (description, image) = match &model {
            config::Model::Nvme(config) => {
                let image = config.open_image()?;
                (config.description(image.size), Some(image))
            }
            config::Model::DmaTest(_) => (dma_test::DmaTest::new().description().clone(), None),
        };
        Ok(Self {
            id: id.to_owned(),
            program,
            model,
            image,
            described: Described {
                description,
                bars: BarOwner::Borrower,
            },
            adapter,
            last: Report::default(),
        })
    }

    /// Starts a worker and hands the lease to it.
    pub(crate) fn start(
        &self,
        entry: DeviceEntry,
        poll_us: u64,
        lease: &Lease,
    ) -> Result<Worker, StartError> {
        let (orders, their_orders) = Channel::pair().map_err(StartError::Channel)?;
        let (calls, their_calls) = Channel::pair().map_err(StartError::Channel)?;
        let (log, their_log) = io::pipe().map_err(StartError::Channel)?;
        rustix::io::ioctl_fionbio(&log, true).map_err(|errno| StartError::Channel(errno.into()))?;
        let level = std::env::var_os(LOG_LEVELS);
        let child = Command::new(&self.program.path)
            .arg0("farside")
            .args(&self.program.args)
            .args([self.id.as_str(), lease.vm.as_str()])
            .stdin(Stdio::from(their_orders.into_socket()))
            .stdout(Stdio::null())
            .stderr(their_log)
            .env_clear()
            .envs(level.map(|level| (LOG_LEVELS, level)))
            // A terminal's Ctrl-C is for the broker, which ends the lease in order.
            .process_group(0)
            .spawn()
            .map_err(|source| StartError::Spawn {
                program: self.program.path.clone(),
                source,
            })?;
        let mut worker = Worker::new(child, orders, calls, log).map_err(StartError::Channel)?;
        let (model, image) = match (&self.model, &self.image) {
            (config::Model::Nvme(config), Some(image)) => {
                let model = Model::Nvme {
                    config: serde_json::to_string(config).map_err(StartError::Config)?,
                    size: image.size,
                    punches_holes: image.punches_holes,
                };
                (model, Some(image.file.as_fd()))
            }
            _ => (Model::DmaTest, None),
        };
        let start = Order::Start(Box::new(Start {
            entry,
            model,
            limits: self.adapter.limits().clone(),
            poll_us,
            vm: lease.vm.clone(),
            generation: lease.generation,
            route: lease.route,
        }));
        let their_calls = their_calls.into_socket();
        let fds: Vec<BorrowedFd<'_>> = [their_calls.as_fd(), lease.connection.as_fd()]
            .into_iter()
            .chain(image)
            .chain(lease.bar_memory.iter().map(AsFd::as_fd))
            .collect();
        worker
            .orders
            .send(&start, &fds, START_TIMEOUT)
            .map_err(StartError::Send)?;
        Ok(worker)
    }

    /// Adds the last report of a lease.
    pub(crate) fn ended(&mut self, report: Report) {
        self.last = self.with_former(report);
    }

    /// A worker's report with the counters of former leases: each worker counts from zero.
    pub(crate) fn with_former(&self, report: Report) -> Report {
        let mut report = report.bounded();
        for (name, value) in &mut report.counters {
            let former = self.last.counters.iter().find(|(known, _)| known == name);
            *value = value.saturating_add(former.map_or(0, |(_, value)| *value));
        }
        report
    }

    fn file(&self) -> Option<&File> {
        self.image.as_ref().map(|image| &image.file)
    }
}

impl Available for WorkerDevice {
    fn kind(&self) -> &'static str {
        "model"
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn check(&self, route: Route, ram: &[RamRange]) -> Result<(), RemoteError> {
        check_model(&self.adapter, route, ram)
    }

    fn flush(&mut self) -> Result<(), RemoteError> {
        let flushed = self.file().map_or(Ok(()), File::sync_data);
        flushed.map_err(|error| not_flushed(&self.id, &error))
    }

    fn report(&self) -> Report {
        Report {
            faults: self.last.faults.clone(),
            counters: self.last.counters.clone(),
            ..Report::default()
        }
    }
}

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("cannot start the worker process {program:?}")]
    Spawn {
        program: OsString,
        source: io::Error,
    },
    #[error("cannot make the channels to a worker process")]
    Channel(#[source] io::Error),
    #[error("cannot encode the device's configuration")]
    Config(#[source] serde_json::Error),
    #[error("cannot hand the lease to the worker process")]
    Send(#[source] ChannelError),
}

/// A worker process. Dropping it kills it, and waits until it is gone.
pub(crate) struct Worker {
    child: Child,
    /// Readable when the process has ended, with all of its threads.
    pub(crate) pidfd: OwnedFd,
    pub(crate) orders: Channel,
    pub(crate) calls: Channel,
    /// Its standard error, not blocking.
    pub(crate) log: PipeReader,
}

impl Worker {
    fn new(mut child: Child, orders: Channel, calls: Channel, log: PipeReader) -> io::Result<Self> {
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self {
                child,
                pidfd,
                orders,
                calls,
                log,
            }),
            Err(errno) => {
                // It has no lease yet.
                let _ = child.kill();
                child.wait()?;
                Err(errno.into())
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to end its lease in order.
    pub(crate) fn stop(&mut self) {
        if self.orders.shut_down_sending().is_err() {
            self.kill();
        }
    }

    pub(crate) fn kill(&self) {
        // Fails if it has ended.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Waits for a process that has ended.
    pub(crate) fn status(&mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
        // Fails if it was waited for.
        let _ = self.child.wait();
    }
}
