//! A lender of two such devices at a TCP port, and peers that send arbitrary data.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{Arc, Mutex, atomic::AtomicU32},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use farside_daemon::{DeviceId, Wakeup};
use farside_fabric::{Budget, soft::Adapter};
use farside_lender_protocol::{
    Address, Channel, Client, Envelope, Generation, Listener, RegisterToken, Registers,
    RemoteError, Reply, Request, Transport, VERSION,
};
use farside_pki::Renewed;
use rustix::event::{PollFd, PollFlags, poll};

use super::device::{Done, Recorder};
use crate::{
    access::Access,
    config::{Borrower, Config},
    connection::{self, About},
    device_loop::{DeviceLoop, InLender, Lendable, Stopped},
    fences::FenceBook,
    listening::PeerLines,
    registry::Registry,
    server::Devices,
    source::DeviceSource,
};

pub(super) const DEADLINE: Duration = Duration::from_secs(20);
pub(super) const DEVICES: [&str; 2] = ["dev0", "dev1"];
pub(super) const DEVICE: &str = DEVICES[0];

/// Polls until `done`, whose request to a server keeps this from busy-waiting.
pub(super) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        std::thread::yield_now();
    }
}

pub(super) struct Host {
    pub(super) address: Address,
    logs: Vec<Arc<Mutex<Vec<Done>>>>,
    /// Remaining calls of `revoke` that will fail, of all devices.
    pub(super) failing_closes: Arc<AtomicU32>,
    stop: Wakeup,
    /// Serves a connection on a thread.
    serve: Arc<dyn Fn(Channel) + Send + Sync>,
    devices: Vec<JoinHandle<Stopped>>,
    /// The directory in which handovers are persisted.
    dir: tempfile::TempDir,
    listener: Option<JoinHandle<()>>,
}

impl Host {
    pub(super) fn new() -> Self {
        let failing_closes = Arc::default();
        let mut logs = Vec::new();
        let mut devices: Vec<Box<dyn DeviceSource>> = Vec::new();
        for _ in DEVICES {
            let (device, log) = Recorder::new(&failing_closes);
            devices.push(Box::new(device));
            logs.push(log);
        }
        let mut host = Self::lending(devices, Duration::ZERO);
        host.logs = logs;
        host.failing_closes = failing_closes;
        host
    }

    /// A host with devices of other kinds, whose threads busy-poll for `poll_time`.
    pub(super) fn lending(devices: Vec<Box<dyn DeviceSource>>, poll_time: Duration) -> Self {
        Self::lending_to(Borrower::Network, devices, poll_time, None)
    }

    /// A host that lends to `borrower`, with TLS by these certificates.
    pub(super) fn with_tls(borrower: &str, certificates: Renewed) -> Self {
        let mut devices: Vec<Box<dyn DeviceSource>> = Vec::new();
        let mut logs = Vec::new();
        for _ in DEVICES {
            let (device, log) = Recorder::new(&Arc::default());
            devices.push(Box::new(device));
            logs.push(log);
        }
        let borrower = borrower.parse().unwrap();
        let tls = Some(Arc::new(certificates));
        let mut host = Self::lending_to(borrower, devices, Duration::ZERO, tls);
        host.logs = logs;
        host
    }

    fn lending_to(
        borrower: Borrower,
        devices: Vec<Box<dyn DeviceSource>>,
        poll_time: Duration,
        tls: Option<Arc<Renewed>>,
    ) -> Self {
        let stop = Wakeup::new().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let fences = FenceBook::load(Some(dir.path().join("lender.json"))).unwrap();
        let registry = Arc::new(Registry::new(fences));
        let mut threads = Vec::new();
        for (id, source) in DEVICES.into_iter().zip(devices) {
            let id: DeviceId = id.parse().unwrap();
            let (kind, described) = (source.kind(), source.described().clone());
            let home = InLender::new(id.clone(), Arc::clone(&registry));
            let (device_loop, queue) = DeviceLoop::new(
                id.clone(),
                Box::new(home),
                stop.clone(),
                poll_time,
                Budget::of_this_process().shared_by(DEVICES.len()).into(),
            )
            .unwrap();
            let user = rustix::process::geteuid().as_raw();
            let access = Access::new(&id, user, vec![borrower.clone()]);
            registry
                .add(&id, kind, described, queue, access, Generation(1))
                .unwrap();
            threads.push(std::thread::spawn(move || {
                device_loop.run(Lendable::Here(source))
            }));
        }
        let listener = Listener::bind_tcp("127.0.0.1", 0, tls).unwrap();
        let address = listener.address();
        let adapter = Adapter::new(Default::default()).unwrap();
        let about = Arc::new(About {
            name: "peer".parse().unwrap(),
            limits: Default::default(),
            devices: Devices::new(
                &Config::default(),
                Arc::clone(&registry),
                adapter.clone(),
                None,
                stop.clone(),
            ),
            adapter,
            ntb: None,
            peers: Vec::new(),
        });
        let stopped = stop.clone();
        let serve: Arc<dyn Fn(Channel) + Send + Sync> = Arc::new(move |channel| {
            let (about, registry) = (Arc::clone(&about), Arc::clone(&registry));
            let stopped = stopped.clone();
            std::thread::spawn(move || {
                let lines = PeerLines::default();
                connection::serve(channel, &about, &registry, &stopped, &lines, &|_| Ok(()));
            });
        });
        let (accepted, stopped) = (Arc::clone(&serve), stop.clone());
        let listener = std::thread::spawn(move || {
            loop {
                let mut fds = [
                    PollFd::new(&listener, PollFlags::IN),
                    PollFd::new(&stopped, PollFlags::IN),
                ];
                poll(&mut fds, None).unwrap();
                if !fds[1].revents().is_empty() {
                    return;
                }
                while let Some(channel) = listener.accept().unwrap() {
                    accepted(channel);
                }
            }
        });
        Self {
            address,
            logs: Vec::new(),
            failing_closes: Arc::default(),
            stop,
            serve,
            devices: threads,
            dir,
            listener: Some(listener),
        }
    }

