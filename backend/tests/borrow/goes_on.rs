//! Leases that go on, with a lender whose workers end when the test has them end.

use std::{
    collections::VecDeque,
    os::fd::AsFd,
    path::Path,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use farside_devices::{Device as _, dma_test::DmaTest};
use farside_lender_protocol::{
    BarMemory, BarOwner, Channel, ChannelError, Described, DeviceEntry, DeviceStatus, Envelope,
    ErrorKind, Generation, Instance, Listener, Registers, RemoteError, Reply, Request, STATE_PAGE,
    Secret,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    host::{DEADLINE, DMA, Served, until},
    lender_loss::config,
};

/// How the lender takes a borrow up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// Its worker serves it.
    Serve,
    /// Its worker is killed before it has answered.
    Kill,
    /// Its worker refuses the first request.
    Refuse,
    /// Its worker answers so late that the next attempt has begun.
    BeLate,
    /// Its worker ends before it has begun, and the lender closes the connection.
    Fail,
}

struct State {
    /// A model has BARs of its borrower, a function its own.
    bars: BarOwner,
    attempts: VecDeque<Attempt>,
    /// The connection and the register channel of the lease.
    lease: Option<(Channel, Channel)>,
    /// For which the device is kept.
    kept: Option<Channel>,
    chain: Option<Secret>,
    /// The current worker cannot be used.
    refuses: bool,
    generation: u64,
    refusals: Vec<String>,
}

impl State {
    /// The worker is killed.
    fn kill(&mut self) {
        let (mut connection, _) = self.lease.take().expect("a worker");
        connection
            .send(&Reply::ProcessEnded, &[], DEADLINE)
            .unwrap();
        self.kept = Some(connection);
    }

    fn borrow(&mut self, mut connection: Channel, resumes: Option<Secret>) -> Option<Channel> {
        let is_gone = |it: &Channel| {
            let mut fds = [PollFd::new(it, PollFlags::RDHUP)];
            poll(&mut fds, Some(&Timespec::default())).unwrap();
            !fds[0].revents().is_empty()
        };
        let mut refusal = None;
        if resumes.is_some() {
            let watched = self.kept.as_ref();
            let watched = watched.or(self.lease.as_ref().map(|(connection, _)| connection));
            if watched.is_none_or(is_gone) || resumes != self.chain {
                refusal = Some(ErrorKind::ChainEnded);
            } else if self.lease.is_some() {
                self.kill();
                refusal = Some(ErrorKind::Busy);
            }
        }
        if let Some(kind) = refusal {
            let message = format!("{kind:?}");
            self.refusals.push(message.clone());
            let refused = Reply::Refused(RemoteError { kind, message });
            connection.send(&refused, &[], DEADLINE).unwrap();
            return Some(connection);
        }
        self.kept = None;
        self.generation += 1;
        let attempt = self.attempts.pop_front().expect("an attempt");
        if attempt == Attempt::Fail {
            return None;
        }
        self.refuses = attempt == Attempt::Refuse;
        let (ours, theirs) = Channel::pair().unwrap();
        let chain = self.chain.get_or_insert_with(|| Secret::random().unwrap());
        if attempt == Attempt::BeLate {
            // Longer than an attempt of the backend takes.
            std::thread::sleep(Duration::from_millis(1700));
        }
        if attempt != Attempt::Kill {
            let lease = Reply::Lease {
                generation: Generation(self.generation),
                registers: Registers::Descriptor,
                bars: vec![BarMemory::Borrowers],
                chain: Some(*chain),
            };
            let theirs = theirs.into_socket();
            connection
                .send(&lease, &[theirs.as_fd()], DEADLINE)
                .unwrap();
        }
        self.lease = Some((connection, ours));
        if attempt == Attempt::Kill {
            self.kill();
        }
        None
    }

