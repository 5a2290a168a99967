//! Servers that answer what a device's owner would not expect.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use farside_vfio_user_client::{Client, ClientError, MAX_DATA, Memory, NoMemory};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

const REPLY: u32 = 1;
const ERROR: u32 = 1 << 5;

struct Peer(UnixStream);

impl Peer {
    /// The next message: id, command, payload.
    fn receive(&mut self) -> (u16, u16, Vec<u8>) {
        let mut header = [0; 16];
        self.0.read_exact(&mut header).unwrap();
        let size = u32::from_ne_bytes(header[4..8].try_into().unwrap());
        let mut payload = vec![0; size as usize - 16];
        self.0.read_exact(&mut payload).unwrap();
        let u16_at = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        (u16_at(0), u16_at(2), payload)
    }

    fn send(&mut self, (id, command): (u16, u16), flags: u32, payload: &[u8]) {
        self.send_as(payload.len() + 16, (id, command), flags, payload);
    }

    fn send_as(&mut self, size: usize, (id, command): (u16, u16), flags: u32, payload: &[u8]) {
        let mut message = Vec::new();
        message.extend(id.to_ne_bytes());
        message.extend(command.to_ne_bytes());
        message.extend((size as u32).to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(0u32.to_ne_bytes());
        message.extend(payload);
        // Fails if the client has ended the connection.
        let _ = self.0.write_all(&message);
    }

    fn shake(&mut self) {
        let (id, command, _) = self.receive();
        let mut payload = vec![0, 0, 1, 0];
        payload.extend(b"{\"capabilities\":{\"max_msg_fds\":8}}\0");
        self.send((id, command), REPLY, &payload);
    }
}

/// A server whose answers to what follows the version are `script`'s.
fn serve(
    script: impl FnOnce(&mut Peer) + Send + 'static,
) -> (tempfile::TempDir, PathBuf, JoinHandle<()>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let mut peer = Peer(listener.accept().unwrap().0);
        script(&mut peer);
    });
    (dir, path, thread)
}

fn u32s(values: &[u32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

/// The error of a read from region 0, to which `script` is the answer.
fn error_of(script: impl FnOnce(&mut Peer, u16) + Send + 'static) -> ClientError {
    let (_dir, path, thread) = serve(|peer| {
        peer.shake();
        let (id, _, _) = peer.receive();
        script(peer, id);
    });
    let mut client = Client::connect(&path).unwrap();
    let read = client.region_read(0, 0, &mut [0; 4], &mut NoMemory);
    let error = read.unwrap_err();
    if error.is_fatal() {
        let next = client.region_read(0, 0, &mut [0; 4], &mut NoMemory);
        assert!(matches!(next, Err(ClientError::Ended)), "{next:?}");
    }
    thread.join().unwrap();
    error
}

#[test]
fn replies_that_are_not_the_one_that_is_due_end_the_connection() {
    let invalid = |error: &ClientError| matches!(error, ClientError::Invalid { .. });
    for error in [
        error_of(|peer, id| peer.send((id + 1, 9), REPLY, &[0; 20])),
        error_of(|peer, id| peer.send((id, 10), REPLY, &[0; 20])),
        error_of(|peer, id| peer.send((id, 9), REPLY, &[0; 19])),
        error_of(|peer, id| peer.send((id, 9), REPLY, &[0; 21])),
        error_of(|peer, id| peer.send_as(15, (id, 9), REPLY, &[])),
        error_of(|peer, id| peer.send_as(1 << 31, (id, 9), REPLY, &[])),
    ] {
        assert!(invalid(&error), "{error}");
    }
    let refused = error_of(|peer, id| peer.send((id, 9), REPLY | ERROR, &[]));
    assert!(matches!(refused, ClientError::Refused { .. }), "{refused}");
    for ended in [
        error_of(|_, _| ()),
        error_of(|peer, id| peer.send_as(36, (id, 9), REPLY, &[0; 4])),
    ] {
        assert!(matches!(ended, ClientError::Ended), "{ended}");
    }
}

#[test]
fn a_server_that_accepts_nobody_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("device");
    let _listener = {
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&socket, 0).unwrap();
        socket
    };
    // Takes the one place.
    let _waits = UnixStream::connect(&path).unwrap();
    let error = Client::connect(&path).unwrap_err();
    assert!(matches!(error, ClientError::Connect(_)), "{error}");
}

