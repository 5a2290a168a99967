//! A lender and backends, each on a thread, on sockets in a temporary directory.
//! The tests of the scripted VMM use this file as well.

use std::{
    io::Read,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use farside_backend::{Backend, Config, Interrupts};
use farside_backend_api::{BackendReport, BorrowState, DeviceReport};
use farside_daemon::Wakeup;
use farside_fabric::{NtbLimits, Usage, pin::PinPolicy};
use farside_lender::{
    Lender,
    config::{DeviceConfig, Model},
};
use farside_lender_protocol::{Address, Client, DeviceStatus};

/// Timeout of operations whose duration is not under test.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// The DMA test device.
pub const DMA: &str = "dma0";
/// The NVMe device.
pub const DISK: &str = "disk0";
/// Bytes of its image.
pub const DISK_SIZE: u64 = 16 << 20;

/// Polls until `done`, whose request to a server keeps this from busy-waiting.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        std::thread::yield_now();
    }
}

/// A host with a lender.
pub struct Host {
    lender: Option<RunningLender>,
    limits: NtbLimits,
    devices: Vec<DeviceConfig>,
    dir: tempfile::TempDir,
}

struct RunningLender {
    stop: Wakeup,
    thread: JoinHandle<()>,
}

impl Host {
    /// A host that lends a DMA test device.
    pub fn new() -> Self {
        Self::lending(NtbLimits::default(), |_| vec![dma_test(DMA)])
    }

    /// A host that lends an NVMe device.
    pub fn with_disk() -> Self {
        Self::lending(NtbLimits::default(), |dir| vec![disk(DISK, dir)])
    }

    /// A host that lends these devices, through an adapter with these limits.
    pub fn lending(limits: NtbLimits, devices: impl FnOnce(&Path) -> Vec<DeviceConfig>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let devices = devices(dir.path());
        let mut host = Self {
            lender: None,
            limits,
            devices,
            dir,
        };
        host.start_lender();
        host
    }

    pub fn lender_socket(&self) -> PathBuf {
        self.dir.path().join("lender.sock")
    }

    pub fn lender(&self) -> Address {
        self.lender_socket().into()
    }

    pub fn directory(&self, vm: &str) -> PathBuf {
        self.dir.path().join(vm)
    }

    pub fn start_lender(&mut self) {
        let lender = Lender::start(farside_lender::config::Config {
            name: "test".parse().unwrap(),
            socket: self.lender_socket(),
            state: Some(self.directory("lender.json")),
            fabric: self.limits.clone(),
            device: self.devices.clone(),
            ..Default::default()
        })
        .unwrap();
        let stop = lender.stop_handle();
        let thread = std::thread::spawn(move || lender.run().unwrap());
        self.lender = Some(RunningLender { stop, thread });
    }

    /// Stops the lender; returns when it has revoked every lease and ended.
    pub fn stop_lender(&mut self) {
        if let Some(RunningLender { stop, thread }) = self.lender.take() {
            stop.raise();
            thread.join().unwrap();
        }
    }

    /// Replaces the devices that it lends from its next start on.
    pub fn lend_instead(&mut self, devices: Vec<DeviceConfig>) {
        self.devices = devices;
    }

    /// The lender's report on a device.
    pub fn lender_status(&self, device: &str) -> DeviceStatus {
        let mut client = Client::connect(&self.lender(), None).unwrap();
        client.status(&device.parse().unwrap()).unwrap()
    }

    /// A configuration of a backend for `vm`.
    pub fn config(&self, vm: &str, devices: &[&str]) -> Config {
        Config {
            vm: vm.parse().unwrap(),
            directory: self.directory(vm),
            devices: devices.iter().map(|id| id.parse().unwrap()).collect(),
            lenders: vec![self.lender()],
            discovery: None,
            pki: self.directory(vm),
            memory: None,
            ram: Vec::new(),
            ntb: None,
            fences: None,
            interrupts: Interrupts::Direct,
            pin_policy: PinPolicy::Prefer,
            open_timeout: Duration::from_millis(4500),
            message_timeout: Duration::from_secs(5),
            lost_after: Duration::from_secs(300),
            socket_group: None,
            layout: Default::default(),
            release: None,
            past: Default::default(),
            helper: None,
        }
    }

