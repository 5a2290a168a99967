//! The worker process.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

use farside_daemon::{
    DeviceId, VmName, Wakeup,
    confine::{ConfineError, locking},
    limit_open_files,
};
use farside_devices::block::LentMedium;
use farside_error_chain::Chain;
use farside_fabric::{Budget, soft::Adapter};
use farside_lender_protocol::{
    Channel, ChannelError, DeviceEntry, Generation, RemoteError, Reply, Revocation,
};
use farside_medium::Link;
use rustix::{
    event::{PollFd, PollFlags, poll},
    thread::CapabilitySet,
};

use super::{
    calls::{CALL_TIMEOUT, Calls, SHORT, end_chain},
    confine::{self, UserChangeError},
    create::{create, map_reservations, no_image, open_medium},
    medium::MediumLease,
    messages::{Answer, Call, CallReply, Numbered, Order, Served, Start},
};
use crate::{
    device_loop::{DeviceLoop, Home, Line},
    lease_owner::LeaseOwner,
    model::ModelDevice,
    registry::{DeviceRequest, GrantedChain, Lease, Release, RequestQueue},
    requests::{ANSWER_TIMEOUT, HANDOVER_TIMEOUT},
    source::DeviceSource,
    tokens::RegisterTokens,
    vfio::{FunctionConfig, WorkerFunction},
    vfio_user::WorkerServer,
};

/// Most open files of a worker: eventfds of 2049 vectors and their successors, which are set before the former ones are
/// closed, and a file for each mapping of the memory of a borrower ([`Budget`]).
const MAX_OPEN_FILES: u64 = 32 << 10;