#[test]
fn a_server_that_is_silent_costs_the_timeout() {
    let (_dir, path, thread) = serve(|peer| {
        peer.shake();
        peer.receive();
        // Until the client gives up.
        let _ = peer.0.read(&mut [0]);
    });
    let mut client = Client::connect(&path).unwrap();
    let began = Instant::now();
    let error = client.device_info().unwrap_err();
    assert!(matches!(error, ClientError::TimedOut { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(9));
    assert!(client.has_ended());
    thread.join().unwrap();
}

/// The error of the description of region 0, to which `payload` is the answer, again and again.
fn region_error(payload: Vec<u8>) -> String {
    let (_dir, path, thread) = serve(move |peer| {
        peer.shake();
        let mut payload = payload;
        // Asked again if it does not fit.
        for _ in 0..2 {
            let (id, command, _) = peer.receive();
            let again = payload.split_off(payload.len().min(4096));
            peer.send((id, command), REPLY, &payload);
            if again.is_empty() {
                break;
            }
            payload = again;
        }
    });
    let error = Client::connect(&path).unwrap().region_info(0).unwrap_err();
    thread.join().unwrap();
    error.to_string()
}

#[test]
fn a_server_that_lies_about_regions_is_refused() {
    const MAPPED: u32 = 1 << 2 | 1 << 3;
    let region = |argsz: u32, index: u32, at: u32, rest: &[u32]| {
        let fields = [argsz, MAPPED, index, at, 0x1000, 0, 0, 0];
        u32s(&[&fields[..], rest].concat())
    };
    for (payload, problem) in [
        (vec![0; 8], "8 bytes for a region"),
        (region(32, 3, 0, &[]), "region 3, not 0"),
        (region(1 << 20, 0, 0, &[]), "over the limit of 4096"),
        (region(40, 0, 32, &[5 | 1 << 16, 32]), "loop"),
        (region(40, 0, 99, &[0, 0]), "beyond its end"),
        (region(48, 0, 32, &[1, 0, 65, 0]), "over the limit of 64"),
        (region(48, 0, 32, &[1, 0, 1, 0]), "cut off"),
        (
            region(64, 0, 32, &[1, 0, 1, 0, 0x1000, 0, 1, 0]),
            "not in its 0x1000 bytes",
        ),
        (
            region(80, 0, 32, &[1, 0, 2, 0, 0, 0, 8, 0, 4, 0, 8, 0]),
            "overlap",
        ),
    ] {
        let error = region_error(payload);
        assert!(error.contains(problem), "{error}");
    }
}

/// 4 KiB at 0x1000.
struct Page(Vec<u8>);

impl Memory for Page {
    fn read(&mut self, address: u64, data: &mut [u8]) -> bool {
        let at = address.checked_sub(0x1000).unwrap_or(u64::MAX) as usize;
        let found = at
            .checked_add(data.len())
            .and_then(|end| self.0.get(at..end));
        found.map(|found| data.copy_from_slice(found)).is_some()
    }

    fn write(&mut self, address: u64, data: &[u8]) -> bool {
        let at = address.checked_sub(0x1000).unwrap_or(u64::MAX) as usize;
        let found = at
            .checked_add(data.len())
            .and_then(|end| self.0.get_mut(at..end));
        found.map(|found| found.copy_from_slice(data)).is_some()
    }
}

fn dma(address: u64, count: u64, data: &[u8]) -> Vec<u8> {
    [&address.to_ne_bytes()[..], &count.to_ne_bytes(), data].concat()
}

#[test]
fn a_server_reaches_memory_that_it_may_by_messages_and_no_other() {
    const DMA_READ: u16 = 11;
    const DMA_WRITE: u16 = 12;
    let (_dir, path, thread) = serve(|peer| {
        peer.shake();
        let (id, command, _) = peer.receive();
        let mut ask = |command: u16, payload: Vec<u8>| {
            peer.send((77, command), 0, &payload);
            let (id, of, payload) = peer.receive();
            assert_eq!((id, of), (77, command));
            payload
        };
        ask(DMA_WRITE, dma(0x1004, 2, &[8, 9]));
        let read = ask(DMA_READ, dma(0x1003, 4, &[]));
        assert_eq!(read[16..], [1, 8, 9, 1]);
        // Error replies have no payload.
        for (command, payload) in [
            (DMA_READ, dma(0x1ffd, 4, &[])),
            (DMA_READ, dma(0, 4, &[])),
            (DMA_READ, dma(u64::MAX, 4, &[])),
            (DMA_READ, dma(0x1000, MAX_DATA as u64 + 1, &[])),
            (DMA_READ, dma(0x1000, 4, &[1])),
            (DMA_WRITE, dma(0x1000, 4, &[1])),
            (DMA_WRITE, vec![1]),
            (14, Vec::new()),
        ] {
            assert_eq!(ask(command, payload), [0u8; 0]);
        }
        peer.send((id, command), REPLY, &[0; 20]);
        // One more, between requests.
        peer.send((78, DMA_WRITE), 0, &dma(0x1000, 1, &[5]));
        assert_eq!(peer.receive().0, 78);
        // The client ends the connection.
        assert_eq!(peer.0.read(&mut [0]).unwrap(), 0);
    });
    let mut client = Client::connect(&path).unwrap();
    let mut page = Page(vec![1; 4096]);
    client.region_read(0, 0, &mut [0; 4], &mut page).unwrap();
    while !client.serve(&mut page).unwrap() {
        std::thread::yield_now();
    }
    drop(client);
    thread.join().unwrap();
    assert_eq!(page.0[..8], [5, 1, 1, 1, 8, 9, 1, 1]);
}

/// A connection on which a request is unanswered, and the client that goes on with it once `killed` has done what the process
/// before did.
fn adopt(
    script: impl FnOnce(&mut Peer) + Send + 'static,
    killed: impl FnOnce(&mut UnixStream),
) -> Result<Client, ClientError> {
    const READ: u16 = 9;
    let (_dir, path, thread) = serve(|peer| {
        peer.shake();
        script(peer);
    });
    let (socket, limits) = Client::connect(&path).unwrap().into_socket();
    let mut before = UnixStream::from(socket.try_clone().unwrap());
    let mut request = [0; 32];
    request[2..4].copy_from_slice(&READ.to_ne_bytes());
    request[4..8].copy_from_slice(&32u32.to_ne_bytes());
    before.write_all(&request).unwrap();
    killed(&mut before);
    drop(before);
    let client = Client::adopt(socket, limits);
    if client.is_err() {
        thread.join().unwrap();
    }
    client
}

#[test]
fn a_reply_to_a_process_that_was_killed_is_not_taken_for_another() {
    let client = adopt(
        |peer| {
            let (id, command, _) = peer.receive();
            peer.send((id, command), REPLY, &[7; 24]);
            let (id, command, _) = peer.receive();
            peer.send((id, command), REPLY, &u32s(&[16, 3, 9, 5]));
            // From now on, it would be one to nothing.
            let (id, command, _) = peer.receive();
            peer.send((id ^ 1, command), REPLY, &[0; 20]);
        },
        |_| (),
    );
    let error = client
        .unwrap()
        .region_read(0, 0, &mut [0; 4], &mut NoMemory);
    let error = error.unwrap_err();
    assert!(matches!(error, ClientError::Invalid { .. }), "{error}");
}

#[test]
fn a_reply_of_which_a_process_that_was_killed_had_a_part_ends_the_connection() {
    let error = adopt(
        |peer| {
            let (id, command, _) = peer.receive();
            peer.send((id, command), REPLY, &[0xff; 24]);
            // The client's request, and the end of the connection.
            peer.receive();
            // Of which it leaves the rest.
            assert_eq!(peer.0.read(&mut [0]).unwrap_or(0), 0);
        },
        |before| {
            before.set_nonblocking(false).unwrap();
            before.read_exact(&mut [0; 20]).unwrap();
        },
    );
    let error = error.unwrap_err();
    assert!(matches!(error, ClientError::Invalid { .. }), "{error}");
}

#[test]
fn a_reply_that_comes_in_parts_is_taken() {
    let (_dir, path, thread) = serve(|peer| {
        peer.shake();
        let (id, command, _) = peer.receive();
        let mut reply = Vec::new();
        for word in [id, command] {
            reply.extend(word.to_ne_bytes());
        }
        reply.extend(u32s(&[36, REPLY, 0]));
        reply.extend([5; 20]);
        for part in reply.chunks(3) {
            peer.0.write_all(part).unwrap();
            std::thread::yield_now();
        }
    });
    let mut client = Client::connect(&path).unwrap();
    let mut data = [0; 4];
    client.region_read(0, 0, &mut data, &mut NoMemory).unwrap();
    assert_eq!(data, [5; 4]);
    thread.join().unwrap();
}
