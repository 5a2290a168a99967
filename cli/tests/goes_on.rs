//! Leases that go on after their worker, as hostile and unlucky borrowers have them.

use std::{
    fs,
    fs::File,
    io::{BufRead, BufReader},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use farside_fabric::memory::create_sealed;
use farside_lender_protocol::{
    CallError, Client, ErrorKind, Keeping, Lease, RemoteError, STATE_PAGE, Secret,
    registers::{Access, Event},
};
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    process::{Pid, Signal, kill_process},
};

const DEADLINE: Duration = Duration::from_secs(20);

const KEEP: Duration = Duration::from_secs(100);

/// A lender of disk0.
struct Lender {
    child: Child,
    dir: tempfile::TempDir,
}

impl Lender {
    fn start() -> Self {
        Self::start_in(tempfile::tempdir().expect("a directory"))
    }

    fn start_in(dir: tempfile::TempDir) -> Self {
        let image = dir.path().join("disk.img");
        if !image.exists() {
            let file = File::create(&image).expect("a file");
            file.set_len(16 << 20).expect("a size");
        }
        let mut child = Command::new(env!("CARGO_BIN_EXE_farside"))
            .arg("lend")
            .arg("--socket")
            .arg(dir.path().join("lender.sock"))
            .arg("--nvme")
            .arg(format!("disk0={}", image.display()))
            .env("FARSIDE_STATE_DIR", dir.path())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut log = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        while !line.contains("listens at") {
            line.clear();
            assert!(log.read_line(&mut line).expect("UTF-8") > 0, "it ended");
        }
        // Else the lender would wait for room in the pipe.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Self { child, dir }
    }

