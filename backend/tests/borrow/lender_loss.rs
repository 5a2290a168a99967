//! Lenders that disappear, restart, or stop replying.

use std::{
    os::fd::AsFd,
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use farside_backend_api::BorrowState;
use farside_devices::{
    Device as _,
    dma_test::{self, DmaTest, reg},
};
use farside_lender_protocol::{
    BarMemory, BarOwner, Channel, Described, DeviceEntry, DeviceStatus, Envelope, ErrorKind,
    Generation, Instance, Listener, Registers, RemoteError, Reply, Request,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::{
    guest::{
        BUS_MASTER, COMMAND, CONFIG, Event, MEMORY, SMALL, command, enable, fill, raise, read_u32,
        set_command, small,
    },
    host::{DEADLINE, DMA, Host, Served, assert_closed, assert_open, until},
    vmm::{DATA_EVENTFD, DMA_UNMAP, TRIGGER, unmap},
};

#[test]
fn a_backend_outlives_its_lender_and_finds_the_next_one() {
    let mut host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let ram = small(&mut vmm);
    let event = Event::new();
    vmm.set_irqs(2, DATA_EVENTFD | TRIGGER, 0, 1, &[&event])
        .unwrap();
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    let generation = served.status().generation;
    host.stop_lender();
    until("the loss is seen", || served.state() == "lost");

    // As if the device had been hot-unplugged.
    assert_eq!(read_u32(&mut vmm, 0, reg::ID), !0);
    assert_eq!(read_u32(&mut vmm, CONFIG, 0), !0);
    vmm.try_write(0, reg::SCRATCH, &[1; 4]).unwrap();
    let status = served.status();
    assert_eq!((status.bytes_pinned, status.dma_windows), (0, 0));
    // The rest of the protocol keeps working.
    vmm.map(8 << 30, SMALL, ram.fd(0)).unwrap();
    vmm.unmap(8 << 30, SMALL).unwrap();
    set_command(&mut vmm, MEMORY | BUS_MASTER);
    assert_eq!(served.state(), "lost");
    assert_eq!(vmm.reset(), Err(Errno::NODEV), "still away");
    assert_eq!(served.state(), "lost");

    host.start_lender();
    assert_eq!(
        read_u32(&mut vmm, 0, reg::ID),
        !0,
        "the guest has not reset it"
    );
    vmm.reset().unwrap();
    assert_closed(&host, &served, DMA, "leased");
    assert!(served.status().generation > generation);
    assert_eq!(read_u32(&mut vmm, 0, reg::ID), dma_test::ID);
    assert_eq!(command(&mut vmm), 0);
    assert!(enable(&mut vmm));
    assert_open(&host, &served, DMA, SMALL, 1);
    assert!(!fill(&mut vmm, 0, 0x1000, 3).faulted());
    ram.assert_filled(0, 0x1000, 3);
    // The vectors were assigned to the new lease.
    raise(&mut vmm, 0);
    assert_eq!(event.wait(), 1);
}

#[test]
fn a_client_of_a_lost_device_can_go_and_the_next_gets_the_new_lender() {
    let mut host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    vmm.reset().unwrap();
    host.stop_lender();
    until("the loss is seen", || served.state() == "lost");
    drop(vmm);
    until("the client is forgotten", || served.state() == "described");
    host.start_lender();
    let mut vmm = served.client(DMA);
    vmm.reset().unwrap();
    assert_closed(&host, &served, DMA, "leased");
}

/// The requests that the test's lender stops answering.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mute {
    Registers,
    UnmapPeer,
    /// The first of these requests is answered when the test requests it.
    Until(Kind),
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Borrow,
    SetIrqs,
    OpenWindow,
    MapPeer,
    EnableBusMaster,
    UnmapPeer,
    Close,
    Reset,
    Other,
}

impl Kind {
    fn of(request: &Request) -> Self {
        match request {
            Request::Borrow { .. } => Self::Borrow,
            Request::SetIrqs(_) => Self::SetIrqs,
            Request::OpenWindow { .. } => Self::OpenWindow,
            Request::MapPeer { .. } => Self::MapPeer,
            Request::EnableBusMaster => Self::EnableBusMaster,
            Request::UnmapPeer { .. } => Self::UnmapPeer,
            Request::Close => Self::Close,
            Request::Reset => Self::Reset,
            _ => Self::Other,
        }
    }
}

/// A lender that answers everything, up to a given request. When the backend hangs up under
/// a lease, it sends the test a channel for the permission to hang up, and waits for that.
pub struct Muted {
    pub hung_up: mpsc::Receiver<mpsc::Sender<()>>,
    /// The requests received under a lease, before they are handled.
    pub asked: mpsc::Receiver<Kind>,
    /// Releases the delayed reply.
    pub answer: mpsc::Sender<()>,
    pub thread: JoinHandle<()>,
}

impl Muted {
    /// Listens when it returns.
    pub fn start(socket: std::path::PathBuf, mute: Mute) -> Self {
        let listener = Listener::bind(&socket).unwrap();
        let (hang_up, hung_up) = mpsc::channel();
        let (asks, asked) = mpsc::channel();
        let (answer, told) = mpsc::channel();
        let mut answered = false;
        let mut hold = move |request: &Request| {
            let kind = Kind::of(request);
            let _ = asks.send(kind);
            if !answered && Mute::Until(kind) == mute {
                answered = true;
                told.recv_timeout(2 * DEADLINE).unwrap();
            }
        };
        let thread = std::thread::spawn(move || {
            // Lookups and checks, then the lease.
            loop {
                let mut peer = loop {
                    if let Some(peer) = listener.accept().unwrap() {
                        break peer;
                    }
                    poll(&mut [PollFd::new(&listener, PollFlags::IN)], None).unwrap();
                };
                if Self::serve(&mut peer, mute, &mut hold) {
                    let (go, wait) = mpsc::channel();
                    hang_up.send(go).unwrap();
                    wait.recv().unwrap();
                    return;
                }
            }
        });
        Self {
            hung_up,
            asked,
            answer,
            thread,
        }
    }

    /// Serves a connection to its end. Returns whether it was a lease.
    fn serve(peer: &mut Channel, mute: Mute, hold: &mut impl FnMut(&Request)) -> bool {
        let mut registers = Vec::new();
        while let Ok((Envelope { request, .. }, _)) = peer.receive::<Envelope>(DEADLINE) {
            let mut fds = Vec::new();
            hold(&request);
            let reply = match request {
                Request::Hello { .. } => Reply::Welcome {
                    lender: "muted".into(),
                    instance: Instance::random().unwrap(),
                },
                Request::Describe { device } if device != DMA => Reply::Refused(RemoteError {
                    kind: ErrorKind::UnknownDevice,
                    message: format!("no device {device}"),
                }),
                Request::Describe { .. } => Reply::Description(Box::new(Described {
                    description: DmaTest::new().description().clone(),
                    bars: BarOwner::Borrower,
                    rom: 0,
                    state: 0,
                })),
                Request::Status { .. } => Reply::Status(Box::new(DeviceStatus {
                    entry: DeviceEntry {
                        id: DMA.parse().unwrap(),
                        source: "model".into(),
                        summary: String::new(),
                        borrowed_by: None,
                        fences: Vec::new(),
                        problem: None,
                        availability: Default::default(),
                        kept: None,
                    },
                    bus_master: false,
                    usage: Default::default(),

                    interrupts: Vec::new(),
                    faults: Default::default(),
                    counters: Vec::new(),
                    limits: Vec::new(),
                })),
                Request::Borrow { .. } => {
                    let (ours, theirs) = Channel::pair().unwrap();
                    fds.push(theirs.into_socket());
                    registers.push(ours);
                    Reply::Lease {
                        generation: Generation(7),
                        registers: Registers::Descriptor,
                        bars: vec![BarMemory::Borrowers],
                        chain: None,
                    }
                }
                Request::OpenWindow { .. } => Reply::Window { lut_entries: 1 },
                Request::UnmapPeer { .. } if mute == Mute::UnmapPeer => continue,
                _ => Reply::Done,
            };
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if peer.send(&reply, &fds, DEADLINE).is_err() {
                // The backend has hung up.
                break;
            }
        }
        !registers.is_empty()
    }
}

/// A backend of a lender that stops replying.
fn muted(mute: Mute) -> (tempfile::TempDir, Muted, Served) {
    muted_within(mute, Duration::from_secs(4), MESSAGE_TIMEOUT)
}

/// As [`muted`], with these timeouts.
pub fn muted_within(
    mute: Mute,
    open_timeout: Duration,
    message_timeout: Duration,
) -> (tempfile::TempDir, Muted, Served) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("lender.sock");
    let lender = Muted::start(socket.clone(), mute);
    let served = Served::start(config(&dir, socket, open_timeout, message_timeout));
    (dir, lender, served)
}

