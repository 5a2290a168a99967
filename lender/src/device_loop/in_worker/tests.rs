//! A worker that is gone, and leaves a function that cannot be taken down; workers that do not start, or
//! end a chain that is not theirs.

use std::{
    fs::File,
    sync::{Arc, mpsc::Sender},
    thread::JoinHandle,
};

use farside_daemon::Wakeup;
use farside_fabric::{Budget, soft::Adapter};
use farside_lender_protocol::{Channel, DeviceEntry, Secret, Transport};
use farside_vfio::SecondHandle;

use super::*;
use crate::{
    config::Model,
    device_loop::Home,
    keeper::Keeper,
    registry::RequestQueue,
    tokens::RegisterTokens,
    worker::{Call, Program, Workers},
};

const DEADLINE: Duration = Duration::from_secs(20);

/// Passes the device's problems on.
struct Problems(Sender<Option<String>>, Arc<RegisterTokens>);

impl Home for Problems {
    fn entry(&self) -> Option<DeviceEntry> {
        None
    }

    fn tokens(&self) -> &Arc<RegisterTokens> {
        &self.1
    }

    fn end_chain(&self) {}

    fn keeps_running(&self, _: Generation) -> bool {
        false
    }

    fn released(&self, _: Generation, _: Release) {
        panic!("the lease has ended");
    }

    fn problem(&self, _: Option<&str>, now: Option<&str>) {
        self.0.send(now.map(str::to_owned)).unwrap();
    }

    fn dma_faults(&self, reported: u64) -> u64 {
        reported
    }

    fn line(&self, _: Line, _: &str) {}
}

/// A process that does nothing with its lease.
fn idle() -> Program {
    Program {
        cgroup: None,
        path: "sh".into(),
        args: vec!["-c".into(), "exec sleep 1000".into()],
        keeper: None,
    }
}

fn workers(program: Program) -> Workers {
    let (keeper, _) = Keeper::find("lender.sock".as_ref(), Some(program.clone())).unwrap();
    Workers {
        program,
        keeper: Arc::new(keeper),
    }
}

fn lease(generation: u64) -> Lease {
    let connection = Channel::pair().unwrap().0;
    Lease {
        owner: LeaseOwner::of("web1".parse().unwrap(), &connection),
        connection,
        generation: Generation(generation),
        transport: Transport::SharedMemory,
        bar_memory: Vec::new(),
        state: None,
        chain: None,
    }
}

fn entry(id: &str) -> DeviceEntry {
    DeviceEntry {
        id: id.parse().unwrap(),
        source: "model".into(),
        summary: String::new(),
        borrowed_by: None,
        fences: Vec::new(),
        problem: None,
        availability: Default::default(),
        kept: None,
    }
}

/// What posts requests to the device, a sender of its stop, and its thread, which passes on whether
/// the function was taken down, and the device.
type Stuck = (RequestQueue, Wakeup, JoinHandle<(bool, DeviceLoop)>);

/// A device whose function cannot be taken down. Its lease has been released before unless `leased`.
fn stuck(leased: bool) -> Stuck {
    let (problems, problem) = mpsc::channel();
    let stop = Wakeup::new().unwrap();
    let (mut owner, queue) = DeviceLoop::new(
        "dma0".parse().unwrap(),
        Box::new(Problems(problems, Arc::default())),
        stop.clone(),
        Duration::ZERO,
        Budget::of_this_process().shared_by(1).into(),
    )
    .unwrap();
    let adapter = Adapter::new(Default::default()).unwrap();
    let model = Model::DmaTest(Default::default());
    let mut device = WorkerDevice::open(&owner.id, model, adapter, workers(idle()), None).unwrap();
    let lease = lease(1);
    let of = (lease.owner.clone(), lease.generation);
    let started = device.start(entry("dma0"), 0, lease);
    let (worker, borrower, _) = started.map_err(|(_, error)| error).unwrap();
    worker.kill();
    let serving = std::thread::spawn(move || {
        let mut lease = WorkerLease::new(&mut owner, &mut device, worker, Some(borrower), of);
        // No container of VFIO: it unmaps nothing.
        let parts = r#"{ "bdf": "0000:03:00.0", "config_offset": 0, "iommu": "Type1" }"#;
        let null = || File::open("/dev/null").unwrap().into();
        let handle = SecondHandle::new(serde_json::from_str(parts).unwrap(), [null(), null()]);
        lease.running = Some(Handle::Function(handle));
        if !leased {
            lease.leased = false;
        }
        let down = lease.run();
        (down, owner)
    });
    let said = problem.recv_timeout(DEADLINE).unwrap().unwrap();
    assert!(said.contains("cannot stop its DMA"), "{said}");
    (queue, stop, serving)
}

