use serde_json::{Value, json};

use super::*;

/// The names that external tools rely on, written out, so that no change of a type
/// changes them unnoticed.
fn document() -> Value {
    json!({
        "format": 1,
        "backends": [{
            "format": 1,
            "vm": "web1",
            "pid": 7,
            "problem": null,
            "restarts": 2,
            "keeper_restarts": 1,
            "farside": "1.0.0",
            "records_version": 2,
            "protocol_version": 15,
            "devices": [{
                "device": "disk0",
                "summary": "NVMe, 1 GiB",
                "lender": "tcp:rack1-b:7410",
                "attached": false,
                "state": "ready",
                "epoch": 3,
                "bytes_pinned": 10,
                "bytes_locked": 9,
                "dma_windows": 2,
                "lut_entries": 4,
                "bytes_unreachable": 0,
                "guest_ram_bytes": 10,
                "layout_probes": 5,
                "bme_to_ready_us": 6,
                "bytes_pinned_before_bme": 0,
                "bars": [{"bar": 0, "gpa": 0xfe00_0000_u32, "size": 0x4000}],
                "interrupts": {
                    "enabled": "Msix",
                    "fired": [{"index": "Msix", "vector": 1, "fired": 40}],
                    "pending": 0,
                    "dropped": 0,
                    "failed": 0
                },
                "last_error": null,
                "open_timeout_ms": 4000,
                "connection": {
                    "state": "waiting",
                    "seconds": 3,
                    "retries": 7, "restarts": 0,
                    "last_error": "no route to host"
                },
                "controller": null,
                "state_version": 2
            }]
        }],
        "lenders": [{
            "lender": "rack1-b",
            "address": "/run/farside/lender.sock",
            "devices": [{
                "entry": {
                    "id": "disk0",
                    "source": "model",
                    "summary": "NVMe, 1 GiB",
                    "borrowed_by": {"vm": "web1", "epoch": 3, "seconds": 2},
                    "fences": [
                        {"vm": "web1", "epoch": 2, "migration": "m1", "reserved": false}
                    ],
                    "problem": null,
                    "availability": "available",
                    "kept": null
                },
                "bus_master": true,
                "usage": {
                    "windows": 2,
                    "lut_entries": 4,
                    "window_bytes": 10,
                    "bytes_mapped": 10,
                    "lender_pages": pages(),
                    "borrower_pages": pages()
                },
                "interrupts": [[2, 1, 40]],
                "faults": {
                    "total": 1,
                    "by_reason": {
                        "bus_master_disabled": 1,
                        "lender_domain": 0,
                        "window": 0,
                        "borrower_domain": 0,
                        "permission": 0,
                        "memory_gone": 0
                    },
                    "recent": [{
                        "sequence": 1,
                        "unix_ms": 8,
                        "fault": {
                            "iova": 4096,
                            "len": 64,
                            "access": "Read",
                            "reason": "BusMasterDisabled"
                        }
                    }]
                },
                "counters": [["io_commands", 12]],
                "limits": [{"resource": "memory-bytes", "used": 10, "limit": 20}]
            }],
            "limits": [{"resource": "lut-entries", "used": 4, "limit": 256}]
        }]
    })
}

fn pages() -> Value {
    json!({"pages_4k": 3, "pages_2m": 2, "pages_1g": 1})
}

#[test]
fn the_document_keeps_its_names() {
    let json = document();
    let status = Status::from_json(json.to_string().as_bytes()).unwrap();
    assert_eq!(serde_json::to_value(&status).unwrap(), json);

    let borrow = status.backend("web1").unwrap().device("disk0").unwrap();
    assert_eq!(borrow.state, BorrowState::Ready);
    assert!(!borrow.is_closed());
    let lent = status.lent("disk0").unwrap();
    assert!(lent.bus_master && !lent.is_free());
    let mut returned = lent.clone();
    returned.entry.borrowed_by = None;
    returned.bus_master = false;
    assert!(!returned.is_free(), "its windows are open");
    returned.usage = Default::default();
    assert!(returned.is_free());
    assert!(status.backend("web2").is_none() && status.lent("disk1").is_none());
}

/// As [`document`]: every name of a value.
#[test]
fn values_keep_their_names() {
    use farside_fabric::{Access, FaultReason};
    use farside_irq_relay::IrqIndex;

    fn names<T: serde::Serialize>(values: &[T]) -> Vec<String> {
        let name = |value| serde_json::from_value(serde_json::to_value(value).unwrap());
        values.iter().map(|value| name(value).unwrap()).collect()
    }
    let reasons = names(&[
        FaultReason::BusMasterDisabled,
        FaultReason::LenderDomain,
        FaultReason::Window,
        FaultReason::BorrowerDomain,
        FaultReason::Permission,
        FaultReason::MemoryGone,
    ]);
    let expected = "BusMasterDisabled LenderDomain Window BorrowerDomain Permission MemoryGone";
    assert_eq!(reasons.join(" "), expected);
    assert_eq!(
        names(&[Access::Read, Access::Write]).join(" "),
        "Read Write"
    );
    let indexes = [
        IrqIndex::Intx,
        IrqIndex::Msi,
        IrqIndex::Msix,
        IrqIndex::Err,
        IrqIndex::Req,
    ];
    assert_eq!(names(&indexes).join(" "), "Intx Msi Msix Err Req");
    let states = [
        BorrowState::Unleased,
        BorrowState::Leased,
        BorrowState::Ready,
        BorrowState::Closing,
        BorrowState::Lost,
    ];
    assert_eq!(
        names(&states).join(" "),
        "described leased ready closing lost"
    );
}

#[test]
fn states_display_as_they_are_written() {
    for state in [
        BorrowState::Unleased,
        BorrowState::Leased,
        BorrowState::Ready,
        BorrowState::Closing,
        BorrowState::Lost,
    ] {
        assert_eq!(serde_json::to_value(state).unwrap(), state.to_string());
    }
}

#[test]
fn a_backend_from_before_the_number_is_read() {
    let mut json = document()["backends"][0].clone();
    json.as_object_mut().unwrap().remove("format");
    let report = BackendReport::from_json(json.to_string().as_bytes()).unwrap();
    assert_eq!((report.format, report.pid), (1, 7));
}

#[test]
fn another_format_is_refused_by_its_number() {
    let error = BackendReport::from_json(br#"{"format": 2, "vms": []}"#).unwrap_err();
    assert!(matches!(error, StatusError::Format(2)), "{error}");
    let error = BackendReport::from_json(br#"{"vm": "web1"}"#).unwrap_err();
    assert!(matches!(error, StatusError::Malformed(_)), "{error}");
}
