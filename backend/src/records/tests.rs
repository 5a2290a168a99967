//! The format of a device's snapshot, as each version has it.

use std::path::PathBuf;

use farside_hand_over::{
    decode,
    samples::{self, Example},
};
use farside_irq_relay::{Action, IrqIndex};
use farside_keeper::RECORDS;
use farside_lender_protocol::{BarOwner, Described, Transport};
use farside_pci::{Bar, BarKind, Description, SparseMmapArea};
use farside_vfio_user::Negotiated;

use super::{
    saved::{SavedIrqData, SavedIrqs, SavedMapping},
    *,
};

fn sample(version: u32) -> PathBuf {
    let name = format!("tests/samples/snapshot-{version}.txt");
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn described() -> SavedDescription {
    let bar = |size, kind, mappable| {
        Some(Bar {
            size,
            kind,
            mappable,
        })
    };
    let area = SparseMmapArea {
        offset: 0x1000,
        len: 0x2000,
    };
    let description = Description {
        config: (0..=255).collect(),
        bars: [
            bar(0x4000, BarKind::Memory64 { prefetchable: true }, vec![area]),
            None,
            bar(256, BarKind::Io, Vec::new()),
            bar(
                4096,
                BarKind::Memory32 {
                    prefetchable: false,
                },
                Vec::new(),
            ),
            None,
            None,
        ],
        intx: true,
        msi_vectors: 4,
        msix_vectors: 9,
        summary: "NVMe, 1 GiB".into(),
    };
    SavedDescription {
        description,
        bars: BarOwner::Borrower,
        state: 300_000,
    }
}

fn saved() -> Saved {
    let irqs = |index, action, data| SavedIrqs {
        index,
        start: 1,
        action,
        data,
    };
    let mapping = |backing| SavedMapping {
        start: 1 << 32,
        len: 1 << 30,
        writable: true,
        backing,
    };
    Saved {
        device: "disk0".into(),
        lender: "/run/farside/lender.sock".into(),
        described: described(),
        transport: Transport::SharedMemory,
        negotiated: Some(Negotiated {
            minor: 1,
            client_max_msg_fds: 16,
            client_max_data_xfer_size: 1 << 20,
            write_multiple: true,
        }),
        config: (0..=255).rev().collect(),
        memory: vec![mapping(Some((300, 4096))), mapping(None)],
        refused: vec![(0xa_0000, 0x2_0000)],
        irqs: vec![
            irqs(
                IrqIndex::Intx,
                Action::Mask,
                SavedIrqData::Masks(Vec::new()),
            ),
            irqs(
                IrqIndex::Msi,
                Action::Unmask,
                SavedIrqData::Masks(vec![true, false]),
            ),
            irqs(
                IrqIndex::Msix,
                Action::Trigger,
                SavedIrqData::Targets(vec![Some(17), None]),
            ),
            irqs(
                IrqIndex::Err,
                Action::Trigger,
                SavedIrqData::Targets(vec![Some(18)]),
            ),
            irqs(
                IrqIndex::Req,
                Action::Trigger,
                SavedIrqData::Targets(vec![Some(19)]),
            ),
        ],
        bars: vec![20, 21],
        state: Some(22),
        absent: false,
        unplugged: true,
        ram_taken: true,
        rom: 0,
        peer_bars: Vec::new(),
        placed: Vec::new(),
    }
}

/// A device that is borrowed and one that is not, by each transport.
fn examples() -> Vec<Example> {
    let idle = |transport, bars| {
        let SavedDescription {
            description, state, ..
        } = described();
        Saved {
            described: SavedDescription {
                description,
                bars,
                state,
            },
            transport,
            negotiated: None,
            memory: Vec::new(),
            refused: Vec::new(),
            irqs: Vec::new(),
            bars: Vec::new(),
            state: None,
            absent: true,
            unplugged: false,
            ram_taken: false,
            ..saved()
        }
    };
    let examples = [
        ("ready", saved()),
        ("ntb", idle(Transport::Ntb, BarOwner::Lender)),
        ("network", idle(Transport::Network, BarOwner::Borrower)),
    ];
    let encode = |(name, saved): (&str, Saved)| {
        let bytes = postcard::to_stdvec(&saved).expect("a snapshot");
        (name.to_owned(), bytes)
    };
    examples.map(encode).into()
}

#[test]
fn a_device_with_a_rom_is_the_one_that_the_lender_describes() {
    let with_rom = Described {
        rom: 65_536,
        ..saved().described()
    };
    let (described, rom) = SavedDescription::of(&with_rom);
    let saved = Saved {
        described,
        rom,
        ..saved()
    };
    let left = postcard::to_stdvec(&saved).expect("a snapshot");
    let next: Saved = decode(&left).expect("a snapshot");
    assert_eq!(next.described(), with_rom);
}

#[test]
fn the_format_of_snapshots_has_not_changed_without_its_version() {
    samples::is_unchanged(&sample(RECORDS.version()), &examples());
}

#[test]
fn snapshots_of_this_version_and_of_the_one_before_are_read() {
    for version in RECORDS.oldest()..=RECORDS.version() {
        let sample = samples::read(&sample(version));
        assert_eq!(sample.len(), 3);
        for (name, bytes) in sample {
            let read: Saved = decode(&bytes).expect("a snapshot");
            let now = examples().into_iter().find(|(it, _)| *it == name);
            let (_, now) = now.unwrap_or_else(|| panic!("no {name}"));
            assert_eq!(
                postcard::to_stdvec(&read),
                Ok(now),
                "{name}, version {version}"
            );
        }
    }
}

#[test]
fn a_snapshot_without_its_last_fields_has_none_of_what_they_say() {
    let all = Saved {
        rom: 1,
        peer_bars: vec![1],
        placed: vec![1],
        ..saved()
    };
    let mut bytes = postcard::to_stdvec(&all).expect("a snapshot");
    bytes.truncate(bytes.len() - 7);
    let read: Saved = decode(&bytes).expect("a snapshot");
    assert_eq!(
        (read.unplugged, read.ram_taken, read.rom),
        (false, false, 0)
    );
    assert!(read.peer_bars.is_empty() && read.placed.is_empty());
    assert_eq!((read.state, read.bars), (Some(22), vec![20, 21]));
}

#[test]
fn the_format_of_the_lease_has_not_changed_without_its_version() {
    let file = DeviceFile::new().expect("a file");
    let record = LeaseRecord::new(file.lease().expect("words"));
    let of = |state: &str, record: &LeaseRecord| {
        let words = [STATUS, CHAIN, CHAIN + 1].map(|n| (n, record.0.get(n)));
        let bytes = words.map(|(n, word)| [&n.to_be_bytes()[..], &word.to_be_bytes()].concat());
        (state.to_owned(), bytes.concat())
    };
    let mut examples = vec![of("none", &record)];
    record.set(None);
    examples.push(of("ends", &record));
    record.set(Some(Secret::from_bits(0x0123_4567 << 96 | 0x89ab_cdef)));
    examples.push(of("goes-on", &record));
    record.clear();
    examples.push(of("cleared", &record));
    let connections = [CONNECTIONS.start, CONNECTIONS.end].map(|n| n as u8);
    examples.push(("connections".to_owned(), connections.to_vec()));
    let version = RECORDS.version();
    let path = format!(
        "{}/tests/samples/lease-{version}.txt",
        env!("CARGO_MANIFEST_DIR")
    );
    samples::is_unchanged(path.as_ref(), &examples);
}
