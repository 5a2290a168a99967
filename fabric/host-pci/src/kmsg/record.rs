//! One record of `/dev/kmsg`: `priority,sequence,microseconds,flags[,...];text`
//! and lines of ` KEY=value`.
//!
//! Source: Linux `Documentation/ABI/testing/dev-kmsg`.

use farside_pci::Bdf;

/// The low three bits of the priority are the level, the others the facility.
const FACILITY_SHIFT: u32 = 3;

/// A record of the kernel's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The facility: 0 for the kernel. A process cannot use 0.
    pub facility: u32,
    /// Its sequence number.
    pub sequence: u64,
    /// Its timestamp, in microseconds of the kernel's log clock.
    pub microseconds: u64,
    /// Its text, without the line feed.
    pub text: String,
    /// The PCI function in the record's metadata.
    pub device: Option<Bdf>,
}

impl Record {
    /// Parses a record as returned by one `read` of `/dev/kmsg`; `None` if malformed.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let whole = String::from_utf8_lossy(bytes);
        let (head, rest) = whole.split_once(';')?;
        let mut fields = head.split(',');
        let priority: u32 = fields.next()?.parse().ok()?;
        let sequence = fields.next()?.parse().ok()?;
        let microseconds = fields.next()?.parse().ok()?;
        let mut lines = rest.split('\n');
        Some(Self {
            facility: priority >> FACILITY_SHIFT,
            sequence,
            microseconds,
            text: lines.next()?.to_owned(),
            device: lines
                .filter_map(|line| line.strip_prefix(" DEVICE=+pci:"))
                .find_map(|bdf| bdf.parse().ok()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_a_record_with_its_device() {
        let record = Record::parse(
            b"3,1017,5123456,-;vfio-pci 0000:04:00.0: AMD-Vi: Event\n SUBSYSTEM=pci\n DEVICE=+pci:0000:04:00.0\n",
        )
        .unwrap();
        assert_eq!(record.facility, 0);
        assert_eq!(record.sequence, 1017);
        assert_eq!(record.microseconds, 5_123_456);
        assert_eq!(record.text, "vfio-pci 0000:04:00.0: AMD-Vi: Event");
        assert_eq!(record.device, "0000:04:00.0".parse().ok());
    }

    #[test]
    fn reads_a_record_with_later_fields_and_semicolons_in_its_text() {
        let record = Record::parse(b"30,7,9,c,caller=T1;a; b\n").unwrap();
        assert_eq!(record.facility, 3);
        assert_eq!(record.text, "a; b");
        assert_eq!(record.device, None);
    }

    #[test]
    fn what_is_no_record_is_none() {
        for bytes in [
            &b""[..],
            b";",
            b"x,1,2,-;a",
            b"3,1;a",
            b"3,1,2,-",
            b"-3,1,2,-;a",
            b"3,,2,-;a",
        ] {
            assert_eq!(Record::parse(bytes), None, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = Record::parse(&bytes);
        }
    }
}
