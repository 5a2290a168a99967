//! A client's stream whose backend is killed again and again: nothing is lost, doubled or reordered.
//!
//! The client sends messages of random sizes in random pieces, some with descriptors, and reads the answers late. The
//! backend ends at random points, in the first test between two calls of the journal, in the second by SIGKILL at any
//! instruction; the next one goes on. The seed is printed; `FARSIDE_SEED` repeats the choices.

mod exchanges;

use std::{
    collections::BTreeMap,
    fs,
    io::{IoSlice, IoSliceMut, Read},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use farside_keeper::{DeviceFile, Former, Journal, Kept, MAX_FDS, Options, Received, Snapshots};
use libtest_mimic::{Arguments, Trial};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, memfd_create},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt::set_socket_send_buffer_size,
    },
    process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid},
};

use exchanges::{Exchange, HEADER, Random, encoded, exchanges, header};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A descriptor that can be told from others.
fn marked(number: u64, n: usize) -> OwnedFd {
    let file = memfd_create("journal-test", MemfdFlags::CLOEXEC).unwrap();
    let mark = number * 100 + n as u64;
    rustix::io::pwrite(&file, &mark.to_le_bytes(), 0).unwrap();
    file
}

fn check_marks(fds: &[OwnedFd], number: u64, count: usize) {
    assert_eq!(fds.len(), count, "descriptors of {number}");
    for (n, fd) in fds.iter().enumerate() {
        let mut mark = [0; 8];
        rustix::io::pread(fd, &mut mark, 0).unwrap();
        assert_eq!(u64::from_le_bytes(mark), number * 100 + n as u64);
    }
}

fn wait(fd: impl AsFd, flags: PollFlags, timeout: Duration) {
    let mut fds = [PollFd::new(&fd, flags)];
    let _ = poll(&mut fds, Some(&Timespec::try_from(timeout).unwrap()));
}