    pub(super) fn client(&self, vm: &str) -> Client {
        Client::connect(&self.address, Some(&vm.parse().unwrap())).unwrap()
    }

    pub(super) fn peer(&self) -> Peer {
        Peer {
            channel: Channel::connect(&self.address, self.dir.path(), DEADLINE).unwrap(),
            generation: Generation(0),
        }
    }

    /// A peer that has sent Hello.
    pub(super) fn hello(&self, vm: &str) -> Peer {
        let mut peer = self.peer();
        let vm = Some(vm.to_owned());
        let hello = Request::Hello {
            version: VERSION,
            vm,
        };
        peer.call(hello, 0).unwrap();
        peer
    }

    /// A tool of the lender's own user, on this host.
    pub(super) fn operator(&self) -> Peer {
        let (ours, theirs) = Channel::pair().unwrap();
        (self.serve)(theirs);
        let mut peer = Peer {
            channel: ours,
            generation: Generation(0),
        };
        let hello = Request::Hello {
            version: VERSION,
            vm: None,
        };
        peer.call(hello, 0).unwrap();
        peer
    }

    /// A peer with a lease, and the token for its register channel.
    pub(super) fn borrow(&self, vm: &str) -> (Peer, RegisterToken) {
        let mut peer = self.hello(vm);
        let device = DEVICE.parse().unwrap();
        let transport = Transport::Ntb;
        match peer
            .call(
                Request::Borrow {
                    device,
                    transport,
                    fence: None,
                },
                0,
            )
            .unwrap()
        {
            Reply::Lease {
                generation,
                registers: Registers::RegisterToken(token),
                ..
            } => {
                peer.generation = generation;
                (peer, token)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Connects the register channel of a token.
    pub(super) fn registers(&self, token: RegisterToken) -> Result<Channel, RemoteError> {
        let mut peer = self.peer();
        match peer.call(Request::Registers { token }, 0)? {
            Reply::Done => Ok(peer.channel),
            other => panic!("{other:?}"),
        }
    }

    /// A bare socket.
    pub(super) fn socket(&self) -> TcpStream {
        match &self.address {
            Address::Tcp { host, port } | Address::Tls { host, port } => {
                TcpStream::connect((host.as_str(), *port)).unwrap()
            }
            Address::Unix(_) => unreachable!(),
        }
    }

    pub(super) fn holder(&self) -> Option<String> {
        let mut tool = Client::connect(&self.address, None).unwrap();
        let status = tool.status(&DEVICE.parse().unwrap()).unwrap();
        status.entry.borrowed_by.map(|by| by.vm.to_string())
    }

    /// Waits until the device is not lent; then it must not be able to access any memory
    /// either.
    pub(super) fn wait_until_free(&self) {
        until("the device is free", || self.holder().is_none());
        let log = self.log();
        let end = &log[log.len() - 3..];
        assert_eq!(end, [Done::Close, Done::Settle, Done::End], "{log:?}");
    }

    /// Stops the devices' threads, and returns how the thread of [`DEVICE`] ended.
    pub(super) fn stop(&mut self) -> Stopped {
        self.stop.raise();
        let mut ends = self.devices.drain(..).map(|thread| thread.join().unwrap());
        let first = ends.next().unwrap();
        ends.for_each(drop);
        first
    }

    pub(super) fn log(&self) -> Vec<Done> {
        self.logs[0].lock().unwrap().clone()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.raise();
        let devices = self.devices.drain(..).map(|thread| thread.join().map(drop));
        let listener = self.listener.take().map(JoinHandle::join);
        for ended in devices.chain(listener) {
            if !std::thread::panicking() {
                ended.unwrap();
            }
        }
    }
}

pub(super) struct Peer {
    pub(super) channel: Channel,
    pub(super) generation: Generation,
}

impl Peer {
    /// Sends a request that is ordered after `accesses` register accesses.
    pub(super) fn post(&mut self, request: Request, accesses: u64) {
        let envelope = Envelope {
            generation: self.generation,
            accesses,
            request,
        };
        self.channel.send(&envelope, &[], DEADLINE).unwrap();
    }

    pub(super) fn call(&mut self, request: Request, accesses: u64) -> Result<Reply, RemoteError> {
        self.post(request, accesses);
        match self.channel.receive(DEADLINE).unwrap().0 {
            Reply::Refused(error) => Err(error),
            reply => Ok(reply),
        }
    }
}

/// Waits for the lender to close the connection, in whatever way.
#[track_caller]
pub(super) fn expect_closed(mut socket: impl Read) {
    let mut rest = Vec::new();
    match socket.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

/// Sends `message` with a length prefix.
pub(super) fn send_frame(socket: &mut impl Write, message: &[u8]) {
    socket
        .write_all(&(message.len() as u32).to_le_bytes())
        .unwrap();
    socket.write_all(message).unwrap();
}