/// The configuration of a backend whose lender has this socket.
pub fn config(
    dir: &tempfile::TempDir,
    socket: std::path::PathBuf,
    open_timeout: Duration,
    message_timeout: Duration,
) -> farside_backend::Config {
    farside_backend::Config {
        vm: "a".parse().unwrap(),
        directory: dir.path().join("a"),
        devices: vec![DMA.parse().unwrap()],
        lenders: vec![socket.into()],
        discovery: None,
        pki: dir.path().to_owned(),
        memory: None,
        ram: Vec::new(),
        ntb: None,
        fences: None,
        interrupts: Default::default(),
        pin_policy: farside_fabric::pin::PinPolicy::Prefer,
        open_timeout,
        message_timeout,
        lost_after: Duration::from_secs(300),
        socket_group: None,
        layout: Default::default(),
        release: None,
        past: Default::default(),
        helper: None,
    }
}

/// QEMU's message timeout, after which the VM continues without the reply.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

#[test]
fn a_register_read_that_is_not_answered_is_all_ones_in_time() {
    unanswered_read(0, reg::ID, !0);
}

/// Only one bit of the register must be read from the device; the backend has the others.
/// Afterwards the whole register reads as all ones.
#[test]
fn a_read_of_status_that_is_not_answered_ends_in_time() {
    const HAS_CAPABILITIES: u32 = 1 << 20;
    unanswered_read(CONFIG, COMMAND, HAS_CAPABILITIES);
}