/// Sends all messages.
fn send_all(socket: &UnixStream, exchanges: &[Exchange], mut random: Random) {
    for (number, exchange) in (0..).zip(exchanges) {
        let bytes = encoded(number, exchange.body);
        let fds: Vec<_> = (0..exchange.fds).map(|n| marked(number, n)).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut sent = 0;
        while sent < bytes.len() {
            let left = bytes.len() - sent;
            let piece = match random.below(3) {
                0 => left,
                1 => left.min(1 + random.below(40) as usize),
                _ => 1 + random.below(left as u64) as usize,
            };
            let mut space =
                [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !fds.is_empty() {
                assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            }
            let piece = [IoSlice::new(&bytes[sent..sent + piece])];
            sent += sendmsg(socket, &piece, &mut control, SendFlags::NOSIGNAL).unwrap();
        }
        if random.one_in(20) {
            std::thread::sleep(Duration::from_micros(random.below(2000)));
        }
    }
}

/// Receives all answers.
fn receive_all(socket: &UnixStream, exchanges: &[Exchange], mut random: Random) {
    let mut bytes = Vec::new();
    let mut fds = Vec::new();
    for (number, exchange) in (0..).zip(exchanges) {
        let Some(body) = exchange.answer else {
            continue;
        };
        let expected = encoded(number, body);
        while bytes.len() < expected.len() {
            if random.one_in(20) {
                std::thread::sleep(Duration::from_micros(random.below(5000)));
            }
            // No further than the answer: a descriptor comes with its first byte.
            let mut buffer = vec![0; expected.len() - bytes.len()];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut vectors = [IoSliceMut::new(&mut buffer)];
            let received = recvmsg(socket, &mut vectors, &mut control, RecvFlags::CMSG_CLOEXEC);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            let received = received.unwrap().bytes;
            assert_ne!(
                received, 0,
                "the backend has closed the connection before answer {number}"
            );
            bytes.extend(&buffer[..received]);
        }
        assert_eq!(
            header(&bytes),
            Some((body, number)),
            "one answer to each message, in order"
        );
        assert!(bytes == expected, "answer {number} is as it was");
        check_marks(&fds, number, exchange.answer_fd.into());
        bytes.clear();
        fds.clear();
    }
}

/// As a process that serves the client.
struct Backend {
    journal: Journal,
    snapshots: Snapshots,
    socket: OwnedFd,
    /// Descriptors that were received, with the start of their message.
    passed: Vec<(usize, Vec<OwnedFd>)>,
    /// Those of an answer.
    answered: Option<OwnedFd>,
    /// The number of the next message.
    next: u64,
}

/// It was killed.
struct Killed;

impl Backend {
    fn begin(file: &DeviceFile, socket: OwnedFd) -> Self {
        let mut journal = file.journal().unwrap();
        journal.begin(socket.as_raw_fd());
        Self {
            snapshots: file.snapshots(&journal).unwrap(),
            journal,
            socket,
            passed: Vec::new(),
            answered: None,
            next: 0,
        }
    }

    fn take_over(file: &DeviceFile, mut claim: impl FnMut(RawFd) -> Option<OwnedFd>) -> Self {
        let journal = file.journal().unwrap();
        let snapshots = file.snapshots(&journal).unwrap();
        let socket = claim(journal.client().expect("a client")).expect("its socket");
        let next = snapshots.inherited().first_chunk().copied();
        let mut backend = Self {
            next: next.map_or(0, u64::from_le_bytes),
            answered: journal
                .waiting()
                .map(|fd| claim(fd).expect("an answer's descriptor")),
            journal,
            snapshots,
            socket,
            passed: Vec::new(),
        };
        let [(front, front_refused), (last, last_refused)] = backend.journal.inherited();
        assert!(!(front_refused || last_refused));
        let mut all = |fds: Vec<_>| -> Vec<_> {
            fds.into_iter()
                .map(|fd| claim(fd).unwrap_or_else(|| panic!("descriptor {fd} of a message")))
                .collect()
        };
        let (front, last) = (all(front), all(last));
        backend.attribute(0, front);
        backend.attribute(backend.last_start(), last);
        backend
    }

    fn attribute(&mut self, start: usize, fds: Vec<OwnedFd>) {
        if fds.is_empty() {
            return;
        }
        match self.passed.iter_mut().find(|passed| passed.0 == start) {
            Some(passed) => passed.1.extend(fds),
            None => self.passed.push((start, fds)),
        }
    }

    fn last_start(&self) -> usize {
        let input = self.journal.input();
        let mut start = 0;
        while let Some((body, _)) = header(&input[start..])
            && start + HEADER + body < input.len()
        {
            start += HEADER + body;
        }
        start
    }

    /// Does one thing. Returns whether it has to wait.
    fn step(
        &mut self,
        exchanges: &[Exchange],
        random: &mut Random,
        may_be_killed: &mut dyn FnMut() -> Result<(), Killed>,
    ) -> Result<Option<PollFlags>, Killed> {
        if self.journal.queued() > 0 {
            let flushed = self.journal.flush(self.socket.as_fd()).unwrap();
            may_be_killed()?;
            if !flushed {
                return Ok(Some(PollFlags::OUT));
            }
            self.answered = None;
        }
        if self.journal.to_drain() > 0 {
            return self.drain(may_be_killed);
        }
        let have = self.journal.input().len();
        let front = header(self.journal.input());
        let is_refused = front.is_some_and(|(_, number)| exchanges[number as usize].is_refused);
        let want = front.map_or(HEADER, |(body, _)| HEADER + body);
        if front.is_none() || have < want && !is_refused {
            let least = if random.one_in(2) { HEADER } else { 8 << 10 };
            let carried = self.passed.first().map_or(&[][..], |it| it.1.as_slice());
            let want = want.max(least);
            let received = self
                .journal
                .receive(self.socket.as_fd(), want, (carried, false));
            let Some(Received {
                bytes,
                fds,
                refused,
            }) = received.unwrap()
            else {
                return Ok(Some(PollFlags::IN));
            };
            assert!(bytes > 0 && !refused);
            self.attribute(self.last_start(), fds);
            may_be_killed()?;
            return Ok(None);
        }
        self.answer(want, exchanges, random, may_be_killed)?;
        Ok(None)
    }

    fn drain(
        &mut self,
        may_be_killed: &mut dyn FnMut() -> Result<(), Killed>,
    ) -> Result<Option<PollFlags>, Killed> {
        let left = self.journal.to_drain();
        // A process before may have received a part, and not been done with it.
        if self.journal.input().is_empty() {
            let most = left.min(8 << 10) as usize;
            let socket = self.socket.as_fd();
            let received = self
                .journal
                .receive(socket, most, Default::default())
                .unwrap();
            may_be_killed()?;
            if received.is_none() {
                return Ok(Some(PollFlags::IN));
            }
        }
        let bytes = self.journal.input().len().min(left as usize);
        self.journal
            .commit(bytes, left - bytes as u32, &[], None)
            .unwrap();
        may_be_killed()?;
        Ok(None)
    }

    /// Is done with the message at the front, of `size` bytes.
    fn answer(
        &mut self,
        size: usize,
        exchanges: &[Exchange],
        random: &mut Random,
        may_be_killed: &mut dyn FnMut() -> Result<(), Killed>,
    ) -> Result<(), Killed> {
        let input = self.journal.input();
        let (_, number) = header(input).unwrap();
        assert_eq!(number, self.next, "each message once, in order");
        let exchange = &exchanges[number as usize];
        let expected = encoded(number, exchange.body);
        let have = size.min(input.len());
        assert!(
            input[..have] == expected[..have],
            "message {number} is as it was sent"
        );
        let fds = match self.passed.first() {
            Some((start, fds)) if *start < have => fds.as_slice(),
            _ => &[],
        };
        check_marks(fds, number, exchange.fds);
        // Some snapshots are replaced before they are current.
        for wrong in 0..random.below(2) {
            self.snapshots
                .stage(&(wrong + 1_000_000).to_le_bytes())
                .unwrap();
            may_be_killed()?;
        }
        let mut snapshot = (number + 1).to_le_bytes().to_vec();
        snapshot.resize(8 + random.size() / 4, number as u8);
        self.snapshots.stage(&snapshot).unwrap();
        may_be_killed()?;
        let answer = exchange
            .answer
            .map(|body| encoded(number, body))
            .unwrap_or_default();
        let fd = exchange.answer_fd.then(|| marked(number, 0));
        let raw = fd.as_ref().map(AsRawFd::as_raw_fd);
        if fd.is_some() {
            self.answered = fd;
        }
        self.journal
            .commit(have, (size - have) as u32, &answer, raw)
            .unwrap();
        self.next += 1;
        // They stay open until the next commit, as those of a snapshot do.
        self.passed.retain(|(start, _)| *start >= have);
        for passed in &mut self.passed {
            passed.0 -= have;
        }
        may_be_killed()
    }

    fn is_done(&self, exchanges: &[Exchange]) -> bool {
        self.next == exchanges.len() as u64
            && self.journal.queued() == 0
            && self.journal.to_drain() == 0
    }

    /// Leaves its descriptors, and does nothing else.
    fn leave(self, left: &mut BTreeMap<RawFd, OwnedFd>) {
        let Self {
            journal,
            snapshots,
            socket,
            passed,
            answered,
            next: _,
        } = self;
        // Only unmapped, as at the end of a process.
        drop((journal, snapshots));
        let fds = passed.into_iter().flat_map(|(_, fds)| fds);
        let fds = fds.chain(answered).chain([socket]);
        left.extend(fds.map(|fd| (fd.as_raw_fd(), fd)));
    }
}

/// A client's two ends of the connection, of which the backend's takes little at a time.
fn connection() -> (UnixStream, UnixStream) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    set_socket_send_buffer_size(&ours, 4 << 10).unwrap();
    ours.set_nonblocking(true).unwrap();
    (theirs, ours)
}

