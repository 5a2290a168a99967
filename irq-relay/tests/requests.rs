//! Valid requests of a client, and the errno for invalid ones.

mod common;

use std::{
    fs::File,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use common::all_counts;
use farside_irq_relay::{
    IrqCounts, IrqData, IrqEventFd, IrqIndex, SetIrqs, SetIrqsError, SetIrqsMessage, wire::*,
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::OFlags,
    io::Errno,
};

const TRIGGER_NONE: u32 = SET_ACTION_TRIGGER | SET_DATA_NONE;
const TRIGGER_EVENTFD: u32 = SET_ACTION_TRIGGER | SET_DATA_EVENTFD;

fn parse(
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    payload: &[u8],
    fds: Vec<OwnedFd>,
) -> Result<SetIrqs, SetIrqsError> {
    let message = SetIrqsMessage {
        flags,
        index,
        start,
        count,
        data: payload,
        fds,
    };
    SetIrqs::decode(&all_counts(), message)
}

#[track_caller]
fn refused(result: Result<SetIrqs, SetIrqsError>, errno: Errno, text: &str) {
    let error = result.expect_err("must be refused");
    assert_eq!(error.to_string(), text);
    assert_eq!(error.errno(), errno);
}

fn eventfds(count: usize, flags: EventfdFlags) -> Vec<OwnedFd> {
    (0..count).map(|_| eventfd(0, flags).unwrap()).collect()
}

#[test]
fn irq_info_says_what_the_code_does() {
    let counts = all_counts();
    let info = |index| {
        let info = counts.info(index);
        (info.flags, info.count)
    };
    assert_eq!(info(IrqIndex::Intx), (0b0111, 1));
    assert_eq!(info(IrqIndex::Msi), (0b1001, 32));
    assert_eq!(info(IrqIndex::Msix), (0b0011, 2048));
    assert_eq!(info(IrqIndex::Err), (0b1001, 1));
    assert_eq!(info(IrqIndex::Req), (0b1001, 1));
}

#[test]
fn counts_beyond_pci_are_refused() {
    let error = IrqCounts::new().with_msix(2049).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2049 MSI-X vectors: a function has at most 2048"
    );
    assert!(IrqCounts::new().with_msi(33).is_err());
}

#[test]
fn eventfds_of_either_mode_are_taken() {
    for flags in [EventfdFlags::empty(), EventfdFlags::NONBLOCK] {
        let set = parse(TRIGGER_EVENTFD, 2, 2045, 3, &[], eventfds(3, flags)).unwrap();
        assert_eq!(set.range().vectors(), 2045..2048);
        let IrqData::Targets(targets) = set.data() else {
            panic!("{set:?}")
        };
        assert!(targets.iter().all(Option::is_some));
    }
}

#[test]
fn a_full_blocking_eventfd_does_not_block_the_device() {
    let fd = eventfds(1, EventfdFlags::empty()).remove(0);
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let set = parse(TRIGGER_EVENTFD, 0, 0, 1, &[], vec![fd]).unwrap();
    let mut vectors = common::vectors();
    vectors.apply(set).unwrap();
    vectors.set_intx(true);
    assert_eq!(vectors.fired(IrqIndex::Intx, 0), 1);
    assert_eq!(vectors.status().failed, 0);
}

/// The mode and the counter are the client's at any time, not only when it sends the descriptor.
#[test]
fn an_eventfd_that_is_filled_and_set_to_blocking_mode_blocks_one_interrupt() {
    let fds = eventfds(2, EventfdFlags::NONBLOCK);
    let clients: Vec<_> = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let set = parse(TRIGGER_EVENTFD, 2, 0, 2, &[], fds).unwrap();
    let mut vectors = common::vectors();
    vectors.apply(set).unwrap();
    for fd in &clients {
        rustix::fs::fcntl_setfl(fd, OFlags::empty()).unwrap();
        rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }
    let began = Instant::now();
    for vector in [0, 1, 0, 1] {
        vectors.raise(vector);
    }
    // One write is interrupted, which takes up to a second; no second one is made.
    assert!(
        began.elapsed() < Duration::from_millis(1900),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(vectors.status().failed, 4);

    // The next client has interrupts again.
    vectors.disable_all();
    let fds = eventfds(1, EventfdFlags::NONBLOCK);
    let client = fds[0].try_clone().unwrap();
    let set = parse(TRIGGER_EVENTFD, 2, 0, 1, &[], fds).unwrap();
    vectors.apply(set).unwrap();
    vectors.raise(0);
    let mut counter = [0; 8];
    rustix::io::read(&client, &mut counter).unwrap();
    assert_eq!(u64::from_ne_bytes(counter), 1);
}

/// Each is the first to block in its process's lifetime or not: the watch serves all threads.
#[test]
fn threads_that_block_are_freed_again_and_again() {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..2 {
                    let fd = eventfds(1, EventfdFlags::NONBLOCK).remove(0);
                    let client = fd.try_clone().unwrap();
                    let trigger = IrqEventFd::try_from(fd).unwrap();
                    rustix::fs::fcntl_setfl(&client, OFlags::empty()).unwrap();
                    rustix::io::write(&client, &(u64::MAX - 1).to_ne_bytes()).unwrap();
                    assert_eq!(trigger.signal(), Err(Errno::TIMEDOUT));
                }
            });
        }
    });
}

#[test]
fn no_descriptors_take_the_triggers_away() {
    let set = parse(TRIGGER_EVENTFD, 2, 0, 2048, &[], vec![]).unwrap();
    let IrqData::Targets(targets) = set.data() else {
        panic!("{set:?}")
    };
    assert_eq!(targets.len(), 2048);
    assert!(targets.iter().all(Option::is_none));
}

