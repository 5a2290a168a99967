//! A lender, and a peer that can send it arbitrary data.

use std::{
    fs::{File, Permissions},
    io::IoSlice,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::Path,
    sync::LazyLock,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use farside_daemon::Wakeup;
use farside_devices::dma_test::SRAM_SIZE;
use farside_fabric::{Iova, NtbLimits, PeerAddress, Usage};
use farside_lender::{
    Lender,
    config::{Borrower, Config, DeviceConfig, Model, TlsConfig},
};
use farside_lender_protocol::{
    Address, Channel, ChannelError, Client, DeviceStatus, Envelope, ErrorKind, Generation,
    HeldFence, RemoteError, Reply, Request, Secret, Transport, VERSION,
    registers::{Access, Event},
};
use farside_pki::issue::{self, Validity};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};

pub const DEADLINE: Duration = Duration::from_secs(20);
pub const DEVICE: &str = "dma0";

/// The name in the certificates of [`pki`].
pub const HOST: &str = "rack1-a";

/// The directory with the certificates of these tests' lenders and peers.
pub fn pki() -> &'static Path {
    static PKI: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
        let pki = tempfile::tempdir().unwrap();
        let (dir, days) = (pki.path(), Validity::days(1));
        issue::init(dir, "test CA", days, false).unwrap();
        let local = ["127.0.0.1".parse().unwrap()];
        issue::issue(dir, HOST, &local, days, dir, false).unwrap();
        pki
    });
    PKI.path()
}

/// Polls until `done`, whose request to a server keeps this from busy-waiting.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        std::thread::yield_now();
    }
}

/// The secret of the fence that a migration asks for in these tests.
pub fn secret(migration: &str) -> Secret {
    let bits = migration
        .bytes()
        .fold(0, |bits, byte| bits << 8 | u128::from(byte));
    format!("{bits:032x}").try_into().unwrap()
}

/// A fence that a migration asked for.
pub fn held(generation: u64, migration: &str) -> HeldFence {
    HeldFence {
        generation: Generation(generation),
        secret: Some(secret(migration)),
    }
}

/// A lender that runs while this value lives.
pub struct Running {
    dir: tempfile::TempDir,
    config: Config,
    /// Its socket, a TCP port of this host, and one with TLS.
    pub addresses: Vec<Address>,
    stop: Wakeup,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    /// Lends one DMA test device.
    pub fn new() -> Self {
        Self::with(1, NtbLimits::default())
    }

    /// Lends DMA test devices `dma0`, `dma1`, ..., also to peers of both ports.
    pub fn with(devices: usize, fabric: NtbLimits) -> Self {
        Self::start(&vec![&["network", "host=rack1-a"][..]; devices], fabric)
    }

    /// Lends one DMA test device for each list of borrowers.
    pub fn lending(borrowers: &[&[&str]]) -> Self {
        Self::start(borrowers, NtbLimits::default())
    }

    fn start(borrowers: &[&[&str]], fabric: NtbLimits) -> Self {
        // Other users may pass through it; the socket's own directory is created by the lender.
        let passable = Permissions::from_mode(0o711);
        let dir = tempfile::Builder::new().permissions(passable).tempdir();
        let dir = dir.unwrap();
        let rule = |rule: &&str| rule.parse::<Borrower>().unwrap();
        let device = borrowers.iter().enumerate().map(|(n, rules)| DeviceConfig {
            id: format!("dma{n}").parse().unwrap(),
            source: Model::dma_test().into(),
            borrowers: rules.iter().map(rule).collect(),
        });
        let config = Config {
            name: "test".parse().unwrap(),
            state: Some(dir.path().join("lender.json")),
            socket: dir.path().join("run/lender.sock"),
            listen: ["tcp:127.0.0.1:0", "tls:127.0.0.1:0"]
                .map(|address| address.parse().unwrap())
                .into(),
            tls: Some(TlsConfig {
                directory: Some(pki().to_owned()),
            }),
            fabric,
            device: device.collect(),
            ..Config::default()
        };
        let lender = Lender::start(config.clone()).unwrap();
        let stop = lender.stop_handle();
        let addresses = lender.addresses();
        let thread = std::thread::spawn(move || lender.run().unwrap());
        Self {
            dir,
            config,
            addresses,
            stop,
            thread: Some(thread),
        }
    }