    /// A backend that serves the device to VM `a`.
    pub fn serve(&self, device: &str) -> Served {
        Served::start(self.config("a", &[device]))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop_lender();
    }
}

pub fn dma_test(id: &str) -> DeviceConfig {
    DeviceConfig {
        id: id.parse().unwrap(),
        source: Model::dma_test().into(),
        borrowers: Vec::new(),
    }
}

pub fn disk(id: &str, dir: &Path) -> DeviceConfig {
    let path = dir.join(format!("{id}.img"));
    let image = std::fs::File::create(&path).unwrap();
    image.set_len(DISK_SIZE).unwrap();
    DeviceConfig {
        id: id.parse().unwrap(),
        source: Model::nvme(path, false).into(),
        borrowers: Vec::new(),
    }
}

/// A running backend.
pub struct Served {
    directory: PathBuf,
    stop: Wakeup,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    pub fn start(config: Config) -> Self {
        let backend = Backend::start(&config).unwrap();
        let stop = Wakeup::new().unwrap();
        let raised = stop.clone();
        let thread = std::thread::spawn(move || backend.run(raised).unwrap());
        Self {
            directory: config.directory,
            stop,
            thread: Some(thread),
        }
    }

    /// Stops the backend; returns when it has returned every device and ended. Signalled
    /// twice, it does not wait for connected clients.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop.raise();
            self.stop.raise();
            thread.join().unwrap();
        }
    }

    pub fn socket(&self, device: &str) -> PathBuf {
        self.directory.join(format!("{device}.sock"))
    }

    /// The backend's report on its first device.
    pub fn status(&self) -> DeviceReport {
        self.full_status().devices.swap_remove(0)
    }

    pub fn full_status(&self) -> BackendReport {
        let mut socket = UnixStream::connect(self.directory.join("status")).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut report = Vec::new();
        socket.read_to_end(&mut report).unwrap();
        BackendReport::from_json(&report).unwrap()
    }

    pub fn state(&self) -> String {
        self.status().state.to_string()
    }

    pub fn last_error(&self) -> String {
        self.status().last_error.expect("an error is reported")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // A failing test must report its own reason.
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

/// Checks that both sides report nothing as mapped or pinned.
#[track_caller]
pub fn assert_closed(host: &Host, served: &Served, device: &str, state: &str) {
    let status = served.status();
    assert_eq!(status.state.to_string(), state, "{status:?}");
    assert_eq!(
        (status.bytes_pinned, status.bytes_locked),
        (0, 0),
        "{status:?}"
    );
    assert_eq!(
        (status.dma_windows, status.lut_entries),
        (0, 0),
        "{status:?}"
    );
    let lender = host.lender_status(device);
    assert!(!lender.bus_master);
    assert_eq!(lender.usage, Usage::default());
    let holder = lender.entry.borrowed_by.map(|holder| holder.vm);
    let expected = (state == "leased").then_some("a");
    assert_eq!(holder.as_deref(), expected);
}

/// Checks that both sides report that much RAM, through that many windows.
#[track_caller]
pub fn assert_open(host: &Host, served: &Served, device: &str, bytes: u64, windows: u32) {
    let status = served.status();
    assert_eq!(status.state, BorrowState::Ready, "{status:?}");
    assert_eq!(status.bytes_pinned, bytes, "{status:?}");
    assert_eq!(status.dma_windows, windows, "{status:?}");
    let lender = host.lender_status(device);
    assert!(lender.bus_master);
    assert_eq!(lender.usage.bytes_mapped, bytes);
    assert_eq!(lender.usage.windows, windows);
    assert_eq!(status.lut_entries, lender.usage.lut_entries);
    assert_eq!(lender.entry.borrowed_by.unwrap().vm, "a");
}
