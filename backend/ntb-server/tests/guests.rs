//! Two guests in real QEMU, connected by the NTB. These tests fail with the reason where
//! the test bed cannot be prepared (no apt, no network).

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use farside_daemon::Wakeup;
use farside_ntb::regs::{
    ID, REGISTERS_BAR, WINDOW_BAR, error, link_control, link_status, lut, lut_entry, reg,
    requester, requester_entry,
};
use farside_ntb_server::{Config, NtbServer, PortAt, PortConfig};
use farside_testbed::{BarAddress, Progress, Testbed, Vm, Width};

/// Two emulated guests may share two CPUs with others.
const BOOT: Duration = Duration::from_secs(240);
const SHORT: Duration = Duration::from_secs(60);

/// Bytes of a segment: 1 GiB in 512.
const SEGMENT: u64 = 2 << 20;

fn testbed() -> &'static Testbed {
    static TESTBED: OnceLock<Testbed> = OnceLock::new();
    TESTBED.get_or_init(|| Testbed::prepare(&Progress::auto()).unwrap())
}

/// A server on a thread.
struct Server {
    directory: tempfile::TempDir,
    stop: Wakeup,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| PortAt {
            socket: directory.path().join(name),
            sizes: PortConfig::default(),
        };
        let config = Config {
            ports: [at("a"), at("b")],
        };
        let server = NtbServer::start(&config).unwrap();
        let stop = Wakeup::new().unwrap();
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || server.run(&stop).unwrap()
        });
        Self {
            directory,
            stop,
            thread: Some(thread),
        }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.raise();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.expect("it was started").expect("the server panicked");
        }
    }
}

fn device(socket: &Path) -> String {
    serde_json::json!({
        "driver": "vfio-user-pci",
        "socket": { "type": "unix", "path": socket },
    })
    .to_string()
}

/// A guest with a port.
struct Host {
    vm: Vm,
    bdf: String,
}

/// The sysfs name of the only PCI function with that vendor and device.
fn find(vm: &Vm, id: &str) -> String {
    let line = vm.exec_ok(&format!("lspci -D -d {id}"), SHORT).unwrap();
    let name = line.split_whitespace().next();
    name.unwrap_or_else(|| panic!("no {id} in the guest"))
        .to_owned()
}

impl Host {
    /// Waits for a guest and performs a driver's initialization.
    fn new(vm: Vm) -> Self {
        vm.wait_agent(BOOT).unwrap();
        let bdf = find(&vm, "fa5d:b41d");
        let host = Self { vm, bdf };
        host.vm.config_write(&host.bdf, 4, Width::U16, 6).unwrap();
        assert_eq!(host.get(reg::ID), ID);
        host.put(requester_entry(0), requester::VALID);
        host.put(reg::LINK_CONTROL, link_control::ENABLE);
        // A read flushes the posted write: afterwards the other guest sees the link.
        assert_eq!(host.get(reg::LINK_CONTROL), link_control::ENABLE);
        host
    }

    fn at(&self, bar: u8, offset: u64) -> BarAddress {
        BarAddress {
            bdf: self.bdf.clone(),
            bar,
            offset,
        }
    }

    fn get(&self, offset: u64) -> u32 {
        let at = self.at(REGISTERS_BAR, offset);
        self.vm.mmio_read(&at, Width::U32).unwrap() as u32
    }

    fn put(&self, offset: u64, value: u32) {
        let at = self.at(REGISTERS_BAR, offset);
        self.vm.mmio_write(&at, Width::U32, value.into()).unwrap();
    }

    /// Translates a segment to a peer address; written as two halves, the valid bit last.
    fn lead(&self, segment: u32, address: u64) {
        let entry = address | lut::VALID;
        self.put(lut_entry(segment) + 4, (entry >> 32) as u32);
        self.put(lut_entry(segment), entry as u32);
    }

    fn store(&self, offset: u64, width: Width, value: u64) {
        let at = self.at(WINDOW_BAR, offset);
        self.vm.mmio_write(&at, width, value).unwrap();
    }

    fn load(&self, offset: u64, width: Width) -> u64 {
        self.vm
            .mmio_read(&self.at(WINDOW_BAR, offset), width)
            .unwrap()
    }
}