    /// Answers what the borrower of the lease has asked.
    fn serve_lease(&mut self) {
        let Some((connection, _)) = &mut self.lease else {
            return;
        };
        match connection.try_receive::<Envelope>() {
            Ok(Some(_)) => {
                let reply = match self.refuses {
                    true => Reply::Refused(RemoteError {
                        kind: ErrorKind::Internal,
                        message: "out of memory".into(),
                    }),
                    false => Reply::Done,
                };
                connection.send(&reply, &[], DEADLINE).unwrap();
            }
            Ok(None) => {}
            Err(ChannelError::Closed) => self.lease = None,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A lender of one device.
struct Lender {
    state: Arc<Mutex<State>>,
}

impl Lender {
    fn start(socket: &Path, bars: BarOwner, attempts: &[Attempt]) -> Self {
        let listener = Listener::bind(socket).unwrap();
        let state = Arc::new(Mutex::new(State {
            bars,
            attempts: attempts.iter().copied().collect(),
            lease: None,
            kept: None,
            chain: None,
            refuses: false,
            generation: 0,
            refusals: Vec::new(),
        }));
        let of_threads = Arc::clone(&state);
        std::thread::spawn(move || {
            loop {
                while let Some(peer) = listener.accept().unwrap() {
                    let state = Arc::clone(&of_threads);
                    std::thread::spawn(move || serve(peer, &state));
                }
                of_threads.lock().unwrap().serve_lease();
                let soon = Timespec::try_from(Duration::from_millis(2)).unwrap();
                poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&soon)).unwrap();
            }
        });
        Self { state }
    }

    fn refusals(&self) -> Vec<String> {
        self.state.lock().unwrap().refusals.clone()
    }
}

/// Serves a connection until it is a lease, or closed.
fn serve(mut peer: Channel, state: &Mutex<State>) {
    while let Ok((Envelope { request, .. }, _)) = peer.receive::<Envelope>(DEADLINE) {
        let reply = match request {
            Request::Hello { .. } => Reply::Welcome {
                lender: "scripted".into(),
                instance: Instance::random().unwrap(),
            },
            Request::Describe { .. } => Reply::Description(Box::new(Described {
                description: DmaTest::new().description().clone(),
                bars: state.lock().unwrap().bars,
                rom: 0,
                state: 2 * STATE_PAGE,
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
            Request::BorrowAndKeep { resumes, .. } => {
                match state.lock().unwrap().borrow(peer, resumes) {
                    Some(connection) => {
                        peer = connection;
                        continue;
                    }
                    None => return,
                }
            }
            _ => Reply::Done,
        };
        if peer.send(&reply, &[], DEADLINE).is_err() {
            return;
        }
    }
}

/// Has a VM borrow the device, and its worker be killed. The lender takes the lease up with these attempts.
fn goes_on_after(attempts: &[Attempt]) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("lender.sock");
    let attempts = [&[Attempt::Serve], attempts].concat();
    let lender = Lender::start(&socket, BarOwner::Borrower, &attempts);
    let served = Served::start(config(&dir, socket, Duration::from_secs(4), DEADLINE));
    let mut vmm = served.client(DMA);
    vmm.reset().unwrap();
    assert_eq!(served.state(), "leased");
    lender.state.lock().unwrap().kill();
    until("the device goes on, or is lost", || {
        let connection = served.status().connection;
        served.state() == "lost" || connection.is_some_and(|it| it.restarts == 1)
    });
    assert_eq!(served.state(), "leased", "{:?}", lender.refusals());
    assert!(lender.state.lock().unwrap().attempts.is_empty());
    lender.refusals()
}

#[test]
fn a_worker_that_is_killed_before_its_first_answer_costs_another_attempt() {
    let refusals = goes_on_after(&[Attempt::Kill, Attempt::Kill, Attempt::Serve]);
    assert_eq!(refusals, [""; 0]);
}

#[test]
fn a_worker_that_answers_late_is_waited_for() {
    let refusals = goes_on_after(&[Attempt::BeLate]);
    assert_eq!(refusals, [""; 0]);
}

#[test]
fn a_worker_that_refuses_is_ended_for_another() {
    let refusals = goes_on_after(&[Attempt::Refuse, Attempt::Serve]);
    assert_eq!(refusals, ["Busy"]);
}

/// A reset that a VM asks for while its device has no worker, and whether it is answered before the lender takes the next
/// attempt up.
fn reset_without_a_worker(bars: BarOwner) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("lender.sock");
    let lender = Lender::start(&socket, bars, &[Attempt::Serve, Attempt::Serve]);
    let served = Served::start(config(&dir, socket, Duration::from_secs(4), DEADLINE));
    let mut vmm = served.client(DMA);
    vmm.reset().unwrap();
    let mut state = lender.state.lock().unwrap();
    state.kill();
    std::thread::scope(|scope| {
        let (answered, answer) = mpsc::channel();
        scope.spawn(move || {
            vmm.reset().unwrap();
            answered.send(()).unwrap();
            // The device is returned with it.
            answered
        });
        // Longer than an attempt, and shorter than a request is held.
        let without = answer.recv_timeout(Duration::from_millis(1500)).is_ok();
        drop(state);
        if !without {
            answer.recv_timeout(DEADLINE).unwrap();
        }
        without
    })
}

/// A function does DMA on when its worker is gone: what stops it is answered by the next one.
#[test]
fn a_function_without_a_worker_is_not_said_to_be_reset() {
    assert!(reset_without_a_worker(BarOwner::Borrower));
    assert!(!reset_without_a_worker(BarOwner::Lender));
}

/// A VM whose function has no worker and gets none is told that it is reset when the lender has stopped it.
#[test]
fn a_function_that_gets_no_worker_is_stopped_before_its_vm_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("lender.sock");
    let lender = Lender::start(&socket, BarOwner::Lender, &[Attempt::Serve]);
    let served = Served::start(config(&dir, socket, Duration::from_secs(4), DEADLINE));
    let mut vmm = served.client(DMA);
    vmm.reset().unwrap();
    let mut state = lender.state.lock().unwrap();
    state.kill();
    let kept = state.kept.take().unwrap();
    std::thread::scope(|scope| {
        let resets = scope.spawn(|| vmm.reset());
        // It takes no attempt up meanwhile, and closes the connection when it has stopped the function.
        let mut fds = [PollFd::new(&kept, PollFlags::RDHUP)];
        let patience = Timespec::try_from(DEADLINE).unwrap();
        poll(&mut fds, Some(&patience)).unwrap();
        assert!(
            !fds[0].revents().is_empty(),
            "the backend does not give it up"
        );
        std::thread::sleep(Duration::from_millis(200));
        assert!(
            !resets.is_finished(),
            "answered while the function does DMA"
        );
        drop(kept);
        let _ = resets.join().unwrap();
    });
    drop(state);
}

#[test]
fn a_worker_that_ends_before_the_lease_costs_the_vm_nothing() {
    use Attempt::{Fail, Kill, Serve};
    for (attempts, state) in [
        ([Kill, Kill, Serve], "leased"),
        ([Fail, Fail, Serve], "leased"),
        ([Fail, Fail, Fail], "described"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("lender.sock");
        let lender = Lender::start(&socket, BarOwner::Borrower, &attempts);
        let served = Served::start(config(&dir, socket, Duration::from_secs(4), DEADLINE));
        let mut vmm = served.client(DMA);
        let answer = vmm.reset();
        assert_eq!(answer.is_ok(), state == "leased", "{answer:?}");
        assert_eq!(served.state(), state);
        assert!(lender.state.lock().unwrap().attempts.is_empty());
    }
}
