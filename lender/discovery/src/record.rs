//! What is in etcd: a key for each device id, whose value names the lender.

use std::fmt;

use farside_daemon::{DeviceId, LenderName};
use farside_lender_protocol::{Address, Instance};
use serde::{Deserialize, Serialize};

/// The version of the values.
const FORMAT: u32 = 1;

/// Longest value, bytes.
const MAX_VALUE: usize = 1024;

/// The lender that lends a device: the value of its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    format: u32,
    /// Its name.
    pub(crate) lender: LenderName,
    /// Where hosts reach it: with TLS.
    pub(crate) address: Address,
    /// Its run.
    pub(crate) instance: Instance,
}

impl Record {
    pub(crate) fn new(lender: LenderName, address: Address, instance: Instance) -> Self {
        Self {
            format: FORMAT,
            lender,
            address,
            instance,
        }
    }

    /// A value of a key: of any peer of etcd's.
    pub(crate) fn parse(value: &[u8]) -> Option<Self> {
        if value.len() > MAX_VALUE {
            return None;
        }
        let record: Self = serde_json::from_slice(value).ok()?;
        (record.format == FORMAT && is_announced(&record.address)).then_some(record)
    }

    pub(crate) fn to_value(&self) -> Vec<u8> {
        // Strings and a number: it cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Whether it is the same lender, in this run or in another.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        self.lender == other.lender && self.address == other.address
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lender {} at {}", self.lender, self.address)
    }
}

/// Whether an address may be found: with TLS, and with a port.
pub(crate) fn is_announced(address: &Address) -> bool {
    matches!(address, Address::Tls { port, .. } if *port != 0)
}

/// The keys of devices below a prefix.
#[derive(Clone, Debug)]
pub(crate) struct Keys(String);

impl Keys {
    pub(crate) fn new(prefix: &str) -> Self {
        Self(format!("{prefix}/devices/"))
    }

    /// What all of them begin with.
    pub(crate) fn prefix(&self) -> &str {
        &self.0
    }

    pub(crate) fn key(&self, device: &DeviceId) -> String {
        format!("{}{device}", self.0)
    }

    /// The device of a key.
    pub(crate) fn device(&self, key: &[u8]) -> Option<DeviceId> {
        let key = std::str::from_utf8(key).ok()?;
        key.strip_prefix(&self.0)?.parse().ok()
    }
}

/// At most so much of foreign bytes, without control characters.
pub(crate) fn shown(bytes: &[u8]) -> String {
    const MOST: usize = 80;
    let cut = if bytes.len() > MOST { "..." } else { "" };
    let bytes = &bytes[..bytes.len().min(MOST)];
    format!("\"{}{cut}\"", bytes.escape_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let address = "tls:rack1-b:7410".parse().unwrap();
        let instance = Instance::try_from("0f".repeat(16)).unwrap();
        Record::new("rack1-b".parse().unwrap(), address, instance)
    }

    #[test]
    fn a_value_parses_again() {
        let value = String::from_utf8(record().to_value()).unwrap();
        assert_eq!(
            value,
            r#"{"format":1,"lender":"rack1-b","address":"tls:rack1-b:7410","instance":"0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f"}"#
        );
        assert_eq!(Record::parse(value.as_bytes()), Some(record()));
    }

    #[test]
    fn garbage_is_no_record() {
        let good = String::from_utf8(record().to_value()).unwrap();
        for (old, new) in [
            ("\"format\":1", "\"format\":2"),
            ("rack1-b\",\"address", "../x\",\"address"),
            ("tls:rack1-b:7410", "tcp:rack1-b:7410"),
            ("tls:rack1-b:7410", "tls:rack1-b:0"),
            ("tls:rack1-b:7410", "/run/farside/lender.sock"),
            ("tls:rack1-b:7410", "tls:a\\u0007b:7410"),
            ("{", "{\"more\":1,"),
            ("\"0f", "\"+f"),
            ("{", "["),
        ] {
            let bad = good.replace(old, new);
            assert_ne!(bad, good);
            assert_eq!(Record::parse(bad.as_bytes()), None, "{bad}");
        }
        let padded = format!("{good}{}", " ".repeat(MAX_VALUE));
        for bad in [&b""[..], b"\xff\xfe", b"null", padded.as_bytes()] {
            assert_eq!(Record::parse(bad), None);
        }
        assert_eq!(Record::parse("[".repeat(MAX_VALUE).as_bytes()), None);
    }

    #[test]
    fn keys_name_devices() {
        let keys = Keys::new("/farside");
        let disk0: DeviceId = "disk0".parse().unwrap();
        assert_eq!(keys.key(&disk0), "/farside/devices/disk0");
        assert_eq!(keys.device(b"/farside/devices/disk0"), Some(disk0));
        for bad in [
            &b"/farside/devices/"[..],
            b"/farside/devices/a/b",
            b"/farside/devices/\xff",
            b"/farside/device/a",
            b"",
        ] {
            assert_eq!(keys.device(bad), None);
        }
    }

    #[test]
    fn foreign_bytes_are_escaped_and_cut() {
        assert_eq!(shown(b"a\x1b[2J\xff"), r#""a\x1b[2J\xff""#);
        let long = shown(&[b'x'; 1000]);
        assert!(long.len() < 100 && long.ends_with("...\""), "{long}");
    }
}
