//! Both halves of a medium, with a socket between them that is cut.

use std::{fs::File, os::unix::fs::FileExt};

use farside_fabric::memory::{HostSlice, SharedMemory};
use farside_medium::{FrameError, MAX_DATA, REFUSED};
use proptest::prelude::*;
use rustix::net::{SendFlags, send};

use super::*;
use crate::{
    block::{self, BlockError, BlockQueue, Durability, Ended, EngineChoice, LentMedium, Limits},
    test_links::links,
};

const SIZE: u64 = 1 << 20;
const DEPTH: u16 = 8;

fn image() -> File {
    let image = tempfile::tempfile().unwrap();
    image.set_len(SIZE).unwrap();
    image
}

fn lend(image: &File, read_only: bool, link: Link) -> LentMedium {
    lend_with(image, read_only, link, Limits::default())
}

fn lend_with(image: &File, read_only: bool, link: Link, limits: Limits) -> LentMedium {
    let image = image.try_clone().unwrap();
    let block = BlockQueue::open(image, EngineChoice::Threads, block::DEPTH);
    LentMedium::new(
        block.and_then(|block| block.limited(limits)).unwrap(),
        (SIZE, read_only),
        ("disk0", link),
    )
    .unwrap()
}

/// A borrower, and its lender unless the connection is cut.
struct Pair {
    // Dropped first: the queue waits until its lender has closed the connection.
    lent: Option<LentMedium>,
    queue: BlockQueue,
    keeper: MediumKeeper,
    image: File,
    failed_syncs: u32,
}

impl Pair {
    fn new(read_only: bool) -> Self {
        let image = image();
        let (near, far) = links();
        let (medium, keeper) = remote_medium(SIZE, near).unwrap();
        Self {
            queue: BlockQueue::remote(medium, DEPTH).unwrap(),
            keeper,
            lent: Some(lend(&image, read_only, far)),
            image,
            failed_syncs: 0,
        }
    }

    /// A cut that the borrower notices.
    fn cut(&mut self) -> Notice {
        self.lent = None;
        loop {
            if let Ok(notice) = self.keeper.notices.try_recv() {
                return notice;
            }
            self.queue.turn();
            self.queue.is_busy();
        }
    }

    fn reconnect(&mut self) {
        let (near, far) = links();
        self.lent = Some(lend(&self.image, false, far));
        self.keeper.supply(Supply::Link(Box::new(near), SIZE));
    }

    fn serve(&mut self) {
        let failed = &mut self.failed_syncs;
        if let Some(lent) = &mut self.lent {
            lent.turn(&mut || *failed += 1).unwrap();
        }
    }

    fn done(&mut self) -> (Tag, Result<(), BlockError>) {
        loop {
            self.queue.turn();
            if let Some(done) = self.queue.next_done() {
                return done;
            }
            self.queue.is_busy();
            self.serve();
        }
    }

    /// Starts a write of `byte`s.
    fn write(&mut self, tag: Tag, offset: u64, len: usize, byte: u8) {
        let slice = memory(len);
        slice.write(&vec![byte; len]);
        *self.queue.slices(tag) = vec![slice];
        self.queue.write(tag, offset, Durability::Cached);
    }
}

fn memory(len: usize) -> HostSlice {
    SharedMemory::anonymous(len).unwrap().slice(0, len).unwrap()
}

