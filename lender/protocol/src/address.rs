//! A lender's address: a UNIX socket on this host, or a TCP port of another, with TLS or without.

use std::{
    fmt,
    net::{Ipv6Addr, SocketAddrV6},
    path::{Path, PathBuf},
    str::FromStr,
};

use crate::{BarOwner, Transport};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

/// Prefix of a TCP address without TLS.
const TCP: &str = "tcp:";

/// Prefix of a TCP address with TLS.
const TLS: &str = "tls:";

/// Longest host name, bytes (RFC 1035).
const MAX_HOST: usize = 253;

/// The address of a lender in configuration files and on the command line.
///
/// ```
/// use farside_lender_protocol::Address;
///
/// let near: Address = "/run/farside/lender.sock".parse().unwrap();
/// let far: Address = "tls:rack1-b:7410".parse().unwrap();
/// assert!(!near.is_tcp() && far.is_tcp());
/// assert_eq!(far.to_string(), "tls:rack1-b:7410");
/// assert!("lender.sock".parse::<Address>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A UNIX socket on this host. Written as its path, with at least one `/`.
    Unix(PathBuf),
    /// A TCP port, neither encrypted nor authenticated. Written `tcp:HOST:PORT`.
    Tcp {
        /// A name, an IPv4 address or an IPv6 address (without brackets).
        host: String,
        /// The port. For a listener, 0 selects a free port.
        port: u16,
    },
    /// A TCP port with TLS, where both sides present certificates. Written `tls:HOST:PORT`.
    Tls {
        /// As in [`Address::Tcp`]. The lender's certificate must be for it.
        host: String,
        /// As in [`Address::Tcp`].
        port: u16,
    },
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SharedMemory => "memory",
            Self::Ntb => "NTB",
            Self::Network => "network",
        })
    }
}

impl Transport {
    /// How a device of the lender at `address` reaches a VM of this host. `bars` tells a model from
    /// hardware.
    pub fn between(address: &Address, bars: BarOwner) -> Self {
        match (address.is_tcp(), bars) {
            (false, _) => Self::SharedMemory,
            (true, BarOwner::Borrower) => Self::Network,
            (true, BarOwner::Lender) => Self::Ntb,
        }
    }
}

/// An invalid address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid lender address {text:?}: {why}; use the path of its socket with a `/` (/run/farside/lender.sock, ./lender.sock), or tls:HOST:PORT (tls:rack1-b:7410, tls:10.0.0.2:7410, tls:[fd00::2]:7410), or tcp:HOST:PORT without encryption"
)]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl Address {
    /// Whether it is a TCP port, with TLS or without: TCP cannot carry descriptors.
    pub fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp { .. } | Self::Tls { .. })
    }

    /// The path of a UNIX socket.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Unix(path) => Some(path),
            Self::Tcp { .. } | Self::Tls { .. } => None,
        }
    }
}

impl From<PathBuf> for Address {
    fn from(path: PathBuf) -> Self {
        Self::Unix(path)
    }
}

impl From<&Path> for Address {
    fn from(path: &Path) -> Self {
        Self::Unix(path.to_owned())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => {
                let text = path.to_string_lossy();
                // Keeps the text parseable.
                let has_scheme = text.starts_with(TCP) || text.starts_with(TLS);
                let bare = !text.contains('/') || has_scheme;
                write!(f, "{}{text}", if bare { "./" } else { "" })
            }
            Self::Tcp { host, port } => write_port(f, TCP, host, *port),
            Self::Tls { host, port } => write_port(f, TLS, host, *port),
        }
    }
}