/// Timeout for the lease, which the broker sends right after the start.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a worker process ends without having served its lease.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The broker is gone, or violates the protocol.
    #[error("no lease from the lender's process: this program is started by `farside lend`")]
    NoLease(#[source] ChannelError),
    /// The first order is another one, or has too few descriptors.
    #[error("an invalid lease from the lender's process")]
    InvalidLease,
    /// The device cannot be created.
    #[error("cannot create the device")]
    Device(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The process cannot have a user of its own.
    #[error("cannot confine the worker process")]
    User(#[from] UserChangeError),
    /// The process cannot be confined.
    #[error("cannot confine the worker process")]
    Confine(#[from] ConfineError),
    /// A thread, an eventfd or a poll failed.
    #[error("cannot run the worker process")]
    System(#[from] io::Error),
}

/// Serves one lease, which comes through `broker`.
///
/// # Errors
/// A [`WorkerError`]; the broker ends the lease then.
pub fn run(broker: OwnedFd) -> Result<(), WorkerError> {
    limit_open_files(MAX_OPEN_FILES);
    let mut orders = Channel::from_socket(broker).appendable();
    let (order, fds) = orders
        .receive::<Numbered<Order>>(START_TIMEOUT)
        .map_err(WorkerError::NoLease)?;
    let (number, Order::Start(start)) = order else {
        return Err(WorkerError::InvalidLease);
    };
    let Start {
        entry,
        device,
        poll_us,
        vm,
        generation,
        transport,
        chain,
    } = *start;
    let mut fds = fds.into_iter();
    let mut next = || fds.next().ok_or(WorkerError::InvalidLease);
    let calls = Arc::new(Calls::new(Channel::from_socket(next()?).appendable()));
    let connection = next()?;
    let id = entry.id.clone();
    if let Served::Medium(served) = device {
        give_up_rights(CapabilitySet::empty())?;
        let link = Link::new(connection, served.secrets.as_ref());
        let link = link.map_err(|error| WorkerError::Device(error.into()))?;
        let image = match served.size {
            0 => no_image()?,
            _ => next()?,
        };
        let block = open_medium(&served, image)?;
        let mut medium =
            LentMedium::new(block, (served.size, served.read_only), (id.as_str(), link))?;
        let mut locks = Vec::new();
        if served.shared {
            let reservations = map_reservations(&id, next()?, &mut locks);
            medium = medium.sharing(reservations.map_err(WorkerError::Device)?);
        }
        confine::restrict_system_calls(confine::Kind::Model, &locks)?;
        let lease = MediumLease {
            id,
            vm,
            generation,
            medium,
            poll_time: Duration::from_micros(poll_us),
            problem: None,
        };
        return Ok(lease.serve(&mut orders, &calls)?);
    }
    let mut connection = Channel::from_socket(connection);
    let failed = |error: RemoteError| WorkerError::Device(error.into());
    // What needs files comes before the confinement.
    let quota = Budget::of_this_process().shared_by(1);
    let stop = Wakeup::new()?;
    let kind = match &device {
        Served::Model { .. } | Served::Medium(_) => confine::Kind::Model,
        Served::Function(_) => confine::Kind::Function,
        Served::Server { .. } => confine::Kind::Server,
    };
    let mut locks = Vec::new();
    let owner = LeaseOwner::of(vm.clone(), &connection);
    let source: Box<dyn DeviceSource> = match device {
        Served::Function(config) => {
            // What the IOMMU maps counts as locked. The broker has compared it with the limit, or may
            // exceed that.
            let keep = locking();
            let opened = match config.adopts {
                Some(parts) => {
                    let fds = [next()?, next()?];
                    WorkerFunction::adopt(&id, config.described, parts, fds)
                }
                None => open_function(&id, *config, &stop, &calls),
            };
            match opened {
                Ok(function) => {
                    give_up_rights(keep)?;
                    Box::new(function)
                }
                Err(error) => {
                    not_lent(&calls, &mut connection, (&id, &vm), error);
                    return Ok(());
                }
            }
        }
        Served::Server { config, adopts } => {
            let socket = next()?;
            give_up_rights(CapabilitySet::empty())?;
            match WorkerServer::open((&id, &vm), *config, socket, adopts) {
                Ok(server) => Box::new(server),
                Err(error) => {
                    not_lent(&calls, &mut connection, (&id, &vm), error);
                    return Ok(());
                }
            }
        }
        // Served above.
        Served::Medium(_) => return Err(WorkerError::InvalidLease),
        Served::Model { model, limits } => {
            // Before threads are started: each thread has privileges and Landlock's rules of its own.
            give_up_rights(CapabilitySet::empty())?;
            let device = create(&id, model, &mut next, &mut locks)?;
            let adapter = Adapter::with_tables(limits, calls.clone());
            Box::new(ModelDevice::new(&id, device, adapter).map_err(failed)?)
        }
    };
    let home = InWorker {
        entry,
        kind,
        since: Instant::now(),
        problem: Mutex::default(),
        tokens: Arc::default(),
        calls,
    };
    let (device_loop, queue) = DeviceLoop::new(
        id,
        Box::new(home),
        stop.clone(),
        Duration::from_micros(poll_us),
        quota.into(),
    )?;
    farside_irq_relay::watch_eventfds();
    let ended = Wakeup::new()?;
    let raised = ended.clone();
    let thread = std::thread::Builder::new()
        .name("lease".into())
        .spawn(move || {
            let report = device_loop.run_once(source);
            raised.raise();
            report
        })?;
    confine::restrict_system_calls(kind, &locks)?;
    let state = chain.map(|_| fds.next().ok_or(WorkerError::InvalidLease));
    let lease = Lease {
        connection,
        owner,
        generation,
        transport,
        state: state.transpose()?,
        bar_memory: fds.collect(),
        chain: chain.map(|(secret, goes_on)| GrantedChain { secret, goes_on }),
    };
    queue
        .post(DeviceRequest::Lease(lease))
        .map_err(|error| WorkerError::Device(error.into()))?;
    relay(&mut orders, &queue, generation, &stop, &ended)?;
    // If the thread has panicked, the broker sees how this process ends.
    let report = thread
        .join()
        .map_err(|_| io::Error::other("its thread has panicked"))?;
    if let Some(report) = report {
        // Fails if the broker is gone.
        let _ = orders.send(
            &(number, Answer::Ended(Box::new(report))),
            &[],
            CALL_TIMEOUT,
        );
    }
    Ok(())
}

/// The lease fails before it has begun.
fn not_lent(
    calls: &Calls,
    connection: &mut Channel,
    (id, vm): (&DeviceId, &VmName),
    error: RemoteError,
) {
    let line = format!("device {id}: cannot lend to VM {vm}: {error}");
    calls.tell(Call::Line(Line::NotLent, line));
    // Release first, so that the peer can retry at once.
    calls.released(Release::Over(Revocation::Released));
    // The borrow fails whether or not the peer receives this.
    let _ = connection.send(&Reply::Refused(error), &[], CALL_TIMEOUT);
}

/// Takes a user of its own, and gives up privileges but `keep`, files and the network.
fn give_up_rights(keep: CapabilitySet) -> Result<(), WorkerError> {
    confine::change_user(keep)?;
    Ok(confine::give_up_privileges(keep)?)
}

/// Opens a function, and gives the broker a handle on it.
fn open_function(
    id: &DeviceId,
    config: FunctionConfig,
    stop: &Wakeup,
    calls: &Calls,
) -> Result<WorkerFunction, RemoteError> {
    let function = WorkerFunction::open(id, config, stop)?;
    let (parts, handle) = function.share()?;
    let handle = handle.each_ref().map(AsFd::as_fd);
    calls.call_with(Call::Opened(parts), &handle, CALL_TIMEOUT)?;
    Ok(function)
}

/// Passes orders to the device thread until that has ended.
fn relay(
    orders: &mut Channel,
    queue: &RequestQueue,
    generation: Generation,
    stop: &Wakeup,
    ended: &Wakeup,
) -> io::Result<()> {
    let mut broker_lives = true;
    loop {
        let mut fds = vec![PollFd::new(ended, PollFlags::IN)];
        if broker_lives {
            fds.push(PollFd::new(&*orders, PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Err(errno) if errno != rustix::io::Errno::INTR => return Err(errno.into()),
            _ if !fds[0].revents().is_empty() => return Ok(()),
            _ => {}
        }
        match orders.try_receive::<Numbered<Order>>() {
            Ok(Some(((number, order), _))) => {
                let answer = (number, ask(queue, generation, order));
                let sent = orders.send(&answer, &[], CALL_TIMEOUT);
                // A broker that has died reads none; the next one ignores it.
                broker_lives = matches!(sent, Ok(()) | Err(ChannelError::TimedOut(_)));
            }
            Ok(None) => {}
            Err(_) => broker_lives = false,
        }
        if !broker_lives {
            stop.raise();
        }
    }
}

/// The device thread's answer.
fn ask(queue: &RequestQueue, generation: Generation, order: Order) -> Answer {
    fn wait<T>(
        queue: &RequestQueue,
        timeout: Duration,
        request: impl FnOnce(mpsc::SyncSender<T>) -> DeviceRequest,
        answer: impl FnOnce(T) -> Answer,
    ) -> Answer {
        let (sender, receiver) = mpsc::sync_channel(1);
        let posted = queue.post(request(sender)).ok();
        let came = posted.and_then(|()| receiver.recv_timeout(timeout).ok());
        came.map_or(Answer::Nothing, answer)
    }
    match order {
        Order::Status => wait(queue, ANSWER_TIMEOUT, DeviceRequest::Report, |report| {
            Answer::Status(Box::new(report))
        }),
        Order::HandOver { fence } => wait(
            queue,
            HANDOVER_TIMEOUT,
            |reply| DeviceRequest::HandOver { fence, reply },
            Answer::HandedOver,
        ),
        Order::Revoke { limit } => {
            let until = Instant::now() + limit;
            // Fails if the lease is about to end.
            let _ = queue.post(DeviceRequest::Revoke { generation, until });
            Answer::Nothing
        }
        Order::Resize { to } => wait(
            queue,
            ANSWER_TIMEOUT,
            |reply| DeviceRequest::Resize { to, reply },
            Answer::Resized,
        ),
        Order::Start(_) => Answer::Nothing,
    }
}

/// The broker's side of the device, as its thread sees it.
struct InWorker {
    /// As it was when the lease began.
    entry: DeviceEntry,
    kind: confine::Kind,
    since: Instant,
    problem: Mutex<Option<String>>,
    /// Unused: a model is lent only where descriptors can be passed.
    tokens: Arc<RegisterTokens>,
    calls: Arc<Calls>,
}

impl Home for InWorker {
    fn entry(&self) -> Option<DeviceEntry> {
        let mut entry = self.entry.clone();
        if let Some(borrowed_by) = &mut entry.borrowed_by {
            borrowed_by.seconds = self.since.elapsed().as_secs();
        }
        // Replaced as a whole.
        let problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        entry.problem = problem.clone();
        Some(entry)
    }

    fn tokens(&self) -> &Arc<RegisterTokens> {
        &self.tokens
    }

    /// The broker decides, when this process has ended.
    fn keeps_running(&self, _generation: Generation) -> bool {
        false
    }

    fn released(&self, _generation: Generation, how: Release) {
        self.calls.released(how);
    }

    fn begins(&self) {
        self.calls.tell(Call::Begins);
    }

    fn end_chain(&self) {
        end_chain(&self.calls);
    }

    fn problem(&self, _before: Option<&str>, now: Option<&str>) {
        let now = now.map(str::to_owned);
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = now.clone();
        self.calls.tell(Call::Problem(now));
    }

    fn dma_faults(&self, reported: u64) -> u64 {
        // The kernel logs those of a function, which the broker reads.
        match self.kind {
            confine::Kind::Model | confine::Kind::Server => reported,
            confine::Kind::Function => match self.calls.call_with(Call::DmaFaults, &[], SHORT) {
                Ok(CallReply::DmaFaults(count)) => count,
                _ => reported,
            },
        }
    }

    fn line(&self, kind: Line, line: &str) {
        // A server gets descriptors of the guest's memory and interrupts at any time.
        if kind == Line::Borrowed
            && self.kind != confine::Kind::Server
            && let Err(error) = confine::send_no_descriptors()
        {
            log::error!(
                "cannot restrict what the worker process sends: {}",
                Chain(&error)
            );
            // The lease ends with the process.
            std::process::exit(1);
        }
        self.calls.tell(Call::Line(kind, line.to_owned()));
    }
}
