//! Commands from the server to the client.

use std::time::{Duration, Instant};

use farside_vfio_user::serve::{Answer, Handler, Pumped, pump, pump_replies};
use farside_vfio_user::{
    Connection, ConnectionError, DmaCommands, Errno, Header, Matched, Refusal, ReplyTo, Request,
    Session,
};
use rustix::event::{PollFd, PollFlags, poll};

use crate::harness::*;

const DMA_READ: u16 = 11;
const DMA_WRITE: u16 = 12;
const REPLY: u32 = 1;
const ERROR_REPLY: u32 = 1 | 1 << 5;

/// A server with outstanding commands, which answers requests later.
struct Server {
    commands: DmaCommands<u32>,
    /// Tags and results, in order of arrival.
    results: Vec<(u32, Result<Vec<u8>, Errno>)>,
    resets: Vec<ReplyTo>,
}

impl Handler for Server {
    fn refused(&mut self, _: &Refusal) {}

    fn handle(&mut self, request: Request<'_>, to: ReplyTo) -> Answer<'_> {
        match request {
            Request::DeviceReset => {
                self.resets.push(to);
                Answer::Later
            }
            other => panic!("{other:?}"),
        }
    }

    fn reply(&mut self, header: &Header, payload: &[u8]) -> bool {
        match self.commands.on_reply(header, payload) {
            Matched::Nothing => false,
            Matched::Probe => true,
            Matched::Command { tag, result } => {
                self.results.push((tag, result.map(<[u8]>::to_vec)));
                true
            }
        }
    }
}

/// The client's layout of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Specified,
    Early,
}

struct World {
    wire: Wire,
    server: Server,
}

impl World {
    fn new(timeout: Duration, most: usize) -> Self {
        Self {
            wire: Wire::negotiated(),
            server: Server {
                commands: DmaCommands::new(timeout, most),
                results: Vec::new(),
                resets: Vec::new(),
            },
        }
    }

    /// A world whose client has answered the layout probe.
    fn settled(layout: Layout) -> Self {
        let mut world = Self::new(Duration::from_secs(60), 16);
        world.server.commands.read(0, 1, 0).unwrap();
        world.settle(layout);
        let first = world.command();
        world.answer(&first, REPLY, 0, &[0; 17]);
        world.server.results.clear();
        world
    }

    fn settle(&mut self, layout: Layout) {
        let question = self.command();
        assert_eq!(question.command, DMA_WRITE);
        assert_eq!(question.payload, longs(&[0, 1 << 32]));
        match layout {
            Layout::Specified => self.answer(&question, ERROR_REPLY, 7, &[]),
            Layout::Early => self.answer(&question, REPLY, 0, &[]),
        }
    }

    /// The next command that arrives at the client.
    fn command(&mut self) -> Received {
        self.server.commands.flush(&mut self.wire.server).unwrap();
        let command = self.wire.received().expect("a command");
        assert_eq!((command.flags, command.error), (0, 0));
        command
    }

    /// Answers a command, and lets the server process the reply.
    fn answer(&mut self, to: &Received, flags: u32, error: u32, payload: &[u8]) {
        let mut bytes = message(to.id, to.command, flags, payload);
        bytes[12..16].copy_from_slice(&error.to_ne_bytes());
        self.wire.send(&bytes);
        self.run();
    }

    fn run(&mut self) -> Pumped {
        let Wire {
            server, session, ..
        } = &mut self.wire;
        pump(server, session, &mut self.server, 100).unwrap()
    }
}

#[test]
fn a_specified_client_has_its_data_behind_64_bits_of_count() {
    let mut world = World::settled(Layout::Specified);
    world.server.commands.write(0x1000, b"abcdef", 1).unwrap();
    world.server.commands.read(0x2000, 3, 2).unwrap();
    let write = world.command();
    assert_eq!(write.command, DMA_WRITE);
    assert_eq!(
        write.payload,
        [&longs(&[0x1000, 6])[..], b"abcdef"].concat()
    );
    let read = world.command();
    assert_eq!(read.command, DMA_READ);
    assert_eq!(read.payload, longs(&[0x2000, 3]));
    world.answer(&write, REPLY, 0, &longs(&[0x1000, 6]));
    let reply = [&longs(&[0x2000, 3])[..], b"xyz"].concat();
    world.answer(&read, REPLY, 0, &reply);
    assert_eq!(
        world.server.results,
        [(1, Ok(vec![])), (2, Ok(b"xyz".to_vec()))]
    );
    assert!(world.server.commands.is_idle());
}