    /// Kills it, and starts another.
    fn again(mut self) -> Self {
        self.child.kill().expect("a process");
        self.child.wait().expect("a child");
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().expect("a directory"));
        Self::start_in(dir)
    }

    fn client(&self, vm: &str) -> Client {
        let socket = self.dir.path().join("lender.sock");
        Client::connect(&socket.into(), Some(&vm.parse().expect("a name"))).expect("a lender")
    }

    fn borrow(
        &self,
        vm: &str,
        state: &impl AsFd,
        resumes: Option<Secret>,
    ) -> Result<(Client, Lease), CallError> {
        self.borrow_for(KEEP, vm, state, resumes)
    }

    fn borrow_for(
        &self,
        keep: Duration,
        vm: &str,
        state: &impl AsFd,
        resumes: Option<Secret>,
    ) -> Result<(Client, Lease), CallError> {
        let mut client = self.client(vm);
        let keeping = Keeping { keep, resumes };
        let id = "disk0".parse().expect("an id");
        let lease = client.borrow_and_keep(&id, keeping, &[state.as_fd()])?;
        Ok((client, lease))
    }

    /// Borrows as soon as the lender has ended the lease before.
    fn borrow_soon(&self, vm: &str, state: &OwnedFd, resumes: Option<Secret>) -> (Client, Lease) {
        let began = Instant::now();
        loop {
            match self.borrow(vm, state, resumes) {
                Ok(lent) => return lent,
                Err(CallError::Refused(error))
                    if error.kind == ErrorKind::Busy && began.elapsed() < DEADLINE =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn refusal(&self, vm: &str, state: &impl AsFd, resumes: Option<Secret>) -> RemoteError {
        match self.borrow(vm, state, resumes) {
            Err(CallError::Refused(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    fn state(&self) -> OwnedFd {
        create_sealed("state", self.state_bytes()).expect("memory")
    }

    fn state_bytes(&self) -> u64 {
        let described = self
            .client("web1")
            .describe(&"disk0".parse().expect("an id"));
        described.expect("a description").state
    }

    fn kill_worker(&self) {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let threads = threads.expect("threads").flatten();
        let children = threads.map(|thread| fs::read_to_string(thread.path().join("children")));
        let pids: String = children.map(Result::unwrap_or_default).collect();
        let is_worker = |pid: &&str| {
            let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline"));
            arguments.is_ok_and(|arguments| arguments.contains("lease-worker"))
        };
        let worker = pids.split_whitespace().find(is_worker).expect("a worker");
        let worker = worker.parse().ok().and_then(Pid::from_raw);
        kill_process(worker.expect("a number"), Signal::KILL).expect("a process");
    }

    /// The number of its descriptors.
    fn descriptors(&self) -> usize {
        let of_lender = fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        of_lender.expect("descriptors").count()
    }

    /// Waits until the device is neither lent nor kept.
    fn wait_free(&self) {
        let began = Instant::now();
        loop {
            let status = self.client("web1").status(&"disk0".parse().expect("an id"));
            let entry = status.expect("a status").entry;
            if entry.borrowed_by.is_none() && entry.kept.is_none() {
                return;
            }
            assert!(began.elapsed() < DEADLINE, "{entry:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The controller's version register: 1.4.
fn version(lease: &mut Lease) -> u64 {
    register(lease, 8)
}

fn register(lease: &mut Lease, offset: u64) -> u64 {
    let read = Access::Read {
        bar: 0,
        offset,
        len: 4,
    };
    assert!(lease.registers.try_send(&read, &[]).expect("a channel"));
    match lease
        .registers
        .receive::<Event>(DEADLINE)
        .expect("an answer")
        .0
    {
        // The bytes beyond the access are ones.
        Event::Data { value } => value & 0xffff_ffff,
        other => panic!("{other:?}"),
    }
}

fn write(lease: &mut Lease, offset: u64, value: u64) {
    let write = Access::Write {
        bar: 0,
        offset,
        len: 4,
        value,
    };
    assert!(lease.registers.try_send(&write, &[]).expect("a channel"));
}

#[test]
fn a_lease_goes_on_with_its_registers_from_worker_to_worker_and_lender_to_lender() {
    let lender = Lender::start();
    let state = lender.state();
    let (client, mut lease) = lender.borrow("web1", &state, None).expect("a lease");
    let chain = lease.chain.expect("a chain");
    const AQA: u64 = 0x24;
    write(&mut lease, AQA, 0x1f_001f);
    assert_eq!(register(&mut lease, AQA), 0x1f_001f);
    lender.kill_worker();
    let (client, mut lease) = {
        drop(lease);
        let lent = lender.borrow_soon("web1", &state, Some(chain));
        drop(client);
        lent
    };
    assert_eq!(register(&mut lease, AQA), 0x1f_001f);
    // Another VM waits, and neither takes the lease over nor the device.
    let error = lender.refusal("web2", &lender.state(), None);
    assert_eq!(error.kind, ErrorKind::Busy, "{error}");
    let lender = lender.again();
    let (client, mut lease) = {
        let lent = lender.borrow_soon("web1", &state, Some(chain));
        drop((client, lease));
        lent
    };
    assert_eq!(register(&mut lease, AQA), 0x1f_001f);
    // Without the chain it is another lease, and the device is reset.
    drop((client, lease));
    lender.wait_free();
    let (_client, mut lease) = lender.borrow("web1", &state, None).expect("a lease");
    assert_eq!(register(&mut lease, AQA), 0);
    assert_ne!(lease.chain, Some(chain));
}

#[test]
fn only_its_vm_goes_on_with_a_lease_and_only_with_its_secret() {
    let lender = Lender::start();
    let state = lender.state();
    let (_client, lease) = lender.borrow("web1", &state, None).expect("a lease");
    let chain = lease.chain.expect("a chain");
    let others = Secret::random().expect("random bits");
    for (vm, chain) in [("web2", chain), ("web1", others), ("web2", others)] {
        let error = lender.refusal(vm, &lender.state(), Some(chain));
        assert_eq!(error.kind, ErrorKind::ChainEnded, "{vm}: {error}");
    }
    lender.kill_worker();
    let error = lender.refusal("web2", &state, Some(chain));
    assert_eq!(error.kind, ErrorKind::ChainEnded, "{error}");
    let (mut client, _lease) = lender.borrow_soon("web1", &state, Some(chain));
    client.return_device().expect("an answer");
    // The lease is over.
    let error = lender.refusal("web1", &state, Some(chain));
    assert_eq!(error.kind, ErrorKind::ChainEnded, "{error}");
    lender
        .borrow("web2", &lender.state(), None)
        .expect("a lease");
}

#[test]
fn a_borrower_that_ends_leaves_nothing_kept() {
    let lender = Lender::start();
    let state = lender.state();
    drop(lender.borrow("web1", &state, None).expect("a lease"));
    lender.wait_free();
    // With its worker.
    let lease = lender.borrow("web1", &state, None).expect("a lease");
    drop(lease);
    let began = Instant::now();
    lender.wait_free();
    // After its worker.
    let lease = lender.borrow_soon("web1", &state, None);
    lender.kill_worker();
    std::thread::sleep(Duration::from_millis(100));
    drop(lease);
    lender.wait_free();
    assert!(began.elapsed() < KEEP / 2);
}

/// Each time its worker ends, and another is started.
#[test]
fn a_borrower_that_asks_again_and_again_costs_the_lender_nothing_and_others_no_device() {
    let lender = Lender::start();
    let state = lender.state();
    let (mut client, mut lease) = lender.borrow("web1", &state, None).expect("a lease");
    let chain = lease.chain.expect("a chain");
    let mut descriptors = 0;
    for round in 0..30 {
        // The worker runs.
        let next = lender.borrow_soon("web1", &state, Some(chain));
        drop((client, lease));
        (client, lease) = next;
        assert_eq!(version(&mut lease), 0x1_0400);
        let error = lender.refusal("web2", &state, Some(chain));
        assert_eq!(error.kind, ErrorKind::ChainEnded, "{error}");
        if round == 0 {
            descriptors = lender.descriptors();
        }
    }
    // Connections that are being closed come and go.
    let began = Instant::now();
    while lender.descriptors() > descriptors {
        assert!(
            began.elapsed() < DEADLINE,
            "{} of {descriptors}",
            lender.descriptors()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    drop((client, lease));
    lender.wait_free();
    lender
        .borrow("web2", &lender.state(), None)
        .expect("a lease");
}

/// Its connection stays open.
#[test]
fn a_device_without_a_worker_is_kept_no_longer_than_was_asked_for() {
    let lender = Lender::start();
    let state = lender.state();
    let keep = Duration::from_millis(1500);
    let borrowed = lender.borrow_for(keep, "web1", &state, None);
    let (_client, lease) = borrowed.expect("a lease");
    let chain = lease.chain.expect("a chain");
    let killed = Instant::now();
    lender.kill_worker();
    lender.wait_free();
    assert!(killed.elapsed() >= keep, "{:?}", killed.elapsed());
    let lent = lender.borrow("web2", &lender.state(), None);
    let (_other, mut lease) = lent.expect("a lease");
    assert_eq!(version(&mut lease), 0x1_0400);
    let error = lender.refusal("web1", &state, Some(chain));
    assert_eq!(error.kind, ErrorKind::ChainEnded, "{error}");
}

#[test]
fn a_file_that_is_no_sealed_state_is_refused_in_words() {
    let lender = Lender::start();
    let bytes = lender.state_bytes();
    let unsealed = memfd_create("state", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&unsealed, bytes).expect("a size");
    let short = create_sealed("state", bytes - 4096).expect("memory");
    let long = create_sealed("state", bytes + 4096).expect("memory");
    let (pipe, _end) = std::io::pipe().expect("a pipe");
    let refusals = [
        (lender.refusal("web1", &unsealed, None), "not sealed"),
        (lender.refusal("web1", &pipe, None), "not sealed"),
        (lender.refusal("web1", &short, None), "bytes, and not"),
        (lender.refusal("web1", &long, None), "bytes, and not"),
    ];
    for (error, words) in refusals {
        assert!(error.message.contains(words), "{error}");
    }
    let mut client = lender.client("web1");
    let keeping = Keeping {
        keep: KEEP,
        resumes: None,
    };
    let id = "disk0".parse().expect("an id");
    let error = client.borrow_and_keep(&id, keeping, &[]).unwrap_err();
    assert!(error.to_string().contains("without the file"), "{error}");
    let (_client, mut lease) = lender
        .borrow("web1", &lender.state(), None)
        .expect("a lease");
    assert_eq!(version(&mut lease), 0x1_0400);
}

#[test]
fn a_state_of_a_later_version_is_refused_and_waits_for_a_lender_that_reads_it() {
    let lender = Lender::start();
    let state = lender.state();
    let (_client, lease) = lender.borrow("web1", &state, None).expect("a lease");
    let chain = lease.chain.expect("a chain");
    lender.kill_worker();
    let file = File::from(state.try_clone().expect("a descriptor"));
    let version = |version: u32| {
        let written = file.write_all_at(&version.to_le_bytes(), STATE_PAGE + 8);
        written.expect("memory");
    };
    for later in [3, 999] {
        version(later);
        let refused = lender.refusal("web1", &state, Some(chain));
        // Not the end of the chain: the borrower asks again.
        assert_eq!(refused.kind, ErrorKind::Invalid, "{refused}");
        for part in [
            &format!("the state of the model has version {later} (of farside"),
            "reads versions 1 and 2",
            "start the lender of farside",
        ] {
            assert!(refused.message.contains(part), "no {part:?} in {refused}");
        }
    }
    // The version before.
    version(1);
    let (_client, mut lease) = lender.borrow_soon("web1", &state, Some(chain));
    assert_eq!(self::version(&mut lease), 0x1_0400);
    let mut written = [0; 4];
    let read = file.read_exact_at(&mut written, STATE_PAGE + 8);
    read.expect("memory");
    assert_eq!(u32::from_le_bytes(written), 2);
}

#[test]
fn a_state_of_garbage_is_refused_or_harmless() {
    let lender = Lender::start();
    let state = lender.state();
    let (_client, lease) = lender.borrow("web1", &state, None).expect("a lease");
    let mut chain = lease.chain.expect("a chain");
    let file = File::from(state.try_clone().expect("a descriptor"));
    let mut good = vec![0; lender.state_bytes() as usize];
    file.read_exact_at(&mut good, 0).expect("the state");
    let mut random = 1u64;
    let (mut refused, mut taken) = (0, 0);
    for round in 0..40usize {
        lender.kill_worker();
        let mut bad = good.clone();
        let from = STATE_PAGE as usize + if round % 4 == 0 { 0 } else { 12 };
        for byte in bad[from..].iter_mut().step_by(1 + round * 5) {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            *byte = (random >> 33) as u8;
        }
        file.write_all_at(&bad, 0).expect("memory");
        let began = Instant::now();
        loop {
            match lender.borrow("web1", &state, Some(chain)) {
                Ok((_, mut lease)) => {
                    taken += 1;
                    assert_eq!(version(&mut lease), 0x1_0400);
                    std::mem::forget(lease);
                    break;
                }
                Err(CallError::Refused(error)) if error.kind == ErrorKind::ChainEnded => {
                    refused += 1;
                    assert!(error.message.contains("state"), "{error}");
                    break;
                }
                Err(CallError::Refused(error)) if error.kind == ErrorKind::Busy => {
                    assert!(began.elapsed() < DEADLINE, "{error}");
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("{error}"),
            }
        }
        // A lease that was refused is over.
        lender.wait_free();
        let (client, lease) = lender.borrow_soon("web1", &state, None);
        chain = lease.chain.expect("a chain");
        std::mem::forget((client, lease));
    }
    println!("{refused} refused, {taken} taken");
    assert!(refused > 10);
}

#[test]
fn a_state_that_changes_meanwhile_has_no_effect_on_its_worker() {
    let lender = Lender::start();
    let state = lender.state();
    let (_client, mut lease) = lender.borrow("web1", &state, None).expect("a lease");
    let file = File::from(state);
    let over = Arc::new(AtomicBool::new(false));
    let writes = Arc::clone(&over);
    let writer = std::thread::spawn(move || {
        let mut byte = 0u8;
        while !writes.load(Ordering::Relaxed) {
            byte = byte.wrapping_add(1);
            file.write_all_at(&vec![byte; 1 << 18], 0).expect("memory");
        }
    });
    for round in 0..500 {
        write(&mut lease, 0x24, round);
        assert_eq!(register(&mut lease, 0x24), round);
    }
    over.store(true, Ordering::Relaxed);
    writer.join().expect("it writes");
}