fn between_calls() {
    let mut random = Random::new();
    let exchanges = exchanges(&mut random, 1500);
    let (client, socket) = connection();
    let others = [(); 2].map(|()| Random(random.below(u64::MAX)));
    let [to_send, to_receive] = others;
    std::thread::scope(|scope| {
        scope.spawn(|| send_all(&client, &exchanges, to_send));
        scope.spawn(|| receive_all(&client, &exchanges, to_receive));
        let mut file = DeviceFile::new().unwrap();
        let mut backend = Backend::begin(&file, socket.into());
        let deadline = Instant::now() + TIMEOUT;
        let (mut kills, mut calls) = (0, random.below(8));
        while !backend.is_done(&exchanges) {
            assert!(
                Instant::now() < deadline,
                "stuck at message {}: {:?}",
                backend.next,
                backend.journal
            );
            let next = backend.next;
            let mut may_be_killed = || match calls.checked_sub(1) {
                Some(left) => {
                    calls = left;
                    Ok(())
                }
                None => Err(Killed),
            };
            match backend.step(&exchanges, &mut random, &mut may_be_killed) {
                Ok(None) => {}
                Ok(Some(flags)) => wait(&backend.socket, flags, Duration::from_millis(100)),
                Err(Killed) => {
                    let committed = backend.next;
                    assert!(committed - next <= 1);
                    let mut left = BTreeMap::new();
                    backend.leave(&mut left);
                    // The next process has the descriptor, and nothing of the memory.
                    let next_file = file.as_fd().try_clone_to_owned().unwrap();
                    file = DeviceFile::take_over(&next_file).unwrap();
                    backend = Backend::take_over(&file, |fd| left.remove(&fd));
                    if committed > 0 {
                        assert_eq!(backend.next, committed, "the snapshot of the last commit");
                    }
                    calls = random.below(12);
                    kills += 1;
                }
            }
        }
        println!("{kills} kills");
        // The client's threads end with the last answer.
    });
}