    /// Replaces it by another lender, which reads the first one's file.
    pub fn restart(&mut self) {
        self.stop();
        let lender = Lender::start(self.config.clone()).unwrap();
        self.stop = lender.stop_handle();
        self.addresses = lender.addresses();
        self.thread = Some(std::thread::spawn(move || lender.run().unwrap()));
    }

    /// The file with its fences.
    pub fn state(&self) -> std::path::PathBuf {
        self.dir.path().join("lender.json")
    }

    pub fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("run/lender.sock")
    }

    pub fn peer(&self) -> Peer {
        Peer::connect(&self.socket().into())
    }

    /// A peer of each kind without TLS: local, and possibly remote (TCP).
    pub fn peers(&self) -> Vec<Peer> {
        self.addresses[..2].iter().map(Peer::connect).collect()
    }

    /// A peer that has sent Hello for `vm`.
    pub fn hello(&self, vm: &str) -> Peer {
        self.peer().greeted(vm)
    }

    /// A peer that has sent Hello for no VM.
    pub fn tool(&self) -> Peer {
        self.peer().of_tool()
    }

    /// A peer with a lease of the device for `vm`, and the register channel.
    pub fn borrow(&self, device: &str, vm: &str) -> (Peer, Channel) {
        let mut peer = self.hello(vm);
        let registers = peer.borrow(device).unwrap();
        (peer, registers)
    }

    pub fn status(&self, device: &str) -> DeviceStatus {
        Client::connect(&self.socket().into(), None)
            .unwrap()
            .status(&device.parse().unwrap())
            .unwrap()
    }

    pub fn holder(&self, device: &str) -> Option<String> {
        self.status(device)
            .entry
            .borrowed_by
            .map(|holder| holder.vm.to_string())
    }

    /// Waits until the device is not lent; then nothing of it may be open.
    pub fn wait_until_free(&self, device: &str) {
        until("the device is free", || self.holder(device).is_none());
        let status = self.status(device);
        assert_eq!(status.usage, Usage::default());
        assert!(!status.bus_master);
    }

    /// Stops it, and waits for its end.
    pub fn stop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

/// A connection to a lender, without checks of the sent messages.
pub struct Peer {
    pub channel: Channel,
    pub generation: Generation,
}

impl Peer {
    pub fn connect(address: &Address) -> Self {
        Self {
            channel: Channel::connect(address, pki(), DEADLINE).unwrap(),
            generation: Generation(0),
        }
    }

    /// The peer, after Hello for `vm`.
    pub fn greeted(mut self, vm: &str) -> Self {
        let reply = self.hello(VERSION, Some(vm)).unwrap();
        assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
        self
    }

    /// The peer, after Hello for no VM.
    pub fn of_tool(mut self) -> Self {
        let reply = self.hello(VERSION, None).unwrap();
        assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
        self
    }