#[test]
fn indexes_and_ranges_are_checked() {
    refused(
        parse(TRIGGER_NONE, 5, 0, 0, &[], vec![]),
        Errno::INVAL,
        "interrupt index 5 does not exist: 0 (INTx) to 4 (request) do",
    );
    refused(
        parse(TRIGGER_NONE, 2, 2000, 49, &[], vec![]),
        Errno::INVAL,
        "49 MSI-X vectors from 2000: this function has 2048",
    );
    refused(
        parse(TRIGGER_NONE, 2, u32::MAX, u32::MAX, &[], vec![]),
        Errno::INVAL,
        "4294967295 MSI-X vectors from 4294967295: this function has 2048",
    );
    refused(
        parse(TRIGGER_NONE, 2, 2048, 0, &[], vec![]),
        Errno::INVAL,
        "0 MSI-X vectors from 2048: this function has 2048",
    );
    let message = SetIrqsMessage {
        flags: TRIGGER_NONE,
        index: 1,
        start: 0,
        count: 0,
        data: &[],
        fds: vec![],
    };
    refused(
        SetIrqs::decode(&IrqCounts::new(), message),
        Errno::INVAL,
        "this function has no MSI interrupt",
    );
}

#[test]
fn flags_name_one_action_and_one_kind_of_data() {
    for flags in [
        0,
        SET_ACTION_TRIGGER,
        SET_DATA_NONE,
        SET_ACTION_MASK | SET_ACTION_TRIGGER | SET_DATA_NONE,
        SET_ACTION_TRIGGER | SET_DATA_NONE | SET_DATA_BOOL,
        TRIGGER_NONE | 1 << 6,
        u32::MAX,
    ] {
        let error = parse(flags, 1, 0, 1, &[], vec![]).unwrap_err();
        assert!(matches!(error, SetIrqsError::BadFlags { .. }), "{flags:#x}");
        assert_eq!(error.errno(), Errno::INVAL);
    }
}

#[test]
fn an_empty_range_only_disables() {
    parse(TRIGGER_NONE, 1, 0, 0, &[], vec![]).unwrap();
    refused(
        parse(TRIGGER_EVENTFD, 1, 0, 0, &[], vec![]),
        Errno::INVAL,
        "a request for no MSI vectors: only trigger without data, from vector 0 (disable), may be empty",
    );
    assert!(parse(TRIGGER_NONE, 1, 1, 0, &[], vec![]).is_err());
    assert!(parse(SET_ACTION_MASK | SET_DATA_NONE, 1, 0, 0, &[], vec![]).is_err());
    assert!(parse(SET_ACTION_TRIGGER | SET_DATA_BOOL, 1, 0, 0, &[], vec![]).is_err());
}

#[test]
fn data_is_one_entry_a_vector() {
    let mask_bool = SET_ACTION_MASK | SET_DATA_BOOL;
    parse(mask_bool, 2, 0, 3, &[1, 0, 2], vec![]).unwrap();
    refused(
        parse(mask_bool, 2, 0, 3, &[1, 0], vec![]),
        Errno::INVAL,
        "data for 2 vectors in a request for 3 MSI-X vectors",
    );
    refused(
        parse(
            TRIGGER_EVENTFD,
            2,
            0,
            3,
            &[],
            eventfds(2, EventfdFlags::NONBLOCK),
        ),
        Errno::INVAL,
        "data for 2 vectors in a request for 3 MSI-X vectors",
    );
    refused(
        parse(
            TRIGGER_NONE,
            2,
            0,
            1,
            &[],
            eventfds(1, EventfdFlags::NONBLOCK),
        ),
        Errno::INVAL,
        "1 file descriptors with a request that takes none",
    );
}

#[test]
fn data_that_a_request_does_not_take_is_refused() {
    let fds = || eventfds(3, EventfdFlags::NONBLOCK);
    // The kernel's array of descriptor numbers.
    refused(
        parse(TRIGGER_EVENTFD, 2, 0, 3, &[0; 12], fds()),
        Errno::INVAL,
        "12 bytes of data in a request that takes none",
    );
    refused(
        parse(TRIGGER_NONE, 2, 0, 3, &[1; 3], vec![]),
        Errno::INVAL,
        "3 bytes of data in a request that takes none",
    );
}

#[test]
fn error_and_request_cannot_be_masked() {
    refused(
        parse(SET_ACTION_MASK | SET_DATA_NONE, 3, 0, 1, &[], vec![]),
        Errno::NOTTY,
        "the error interrupt cannot be masked",
    );
}

#[test]
fn masking_by_eventfd_is_refused_and_taking_it_away_is_not() {
    let unmask = SET_ACTION_UNMASK | SET_DATA_EVENTFD;
    refused(
        parse(unmask, 0, 0, 1, &[], eventfds(1, EventfdFlags::NONBLOCK)),
        Errno::NOTTY,
        "masking INTx by eventfd is not supported: send the requests",
    );
    parse(unmask, 0, 0, 1, &[], vec![]).unwrap();
}

#[test]
fn what_is_not_an_eventfd_is_never_written_to() {
    let file: OwnedFd = File::open("/dev/null").unwrap().into();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    for fd in [file, pipe, socket.into()] {
        refused(
            parse(TRIGGER_EVENTFD, 0, 0, 1, &[], vec![fd]),
            Errno::INVAL,
            "the file descriptor given as a trigger is not an eventfd",
        );
    }
}