fn write_port(f: &mut fmt::Formatter<'_>, scheme: &str, host: &str, port: u16) -> fmt::Result {
    match host.contains(':') {
        true => write!(f, "{scheme}[{host}]:{port}"),
        false => write!(f, "{scheme}{host}:{port}"),
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = |why| AddressError {
            text: text.to_owned(),
            why,
        };
        let (rest, tls) = match (text.strip_prefix(TCP), text.strip_prefix(TLS)) {
            (Some(rest), _) => (rest, false),
            (None, Some(rest)) => (rest, true),
            (None, None) if text.contains('/') => return Ok(Self::Unix(text.into())),
            (None, None) => {
                return Err(wrong("neither a path with a `/` nor `tls:HOST:PORT`"));
            }
        };
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("missing port"))?;
        // `parse` also accepts a plus sign.
        let port = match port.parse() {
            Ok(port) if port_is_plain(rest) => port,
            _ => return Err(wrong("the port is not a number from 0 to 65535")),
        };
        let host = match host.strip_prefix('[') {
            Some(inner) => {
                let inner = inner
                    .strip_suffix(']')
                    .filter(|inner| is_ipv6(inner))
                    .ok_or_else(|| wrong("invalid IPv6 address in brackets"))?;
                inner.to_owned()
            }
            None if host.contains(':') => {
                return Err(wrong("an IPv6 address needs brackets"));
            }
            None if !is_name(host) => return Err(wrong("invalid host name")),
            None => host.to_owned(),
        };
        Ok(match tls {
            true => Self::Tls { host, port },
            false => Self::Tcp { host, port },
        })
    }
}

fn port_is_plain(rest: &str) -> bool {
    rest.ends_with(|c: char| c.is_ascii_digit()) && !rest.contains('+')
}

/// An IPv6 address, with or without a scope (`fe80::1%2`).
fn is_ipv6(text: &str) -> bool {
    text.parse::<Ipv6Addr>().is_ok() || format!("[{text}]:0").parse::<SocketAddrV6>().is_ok()
}

/// A host name or an IPv4 address.
fn is_name(text: &str) -> bool {
    (1..=MAX_HOST).contains(&text.len())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Self::Unix(path) = self
            && path.to_str().is_none()
        {
            return Err(ser::Error::custom("the path of a socket is not UTF-8"));
        }
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_addresses_parse_again() {
        let tcp = |host: &str, port| Address::Tcp {
            host: host.into(),
            port,
        };
        let tls = |host: &str, port| Address::Tls {
            host: host.into(),
            port,
        };
        let unix = |path: &str| Address::from(Path::new(path));
        for (text, address) in [
            ("/run/farside/lender.sock", unix("/run/farside/lender.sock")),
            ("./lender.sock", unix("./lender.sock")),
            ("./lender.sock", unix("lender.sock")),
            ("./tcp:1/x", unix("tcp:1/x")),
            ("./tls:1/x", unix("tls:1/x")),
            ("tls:rack1-b:7410", tls("rack1-b", 7410)),
            ("tls:[fd00::2]:7410", tls("fd00::2", 7410)),
            ("tcp:rack1-b:7410", tcp("rack1-b", 7410)),
            ("tcp:10.0.0.2:0", tcp("10.0.0.2", 0)),
            ("tcp:[fd00::2]:65535", tcp("fd00::2", 65535)),
            ("tcp:[fe80::1%2]:7410", tcp("fe80::1%2", 7410)),
        ] {
            assert_eq!(address.to_string(), text);
            let read: Address = text.parse().unwrap();
            assert_eq!(read.to_string(), text);
            let is_port = text.starts_with("tcp:") || text.starts_with("tls:");
            assert_eq!(read.is_tcp(), is_port);
        }
        assert_eq!("tcp:a:1".parse(), Ok(tcp("a", 1)));
        assert_eq!("tls:a:1".parse(), Ok(tls("a", 1)));
        assert_eq!("tcp:[::1]:1".parse(), Ok(tcp("::1", 1)));
        assert_eq!("a/b".parse(), Ok(unix("a/b")));
    }

    #[test]
    fn an_error_shows_what_an_address_looks_like() {
        for (text, why) in [
            ("", "neither a path"),
            ("lender.sock", "neither a path"),
            ("10.0.0.2:7410", "neither a path"),
            ("tcp:", "missing port"),
            ("tcp:host", "missing port"),
            ("tcp:host:", "the port"),
            ("tcp:host:65536", "the port"),
            ("tcp:host:+1", "the port"),
            ("tcp:host:-1", "the port"),
            ("tcp::7410", "invalid host name"),
            ("tcp:a b:7410", "invalid host name"),
            ("tcp:a/b:7410", "invalid host name"),
            ("tcp:fd00::2:7410", "brackets"),
            ("tcp:[10.0.0.2]:7410", "brackets"),
            ("tcp:[fd00::2:7410", "brackets"),
            ("tls:host", "missing port"),
            ("TLS:host:1", "neither a path"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(error.contains("tls:10.0.0.2:7410"), "{error}");
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
