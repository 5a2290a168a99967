//! Properties that hold for all accesses.

use proptest::prelude::*;

use super::image::Image;
use super::*;

/// Writes, mostly near registers with effects.
fn writes() -> impl Strategy<Value = Vec<(u64, Vec<u8>)>> {
    let offset = prop_oneof![0..0x100_u64, 0x100..0x220_u64, 0..5000_u64, any::<u64>()];
    let data = prop_oneof![
        prop::collection::vec(any::<u8>(), 1..=8),
        prop::collection::vec(Just(0xff), 1..=8),
        prop::collection::vec(any::<u8>(), 0..300),
    ];
    prop::collection::vec((offset, data), 1..30)
}

fn nvme() -> ConfigSpace {
    ConfigSpace::new(&Image::nvme().0).unwrap()
}

proptest! {
    #[test]
    fn read_only_bits_never_change(writes in writes()) {
        let mut space = nvme();
        for (offset, data) in writes {
            space.write(offset, &data);
            for at in 0..space.bytes.len() {
                let fixed = !space.writable[at] & !space.clearable[at];
                prop_assert_eq!(space.bytes[at] & fixed, space.power_on[at] & fixed);
            }
        }
    }

    #[test]
    fn a_write_is_its_bytes_one_by_one(writes in writes(), cuts in any::<u64>()) {
        let mut whole = nvme();
        let mut parts = whole.clone();
        for (offset, data) in writes {
            // A reset undoes the whole of a write, but only the preceding ones of
            // several partial writes.
            if whole.stage(offset, &data).effects().reset().is_some() {
                continue;
            }
            whole.write(offset, &data);
            let mut from = 0;
            while from < data.len() {
                let len = (1 + (cuts >> (from % 61) & 3) as usize).min(data.len() - from);
                parts.write(offset.wrapping_add(from as u64), &data[from..from + len]);
                from += len;
            }
            // Writes past the end of the address space have no effect either way.
            if offset.checked_add(data.len() as u64).is_some() {
                prop_assert_eq!(&whole.bytes, &parts.bytes);
            } else {
                parts = whole.clone();
            }
        }
    }

    #[test]
    fn a_read_is_its_bytes_one_by_one(
        writes in writes(), offset in 0..5000_u64, len in 0..300_usize,
    ) {
        let mut space = nvme();
        for (offset, data) in writes {
            space.write(offset, &data);
        }
        let mut whole = vec![0; len];
        space.read(offset, &mut whole);
        for (at, byte) in (offset..).zip(whole) {
            prop_assert_eq!(read_u8(&space, at), byte);
        }
    }

    #[test]
    fn effects_tell_every_change(writes in writes(), refuse in any::<bool>()) {
        let mut space = nvme();
        for (offset, data) in writes {
            let before = space.clone();
            let mut staged = space.stage(offset, &data);
            prop_assert_eq!(&before.bytes, &space.bytes);
            let promised = staged.effects().clone();
            let refused = refuse && staged.dma() == Edge::Rising;
            if refused {
                staged.refuse_bus_master();
            }
            let dma = staged.dma();
            let effects = space.commit(staged);
            if refused {
                prop_assert!(!space.bus_master());
            } else {
                prop_assert_eq!(&effects, &promised);
                prop_assert_eq!(dma, Edge::between(before.may_dma(), space.may_dma()));
            }
            let has = |wanted: &dyn Fn(Effect) -> bool| effects.iter().any(wanted);
            prop_assert_eq!(
                effects.bus_master(),
                Edge::between(before.bus_master(), space.bus_master())
            );
            for bar in 0..6 {
                prop_assert_eq!(
                    has(&|e| e == Effect::BarMoved(bar)),
                    before.bar_address(bar) != space.bar_address(bar)
                );
            }
            prop_assert_eq!(
                has(&|e| matches!(e, Effect::MsixChanged(_))), before.msix() != space.msix()
            );
            prop_assert_eq!(
                has(&|e| matches!(e, Effect::MsiChanged(_))), before.msi() != space.msi()
            );
            prop_assert_eq!(
                has(&|e| matches!(e, Effect::PowerState(_))),
                before.power_state() != space.power_state()
            );
        }
    }

    #[test]
    fn reset_is_power_on(writes in writes()) {
        let mut space = nvme();
        for (offset, data) in writes {
            space.write(offset, &data);
        }
        space.reset();
        prop_assert_eq!(space.bytes, nvme().bytes);
    }
}