#[test]
fn status_is_answered_while_a_function_cannot_be_taken_down() {
    let (queue, stop, serving) = stuck(true);
    for _ in 0..3 {
        let (reply, report) = mpsc::sync_channel(1);
        queue.post(DeviceRequest::Report(reply)).unwrap();
        report.recv_timeout(DEADLINE).unwrap();
    }
    stop.raise();
    let (down, _) = serving.join().unwrap();
    assert!(!down, "the function was taken down");
}

#[test]
fn the_next_lease_stays_in_the_queue_while_a_function_cannot_be_taken_down() {
    let (queue, stop, serving) = stuck(false);
    queue.post(DeviceRequest::Lease(lease(2))).unwrap();
    stop.raise();
    let (_, owner) = serving.join().unwrap();
    let next = owner.requests.try_recv();
    assert!(matches!(next, Ok(DeviceRequest::Lease(lease)) if lease.generation == Generation(2)));
}

/// Passes the ends of leases on, and those of chains as `None`.
struct Ends(Sender<Option<Release>>, Arc<RegisterTokens>);

impl Home for Ends {
    fn entry(&self) -> Option<DeviceEntry> {
        Some(entry("disk0"))
    }

    fn tokens(&self) -> &Arc<RegisterTokens> {
        &self.1
    }

    fn end_chain(&self) {
        self.0.send(None).unwrap();
    }

    fn keeps_running(&self, _: Generation) -> bool {
        false
    }

    fn released(&self, _: Generation, how: Release) {
        self.0.send(Some(how)).unwrap();
    }

    fn problem(&self, _: Option<&str>, _: Option<&str>) {}

    fn dma_faults(&self, reported: u64) -> u64 {
        reported
    }

    fn line(&self, _: Line, _: &str) {}
}

/// The loop of a device with a medium, whose workers are `program`, and the ends that it reports.
fn with_medium(program: Program) -> (DeviceLoop, WorkerDevice, mpsc::Receiver<Option<Release>>) {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let (ends, ended) = mpsc::channel();
    let id = "disk0".parse().unwrap();
    let adapter = Adapter::new(Default::default()).unwrap();
    let model = Model::nvme(image.path().to_owned(), false);
    let device = WorkerDevice::open(&id, model, adapter, workers(program), None).unwrap();
    let home = Box::new(Ends(ends, Arc::default()));
    let quota = Budget::of_this_process().shared_by(1).into();
    let made = DeviceLoop::new(id, home, Wakeup::new().unwrap(), Duration::ZERO, quota);
    (made.unwrap().0, device, ended)
}

/// Nobody has the secret of a chain that has begun with that lease.
#[test]
fn a_device_whose_worker_does_not_start_is_kept_for_a_vm_that_may_go_on() {
    let missing = Program {
        cgroup: None,
        path: "/nonexistent/farside".into(),
        args: Vec::new(),
        keeper: None,
    };
    let (mut owner, mut device, ended) = with_medium(missing);
    let free = Release::Over(Revocation::Released);
    for (goes_on, how) in [
        (None, free),
        (Some(false), free),
        (Some(true), Release::Cut),
    ] {
        let (connection, mut peer) = Channel::pair().unwrap();
        let lease = Lease {
            connection,
            transport: Transport::Network,
            chain: goes_on.map(|goes_on| GrantedChain {
                secret: Secret::random().unwrap(),
                goes_on,
            }),
            ..lease(1)
        };
        assert!(device.serve(&mut owner, lease));
        assert_eq!(ended.try_recv().unwrap(), Some(how), "{goes_on:?}");
        let (reply, _) = peer.receive::<Reply>(DEADLINE).unwrap();
        assert!(matches!(reply, Reply::Refused(_)), "{reply:?}");
    }
}

#[test]
fn a_worker_whose_borrower_was_told_and_that_does_not_start_leaves_the_device_kept() {
    let chain = Some(GrantedChain {
        secret: Secret::random().unwrap(),
        goes_on: false,
    });
    assert_eq!(not_begun(chain, false), Release::Cut);
}

#[test]
fn a_worker_without_a_medium_ends_no_chain() {
    let (mut owner, mut device, ended) = with_medium(idle());
    let lease = lease(1);
    let of = (lease.owner.clone(), lease.generation);
    let started = device.start(entry("disk0"), 0, lease);
    let (worker, borrower, _) = started.map_err(|(_, error)| error).unwrap();
    let mut lease = WorkerLease::new(&mut owner, &mut device, worker, Some(borrower), of);
    let reply = lease.serve_call(Call::EndChain, Vec::new());
    assert!(matches!(reply, CallReply::Refused(_)), "{reply:?}");
    assert!(ended.try_recv().is_err());
}

/// Its medium is lent over the network; within the host, its state ends with its worker.
#[test]
fn the_medium_of_a_virtio_blk_disk_can_be_lent() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let id = "disk0".parse().unwrap();
    let adapter = Adapter::new(Default::default()).unwrap();
    let model = Model::virtio_blk(image.path().to_owned(), false);
    let device = WorkerDevice::open(&id, model, adapter, workers(idle()), None).unwrap();
    for transport in [Transport::SharedMemory, Transport::Network] {
        device.check(None, transport, &[]).unwrap();
    }
    assert!(matches!(device.medium(), Some(Ok(_))));
    assert_ne!(device.described().state, 0);
}