fn bytes(image: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    image.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn every_operation_crosses_in_one_frame() {
    let mut pair = Pair::new(false);
    pair.write(0, 4096, 300_000, 7);
    assert_eq!(pair.done(), (0, Ok(())));
    assert_eq!(bytes(&pair.image, 4096, 300_000), vec![7; 300_000]);
    let into = memory(5000);
    *pair.queue.slices(1) = vec![
        into.slice(0, 1000).unwrap(),
        into.slice(1000, 4000).unwrap(),
    ];
    pair.queue.read(1, 300_000);
    assert_eq!(pair.done(), (1, Ok(())));
    let mut read = vec![0; 5000];
    into.read(&mut read);
    assert_eq!(read, bytes(&pair.image, 300_000, 5000));
    pair.queue.flush(2);
    assert_eq!(pair.done(), (2, Ok(())));
    pair.queue.punch(3, 4096, 8192);
    assert_eq!(pair.done(), (3, Ok(())));
    assert_eq!(bytes(&pair.image, 4096, 8193)[8190..], [0, 0, 7]);
    pair.queue.zero(4, 16384, 4096, false);
    assert_eq!(pair.done(), (4, Ok(())));
    assert_eq!(bytes(&pair.image, 16383, 3), [7, 0, 0]);
    let stats = pair.lent.unwrap().stats();
    let stat = |name| stats.iter().find(|(known, _)| *known == name).unwrap().1;
    assert_eq!((stat("reads"), stat("writes"), stat("flushes")), (1, 1, 1));
}

#[test]
fn a_transfer_above_the_longest_frame_is_more_of_them() {
    let mut pair = Pair::new(false);
    let len = SIZE as usize;
    pair.write(0, 0, len, 3);
    assert_eq!(pair.done(), (0, Ok(())));
    pair.queue.zero(1, 0, SIZE, false);
    assert_eq!(pair.done(), (1, Ok(())));
    assert!(bytes(&pair.image, 0, len).iter().all(|byte| *byte == 0));
}

#[test]
fn a_medium_that_grows_is_used_beyond_its_former_end() {
    let mut pair = Pair::new(false);
    pair.write(0, SIZE, 4096, 7);
    assert_eq!(pair.done(), (0, Err(BlockError::Medium(libc::EINVAL))));
    pair.image.set_len(2 * SIZE).unwrap();
    pair.lent.as_mut().unwrap().grow(2 * SIZE);
    let is_reported = |pair: &mut Pair| {
        (0..10).find_map(|_| {
            pair.serve();
            pair.queue.is_busy();
            pair.queue.take_size()
        })
    };
    assert_eq!(is_reported(&mut pair), Some(2 * SIZE));
    pair.write(0, 2 * SIZE - 4096, 4096, 7);
    assert_eq!(pair.done(), (0, Ok(())));
    assert_eq!(bytes(&pair.image, 2 * SIZE - 4096, 4096), [7; 4096]);
    // The size over the next connection.
    pair.cut();
    pair.reconnect();
    assert_eq!(is_reported(&mut pair), Some(SIZE));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Whatever is cut when: each operation ends once, in success, and every write is there.
    #[test]
    fn operations_go_on_after_cuts(steps in proptest::collection::vec((0..4u8, 0..DEPTH, 1..20_000usize), 1..60)) {
        let mut pair = Pair::new(false);
        let mut in_flight = [false; DEPTH as usize];
        let mut expected = vec![0; SIZE as usize];
        for (n, (step, tag, len)) in (1..).zip(steps) {
            let slot = usize::from(tag);
            match step {
                0 | 1 if !in_flight[slot] => {
                    // Each tag has a part of the medium, so writes do not race.
                    let offset = u64::from(tag) * 65536;
                    pair.write(tag, offset, len, n);
                    pair.queue.turn();
                    expected[offset as usize..offset as usize + len].fill(n);
                    in_flight[slot] = true;
                }
                2 if pair.lent.is_some() => drop(pair.cut()),
                _ if pair.lent.is_none() => pair.reconnect(),
                _ => pair.serve(),
            }
            pair.queue.turn();
            while let Some((tag, result)) = pair.queue.next_done() {
                prop_assert_eq!(result, Ok(()));
                prop_assert!(std::mem::take(&mut in_flight[usize::from(tag)]));
            }
        }
        if pair.lent.is_none() {
            pair.reconnect();
        }
        while in_flight.contains(&true) {
            let (tag, result) = pair.done();
            prop_assert_eq!(result, Ok(()));
            prop_assert!(std::mem::take(&mut in_flight[usize::from(tag)]));
        }
        prop_assert!(bytes(&pair.image, 0, SIZE as usize) == expected);
    }

    /// A lender that answers anything ends its connection, or is believed as far as an operation that
    /// is there: no byte outside the memory of a read changes, and nothing ends twice.
    #[test]
    fn a_hostile_lender_reaches_the_memory_of_reads_alone(
        answers in proptest::collection::vec((0..2u8, 0..DEPTH + 2, -6000..6000i32, 0..6000u32), 1..12),
    ) {
        let (near, far) = links();
        let (medium, keeper) = remote_medium(SIZE, near).unwrap();
        let mut queue = BlockQueue::remote(medium, DEPTH).unwrap();
        let whole = memory(3 * 4096);
        *queue.slices(0) = vec![whole.slice(4096, 4096).unwrap()];
        queue.read(0, 0);
        *queue.slices(1) = vec![memory(4096)];
        queue.write(1, 0, Durability::Cached);
        queue.turn();
        let mut ended = 0;
        for (kind, tag, result, data) in answers {
            let condition = Condition { size: SIZE, full: false, read_only: false };
            let data = if kind == 0 { data } else { result.max(0) as u32 };
            let done = Frame::Done { tag, result, data, condition };
            // Fails once the connection has ended.
            let _ = send(&far, &done.encode(), SendFlags::NOSIGNAL);
            let _ = send(&far, &vec![0xee; data as usize], SendFlags::NOSIGNAL);
            queue.is_busy();
            queue.turn();
            while queue.next_done().is_some() {
                ended += 1;
            }
        }
        prop_assert!(ended <= 2);
        let mut guard = [0; 4096];
        for part in [0, 2] {
            whole.slice(part * 4096, 4096).unwrap().read(&mut guard);
            prop_assert!(guard.iter().all(|byte| *byte == 0));
        }
        drop((far, keeper));
    }

    /// A borrower that sends anything gets answers, or loses its connection; the image does not grow.
    #[test]
    fn a_hostile_borrower_stays_in_the_image(
        sent in proptest::collection::vec((0..9u8, 0..2000u16, any::<u64>(), 0..70_000u32, any::<i32>()), 1..20),
    ) {
        let image = image();
        let (near, far) = links();
        let mut lent = lend(&image, false, far);
        for (kind, tag, offset, len, mode) in sent {
            let frame = match kind {
                0 => Frame::Read { tag, offset, len },
                1 => Frame::Write { tag, offset, len: len % 512, durable: mode > 0 },
                2 => Frame::Allocate { tag, mode, offset, len: len.into() },
                3 => Frame::Allocate { tag, mode: super::super::PUNCH_HOLE, offset: offset % SIZE, len: len.into() },
                4 => Frame::Sync { tag },
                7 => Frame::Reserve { tag, len: len % 512 },
                8 => Frame::Report { tag, len, extended: mode > 0 },
                5 => Frame::Release { limit_ms: offset },
                _ => Frame::Write { tag, offset: offset % (2 * SIZE), len: len % 512, durable: false },
            };
            let _ = send(&near, &frame.encode(), SendFlags::NOSIGNAL);
            let _ = send(&near, &vec![1; frame.data_len()], SendFlags::NOSIGNAL);
            match lent.turn(&mut || {}) {
                Ok(_) => {}
                Err(Ended::Cut(error)) => {
                    prop_assert!(matches!(error, LinkError::Frame(_)), "{error}");
                    break;
                }
                Err(Ended::Returned) => prop_assert!(false, "nothing was returned"),
            }
        }
        drop(lent);
        prop_assert_eq!(image.metadata().unwrap().len(), SIZE);
    }
}

#[test]
fn what_is_in_flight_over_a_cut_is_given_up_when_the_owner_waits_for_it() {
    let mut pair = Pair::new(false);
    pair.write(0, 0, 4096, 9);
    pair.cut();
    pair.queue.hurry();
    assert_eq!(pair.done(), (0, Err(BlockError::Unreachable)));
    // It is not done later.
    pair.reconnect();
    pair.queue.flush(1);
    assert_eq!(pair.done(), (1, Ok(())));
    assert_eq!(bytes(&pair.image, 0, 1), [0]);
}

#[test]
fn a_lender_that_is_silent_holds_up_a_drain_for_a_moment_only() {
    let mut pair = Pair::new(false);
    pair.write(0, 0, 4096, 9);
    pair.queue.turn();
    pair.queue.hurry();
    pair.queue.turn();
    assert_eq!(pair.queue.next_done(), None);
    let since = Instant::now();
    while pair.queue.next_done().is_none() {
        assert!(since.elapsed() < Duration::from_secs(4));
        let fd = pair.queue.wake_fd();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
        pair.queue.is_busy();
        pair.queue.hurry();
        pair.queue.turn();
    }
    assert!(since.elapsed() >= HURRY - Duration::from_millis(100));
}

#[test]
fn all_io_fails_once_the_medium_is_given_up() {
    let mut pair = Pair::new(false);
    pair.write(0, 0, 4096, 9);
    pair.cut();
    pair.keeper.supply(Supply::GivenUp);
    let gone = Err(BlockError::Medium(libc::ENODEV));
    assert_eq!(pair.done(), (0, gone));
    pair.queue.flush(1);
    assert_eq!(pair.done(), (1, gone));
}

#[test]
fn a_queue_that_ends_in_order_returns_the_device() {
    let Pair {
        queue, mut lent, ..
    } = Pair::new(false);
    let ends = std::thread::spawn(move || drop(queue));
    let mut end = || loop {
        if let Err(ended) = lent.as_mut().unwrap().turn(&mut || {}) {
            break ended;
        }
    };
    let ended = end();
    assert!(matches!(ended, Ended::Returned), "{ended:?}");
    // It is not free before the lender closes the connection.
    assert!(!ends.is_finished());
    lent = None;
    assert!(lent.is_none());
    ends.join().unwrap();
}

#[test]
fn a_queue_that_ends_with_operations_in_flight_is_a_cut() {
    let Pair {
        mut queue,
        mut lent,
        ..
    } = Pair::new(false);
    queue.flush(0);
    drop(queue);
    let ended = loop {
        if let Err(ended) = lent.as_mut().unwrap().turn(&mut || {}) {
            break ended;
        }
    };
    assert!(matches!(ended, Ended::Cut(LinkError::Closed)), "{ended:?}");
}

#[test]
fn a_write_protected_medium_is_not_written() {
    let mut pair = Pair::new(true);
    pair.write(0, 0, 512, 1);
    assert_eq!(pair.done(), (0, Err(BlockError::ReadOnly)));
    pair.queue.punch(1, 0, 4096);
    assert_eq!(pair.done(), (1, Err(BlockError::ReadOnly)));
    assert_eq!(bytes(&pair.image, 0, 1), [0]);
}

#[test]
fn a_burst_of_long_reads_is_bounded_by_memory() {
    let image = image();
    let (mut near, far) = links();
    let mut lent = lend(&image, false, far);
    for tag in 0..100 {
        let read = Frame::Read {
            tag,
            offset: 0,
            len: MAX_DATA as u32,
        };
        near.post(read, Memory::NONE);
    }
    near.flush().unwrap();
    for _ in 0..100 {
        lent.turn(&mut || {}).unwrap();
    }
    // 16 MiB of data; the rest waits in the socket.
    assert_eq!(lent.in_flight().0, 16);
    let buffer = memory(MAX_DATA);
    let vector = libc::iovec {
        iov_base: buffer.as_ptr().cast(),
        iov_len: MAX_DATA,
    };
    let mut answers = 0;
    while answers < 100 {
        lent.turn(&mut || {}).unwrap();
        // SAFETY: the vector and `buffer` outlive each call, and no frame is left behind.
        let place = |_: &Frame| Ok(unsafe { Memory::new(&vector, 1) });
        while let Some(frame) = near.receive(place).unwrap() {
            assert!(matches!(frame, Frame::Done { tag, .. } if tag == answers));
            answers += 1;
        }
    }
}

#[test]
fn a_lender_asks_for_the_device_once_for_a_connection() {
    let (near, mut far) = links();
    let (medium, keeper) = remote_medium(SIZE, near).unwrap();
    let mut queue = BlockQueue::remote(medium, DEPTH).unwrap();
    for _ in 0..3 {
        let limit_ms = u64::MAX;
        far.post(Frame::Release { limit_ms }, Memory::NONE);
    }
    far.flush().unwrap();
    queue.is_busy();
    let notice = keeper.notices.try_recv().unwrap();
    assert!(matches!(notice, Notice::Release(limit) if limit == Duration::from_millis(u64::MAX)));
    assert!(keeper.notices.try_recv().is_err());
    drop(far);
}

#[test]
fn any_error_of_a_lender_is_one_of_the_operation() {
    for (result, error) in [
        (i32::MIN, BlockError::Refused(0xefff)),
        (-REFUSED, BlockError::Refused(0)),
        (1 - REFUSED, BlockError::Medium(4095)),
    ] {
        let (near, mut far) = links();
        let (medium, _keeper) = remote_medium(SIZE, near).unwrap();
        let mut queue = BlockQueue::remote(medium, DEPTH).unwrap();
        queue.flush(0);
        queue.turn();
        let condition = Condition {
            size: SIZE,
            full: false,
            read_only: false,
        };
        let done = Frame::Done {
            tag: 0,
            result,
            data: 0,
            condition,
        };
        far.post(done, Memory::NONE);
        far.flush().unwrap();
        let done = loop {
            queue.turn();
            if let Some(done) = queue.next_done() {
                break done;
            }
            queue.is_busy();
        };
        assert_eq!(done, (0, Err(error)), "{result}");
        drop(far);
    }
}

/// More frames than one look takes: the rest is not forgotten until the next event.
#[test]
fn frames_that_are_left_are_work() {
    let (near, mut far) = links();
    let (medium, _keeper) = remote_medium(SIZE, near).unwrap();
    let mut queue = BlockQueue::remote(medium, DEPTH).unwrap();
    queue.flush(0);
    queue.turn();
    for _ in 0..2 * DEPTH {
        far.post(Frame::Alive, Memory::NONE);
    }
    let condition = Condition {
        size: SIZE,
        full: false,
        read_only: false,
    };
    let done = Frame::Done {
        tag: 0,
        result: 0,
        data: 0,
        condition,
    };
    far.post(done, Memory::NONE);
    far.flush().unwrap();
    while queue.next_done().is_none() {
        assert!(queue.is_busy());
        queue.turn();
    }
    drop(far);
}

#[test]
fn a_borrower_that_knows_no_limits_is_held_back() {
    let (near, far) = links();
    let (medium, keeper) = remote_medium(SIZE, near).unwrap();
    let limits = Limits {
        iops: Some(100),
        ..Limits::default()
    };
    let image = image();
    let mut pair = Pair {
        queue: BlockQueue::remote(medium, DEPTH).unwrap(),
        keeper,
        lent: Some(lend_with(&image, false, far, limits)),
        image,
        failed_syncs: 0,
    };
    let start = Instant::now();
    for _ in 0..5 {
        for tag in 0..DEPTH {
            pair.write(tag, u64::from(tag) * 4096, 4096, 7);
        }
        for _ in 0..DEPTH {
            assert_eq!(pair.done().1, Ok(()));
        }
    }
    // The first may start after 100 ms, and the last need not be paid for.
    assert!(
        start.elapsed() >= Duration::from_millis(400),
        "{:?}",
        start.elapsed()
    );
}

/// Then the time for which I/O waits begins anew.
#[test]
fn a_connection_counts_once_all_that_had_waited_for_it_was_answered() {
    let mut pair = Pair::new(false);
    let went_on = |pair: &mut Pair| match pair.cut() {
        Notice::Lost { went_on, .. } => went_on,
        notice => panic!("{notice:?}"),
    };
    assert!(!went_on(&mut pair), "a connection without I/O");
    pair.reconnect();
    pair.write(0, 0, 4096, 1);
    assert_eq!(pair.done().0, 0);
    assert!(went_on(&mut pair));
    pair.write(1, 4096, 4096, 2);
    pair.reconnect();
    assert!(!went_on(&mut pair), "what had waited has no answer");
    pair.reconnect();
    assert_eq!(pair.done().0, 1);
    pair.lent = None;
    // Only what came afterwards waits.
    pair.write(2, 8192, 4096, 3);
    assert!(went_on(&mut pair));
}

/// Its memory is still sent from: an answer that comes before costs the connection, not the memory.
#[test]
fn a_write_that_was_not_sent_whole_is_not_over_whatever_the_lender_says() {
    let (near, far) = links();
    let (medium, keeper) = remote_medium(SIZE, near).unwrap();
    let mut queue = BlockQueue::remote(medium, DEPTH).unwrap();
    // Far more than the socket takes.
    *queue.slices(0) = vec![memory(SIZE as usize)];
    queue.write(0, 0, Durability::Cached);
    queue.turn();
    let done = Frame::Done {
        tag: 0,
        result: SIZE as i32,
        data: 0,
        condition: Condition {
            size: SIZE,
            full: false,
            read_only: false,
        },
    };
    send(&far, &done.encode(), SendFlags::NOSIGNAL).unwrap();
    queue.is_busy();
    queue.turn();
    assert_eq!(queue.next_done(), None);
    assert!(!queue.is_connected());
    let notice = keeper.notices.try_recv().unwrap();
    let is_refused = matches!(
        notice,
        Notice::Lost { error: LinkError::Frame(FrameError::Unexpected(frame)), .. } if frame == done
    );
    assert!(is_refused, "{notice:?}");
}
