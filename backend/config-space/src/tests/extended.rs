use super::image::{AER, ARI, Image, SERIAL};
use super::*;

fn nvme() -> ConfigSpace {
    ConfigSpace::new(&Image::nvme().0).unwrap()
}

#[test]
fn the_list_goes_round_what_is_hidden_at_its_head_too() {
    let space = nvme();
    assert_eq!(
        extended(&space),
        [(0, 0x100), (1, AER), (3, SERIAL), (0xe, ARI)]
    );
    for at in (0x104..AER).chain(0x200..0x1000) {
        assert_eq!(read_u8(&space, at), 0, "{at:#x}");
    }
}

#[test]
fn placeholders_are_passed_over_and_not_reported() {
    let mut image = Image::nvme();
    image.extended(0x100, 0, 0x140).extended(0x140, 0x03, 0);
    image.standard(0x70, 0x00, 0x50);
    let space = ConfigSpace::new(&image.0).unwrap();
    assert_eq!(extended(&space), [(0, 0x100), (3, 0x140)]);
    assert_eq!(space.hidden(), []);
}

#[test]
fn what_is_hidden_is_told_in_a_line() {
    assert_eq!(
        nvme().hidden()[1].to_string(),
        "extended capability 0x0010 (single-root I/O virtualization): \
         virtual functions are lent on their own"
    );
}

#[test]
fn a_shown_head_is_the_head() {
    let mut image = Image::nvme();
    image.extended(0x100, 0x03, 0x140).extended(0x140, 0x03, 0);
    let space = ConfigSpace::new(&image.0).unwrap();
    assert_eq!(extended(&space), [(3, 0x100), (3, 0x140)]);
}

#[test]
fn nothing_shown_is_an_empty_list() {
    let mut image = Image::nvme();
    image.extended(0x100, 0x10, 0x140).extended(0x140, 0x1e, 0);
    let space = ConfigSpace::new(&image.0).unwrap();
    assert_eq!(read_u32(&space, 0x100), 0);
    assert_eq!(extended(&space), []);
}

#[test]
fn an_empty_list_is_empty() {
    for header in [0, !0] {
        let mut image = Image::nvme();
        image.put_u32(0x100, header);
        let space = ConfigSpace::new(&image.0).unwrap();
        assert_eq!(extended(&space), []);
        assert_eq!(space.hidden().len(), 1);
    }
}

#[test]
fn only_pci_express_has_extended_space() {
    let mut image = Image::bare(4096);
    image.extended(0x100, 0x03, 0).put_u32(0x104, 7);
    let space = ConfigSpace::new(&image.0).unwrap();
    assert_eq!((read_u32(&space, 0x100), read_u32(&space, 0x104)), (0, 0));
}

#[test]
fn error_reporting_has_its_defaults_and_masks() {
    let mut space = nvme();
    let values = [0, 0x0040_0000, 0x0046_2030, 0, 0xe000, 0];
    for (at, value) in (AER + 4..).step_by(4).zip(values) {
        assert_eq!(read_u32(&space, at), value, "{at:#x}");
    }
    let writable = [0, 0x07ff_f030, 0x07ff_f030, 0, 0xf1c1, 0];
    for (at, value) in (AER + 4..).step_by(4).zip(writable) {
        assert!(write_u32(&mut space, at, !0).is_empty());
        assert_eq!(read_u32(&space, at), value, "{at:#x}");
    }
}

#[test]
fn the_serial_number_is_the_devices() {
    let mut space = nvme();
    write_u32(&mut space, SERIAL + 4, 0);
    assert_eq!(read_u32(&space, SERIAL + 4), 0x1234_5678);
}

#[test]
fn there_is_no_next_function() {
    assert_eq!(read_u32(&nvme(), ARI + 4), 0);
}

#[test]
fn every_capability_has_one_rule_and_a_reason() {
    for table in [policy::STANDARD, policy::EXTENDED] {
        for (at, rule) in table.iter().enumerate() {
            assert!(
                table[..at].iter().all(|other| other.id != rule.id),
                "{:#x}",
                rule.id
            );
            assert!(!rule.name.is_empty());
            if let policy::Treatment::Hide(reason) = rule.treatment {
                assert!(reason.len() > 20, "{reason}");
            }
        }
    }
}