    pub fn post(&mut self, request: Request, fds: &[BorrowedFd<'_>]) {
        let generation = self.generation;
        let envelope = Envelope {
            generation,
            accesses: 0,
            request,
        };
        self.channel.send(&envelope, fds, DEADLINE).unwrap();
    }

    pub fn reply(&mut self) -> Result<(Reply, Vec<OwnedFd>), RemoteError> {
        match self.channel.receive::<Reply>(DEADLINE).unwrap() {
            (Reply::Refused(error), _) => Err(error),
            reply => Ok(reply),
        }
    }

    pub fn call(&mut self, request: Request, fds: &[BorrowedFd<'_>]) -> Result<Reply, RemoteError> {
        self.post(request, fds);
        self.reply().map(|(reply, _)| reply)
    }

    /// Checks that a refusal contains each of `words`; returns its kind.
    #[track_caller]
    pub fn refused(
        &mut self,
        request: Request,
        fds: &[BorrowedFd<'_>],
        words: &[&str],
    ) -> ErrorKind {
        let error = self.call(request, fds).unwrap_err();
        for word in words {
            assert!(error.message.contains(word), "no {word:?} in {error}");
        }
        error.kind
    }

    pub fn hello(&mut self, version: u32, vm: Option<&str>) -> Result<Reply, RemoteError> {
        let vm = vm.map(str::to_owned);
        self.call(Request::Hello { version, vm }, &[])
    }

    /// As [`Peer::hello`]; the lender may close the connection.
    pub fn try_hello(&mut self, version: u32) -> Result<Reply, ChannelError> {
        let envelope = Envelope {
            generation: self.generation,
            accesses: 0,
            request: Request::Hello { version, vm: None },
        };
        self.channel.send(&envelope, &[], DEADLINE)?;
        Ok(self.channel.receive(DEADLINE)?.0)
    }

    pub fn borrow(&mut self, device: &str) -> Result<Channel, RemoteError> {
        self.borrow_under(device, None)
    }

    /// Borrows as a moved VM, which has a fence.
    pub fn borrow_under(
        &mut self,
        device: &str,
        fence: Option<HeldFence>,
    ) -> Result<Channel, RemoteError> {
        let sram = memory(SRAM_SIZE);
        let device = device.parse().unwrap();
        self.post(
            Request::Borrow {
                device,
                transport: Transport::SharedMemory,
                fence,
            },
            &[sram.as_fd()],
        );
        match self.reply()? {
            (Reply::Lease { generation, .. }, fds) => {
                self.generation = generation;
                let socket = fds.into_iter().next().expect("a register channel");
                Ok(Channel::from_socket(socket))
            }
            (other, _) => panic!("{other:?}"),
        }
    }

    /// Maps `file` at `peer_address`, with a window at `iova`, and sets bus-master enable.
    pub fn open(&mut self, file: &File, iova: u64, peer_address: u64, len: u64) {
        let (iova, peer_address) = (Iova::new(iova), PeerAddress::new(peer_address));
        let map = Request::MapPeer {
            peer_address,
            len,
            offset: 0,
            writable: true,
        };
        self.call(map, &[file.as_fd()]).unwrap();
        self.call(
            Request::OpenWindow {
                iova,
                peer_address,
                len,
            },
            &[],
        )
        .unwrap();
        self.call(Request::EnableBusMaster, &[]).unwrap();
    }

    /// Sends arbitrary bytes, framed as one message.
    pub fn send_raw(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        if self.channel.is_tcp() {
            assert!(fds.is_empty());
            let mut frame = (bytes.len() as u32).to_le_bytes().to_vec();
            frame.extend(bytes);
            let sent = send(&self.channel, &frame, SendFlags::NOSIGNAL);
            assert_eq!(sent, Ok(frame.len()));
            return;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let iov = [IoSlice::new(bytes)];
        sendmsg(&self.channel, &iov, &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    /// Waits for the lender to close the connection.
    #[track_caller]
    pub fn expect_closed(&mut self) {
        match self.channel.receive::<Reply>(DEADLINE) {
            Err(ChannelError::Closed) => {}
            other => panic!("not closed: {other:?}"),
        }
    }
}

pub fn read(registers: &mut Channel, bar: u8, offset: u64, len: u8) -> u64 {
    ask(registers, Access::Read { bar, offset, len })
}

pub fn interrupt_status(registers: &mut Channel) -> u64 {
    ask(registers, Access::InterruptStatus)
}

pub fn ask(registers: &mut Channel, access: Access) -> u64 {
    registers.send(&access, &[], DEADLINE).unwrap();
    match registers.receive::<Event>(DEADLINE).unwrap().0 {
        Event::Data { value } => value,
        other => panic!("{other:?}"),
    }
}

pub fn write(registers: &mut Channel, bar: u8, offset: u64, len: u8, value: u64) {
    let access = Access::Write {
        bar,
        offset,
        len,
        value,
    };
    registers.send(&access, &[], DEADLINE).unwrap();
}

pub fn memory(len: u64) -> File {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd.into()
}