const MIB: u64 = 1 << 20;

/// A disk of 1 MiB, whose worker does nothing, and its image.
fn disk() -> (tempfile::NamedTempFile, WorkerDevice) {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(MIB).unwrap();
    let id = "disk0".parse().unwrap();
    let adapter = Adapter::new(Default::default()).unwrap();
    let model = Model::nvme(image.path().to_owned(), false);
    let device = WorkerDevice::open(&id, model, adapter, workers(idle()), None).unwrap();
    (image, device)
}

#[test]
fn a_disk_takes_the_size_of_its_image_unless_that_is_no_size_for_it() {
    let (image, mut device) = disk();
    let path = image.path().display().to_string();
    let mut resize = |len| {
        image.as_file().set_len(len).unwrap();
        let resized = device.take_size();
        let shown = device.described().description.summary.clone();
        (resized.map(|it| (it.from, it.to)), shown)
    };
    let shown = |size: &str| format!("farside NVMe, {size}");
    assert_eq!(resize(2 * MIB), (Ok((MIB, 2 * MIB)), shown("2 MiB")));
    for (len, size, remedy) in [
        (MIB, "1048576", format!("truncate -s 2097152 {path}")),
        (0, "0 bytes", format!("truncate -s 2097152 {path}")),
        (2 * MIB + 1, "2097153", format!("truncate -s %512 {path}")),
    ] {
        let (resized, summary) = resize(len);
        let RemoteError { kind, message } = resized.unwrap_err();
        assert_eq!((kind, summary), (ErrorKind::Invalid, shown("2 MiB")));
        for part in [size, "2097152", &remedy, &path] {
            assert!(message.contains(part), "no {part:?} in {message}");
        }
    }
    assert_eq!(resize(3 * MIB), (Ok((2 * MIB, 3 * MIB)), shown("3 MiB")));
}

/// Orders a lease's worker, of that version, to resize its disk, and kills it. Returns the answer to the requester, and the
/// record for the next broker at the time at which the worker had no order yet.
fn resize_and_kill(version: u32) -> (Result<Resized, RemoteError>, String) {
    let (image, mut device) = disk();
    let (ends, ended) = mpsc::channel();
    let home = Box::new(Ends(ends, Arc::default()));
    let quota = Budget::of_this_process().shared_by(1).into();
    let id = "disk0".parse().unwrap();
    let made = DeviceLoop::new(id, home, Wakeup::new().unwrap(), Duration::ZERO, quota);
    let (mut owner, _queue) = made.unwrap();
    let lease = lease(1);
    let of = (lease.owner.clone(), lease.generation);
    let started = device.start(entry("disk0"), 0, lease);
    let (worker, borrower, record) = started.map_err(|(_, error)| error).unwrap();
    let mut lease = WorkerLease::new(&mut owner, &mut device, worker, Some(borrower), of);
    lease.record = record;
    lease.record.as_mut().unwrap().lease.worker = version;
    image.as_file().set_len(2 * MIB).unwrap();
    let (ours, mut theirs) = Channel::pair().unwrap();
    lease.worker.orders = ours;
    let (reply, resized) = mpsc::sync_channel(1);
    let ordered = lease.resize(reply);
    // Before the order is sent.
    let served = format!("{:?}", lease.record.as_ref().unwrap().lease.served);
    assert!(theirs.try_receive::<Numbered<Order>>().unwrap().is_none());
    if let Some((order, waiting)) = ordered {
        lease.order(order, waiting);
        let received = theirs.try_receive::<Numbered<Order>>().unwrap();
        let ((_, order), _) = received.unwrap();
        assert!(matches!(order, Order::Resize { to } if to == 2 * MIB));
    }
    lease.worker.kill();
    assert!(lease.run());
    assert_eq!(
        ended.recv().unwrap(),
        Some(Release::Over(Revocation::Ended))
    );
    (resized.recv_timeout(DEADLINE).unwrap(), served)
}

#[test]
fn a_size_is_recorded_before_the_worker_has_it_and_stays_if_that_is_killed() {
    let (resized, served) = resize_and_kill(2);
    let resized = resized.unwrap();
    assert_eq!((resized.from, resized.to), (MIB, 2 * MIB));
    assert!(served.contains("size: 2097152"), "{served}");
}

#[test]
fn a_worker_of_the_version_before_gets_no_order_to_resize() {
    let (resized, served) = resize_and_kill(1);
    let error = resized.unwrap_err();
    assert!(error.message.contains("an earlier farside"), "{error}");
    assert!(served.contains("size: 1048576"), "{served}");
}