/// A message that ends its process is told from others.
fn tries() {
    let next = |file: DeviceFile| {
        let left = file.as_fd().try_clone_to_owned().unwrap();
        DeviceFile::take_over(&left).unwrap()
    };
    let mut file = DeviceFile::new().unwrap();
    file.journal().unwrap().begin(0);
    for tries in 1..=3 {
        assert_eq!(file.journal().unwrap().begin_try(), tries);
        file = next(file);
    }
    assert_eq!(file.journal().unwrap().begin_try(), 4);
    file.journal().unwrap().end_try();
    assert_eq!(next(file).journal().unwrap().begin_try(), 1);
}

/// Has a process of [`by_sigkill`] serve the exchanges of this seed.
const SEED: &str = "FARSIDE_KEEPER_TEST_SEED";

const KILLED_EXCHANGES: usize = 6000;

/// The keeper and its backends, in a process of their own, for the client at standard input.
fn keep_backends(seed: &str) -> ! {
    let exchanges = exchanges(&mut Random(seed.parse().unwrap()), KILLED_EXCHANGES);
    let backend = |kept: Kept| {
        let left = kept.files().pop();
        let served = |file: &DeviceFile| file.journal().unwrap().client().is_some();
        let (file, mut backend) = match left {
            Some((_, file)) if served(&file) => {
                let backend = Backend::take_over(&file, |fd| kept.claim(fd));
                (file, backend)
            }
            _ => {
                let file = DeviceFile::new().unwrap();
                let client = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
                let backend = Backend::begin(&file, client);
                kept.register(&file).unwrap();
                (file, backend)
            }
        };
        kept.close_others();
        kept.ready("a test");
        let mut random = Random(kept.restarts().unwrap());
        while !backend.is_done(&exchanges) {
            let Ok(waits) = backend.step(&exchanges, &mut random, &mut || Ok(())) else {
                unreachable!();
            };
            // Behind the last message nothing comes.
            if let Some(flags) = waits.filter(|_| !backend.is_done(&exchanges)) {
                wait(&backend.socket, flags, TIMEOUT);
            }
        }
        // If it is killed here, the next one finds that all is done.
        std::mem::forget((file, backend));
        let open = fs::read_dir("/proc/self/fd").unwrap().count();
        eprintln!("{open} descriptors, {} restarts", kept.restarts().unwrap());
        // One that leaks is there once for each process.
        match open < 24 {
            true => 0,
            false => 3,
        }
    };
    // Without the keeper's socket, each process has its own.
    let path = std::env::temp_dir().join(format!("farside-keeper-{}", std::process::id()));
    let options = Options {
        former: Former::take(&path.join("socket")).unwrap(),
        announce: &|_| (),
        patience: None,
    };
    let code = farside_keeper::keep(backend, options).unwrap();
    std::process::exit(code.into());
}

