//! The `[etcd]` table of `host.toml`.

use std::{fmt, path::PathBuf, str::FromStr};

use farside_lender_protocol::Address;
use serde::{Deserialize, Serialize};

/// Maximum number of endpoints.
const MAX_ENDPOINTS: usize = 16;

/// Longest prefix of keys, bytes.
const MAX_PREFIX: usize = 128;

/// An etcd cluster, and where farside's keys are in it.
///
/// ```
/// let etcd: farside_discovery::EtcdConfig = toml::from_str(r#"
///     endpoints = ["https://10.0.0.5:2379", "https://10.0.0.6:2379"]
///     prefix = "/rack1/farside"
/// "#).unwrap();
/// assert_eq!(etcd.endpoints.len(), 2);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, try_from = "Raw")]
pub struct EtcdConfig {
    /// The client URLs of its members.
    pub endpoints: Vec<EtcdEndpoint>,
    /// What farside's keys begin with.
    pub prefix: String,
    /// The directory with the certificates of this host, for `https:` endpoints. Default: those of
    /// farside.
    pub directory: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    endpoints: Vec<EtcdEndpoint>,
    #[serde(default = "default_prefix")]
    prefix: String,
    #[serde(default)]
    directory: Option<PathBuf>,
}

fn default_prefix() -> String {
    "/farside".to_owned()
}

impl TryFrom<Raw> for EtcdConfig {
    type Error = String;

    fn try_from(raw: Raw) -> Result<Self, String> {
        let Raw {
            endpoints,
            prefix,
            directory,
        } = raw;
        if !(1..=MAX_ENDPOINTS).contains(&endpoints.len()) {
            return Err(format!(
                "`endpoints` has {} of 1 to {MAX_ENDPOINTS} client URLs of etcd: name the members of the cluster, as \"https://10.0.0.5:2379\"",
                endpoints.len()
            ));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || "/-_.".contains(c);
        let is_prefix = prefix.starts_with('/')
            && !prefix.ends_with('/')
            && prefix.len() <= MAX_PREFIX
            && prefix.chars().all(allowed);
        match is_prefix {
            true => Ok(Self {
                endpoints,
                prefix,
                directory,
            }),
            false => Err(format!(
                "`prefix` {prefix:?} is invalid: begin with `/`, end without, and use at most {MAX_PREFIX} letters, digits, `/`, `-`, `_` and `.`"
            )),
        }
    }
}

/// The client URL of a member of etcd: `https://HOST:PORT`, or `http://HOST:PORT` without encryption.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct EtcdEndpoint {
    /// The host and port; with TLS or without.
    address: Address,
}

impl EtcdEndpoint {
    /// Whether it is `https:`.
    pub fn is_tls(&self) -> bool {
        matches!(self.address, Address::Tls { .. })
    }

    /// Its name or IP address.
    pub fn host(&self) -> &str {
        match &self.address {
            Address::Tls { host, .. } | Address::Tcp { host, .. } => host,
            // Not built.
            Address::Unix(_) => "",
        }
    }
}

impl fmt::Display for EtcdEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.address.to_string();
        let rest = text.split_once(':').map_or("", |(_, rest)| rest);
        let scheme = if self.is_tls() { "https" } else { "http" };
        write!(f, "{scheme}://{rest}")
    }
}

impl FromStr for EtcdEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || {
            format!(
                "invalid client URL of etcd {text:?}: use https://HOST:PORT, or http://HOST:PORT without encryption"
            )
        };
        let address = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => format!("tls:{rest}"),
            (None, Some(rest)) => format!("tcp:{rest}"),
            (None, None) => return Err(invalid()),
        };
        match address.parse() {
            // The scope of an IPv6 address has no place in a URL.
            Ok(Address::Tls { host, port } | Address::Tcp { host, port })
                if port == 0 || host.contains('%') =>
            {
                Err(invalid())
            }
            Ok(address @ (Address::Tls { .. } | Address::Tcp { .. })) => Ok(Self { address }),
            Ok(Address::Unix(_)) | Err(_) => Err(invalid()),
        }
    }
}

impl From<EtcdEndpoint> for String {
    fn from(endpoint: EtcdEndpoint) -> Self {
        endpoint.to_string()
    }
}

impl TryFrom<String> for EtcdEndpoint {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Result<EtcdConfig, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn endpoints_are_urls_without_a_path() {
        for good in [
            "https://10.0.0.5:2379",
            "http://etcd-1:2379",
            "https://[fd00::5]:2379",
        ] {
            assert_eq!(good.parse::<EtcdEndpoint>().unwrap().to_string(), good);
        }
        for bad in [
            "",
            "10.0.0.5:2379",
            "https://10.0.0.5",
            "https://10.0.0.5:0",
            "https://10.0.0.5:2379/v3",
            "https://user@etcd:2379",
            "https://[fe80::1%2]:2379",
            "unix:///run/etcd",
            "tls:10.0.0.5:2379",
        ] {
            let error = bad.parse::<EtcdEndpoint>().unwrap_err();
            assert!(error.contains("https://HOST:PORT"), "{error}");
            assert!(error.contains(&format!("{bad:?}")), "{error}");
        }
    }

    #[test]
    fn a_table_names_members_and_may_name_a_prefix() {
        let plain = config("endpoints = ['http://a:1']").unwrap();
        assert_eq!(plain.prefix, "/farside");
        let odd = config("endpoints = []").unwrap_err();
        assert!(odd.contains("`endpoints` has 0 of 1 to 16"), "{odd}");
        for prefix in ["", "farside", "/farside/", "/", "/a b", &"/a".repeat(65)] {
            let error = config(&format!("endpoints = ['http://a:1']\nprefix = '{prefix}'"));
            let error = error.unwrap_err();
            assert!(error.contains("`prefix`"), "{prefix}: {error}");
        }
        let typo = config("endpoint = ['http://a:1']").unwrap_err();
        assert!(typo.contains("`endpoint`"), "{typo}");
    }
}
