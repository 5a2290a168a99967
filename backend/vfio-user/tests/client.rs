//! The independent client of the crate `vfio_user`: all of its messages.

#[path = "support/device.rs"]
mod device;

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

use device::{BAR0_FILE_OFFSET, BAR0_SIZE, BAR2_SIZE, CONFIG_SIZE, TestDevice};
use farside_vfio_user::serve::{Pumped, pump};
use farside_vfio_user::{Connection, ConnectionError, Listener, Session, Slot};
use rustix::event::{PollFd, PollFlags, poll};
use vfio_user::Client;

const EVENTFD_TRIGGER: u32 = 1 << 2 | 1 << 5;
const NONE_TRIGGER: u32 = 1 | 1 << 5;

/// Serves one client on a thread, which returns the device after the client has
/// disconnected.
struct Server {
    _dir: tempfile::TempDir,
    path: PathBuf,
    thread: JoinHandle<TestDevice>,
}

impl Server {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device.sock");
        let (ready, started) = mpsc::channel();
        let thread = std::thread::spawn({
            let path = path.clone();
            move || {
                let listener = Listener::bind(&path).unwrap();
                ready.send(()).unwrap();
                wait(&listener, PollFlags::IN);
                serve(listener.accept(Slot::Free).unwrap().unwrap())
            }
        });
        started.recv().unwrap();
        Self {
            _dir: dir,
            path,
            thread,
        }
    }

    fn client(&self) -> Client {
        Client::new(&self.path).unwrap()
    }

    /// The device, after the client has disconnected.
    fn device(self, client: Client) -> TestDevice {
        drop(client);
        self.thread.join().unwrap()
    }
}

fn serve(mut connection: Connection) -> TestDevice {
    let mut session = Session::new();
    let mut device = TestDevice::new();
    loop {
        match pump(&mut connection, &mut session, &mut device, 64) {
            Ok(Pumped::Idle) => wait(&connection, PollFlags::IN),
            Ok(Pumped::Full) => wait(&connection, PollFlags::OUT),
            Ok(_) => {}
            Err(ConnectionError::Closed) => return device,
            Err(error) => panic!("{error}"),
        }
    }
}

fn wait(fd: &impl AsFd, events: PollFlags) {
    poll(&mut [PollFd::new(fd, events)], None).unwrap();
}

#[test]
fn learns_the_regions() {
    let server = Server::start();
    let client = server.client();
    // `new` has exchanged version, device info and all region infos.
    let bar0 = client.region(0).unwrap();
    assert_eq!((bar0.size, bar0.flags), (BAR0_SIZE, 0xf));
    assert_eq!(bar0.file_offset.as_ref().unwrap().start(), BAR0_FILE_OFFSET);
    let areas: Vec<_> = bar0
        .sparse_areas
        .iter()
        .map(|area| (area.offset, area.size))
        .collect();
    assert_eq!(areas, [(0x1000, 0x1000)]);

    let bar2 = client.region(2).unwrap();
    assert_eq!((bar2.size, bar2.flags), (BAR2_SIZE, 0x7));
    assert!(bar2.file_offset.is_some() && bar2.sparse_areas.is_empty());

    let config = client.region(7).unwrap();
    assert_eq!((config.size, config.flags), (CONFIG_SIZE, 0x3));
    assert!(config.file_offset.is_none());
    assert_eq!(client.region(8).unwrap().size, 0);
    server.device(client);
}

#[test]
fn reads_and_writes() {
    let server = Server::start();
    let mut client = server.client();
    for length in [1, 2, 3, 4, 8, 64, 0x4000] {
        let data: Vec<u8> = (0..length).map(|n| (n * 7) as u8).collect();
        client.region_write(0, 0, &data).unwrap();
        let mut read = vec![0; length];
        client.region_read(0, 0, &mut read).unwrap();
        assert_eq!(read, data);
    }
    server.device(client);
}

#[test]
fn maps_and_unmaps() {
    let server = Server::start();
    let mut client = server.client();
    let file = tempfile::tempfile().unwrap();
    client.dma_map(0, 0, 0xa0000, file.as_raw_fd()).unwrap();
    client
        .dma_map(0x100000, 0x100000, 0x100000, file.as_raw_fd())
        .unwrap();
    client.dma_unmap(0, 0xa0000).unwrap();
    assert_eq!(server.device(client).dma, [(0x100000, 0x100000, true)]);
}

#[test]
fn sets_up_interrupts() {
    let server = Server::start();
    let mut client = server.client();
    let info = client.get_irq_info(2).unwrap();
    assert_eq!((info.index, info.count, info.flags), (2, 8, 3));
    assert_eq!(client.get_irq_info(1).unwrap().count, 0);
    assert_eq!(client.get_irq_info(0).unwrap().flags, 7);

    let eventfds: Vec<_> = (0..8)
        .map(|_| vmm_sys_util::eventfd::EventFd::new(0).unwrap())
        .collect();
    let fds: Vec<_> = eventfds.iter().map(AsRawFd::as_raw_fd).collect();
    client.set_irqs(2, EVENTFD_TRIGGER, 0, 8, &fds).unwrap();
    client.set_irqs(2, NONE_TRIGGER, 3, 2, &[]).unwrap();
    client.set_irqs(2, EVENTFD_TRIGGER, 7, 1, &[]).unwrap();
    let device = server.device(client);
    assert_eq!(device.triggered, [3, 4]);
    assert_eq!(device.eventfds.iter().flatten().count(), 7);
}

#[test]
fn resets() {
    let server = Server::start();
    let mut client = server.client();
    client.reset().unwrap();
    client.reset().unwrap();
    // Version 0.1.7 of the client inverts this.
    assert!(!client.resettable());
    assert_eq!(server.device(client).resets, 2);
}

#[test]
fn shuts_down() {
    let server = Server::start();
    let client = server.client();
    client.shutdown().unwrap();
    server.device(client);
}

/// Not a test: prints the round-trip time of a read of four bytes.
///
/// `cargo test --release -p farside-backend --test client -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn round_trip_time() {
    const ROUNDS: usize = 100_000;
    let server = Server::start();
    let mut client = server.client();
    let mut data = [0; 4];
    for _ in 0..1000 {
        client.region_read(7, 0, &mut data).unwrap();
    }
    let mut times: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            client.region_read(7, 0, &mut data).unwrap();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!(
        "p50 {:?}, p99 {:?}",
        times[ROUNDS / 2],
        times[ROUNDS * 99 / 100]
    );
    server.device(client);
}