/// The processes below `pid`, and whether each is a spare keeper.
fn below(pid: Pid) -> Vec<(Pid, bool)> {
    let process = format!("/proc/{}", pid.as_raw_nonzero());
    let threads = fs::read_dir(format!("{process}/task"));
    let threads = threads.into_iter().flatten().flatten();
    let children = threads.map(|thread| fs::read_to_string(thread.path().join("children")));
    let children: String = children.map(Result::unwrap_or_default).collect();
    let mut found = Vec::new();
    for child in children.split_whitespace() {
        let Some(child) = child.parse().ok().and_then(Pid::from_raw) else {
            continue;
        };
        let name = fs::read_to_string(format!("/proc/{}/comm", child.as_raw_nonzero()));
        found.push((child, name.unwrap_or_default().starts_with("farside-spare")));
        found.extend(below(child));
    }
    found
}

#[allow(
    clippy::zombie_processes,
    reason = "all children of this process are waited for"
)]
fn by_sigkill() {
    let mut random = Random::new();
    let seed = random.below(u64::MAX);
    let exchanges = exchanges(&mut Random(seed), KILLED_EXCHANGES);
    let (client, socket) = connection();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .env(SEED, seed.to_string())
        .stdin(Stdio::from(OwnedFd::from(socket)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    set_child_subreaper(Some(getpid())).unwrap();
    let mut keeper = command.spawn().unwrap();
    drop(command);
    let mut stderr = keeper.stderr.take().unwrap();
    let [to_send, to_receive] = [(); 2].map(|()| Random(random.below(u64::MAX)));
    let mut kills = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| send_all(&client, &exchanges, to_send));
        let received = Arc::new(());
        let receives = Arc::downgrade(&received);
        scope.spawn(|| {
            let _received = received;
            receive_all(&client, &exchanges, to_receive);
        });
        let mut last = None;
        while receives.strong_count() > 0 {
            // The keeper gives up after 100 in 10 s.
            std::thread::sleep(Duration::from_micros(100_000 + random.below(20_000)));
            let all = below(getpid());
            // Without a spare there is nobody to go on.
            if all.len() < 3 || !all.iter().any(|(_, is_spare)| *is_spare) {
                continue;
            }
            let (victim, _) = all[random.below(all.len() as u64) as usize];
            if last != Some(victim) {
                let _ = kill_process(victim, Signal::KILL);
                last = Some(victim);
                kills += 1;
            }
        }
    });
    // The last backend's end ends its keeper, and that the spare.
    let deadline = Instant::now() + TIMEOUT;
    while !below(getpid()).is_empty() {
        assert!(Instant::now() < deadline, "{:?}", below(getpid()));
        while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {}
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut log = String::new();
    stderr.read_to_string(&mut log).unwrap();
    println!("{kills} kills; {log}");
    let ended = log.lines().filter(|line| line.contains("descriptors, "));
    assert!(ended.count() >= 1, "{log}");
    assert!(kills >= 10, "{kills} kills");
}

fn main() {
    if let Ok(seed) = std::env::var(SEED) {
        keep_backends(&seed);
    }
    let tests: [(&str, fn()); 3] = [
        ("a_message_that_ends_processes_is_counted", tries),
        (
            "nothing_is_lost_doubled_or_reordered_between_calls",
            between_calls,
        ),
        (
            "nothing_is_lost_doubled_or_reordered_by_sigkill",
            by_sigkill,
        ),
    ];
    let tests = tests.map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), tests.into()).exit();
}
