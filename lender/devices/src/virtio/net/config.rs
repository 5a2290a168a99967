//! Configuration of a virtio-net model.

use std::{fmt, io, str::FromStr};

use farside_pci::Description;
use ring::hmac;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use virtio_bindings::virtio_net::VIRTIO_NET_S_LINK_UP;

use super::{CONFIG_LEN, KIND, MOST_PAIRS, queue_count};
use crate::{
    block::{Tap, TapError},
    virtio::pci,
};

/// The file with this host's id (machine-id(5)).
const MACHINE_ID: &str = "/etc/machine-id";

/// Least MTU, that of IPv4.
const LEAST_MTU: u16 = 68;

/// A virtio-net model: a network interface on a tap interface of the lender's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The tap interface.
    pub tap: String,
    /// The interface's address in the guest. By default derived from the id of the lender's host
    /// ([`machine-id`](https://www.freedesktop.org/software/systemd/man/latest/machine-id.html)) and that of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// The MTU that the guest is told, bytes. By default the tap interface's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Queue pairs, 1 to 64.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub queues: u16,
}

fn one() -> u16 {
    1
}

fn is_one(queues: &u16) -> bool {
    *queues == 1
}

/// An Ethernet address of one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac([u8; 6]);

/// Bits of the first byte: of a group; not from a manufacturer.
const GROUP: u8 = 1 << 0;
const LOCAL: u8 = 1 << 1;

impl Mac {
    /// That of the device `id` of the host `host`.
    fn derived(host: &str, id: &str) -> Self {
        // The id of a host is not to be found out from what it shows (machine-id(5)).
        let key = hmac::Key::new(hmac::HMAC_SHA256, host.as_bytes());
        let hash = hmac::sign(&key, format!("farside network device {id}").as_bytes());
        let mut mac = [0; 6];
        mac.copy_from_slice(&hash.as_ref()[..6]);
        mac[0] = (mac[0] & !GROUP) | LOCAL;
        Self(mac)
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(out, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

/// No Ethernet address of one interface.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("mac = {0:?}: it must be an address of one interface, such as 52:54:00:12:34:56")]
pub struct MacError(String);

impl FromStr for Mac {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Self, MacError> {
        let error = || MacError(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let is_byte =
                |part: &&str| part.len() == 2 && part.bytes().all(|it| it.is_ascii_hexdigit());
            let part = parts.next().filter(is_byte);
            let part = part.ok_or_else(error)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| error())?;
        }
        let is_one = bytes[0] & GROUP == 0 && bytes != [0; 6];
        match parts.next() {
            None if is_one => Ok(Self(bytes)),
            _ => Err(error()),
        }
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// Why a model cannot be created.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum ConfigError {
    /// The tap interface cannot be used.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The MTU is too small.
    #[error("mtu = {0}: it must be at least {LEAST_MTU} bytes")]
    Mtu(u16),
    /// The number of queues is out of range.
    #[error("queues = {0}: it must be 1 to {MOST_PAIRS} pairs")]
    Queues(u16),
    /// There is nothing to derive an address from.
    #[error("cannot derive an address from {MACHINE_ID}: give one, `mac = \"52:54:00:12:34:56\"`")]
    Host(#[source] io::Error),
    /// The system is out of descriptors or memory.
    #[error("cannot use tap interface {tap}")]
    Engine { tap: String, source: io::Error },
}

impl Config {
    /// A configuration with the defaults for all but the tap interface.
    pub fn new(tap: impl Into<String>) -> Self {
        Self {
            tap: tap.into(),
            mac: None,
            mtu: None,
            queues: one(),
        }
    }

    /// Checks all settings except the tap interface.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(mtu) = self.mtu.filter(|mtu| *mtu < LEAST_MTU) {
            return Err(ConfigError::Mtu(mtu));
        }
        match (1..=MOST_PAIRS).contains(&self.queues) {
            true => Ok(()),
            false => Err(ConfigError::Queues(self.queues)),
        }
    }

    /// Attaches to the tap interface. Returns it with the configuration of the device `id`, in which all is said.
    ///
    /// # Errors
    /// A [`ConfigError`].
    pub fn open_tap(&self, id: &str) -> Result<(Self, Tap), ConfigError> {
        self.validate()?;
        let mac = match self.mac {
            Some(mac) => mac,
            None => {
                let host = std::fs::read_to_string(MACHINE_ID).map_err(ConfigError::Host)?;
                Mac::derived(host.trim(), id)
            }
        };
        let tap = Tap::open(&self.tap)?;
        let complete = Self {
            tap: self.tap.clone(),
            mac: Some(mac),
            mtu: Some(self.mtu.unwrap_or(tap.mtu)),
            queues: self.queues,
        };
        Ok((complete, tap))
    }

    /// Whether `complete` is what [`Config::open_tap`] made of this.
    pub fn is_met_by(&self, complete: &Self) -> bool {
        self.tap == complete.tap
            && self.queues == complete.queues
            && self.mac.is_none_or(|mac| Some(mac) == complete.mac)
            && self.mtu.is_none_or(|mtu| Some(mtu) == complete.mtu)
    }

    /// The function.
    pub fn description(&self) -> Description {
        let mac = self.mac.map(|mac| mac.to_string());
        pci::description(KIND, queue_count(self.queues), mac.unwrap_or_default())
    }

    /// The device's configuration (virtio 1.2, 5.1.4).
    pub(super) fn registers(&self) -> [u8; CONFIG_LEN] {
        let mut bytes = [0; CONFIG_LEN];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        // A lender gives both.
        let Mac(mac) = self.mac.unwrap_or(Mac([LOCAL, 0, 0, 0, 0, 0]));
        put(0, &mac);
        put(6, &(VIRTIO_NET_S_LINK_UP as u16).to_le_bytes());
        put(8, &self.queues.to_le_bytes());
        put(10, &self.mtu.unwrap_or(1500).to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_one_interfaces() {
        for good in [
            "52:54:00:12:34:56",
            "02:00:00:00:00:00",
            "0A:bc:00:00:00:01",
        ] {
            let mac: Mac = good.parse().unwrap();
            assert_eq!(mac.to_string(), good.to_lowercase());
        }
        for bad in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "5:254:00:12:34:56",
            "+2:54:00:12:34:56",
            "01:00:5e:00:00:01",
            "00:00:00:00:00:00",
            "ff:ff:ff:ff:ff:ff",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
    }

    #[test]
    fn derived_addresses_differ_by_host_and_device_and_are_local() {
        let of = Mac::derived;
        let all = [of("a", "nic0"), of("a", "nic1"), of("b", "nic0")];
        for (n, mac) in all.iter().enumerate() {
            assert_eq!(mac.to_string().parse(), Ok(*mac));
            assert_eq!(mac.0[0] & (LOCAL | GROUP), LOCAL);
            assert!(!all[..n].contains(mac));
        }
        assert_eq!(all[0], of("a", "nic0"));
    }
}
