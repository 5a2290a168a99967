//! The formats of leases, and of the messages of workers, as each version has them.

use std::path::PathBuf;

use farside_daemon::DeviceId;
use farside_fabric::{
    Access, Fault, FaultReason, FaultRecord, FaultSummary, Iova, LutRange, Owner, PageCounts,
    PeerAddress, ReasonCounts, Usage,
};
use farside_hand_over::{
    decode,
    samples::{self, Example},
};
use farside_irq_relay::{IrqIndex, VectorCount};
use farside_lender_protocol::{
    ErrorKind, Generation, LimitUse, RemoteError, Resource, Revocation, Secret,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;

use super::*;
use crate::{
    device_loop::Line,
    registry::Release,
    source::Report,
    worker::messages::{Answer, Call, Order},
};

fn sample(version: u32) -> PathBuf {
    let name = format!("tests/samples/leases-{version}.txt");
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// From the text in which JSON has it: its fields are private to their crate.
fn parts(iommu: serde_json::Value) -> HandleParts {
    let parts = json!({"bdf": "0000:03:00.0", "config_offset": 7u64 << 40, "iommu": iommu});
    serde_json::from_value(parts).expect("parts")
}

/// As version 2 has them.
fn adoptable() -> HandleParts {
    let region = json!({"can_map": true, "size": 0x4000, "file_offset": 1u64 << 40, "sparse": [[0, 0x2000]]});
    let irq = json!({"flags": 9, "count": 4});
    let parts = json!({
        "bdf": "0000:03:00.0", "config_offset": 7u64 << 40, "iommu": {"Iommufd": {"ioas": 3}},
        "info": {"regions": [region], "irqs": [irq, irq, irq, irq, irq], "can_reset": true},
    });
    serde_json::from_value(parts).expect("parts")
}

fn description() -> serde_json::Value {
    json!({
        "config": [0x86, 0x80, 1, 2],
        "bars": [
            {"size": 0x4000, "kind": {"Memory64": {"prefetchable": true}}, "mappable": [{"offset": 0x1000, "len": 0x2000}]},
            null, {"size": 256, "kind": "Io", "mappable": []}, {"size": 4096, "kind": {"Memory32": {"prefetchable": false}}, "mappable": []}, null, null,
        ],
        "intx": true, "msi_vectors": 4, "msix_vectors": 9, "summary": "a function",
    })
}

fn probed() -> Probed {
    let probed = json!({
        "bdf": "0000:03:00.0", "api": "iommufd",
        "described": {"description": description(), "bars": "Lender", "state": 0},
        "usable": [[0, 0xfedf_ffffu64], [0xfef0_0000u64, 0x7fff_ffff_ffffu64]], "can_reset": true,
    });
    serde_json::from_value(probed).expect("a function")
}

fn window() -> OpenWindow {
    OpenWindow {
        range: LutRange {
            first: 4,
            entries: 2,
        },
        peer_address: PeerAddress::new(0x1_0000_0000),
        bytes: 0x1000_0000,
    }
}

fn lease(served: KeptDevice) -> KeptLease {
    KeptLease {
        device: "disk0".parse::<DeviceId>().expect("an id"),
        vm: "web1".parse().expect("a name"),
        generation: Generation(1_795_603_832_401_702),
        since: SystemTime::UNIX_EPOCH + Duration::new(1_795_603_832, 401_702_003),
        chain: Some((Secret::from_bits(0x0123_4567 << 96 | 0x89ab_cdef), true)),
        pid: 4711,
        group: Some("/sys/fs/cgroup/lender/lease-4711".into()),
        served,
        first_order: 1 << 32 | 1,
        requester: true,
        windows: vec![window()],
        replied: Some((12, CallReply::Window(window().range))),
        worker: 2,
        state: None,
    }
}

/// Each kind of lease.
fn leases() -> Vec<(&'static str, KeptLease)> {
    let nvme = Model::Nvme {
        config: r#"{"image":"/srv/disk0.img"}"#.into(),
        size: 1 << 30,
        punches_holes: true,
    };
    let plain = KeptLease {
        chain: None,
        group: None,
        requester: false,
        windows: Vec::new(),
        replied: None,
        ..lease(KeptDevice::Model(Model::DmaTest))
    };
    let iommufd = parts(json!({"Iommufd": {"ioas": 3}}));
    let function = |parts| lease(KeptDevice::Function(Box::new(probed()), parts));
    let nvme = KeptLease {
        state: Some(2),
        ..lease(KeptDevice::Model(nvme))
    };
    vec![
        ("nvme", nvme),
        ("dma-test", plain),
        ("function", function(None)),
        ("function-open", function(Some(iommufd))),
        ("function-type1", function(Some(parts(json!("Type1"))))),
    ]
}

/// Since version 2.
fn later_leases() -> Vec<(&'static str, KeptLease)> {
    let function = KeptDevice::Function(Box::new(probed()), Some(adoptable()));
    let config = json!({
        "path": "/run/device.sock", "limits": {"max_msg_fds": 8, "max_data_xfer_size": 1 << 20},
        "described": {"description": description(), "bars": "Lender", "state": 4096},
    });
    let server = serde_json::from_value(config).expect("a server");
    let server = KeptLease {
        requester: false,
        windows: Vec::new(),
        replied: None,
        ..lease(KeptDevice::Server(Box::new(server)))
    };
    vec![("function-adoptable", lease(function)), ("server", server)]
}

fn report() -> Report {
    let fault = |access, reason| Fault {
        iova: Iova::new(0xffff_f000),
        len: 64,
        access,
        reason,
    };
    let record = |sequence, fault| FaultRecord {
        sequence,
        unix_ms: 1_795_603_832_401,
        fault,
    };
    let pages = |n| PageCounts {
        pages_4k: n,
        pages_2m: n + 1,
        pages_1g: n + 2,
    };
    Report {
        bus_master: true,
        usage: Usage {
            windows: 2,
            lut_entries: 12,
            window_bytes: 1 << 32,
            bytes_mapped: 1 << 31,
            lender_pages: pages(1),
            borrower_pages: pages(4),
        },
        interrupts: [
            IrqIndex::Intx,
            IrqIndex::Msi,
            IrqIndex::Msix,
            IrqIndex::Err,
            IrqIndex::Req,
        ]
        .into_iter()
        .map(|index| VectorCount {
            index,
            vector: 3,
            fired: 1000,
        })
        .collect(),
        faults: FaultSummary {
            total: 9,
            by_reason: ReasonCounts {
                bus_master_disabled: 1,
                lender_domain: 2,
                window: 3,
                borrower_domain: 4,
                permission: 5,
                memory_gone: 6,
            },
            recent: vec![
                record(1, fault(Access::Read, FaultReason::BusMasterDisabled)),
                record(2, fault(Access::Write, FaultReason::LenderDomain)),
                record(3, fault(Access::Write, FaultReason::Window)),
                record(4, fault(Access::Write, FaultReason::BorrowerDomain)),
                record(5, fault(Access::Write, FaultReason::Permission)),
                record(6, fault(Access::Write, FaultReason::MemoryGone)),
            ],
        },
        counters: vec![("io_commands".to_owned(), 12).into()],
        limits: [
            Resource::MemoryFiles,
            Resource::MemoryBytes,
            Resource::Mappings,
            Resource::Windows,
            Resource::LutEntries,
            Resource::RequesterEntries,
            Resource::Eventfds,
            Resource::Peers,
            Resource::Devices,
            Resource::Commands,
            Resource::NtbRequesterEntries,
            Resource::NtbLutEntries,
        ]
        .into_iter()
        .map(|resource| LimitUse::new(resource, 1, 2))
        .collect(),
    }
}

/// Each kind of error.
fn errors() -> Vec<RemoteError> {
    let kinds = [
        ErrorKind::Version,
        ErrorKind::UnknownDevice,
        ErrorKind::Busy,
        ErrorKind::StaleGeneration,
        ErrorKind::Limit,
        ErrorKind::Invalid,
        ErrorKind::Internal,
        ErrorKind::Fenced,
        ErrorKind::Denied,
        ErrorKind::ChainEnded,
    ];
    let message = || "the reason".to_owned();
    let error = |kind| RemoteError {
        kind,
        message: message(),
    };
    kinds.into_iter().map(error).collect()
}

/// What a broker sends to a worker that another one has started: [`Order::Start`] is not among it.
fn orders() -> Vec<Order> {
    vec![
        Order::Status,
        Order::HandOver {
            fence: Generation(7),
        },
        Order::Revoke {
            limit: Duration::new(30, 5),
        },
        // Since version 2.
        Order::Resize { to: 1 << 40 },
    ]
}

fn answers() -> Vec<Answer> {
    let refused = errors().into_iter().map(|it| Answer::HandedOver(Err(it)));
    let mut answers = vec![
        Answer::Status(Box::new(report())),
        Answer::Status(Box::default()),
        Answer::HandedOver(Ok(())),
        Answer::Nothing,
        Answer::Ended(Box::new(report())),
    ];
    answers.extend(refused);
    // Since version 2.
    answers.push(Answer::Resized(Ok(())));
    answers
}

fn calls() -> Vec<Call> {
    let range = window().range;
    let revocations = [
        Revocation::Pending,
        Revocation::NotLent,
        Revocation::Released,
        Revocation::Ended,
    ];
    let lines = [
        Line::Borrowed,
        Line::Dropped,
        Line::Ended,
        Line::NotLent,
        Line::Refused,
    ];
    let mut calls = vec![
        Call::Opened(parts(json!("Type1"))),
        Call::Opened(parts(json!({"Iommufd": {"ioas": 3}}))),
        Call::TakeRequester,
        Call::TakeWindow {
            peer_address: window().peer_address,
            bytes: window().bytes,
        },
        Call::GiveBackWindow(range),
        Call::Released(Release::Cut),
        Call::Begins,
        Call::EndChain,
        Call::Problem(None),
        Call::Problem(Some("the medium fails".into())),
        Call::DmaFaults,
    ];
    let over = |it| Call::Released(Release::Over(it));
    calls.extend(revocations.map(over));
    calls.extend(lines.map(|it| Call::Line(it, "device disk0: a line".into())));
    // Since version 2.
    calls.push(Call::Opened(adoptable()));
    calls
}

fn replies() -> Vec<CallReply> {
    let refused = errors().into_iter().map(CallReply::Refused);
    let mut replies = vec![
        CallReply::Again,
        CallReply::Done,
        CallReply::Window(window().range),
        CallReply::DmaFaults(6),
    ];
    replies.extend(refused);
    replies
}

fn numbered<T: Serialize>(name: &str, messages: Vec<T>) -> Vec<Example> {
    let encoded = (1u64..).zip(messages).map(|(number, message)| {
        let bytes = postcard::to_stdvec(&(number, message)).expect("a message");
        (format!("{name}-{number}"), bytes)
    });
    encoded.collect()
}

/// All that outlives a broker, as this version has it.
fn examples() -> Vec<Example> {
    let leases = leases().into_iter().chain(later_leases());
    let leases = leases.map(|(name, lease)| {
        let record = serde_json::to_string(&lease.recorded()).expect("a lease");
        // It changes with each release.
        let record = record.replace(&format!("\"farside\":\"{FARSIDE}\""), "\"farside\":\"x\"");
        (format!("lease-{name}"), record.into_bytes())
    });
    leases
        .chain(numbered("order", orders()))
        .chain(numbered("answer", answers()))
        .chain(numbered("call", calls()))
        .chain(numbered("reply", replies()))
        .collect()
}

/// As the leases of version 1 are read.
fn version_1((name, lease): (&'static str, KeptLease)) -> (&'static str, KeptLease) {
    let lease = KeptLease {
        worker: 1,
        state: lease.state.map(|_| 1),
        ..lease
    };
    (name, lease)
}

#[test]
fn the_format_of_leases_has_not_changed_without_its_version() {
    samples::is_unchanged(&sample(LEASES.version()), &examples());
}

#[test]
fn leases_of_this_version_and_of_the_one_before_are_read() {
    for version in LEASES.oldest()..=LEASES.version() {
        let mut expected = leases();
        match version {
            1 => expected = expected.into_iter().map(version_1).collect(),
            _ => expected.extend(later_leases()),
        }
        let sample = samples::read(&sample(version));
        for (name, lease) in expected {
            let name = format!("lease-{name}");
            let record = sample.iter().find(|(it, _)| *it == name);
            let (_, record) = record.unwrap_or_else(|| panic!("no {name} in version {version}"));
            let read = KeptLease::read(record).unwrap_or_else(|| panic!("{name}, {version}"));
            // Secrets are not shown by `Debug`.
            let text = |lease: &KeptLease| serde_json::to_string(lease).expect("a lease");
            assert_eq!(text(&read), text(&lease), "{name}, version {version}");
            assert_eq!(format!("{read:?}"), format!("{lease:?}"));
        }
    }
}

#[test]
fn messages_of_the_version_before_are_read_as_they_were_sent() {
    fn again<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Vec<u8> {
        let message: Numbered<T> = decode(bytes).expect("a message");
        postcard::to_stdvec(&message).expect("a message")
    }
    for version in LEASES.oldest()..=LEASES.version() {
        let sample = samples::read(&sample(version));
        let messages = sample
            .iter()
            .filter(|(name, _)| !name.starts_with("lease-"));
        let mut count = 0;
        for (name, bytes) in messages {
            let read = match name.split('-').next() {
                Some("order") => again::<Order>(bytes),
                Some("answer") => again::<Answer>(bytes),
                Some("call") => again::<Call>(bytes),
                Some("reply") => again::<CallReply>(bytes),
                _ => panic!("{name}"),
            };
            assert_eq!(read, *bytes, "{name}, version {version}");
            let now = examples().into_iter().find(|(it, _)| it == name);
            assert_eq!(now.map(|(_, now)| now).as_ref(), Some(bytes), "{name}");
            count += 1;
        }
        assert!(count > 40, "{count} messages");
    }
}

/// A worker of a later version, whose messages have more at their ends, is not spoken to; one of the version before has less.
#[test]
fn a_report_of_a_version_without_its_last_fields_is_read() {
    let report = Report {
        limits: Vec::new(),
        ..report()
    };
    let mut bytes = postcard::to_stdvec(&(1u64, Answer::Ended(Box::new(report)))).expect("bytes");
    bytes.pop();
    let (_, answer): Numbered<Answer> = decode(&bytes).expect("a report");
    assert!(
        matches!(answer, Answer::Ended(report) if report.limits.is_empty() && report.faults.total == 9)
    );
}

/// A lease of `device` of the VM web1, whose worker has a window open, unless it has ended.
fn adopted(device: &str, open: OpenWindow, has_ended: bool) -> Adopted {
    let fd = || Channel::pair().expect("sockets").0.into_socket();
    let connection = (!has_ended).then(fd);
    let lease = KeptLease {
        device: device.parse().expect("an id"),
        vm: "web1".parse().expect("a name"),
        generation: Generation(2),
        since: SystemTime::now(),
        chain: None,
        pid: 1,
        group: None,
        served: KeptDevice::Model(Model::DmaTest),
        first_order: 1,
        requester: true,
        windows: vec![open],
        replied: None,
        worker: LEASES.version(),
        state: None,
    };
    Adopted {
        number: 1,
        lease,
        requester: None,
        pidfd: fd(),
        orders: fd(),
        calls: fd(),
        log: fd(),
        connection,
        image: None,
        handle: None,
    }
}

/// The name of its VM is what the borrower has stated to the former broker.
#[test]
fn adopted_leases_share_windows_by_who_is_connected() {
    let adapter = || Adapter::new(Default::default()).expect("limits");
    let range = LutRange {
        first: 3,
        entries: 8,
    };
    let open = OpenWindow {
        range,
        peer_address: PeerAddress::new(1 << 30),
        bytes: 1 << 30,
    };
    let model = config::Model::DmaTest(Default::default());
    let used = |adapter: &Adapter| {
        let usage = adapter.tables().usage().expect("it has them");
        (usage.devices.len(), usage.lut_entries)
    };
    let here = adapter();
    for device in ["disk0", "disk1"] {
        let mut lease = adopted(device, open, false);
        assert!(matches!(lease.go_on(&model, &here), Ok(None)), "{device}");
    }
    assert_eq!(used(&here), (2, 8));
    // A worker that has ended has no window.
    let mut ended = adopted("disk2", open, true);
    assert!(!ended.owner().is(&adopted("disk0", open, false).owner()));
    assert!(matches!(ended.go_on(&model, &here), Ok(None)));
    assert_eq!((used(&here), ended.requester), ((2, 8), None));
    // Somebody else has the range, for a VM of that name.
    let others = adapter();
    let namesake = Owner::new("web1", "host a");
    let entry = others.tables().take_requester("disk3", &namesake);
    let entry = entry.expect("free");
    let OpenWindow {
        peer_address,
        bytes,
        ..
    } = open;
    let taken = others
        .tables()
        .restore_window(entry, peer_address, bytes, range);
    assert!(taken);
    let refused = adopted("disk0", open, false).go_on(&model, &others);
    let why = refused.map(drop).expect_err("the range is taken");
    assert!(why.contains("[fabric]"), "{why}");
}