#[test]
fn an_early_client_has_its_data_behind_32_bits_of_count() {
    let mut world = World::settled(Layout::Early);
    world.server.commands.write(0x1000, b"abcdef", 1).unwrap();
    world.server.commands.read(0x2000, 3, 2).unwrap();
    let write = world.command();
    let payload = [&longs(&[0x1000])[..], &words(&[6]), b"abcdef", &[0; 4]].concat();
    assert_eq!(write.payload, payload);
    let read = world.command();
    assert_eq!(read.payload, longs(&[0x2000, 3]));
    world.answer(&write, REPLY, 0, &[]);
    let reply = [&longs(&[0x2000])[..], &words(&[3]), b"xyz", &[0; 4]].concat();
    world.answer(&read, REPLY, 0, &reply);
    assert_eq!(
        world.server.results,
        [(1, Ok(vec![])), (2, Ok(b"xyz".to_vec()))]
    );
}

#[test]
fn commands_wait_until_the_layout_is_known_and_keep_their_order() {
    let mut world = World::new(Duration::from_secs(60), 16);
    for n in 0..3 {
        world
            .server
            .commands
            .write(n, &[n as u8], n as u32)
            .unwrap();
    }
    world.settle(Layout::Specified);
    for n in 0..3 {
        assert_eq!(
            world.command().payload,
            [&longs(&[n, 1])[..], &[n as u8]].concat()
        );
    }
    // The layout is probed once.
    assert!(world.wire.received().is_none());
}

#[test]
fn errors_and_short_replies_are_told() {
    let mut world = World::settled(Layout::Specified);
    world.server.commands.read(0, 4, 1).unwrap();
    world.server.commands.read(0, 4, 2).unwrap();
    let (first, second) = (world.command(), world.command());
    world.answer(&first, ERROR_REPLY, 14, &[]);
    world.answer(&second, REPLY, 0, &[0; 19]);
    assert_eq!(
        world.server.results,
        [(1, Err(Errno::FAULT)), (2, Err(Errno::PROTO))]
    );
}

#[test]
fn a_reply_that_does_not_match_is_ignored() {
    let mut world = World::settled(Layout::Specified);
    world.server.commands.read(0, 4, 1).unwrap();
    let read = world.command();
    let mut other = world.command_like(&read);
    other.id = read.id.wrapping_add(1);
    world.answer(&other, REPLY, 0, &[0; 20]);
    other.id = read.id;
    other.command = DMA_WRITE;
    world.answer(&other, REPLY, 0, &[]);
    assert_eq!(world.server.results, []);
    assert!(world.wire.received().is_none(), "a reply to a reply");
    world.answer(&read, REPLY, 0, &[1; 20]);
    world.answer(&read, REPLY, 0, &[2; 20]);
    assert_eq!(world.server.results, [(1, Ok(vec![1; 4]))]);
}

#[test]
fn replies_are_taken_while_a_request_is_held_and_the_next_request_waits() {
    let mut world = World::settled(Layout::Specified);
    world.server.commands.read(0, 1, 1).unwrap();
    let read = world.command();
    world.wire.send(&message(7, RESET, 0, &[]));
    assert_eq!(world.run(), Pumped::Later);
    let mut bytes = message(read.id, read.command, REPLY, &[5; 17]);
    bytes.extend(message(8, RESET, 0, &[]));
    world.wire.send(&bytes);
    let taken =
        |world: &mut World| pump_replies(&mut world.wire.server, &mut world.server).unwrap();
    assert!(taken(&mut world), "a request waits");
    assert_eq!(world.server.results, [(1, Ok(vec![5]))]);
    assert_eq!(world.server.resets.len(), 1);
    assert!(taken(&mut world), "it still does");
    assert_eq!(world.run(), Pumped::Later);
    assert_eq!(world.server.resets.len(), 2);
    assert!(!taken(&mut world));
}

#[test]
fn commands_expire_oldest_first_and_their_replies_come_too_late() {
    let mut world = World::new(Duration::from_secs(1), 16);
    let start = Instant::now();
    assert_eq!(world.server.commands.deadline(), None);
    world.server.commands.read(0, 1, 1).unwrap();
    world.settle(Layout::Specified);
    world.server.commands.read(0, 1, 2).unwrap();
    let first = world.command();
    let deadline = world.server.commands.deadline().unwrap();
    assert!(deadline >= start + Duration::from_secs(1));
    assert_eq!(world.server.commands.expire(start), None);
    let later = Instant::now() + Duration::from_secs(1);
    assert_eq!(world.server.commands.expire(later), Some(1));
    assert_eq!(world.server.commands.expire(later), Some(2));
    assert_eq!(world.server.commands.expire(later), None);
    world.answer(&first, REPLY, 0, &[0; 17]);
    assert_eq!(world.server.results, []);
}

