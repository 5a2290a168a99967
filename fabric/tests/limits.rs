//! The adapter's limits: allocations that fit, and the errors of those that do not.

use farside_fabric::{
    FabricError, Iova, LenderPath, LimitError, NtbLimits, Owner, PeerAddress, fits, soft::Adapter,
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[test]
fn the_default_is_a_pxh830_class_adapter() {
    let limits = NtbLimits::default();
    assert_eq!(limits.validate(), Ok(()));
    assert_eq!(limits.max_devices(), 30);
    assert_eq!(limits.segment(), 128 * MIB);
    assert_eq!(limits.alignment(), 128 * MIB);
}

#[test]
fn unknown_keys_are_errors_and_missing_ones_are_defaults() {
    let limits: NtbLimits = serde_json::from_str(r#"{"bar-size": 268435456}"#).expect("valid");
    assert_eq!(limits.bar_size, 256 * MIB);
    assert_eq!(limits.segment(), MIB);
    let error = serde_json::from_str::<NtbLimits>(r#"{"bar_sise": 1}"#).expect_err("typo");
    assert!(error.to_string().contains("bar_sise"));
}

#[test]
fn impossible_limits_are_named() {
    let default = NtbLimits::default;
    let cases = [
        (
            "bar-size",
            NtbLimits {
                bar_size: 3 * GIB,
                ..default()
            },
        ),
        (
            "bar-size",
            NtbLimits {
                bar_size: 0,
                ..default()
            },
        ),
        (
            "lut-entries",
            NtbLimits {
                lut_entries: 0,
                ..default()
            },
        ),
        (
            "lut-entries",
            NtbLimits {
                lut_entries: 48,
                ..default()
            },
        ),
        (
            "lut-entries",
            NtbLimits {
                bar_size: 4096,
                ..default()
            },
        ),
        (
            "alignment",
            NtbLimits {
                alignment: Some(1),
                ..default()
            },
        ),
        (
            "entries-per-window",
            NtbLimits {
                entries_per_window: Some(0),
                ..default()
            },
        ),
        (
            "requester-entries",
            NtbLimits {
                requester_entries: 2,
                ..default()
            },
        ),
    ];
    for (expected, limits) in cases {
        match limits.validate() {
            Err(LimitError::Invalid { name, .. }) => assert_eq!(name, expected),
            other => panic!("{limits:?}: {other:?}"),
        }
    }
}

#[test]
fn a_guest_of_5_gib_fits() {
    let used = fits(&[2 * GIB, 3 * GIB], &NtbLimits::default()).expect("fits");
    assert_eq!((used.windows, used.lut_entries), (2, 40));
    assert_eq!(used.bar_bytes, 5 * GIB);
}

#[test]
fn a_guest_too_large_is_told_what_fits() {
    let error = fits(&[2 * GIB, 62 * GIB], &NtbLimits::default()).expect_err("too large");
    assert_eq!(
        error.to_string(),
        "guest too large for the NTB's BAR of 32 GiB: 2 windows over 64 GiB need 512 LUT entries \
         of 128 MiB, the limit is 256; guest RAM of at most 32640 MiB fits; raise bar-size to 64 GiB"
    );
    // With the BAR size as shipped, not even a small guest fits.
    let delivered = NtbLimits {
        bar_size: 256 * MIB,
        ..NtbLimits::default()
    };
    let error = fits(&[512 * MIB], &delivered)
        .expect_err("too large")
        .to_string();
    assert!(
        error.contains("guest RAM of at most 256 MiB fits"),
        "{error}"
    );
    assert!(error.contains("raise bar-size to 512 MiB"), "{error}");
}

#[test]
fn more_windows_than_entries_is_not_cured_by_a_larger_bar() {
    let limits = NtbLimits {
        lut_entries: 1,
        ..NtbLimits::default()
    };
    let error = fits(&[GIB, GIB], &limits).expect_err("two windows, one entry");
    assert!(error.to_string().contains("raise lut-entries"), "{error}");
}

#[test]
fn windows_that_have_a_bar_each_are_not_joined() {
    let limits = NtbLimits {
        lut_entries: 2,
        entries_per_window: Some(1),
        ..NtbLimits::default()
    };
    assert!(fits(&[2 * GIB, 16 * GIB], &limits).is_ok());
    let error = fits(&[20 * GIB], &limits).expect_err("larger than one BAR");
    assert_eq!(
        error.to_string(),
        "a window of 20 GiB needs 2 LUT entries of 16 GiB; this NTB has at most 1 for one window \
         (entries-per-window), so a window of at most 16 GiB fits; raise bar-size to 64 GiB"
    );
    let adapter = Adapter::new(limits).expect("limits");
    let mut path = adapter
        .attach("disk0", &Owner::new("vm", "user 1"))
        .expect("attach");
    let peer_address = PeerAddress::new(64 * GIB);
    let refused = path.open_window(Iova::new(0), peer_address, 20 * GIB);
    assert!(
        matches!(refused, Err(FabricError::Limit(ref found)) if *found == error),
        "{refused:?}"
    );
    path.open_window(Iova::new(0), peer_address, 16 * GIB)
        .expect("fits");
}

#[test]
fn absurd_spans_do_not_overflow() {
    assert!(fits(&[u64::MAX, u64::MAX], &NtbLimits::default()).is_err());
    assert_eq!(
        fits(&[], &NtbLimits::default()).map(|used| used.windows),
        Ok(0)
    );
}

proptest! {
    /// The maximum named by the error does fit, however it is split.
    #[test]
    fn the_advice_is_good(
        low in 1u64..(1 << 40),
        high in 1u64..(1 << 45),
        lut_bits in 1u32..10,
        split in 0.0..1.0f64,
        entries_per_window in prop::option::of(1u32..600),
    ) {
        let limits = NtbLimits {
            lut_entries: 1 << lut_bits,
            entries_per_window,
            ..NtbLimits::default()
        };
        if let Err(LimitError::GuestTooLarge { fits: advised, remedy, .. }) =
            fits(&[low, high], &limits)
        {
            let low_part = (advised as f64 * split) as u64;
            prop_assert!(fits(&[low_part, advised - low_part], &limits).is_ok());
            if let Some(bar_size) = remedy.0 {
                let larger = NtbLimits { bar_size, ..limits.clone() };
                prop_assert!(fits(&[low, high], &larger).is_ok());
                let smaller = NtbLimits { bar_size: bar_size / 2, ..limits };
                prop_assert!(fits(&[low, high], &smaller).is_err());
            }
        }
    }
}
