//! What all VMs and tools of a host share: `host.toml`. It stays where it is when a VM moves.
//!
//! ```toml
//! lenders = ["/run/farside/lender.sock", "tls:rack1-b:7410"]
//! ntb = "0000:05:00.0"
//! ```

use std::{io, path::Path};

use farside_daemon::paths;
use farside_lender_protocol::Address;
use farside_pci::Bdf;
use serde::Deserialize;

use crate::{LoadError, places};

/// The configuration of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostConfig {
    /// The lenders that this host knows, for VMs and commands that name none.
    pub lenders: Vec<Address>,
    /// This host's NTB endpoint, for VMs that use it. Without one, they borrow what they reach
    /// otherwise.
    pub ntb: Option<Bdf>,
}

impl HostConfig {
    /// Reads [`places::host`]. All is empty if there is no such file.
    ///
    /// # Errors
    /// The file cannot be read, or is invalid.
    pub fn read() -> Result<Self, LoadError> {
        read(&places::host())
    }

    /// The known lenders, or that of this host.
    pub fn lenders(self) -> Vec<Address> {
        match self.lenders.is_empty() {
            true => vec![paths::lender_socket().into()],
            false => self.lenders,
        }
    }
}

fn read(path: &Path) -> Result<HostConfig, LoadError> {
    match std::fs::read_to_string(path) {
        Ok(text) => toml::from_str(&text).map_err(|source| LoadError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(HostConfig::default()),
        Err(source) => Err(LoadError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> Result<HostConfig, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read(file.path()).map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            format!("{error}: {}", source.unwrap_or_default())
        })
    }

    #[test]
    fn a_host_knows_lenders_and_its_endpoint() {
        let config = host(
            "lenders = ['/run/farside/lender.sock', 'tls:rack1-b:7410']\nntb = '0000:05:00.0'",
        )
        .unwrap();
        assert_eq!(config.ntb.unwrap().to_string(), "0000:05:00.0");
        let lenders: Vec<_> = config.lenders().iter().map(Address::to_string).collect();
        assert_eq!(lenders, ["/run/farside/lender.sock", "tls:rack1-b:7410"]);
    }

    #[test]
    fn without_a_file_a_host_has_its_own_lender_and_no_endpoint() {
        let config = read(Path::new("/nonexistent/host.toml")).unwrap();
        assert_eq!(config.ntb, None);
        assert_eq!(config.lenders(), [paths::lender_socket().into()]);
    }

    #[test]
    fn a_bad_file_is_named_with_key_value_and_remedy() {
        for (text, words) in [
            (
                "lender = ['/x']",
                ["unknown field `lender`", "expected `lenders` or `ntb`"],
            ),
            (
                "lenders = ['rack1-b:7410']",
                ["rack1-b:7410", "tls:HOST:PORT"],
            ),
            ("ntb = '5:00'", ["ntb", "5:00"]),
        ] {
            let error = host(text).unwrap_err();
            for word in words {
                assert!(error.contains(word), "{text}: {error}");
            }
        }
    }
}