#[test]
fn a_client_that_never_answers_is_asked_for_its_layout_again() {
    let mut world = World::new(Duration::from_secs(1), 16);
    world.server.commands.write(0, &[1], 1).unwrap();
    world.command();
    let later = Instant::now() + Duration::from_secs(1);
    assert_eq!(world.server.commands.expire(later), Some(1));
    assert!(world.server.commands.is_idle());
    world.server.commands.write(4, &[2], 2).unwrap();
    world.settle(Layout::Early);
    assert_eq!(world.command().payload[..8], longs(&[4]));
}

#[test]
fn commands_are_bounded() {
    let mut world = World::new(Duration::from_secs(60), 2);
    world.server.commands.write(0, &[1], 1).unwrap();
    world.server.commands.write(0, &[1], 2).unwrap();
    assert!(world.server.commands.write(0, &[1], 3).is_err());
    assert!(world.server.commands.read(0, 1, 3).is_err());
    assert_eq!(world.server.commands.clear(), [1, 2]);
    assert!(world.server.commands.is_idle());
    world.server.commands.read(0, 1, 3).unwrap();
}

/// With read-ahead, and a client that sends each message with a separate call, descriptors
/// are attributed to their message.
#[test]
fn reading_ahead_keeps_descriptors_with_their_messages() {
    let mut wire = Wire::negotiated();
    wire.server.read_ahead();
    let map = |address: u64| [words(&[32, 3]), longs(&[0, address, 0x1000])].concat();
    let file = std::fs::File::open("/dev/zero").unwrap();
    let fd = std::os::fd::AsFd::as_fd(&file);
    for n in 0..20u64 {
        let fds = [fd];
        let fds = if n % 3 == 0 { &fds[..] } else { &[] };
        wire.send_fds(&message(n as u16, DMA_MAP, 0, &map(n << 12)), fds);
        wire.send_fds(&message(100, REGION_WRITE, NO_REPLY, &write_of(n)), &[]);
    }
    wire.run().unwrap();
    for n in 0..20 {
        let reply = wire.received().unwrap();
        assert_eq!((reply.id, reply.error), (n, 0));
    }
    let expected: Vec<_> = (0..20u64).map(|n| (n << 12, 0x1000, n % 3 == 0)).collect();
    assert_eq!(wire.device.dma, expected);
    wire.still_framed();
}

/// A write of eight bytes to the start of BAR 0.
fn write_of(value: u64) -> Vec<u8> {
    [access(0, 0, 8), longs(&[value])].concat()
}

#[test]
fn reading_ahead_takes_messages_of_any_size() {
    let (mut client, server) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut server = Connection::new(server).unwrap();
    server.read_ahead();
    let mut session = Session::new();
    let mut device = crate::device::TestDevice::new();
    let mut bytes = message(1, VERSION, 0, &version_payload(0, 1, b"{}"));
    for n in 0..50u32 {
        let len = (n * 997) % 0x4000;
        let data = vec![n as u8; len as usize];
        let payload = [access(0, 0, len), data].concat();
        bytes.extend(message(2, REGION_WRITE, NO_REPLY, &payload));
    }
    let writer = std::thread::spawn(move || {
        std::io::Write::write_all(&mut client, &bytes).unwrap();
    });
    loop {
        match pump(&mut server, &mut session, &mut device, 10) {
            Ok(Pumped::Idle) => wait_readable(&server),
            Ok(_) => {}
            Err(ConnectionError::Closed) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let last = 49 * 997 % 0x4000;
    assert!(device.bar0[..last].iter().all(|byte| *byte == 49));
    writer.join().unwrap();
}

fn wait_readable(connection: &Connection) {
    let mut fds = [PollFd::new(connection, PollFlags::IN)];
    poll(&mut fds, None).unwrap();
}

impl World {
    /// A copy with changed fields.
    fn command_like(&self, like: &Received) -> Received {
        Received {
            payload: Vec::new(),
            fds: Vec::new(),
            ..*like
        }
    }
}