fn unanswered_read(region: u32, offset: u64, found: u32) {
    let (_dir, lender, served) = muted(Mute::Registers);
    let mut vmm = served.client(DMA);
    vmm.reset().unwrap();
    let started = Instant::now();
    // The lender does not react to the backend's hang-up either.
    assert_eq!(read_u32(&mut vmm, region, offset), found);
    assert!(
        started.elapsed() < MESSAGE_TIMEOUT,
        "{:?}",
        started.elapsed()
    );
    assert_eq!(served.state(), "lost");
    // The next read does not wait again.
    assert_eq!(read_u32(&mut vmm, region, offset), !0);
    let leave = lender.hung_up.recv_timeout(DEADLINE).unwrap();
    leave.send(()).unwrap();
    lender.thread.join().unwrap();
}

/// The request that timed out may still be answered: nothing else is sent on its
/// connection, which closes, and that stops the device.
#[test]
fn an_unmap_that_the_lender_does_not_answer_breaks_the_lease_off() {
    let (_dir, lender, served) = muted(Mute::UnmapPeer);
    let mut vmm = served.client(DMA);
    let _ram = small(&mut vmm);
    vmm.reset().unwrap();
    assert!(enable(&mut vmm));
    assert_eq!(served.state(), "ready");
    vmm.post(DMA_UNMAP, &unmap(0, SMALL), &[]);
    let leave = lender.hung_up.recv_timeout(DEADLINE).unwrap();
    // The device may still do DMA, so there is no reply.
    let while_it_may = Timespec::try_from(Duration::from_millis(200)).unwrap();
    let mut fds = [PollFd::new(&vmm.socket, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&while_it_may)), Ok(0));
    leave.send(()).unwrap();
    vmm.reply().unwrap();
    let status = served.status();
    assert_eq!(status.state, BorrowState::Lost);
    assert_eq!((status.bytes_pinned, status.dma_windows), (0, 0));
    lender.thread.join().unwrap();
}