#[test]
fn a_guest_reaches_the_other_guests_memory_and_devices() {
    let server = Server::start();
    let launch = |name: &str, more: &[&str]| {
        testbed()
            .vm(name)
            .memory(512 << 20)
            .args(["-device".to_owned(), device(&server.socket(name))])
            .args(more.iter().copied())
            .launch()
            .unwrap()
    };
    let (a, b) = (launch("a", &[]), launch("b", &["-device", "edu"]));
    let (a, b) = (Host::new(a), Host::new(b));
    assert_ne!(a.get(reg::LINK_STATUS) & link_status::UP, 0);
    assert_ne!(b.get(reg::LINK_STATUS) & link_status::UP, 0);

    // Memory, in both directions and every width.
    for (from, to) in [(&a, &b), (&b, &a)] {
        let page = to.vm.alloc_page(4096).unwrap();
        let segment_offset = page.gpa % SEGMENT;
        from.lead(7, page.gpa - segment_offset);
        let window = 7 * SEGMENT + segment_offset;
        let values = [
            (0x00, Width::U8, 0x11),
            (0x02, Width::U16, 0x2222),
            (0x04, Width::U32, 0x3333_3333),
            (0x08, Width::U64, 0x4444_4444_5555_5555),
        ];
        for (offset, width, value) in values {
            from.store(window + offset, width, value);
            assert_eq!(from.load(window + offset, width), value);
        }
        let bytes = to.vm.read_page(page, 0, 16).unwrap();
        let mut expected = vec![0x11, 0, 0x22, 0x22, 0x33, 0x33, 0x33, 0x33];
        expected.extend([0x55, 0x55, 0x55, 0x55, 0x44, 0x44, 0x44, 0x44]);
        assert_eq!(bytes, expected);
        assert_eq!(from.get(reg::ERROR_COUNT), 0);
    }

    // A register of a device of B's: QEMU's educational device answers a write
    // to its register 4 with the complement.
    let edu = find(&b.vm, "1234:11e8");
    b.vm.config_write(&edu, 4, Width::U16, 2).unwrap();
    let bar = b.vm.config_read(&edu, 0x10, Width::U32).unwrap() & !0xf;
    a.lead(9, bar - bar % SEGMENT);
    let window = 9 * SEGMENT + bar % SEGMENT;
    assert_eq!(a.load(window, Width::U32), 0x0100_00ed);
    a.store(window + 4, Width::U32, 0x1234_5678);
    assert_eq!(a.load(window + 4, Width::U32), 0xedcb_a987);
    assert_eq!(a.get(reg::ERROR_COUNT), 0);

    // An address beyond B's address space is refused.
    a.lead(10, 1 << 40);
    assert_eq!(a.load(10 * SEGMENT, Width::U32), 0xffff_ffff);
    assert_eq!(a.get(reg::ERROR_COUNT), 1);
    assert_eq!(a.get(reg::ERROR_INFO), error::PEER_REFUSED);

    for host in [a, b] {
        host.vm.shutdown(SHORT).unwrap();
    }
}

/// Not a test: prints a guest's rate of accesses through a window.
#[test]
#[ignore = "a measurement"]
fn rates() {
    const COUNT: u64 = 100_000;
    let server = Server::start();
    let launch = |name: &str| {
        testbed()
            .vm(name)
            .memory(512 << 20)
            .args(["-device".to_owned(), device(&server.socket(name))])
            .launch()
            .unwrap()
    };
    let (a, b) = (launch("a"), launch("b"));
    let (a, b) = (Host::new(a), Host::new(b));
    let page = b.vm.alloc_page(2 << 20).unwrap();
    a.lead(0, page.gpa);
    let start = Instant::now();
    a.vm.mmio_fill(&a.at(WINDOW_BAR, 0), Width::U64, 7, COUNT)
        .unwrap();
    // Flushes all posted writes.
    a.load(8 * (COUNT - 1), Width::U64);
    let rate = COUNT as f64 / start.elapsed().as_secs_f64();
    println!("stores of 8 bytes to the far guest's memory: {rate:.0} a second");

    let window = a.vm.config_read(&a.bdf, 0x18, Width::U32).unwrap() & !0xf
        | a.vm.config_read(&a.bdf, 0x1c, Width::U32).unwrap() << 32;
    let before = a.get(reg::WINDOW_READS);
    let start = Instant::now();
    a.vm.phys_read(window, 256 << 10).unwrap();
    let rate = f64::from(a.get(reg::WINDOW_READS) - before) / start.elapsed().as_secs_f64();
    println!("loads from the far guest's memory: {rate:.0} a second");
    drop(b);
}
