//! Where a lender is: a socket on this host, or a port of another one.

use std::{
    fmt,
    net::{Ipv6Addr, SocketAddrV6},
    path::{Path, PathBuf},
    str::FromStr,
};

use crate::Route;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

/// What a TCP address begins with.
const TCP: &str = "tcp:";

/// Longest host name, bytes (RFC 1035).
const MAX_HOST: usize = 253;

/// The address of a lender, as it is written in configuration files and on the
/// command line.
///
/// ```
/// use farside_lender_protocol::Address;
///
/// let near: Address = "/run/farside/lender.sock".parse().unwrap();
/// let far: Address = "tcp:rack1-b:7410".parse().unwrap();
/// assert!(!near.is_tcp() && far.is_tcp());
/// assert_eq!(far.to_string(), "tcp:rack1-b:7410");
/// assert!("lender.sock".parse::<Address>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A UNIX socket on this host. Written as its path, which has a `/`.
    Unix(PathBuf),
    /// A TCP port. Written `tcp:HOST:PORT`.
    Tcp {
        /// A name, an IPv4 address or an IPv6 address (without its brackets).
        host: String,
        /// The port. Who listens at port 0 gets one that is free.
        port: u16,
    },
}

/// Why a text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no address of a lender: {why}; write the path of its socket with a `/` (/run/farside/lender.sock, ./lender.sock), or tcp:HOST:PORT (tcp:rack1-b:7410, tcp:10.0.0.2:7410, tcp:[fd00::2]:7410)"
)]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl Address {
    /// Whether it is reached by TCP: then no descriptor can be sent there.
    pub fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp { .. })
    }

    /// How a device of the lender there reaches the memory of a VM here.
    pub fn route(&self) -> Route {
        match self.is_tcp() {
            true => Route::Ntb,
            false => Route::Memory,
        }
    }

    /// The path of a UNIX socket.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Unix(path) => Some(path),
            Self::Tcp { .. } => None,
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
                // What is written can be read again.
                let bare = !text.contains('/') || text.starts_with(TCP);
                write!(f, "{}{text}", if bare { "./" } else { "" })
            }
            Self::Tcp { host, port } if host.contains(':') => write!(f, "{TCP}[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{TCP}{host}:{port}"),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = |why| AddressError {
            text: text.to_owned(),
            why,
        };
        let Some(rest) = text.strip_prefix(TCP) else {
            return match text.contains('/') {
                true => Ok(Self::Unix(text.into())),
                false => Err(wrong("it is no path and does not begin with `tcp:`")),
            };
        };
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
        // `parse` also takes a plus sign.
        let port = match port.parse() {
            Ok(port) if port_is_plain(rest) => port,
            _ => return Err(wrong("the port is no number from 0 to 65535")),
        };
        let host = match host.strip_prefix('[') {
            Some(inner) => {
                let inner = inner
                    .strip_suffix(']')
                    .filter(|inner| is_ipv6(inner))
                    .ok_or_else(|| wrong("no IPv6 address between the brackets"))?;
                inner.to_owned()
            }
            None if host.contains(':') => {
                return Err(wrong("an IPv6 address needs brackets"));
            }
            None if !is_name(host) => return Err(wrong("no host name before the port")),
            None => host.to_owned(),
        };
        Ok(Self::Tcp { host, port })
    }
}

fn port_is_plain(rest: &str) -> bool {
    rest.ends_with(|c: char| c.is_ascii_digit()) && !rest.contains('+')
}

/// An IPv6 address, with a scope if need be (`fe80::1%2`).
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
    fn what_is_written_is_read_again() {
        let tcp = |host: &str, port| Address::Tcp {
            host: host.into(),
            port,
        };
        let unix = |path: &str| Address::from(Path::new(path));
        for (text, address) in [
            ("/run/farside/lender.sock", unix("/run/farside/lender.sock")),
            ("./lender.sock", unix("./lender.sock")),
            ("./lender.sock", unix("lender.sock")),
            ("./tcp:1/x", unix("tcp:1/x")),
            ("tcp:rack1-b:7410", tcp("rack1-b", 7410)),
            ("tcp:10.0.0.2:0", tcp("10.0.0.2", 0)),
            ("tcp:[fd00::2]:65535", tcp("fd00::2", 65535)),
            ("tcp:[fe80::1%2]:7410", tcp("fe80::1%2", 7410)),
        ] {
            assert_eq!(address.to_string(), text);
            let read: Address = text.parse().unwrap();
            assert_eq!(read.to_string(), text);
            assert_eq!(read.is_tcp(), text.starts_with("tcp:"));
        }
        assert_eq!("tcp:a:1".parse(), Ok(tcp("a", 1)));
        assert_eq!("tcp:[::1]:1".parse(), Ok(tcp("::1", 1)));
        assert_eq!("a/b".parse(), Ok(unix("a/b")));
    }

    #[test]
    fn an_error_shows_what_an_address_looks_like() {
        for (text, why) in [
            ("", "no path"),
            ("lender.sock", "no path"),
            ("10.0.0.2:7410", "no path"),
            ("tcp:", "no port"),
            ("tcp:host", "no port"),
            ("tcp:host:", "the port"),
            ("tcp:host:65536", "the port"),
            ("tcp:host:+1", "the port"),
            ("tcp:host:-1", "the port"),
            ("tcp::7410", "no host name"),
            ("tcp:a b:7410", "no host name"),
            ("tcp:a/b:7410", "no host name"),
            ("tcp:fd00::2:7410", "brackets"),
            ("tcp:[10.0.0.2]:7410", "brackets"),
            ("tcp:[fd00::2:7410", "brackets"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(error.contains("tcp:10.0.0.2:7410"), "{error}");
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
