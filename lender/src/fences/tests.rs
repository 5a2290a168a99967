use std::sync::LazyLock;

use super::*;

static DISK0: LazyLock<DeviceId> = LazyLock::new(|| "disk0".parse().unwrap());
static A: LazyLock<VmName> = LazyLock::new(|| "a".parse().unwrap());
static B: LazyLock<VmName> = LazyLock::new(|| "b".parse().unwrap());

/// A secret for each number.
fn secret(n: u64) -> Secret {
    format!("{n:032x}").try_into().unwrap()
}

/// A fence with the secret of its generation.
fn held(generation: u64) -> HeldFence {
    HeldFence {
        generation: Generation(generation),
        secret: Some(secret(generation)),
    }
}

/// An operator's handover whose fence will be `held(next)`.
fn claim<'a>(vm: &'a VmName, migration: &'a str, supersedes: Option<u64>, next: u64) -> Claim<'a> {
    Claim {
        device: &DISK0,
        vm,
        migration,
        supersedes: supersedes.map(held),
        secret: secret(next),
        operator: true,
    }
}

fn book() -> (tempfile::TempDir, FenceBook) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lender.json");
    (directory, FenceBook::load(Some(file)).unwrap())
}

#[test]
fn handovers_of_one_vm_are_one_line_of_succession() {
    let (_directory, mut book) = book();
    let first = claim(&A, "m1", None, 5);
    assert_eq!(book.asked_before(&first).unwrap(), None);
    book.hand_over(&first, Generation(5)).unwrap();
    assert_eq!(book.asked_before(&first).unwrap(), Some(Generation(5)));
    // A handover that does not supersede the first cannot revoke its device.
    let rival = book.asked_before(&claim(&A, "m2", None, 9)).unwrap_err();
    assert_eq!(rival.kind, ErrorKind::Fenced);
    let second = claim(&A, "m2", Some(5), 9);
    assert_eq!(book.asked_before(&second).unwrap(), None);
    book.hand_over(&second, Generation(9)).unwrap();
    // And the first cannot be repeated.
    let late = book.asked_before(&first).unwrap_err();
    assert!(late.message.contains("m2"), "{late}");
}

#[test]
fn a_reserved_device_is_nobody_elses_until_it_was_borrowed_or_given_up() {
    let (_directory, mut book) = book();
    book.hand_over(&claim(&A, "m1", None, 5), Generation(5))
        .unwrap();
    let others = book.check(&DISK0, &B, None).unwrap_err();
    assert_eq!(others.kind, ErrorKind::Busy);
    assert!(others.message.contains("migration release disk0"));
    for old in [None, Some(held(4))] {
        let refused = book.check(&DISK0, &A, old).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Fenced, "{refused}");
    }
    book.check(&DISK0, &A, Some(held(5))).unwrap();
    book.borrowed(&DISK0, &A);
    book.check(&DISK0, &B, None).unwrap();
    assert!(book.check(&DISK0, &A, None).is_err(), "the fence stays");
    book.hand_over(&claim(&A, "m2", Some(5), 6), Generation(6))
        .unwrap();
    book.end_reservation(&DISK0, None, true).unwrap();
    book.check(&DISK0, &B, None).unwrap();
}

#[test]
fn fences_outlive_the_lender_and_a_broken_file_stops_it() {
    let (directory, mut book) = book();
    book.hand_over(&claim(&A, "m1", None, 5), Generation(5))
        .unwrap();
    let file = directory.path().join("lender.json");
    let again = FenceBook::load(Some(file.clone())).unwrap();
    assert_eq!(again.kept(&DISK0), book.kept(&DISK0));
    assert_eq!(again.largest(&DISK0), Generation(5));
    let text = std::fs::read_to_string(&file).unwrap();
    for bad in [
        &text[..text.len() - 3],
        &text.replace("\"version\": 3", "\"version\": 4"),
    ] {
        std::fs::write(&file, bad).unwrap();
        let error = FenceBook::load(Some(file.clone())).unwrap_err();
        assert!(error.to_string().contains("restore it"), "{error}");
    }
}

#[test]
fn a_lender_without_a_file_hands_nothing_over() {
    let mut book = FenceBook::load(None).unwrap();
    let error = book
        .hand_over(&claim(&A, "m1", None, 5), Generation(5))
        .unwrap_err();
    assert!(error.message.contains("`state` in lender.toml"), "{error}");
    assert!(book.kept(&DISK0).is_empty());
}

