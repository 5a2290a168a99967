//! What all VMs and tools of a host share: `host.toml`. It stays where it is when a VM moves.
//!
//! ```toml
//! lenders = ["/run/farside/lender.sock", "tls:rack1-b:7410"]
//! ntb = "0000:05:00.0"
//! mdns = true
//!
//! [etcd]
//! endpoints = ["https://10.0.0.5:2379", "https://10.0.0.6:2379", "https://10.0.0.7:2379"]
//! ```

use std::{io, path::Path};

use farside_daemon::paths;
use farside_discovery::{Discovery, EtcdConfig};
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
    /// Whether lenders are found, and a lender of this host announced, by mDNS.
    pub mdns: bool,
    /// The cluster in which lenders are found, and a lender of this host announced.
    pub etcd: Option<EtcdConfig>,
}

impl HostConfig {
    /// Reads [`places::host`]. All is empty if there is no such file.
    ///
    /// # Errors
    /// The file cannot be read, or is invalid.
    pub fn read() -> Result<Self, LoadError> {
        read(&places::host())
    }

    /// The lenders that the file lists, or that of this host: where lenders are found in other ways, if
    /// there is one.
    pub fn lenders(&self) -> Vec<Address> {
        match self.lenders.is_empty() {
            true => own_lender(self.discovery().is_some()),
            false => self.lenders.clone(),
        }
    }

    /// How this host finds lenders beside those that the file lists, if it does.
    pub fn discovery(&self) -> Option<Discovery> {
        (self.mdns || self.etcd.is_some()).then(|| Discovery {
            etcd: self.etcd.clone(),
            mdns: self.mdns,
            pki: paths::pki_dir(),
            cache: places::known_lenders(),
        })
    }
}

/// This host's lender; none if `others` are found and it has no socket.
pub(crate) fn own_lender(others: bool) -> Vec<Address> {
    let socket = paths::lender_socket();
    match others && !socket.exists() {
        true => Vec::new(),
        false => vec![socket.into()],
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

    /// The files of the documentation, as printed.
    #[test]
    fn the_files_on_the_page_are_valid() {
        let page = include_str!("../../../docs/network.md");
        let blocks = page.split("```toml\n").skip(1);
        let files: Vec<HostConfig> = blocks
            .map(|block| host(block.split("```").next().unwrap_or_default()).unwrap())
            .collect();
        let [listed, etcd] = &files[..] else {
            panic!("{files:?}");
        };
        assert_eq!(listed.lenders().len(), 3);
        let found = etcd.discovery().unwrap().etcd.unwrap();
        assert_eq!(found.endpoints.len(), 3);
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
    fn a_host_finds_lenders_where_the_file_says_so() {
        assert_eq!(host("lenders = ['/x']").unwrap().discovery(), None);
        let mdns = host("mdns = true").unwrap();
        let found = mdns.discovery().unwrap();
        assert!(found.mdns && found.etcd.is_none());
        let etcd = host("[etcd]\nendpoints = ['https://10.0.0.5:2379']").unwrap();
        let found = etcd.discovery().unwrap();
        assert!(!found.mdns && found.etcd.is_some());
        // It is not this host's lender that is asked: there is none.
        assert!(paths::lender_socket().exists() || etcd.lenders().is_empty());
    }

    #[test]
    fn a_bad_file_is_named_with_key_value_and_remedy() {
        for (text, words) in [
            (
                "lender = ['/x']",
                ["unknown field `lender`", "expected one of `lenders`, `ntb`"],
            ),
            (
                "lenders = ['rack1-b:7410']",
                ["rack1-b:7410", "tls:HOST:PORT"],
            ),
            ("ntb = '5:00'", ["ntb", "5:00"]),
            (
                "[etcd]\nendpoints = ['10.0.0.5:2379']",
                ["10.0.0.5:2379", "https://HOST:PORT"],
            ),
        ] {
            let error = host(text).unwrap_err();
            for word in words {
                assert!(error.contains(word), "{text}: {error}");
            }
        }
    }
}