#[test]
fn a_handover_that_cannot_be_written_down_has_not_happened() {
    let directory = tempfile::tempdir().unwrap();
    // A directory at the file's path.
    let file = directory.path().join("lender.json");
    std::fs::create_dir_all(file.join("x")).unwrap();
    let mut book = FenceBook {
        file: Some(file),
        ..FenceBook::default()
    };
    assert!(
        book.hand_over(&claim(&A, "m1", None, 5), Generation(5))
            .is_err()
    );
    book.check(&DISK0, &A, None).unwrap();
    book.check(&DISK0, &B, None).unwrap();
}

#[test]
fn a_fence_is_passed_with_its_secret() {
    let (_directory, mut book) = book();
    book.hand_over(&claim(&A, "m1", None, 5), Generation(5))
        .unwrap();
    let without = |generation| HeldFence {
        generation: Generation(generation),
        secret: None,
    };
    let other = HeldFence {
        secret: Some(secret(6)),
        ..held(5)
    };
    let kind = |shown| {
        let checked = book.check(&DISK0, &A, Some(shown));
        checked.err().map(|error| error.kind)
    };
    assert_eq!(kind(held(5)), None);
    assert_eq!(kind(without(5)), Some(ErrorKind::Denied));
    assert_eq!(kind(other), Some(ErrorKind::Denied));
    assert_eq!(kind(held(4)), Some(ErrorKind::Fenced));
    // As if the lender's file had been restored from an older copy.
    for newer in [without(6), held(6)] {
        assert_eq!(kind(newer), Some(ErrorKind::Denied));
    }
}

#[test]
fn a_fence_that_is_not_known_is_not_recorded() {
    let (_directory, mut book) = book();
    book.check(&DISK0, &A, Some(held(9))).unwrap();
    book.borrowed(&DISK0, &A);
    assert_eq!(book.kept(&DISK0), []);
}

#[test]
fn who_is_no_operator_takes_a_device_with_proof() {
    let (_directory, mut book) = book();
    let theirs = |claim: Claim<'static>| Claim {
        operator: false,
        ..claim
    };
    let first = theirs(claim(&A, "m1", None, 5));
    book.check_proof(&first, false).unwrap();
    let error = book.check_proof(&first, true).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Denied);
    assert!(error.message.contains("stop the VM"), "{error}");
    book.hand_over(&first, Generation(5)).unwrap();

    // The migration's id is listed, its secret is not.
    let copy = theirs(claim(&A, "m1", None, 6));
    for operator in [false, true] {
        let copy = Claim { operator, ..copy };
        let error = book.asked_before(&copy).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Denied);
    }
    assert_eq!(book.asked_before(&first).unwrap(), Some(Generation(5)));

    let mut next = theirs(claim(&A, "m2", Some(5), 9));
    for leased in [false, true] {
        book.check_proof(&next, leased).unwrap();
    }
    next.supersedes = Some(HeldFence {
        secret: None,
        ..held(5)
    });
    let error = book.check_proof(&next, false).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Denied);
    assert!(error.message.contains("migration claim a"), "{error}");

    for wrong in [None, Some(secret(6))] {
        let error = book.end_reservation(&DISK0, wrong, false).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Denied);
    }
    book.end_reservation(&DISK0, Some(secret(5)), false)
        .unwrap();
    book.check(&DISK0, &B, None).unwrap();
}

#[test]
fn fences_of_the_former_version_are_passed_by_operators() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lender.json");
    let text = r#"{"version": 1, "devices": {"disk0": [
        {"vm": "a", "epoch": 5, "migration": "m1", "reserved": true}]}}"#;
    std::fs::write(&file, text).unwrap();
    let mut book = FenceBook::load(Some(file)).unwrap();
    let shown = Some(HeldFence {
        secret: None,
        ..held(5)
    });
    let error = book.check(&DISK0, &A, shown).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Denied);
    assert!(error.message.contains("migration claim a"), "{error}");
    assert!(book.end_reservation(&DISK0, None, false).is_err());
    let repeated = claim(&A, "m1", None, 5);
    assert_eq!(book.asked_before(&repeated).unwrap(), Some(Generation(5)));
    let next = Claim {
        supersedes: shown,
        ..claim(&A, "m2", None, 6)
    };
    assert_eq!(book.asked_before(&next).unwrap(), None);
    book.check_proof(&next, true).unwrap();
    book.hand_over(&next, Generation(6)).unwrap();
    book.check(&DISK0, &A, Some(held(6))).unwrap();
    book.borrowed(&DISK0, &A);
    book.check(&DISK0, &B, None).unwrap();
}
