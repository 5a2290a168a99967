//! How other hosts find this lender: in etcd and by mDNS, if `host.toml` says so.

use std::{net::IpAddr, sync::Arc};

use farside_daemon::DeviceId;
use farside_discovery::{AnnounceError, Announcer, Announcing, MdnsAnnouncement};
use farside_lender_protocol::Address;

use crate::{config::Config, registry::Registry, server::StartError};

/// The announcements of a lender. They end with the value, within two seconds.
#[derive(Default)]
pub(crate) struct Announced {
    etcd: Option<Announcer>,
    /// Ends with the value.
    _mdns: Option<MdnsAnnouncement>,
}

impl Announced {
    /// Announces the lender, which listens at `listening`, and `devices`.
    pub(crate) fn start(
        config: &Config,
        listening: &[Address],
        devices: Vec<DeviceId>,
        registry: &Arc<Registry>,
    ) -> Result<Self, StartError> {
        let Some(discovery) = &config.discovery else {
            return match &config.announce {
                Some(address) => Err(StartError::NowhereToAnnounce(address.clone())),
                None => Ok(Self::default()),
            };
        };
        let Some(address) = address(config, listening)? else {
            log::warn!(
                "lender {} is not announced in etcd or by mDNS, which host.toml has: it listens at no tls: address",
                config.name
            );
            return Ok(Self::default());
        };
        let etcd = discovery.etcd.clone().map(|etcd| {
            let announcing = Announcing {
                etcd,
                pki: discovery.pki.clone(),
                lender: config.name.clone(),
                address: address.clone(),
                instance: registry.instance(),
            };
            // Registry and announcer end in either order.
            let registry = Arc::downgrade(registry);
            let report = move |device: &DeviceId, problem| {
                if let Some(registry) = registry.upgrade() {
                    registry.set_conflict(device, problem);
                }
            };
            Announcer::start(&announcing, devices, Box::new(report))
        });
        let etcd = etcd.transpose()?;
        let mdns = discovery
            .mdns
            .then(|| MdnsAnnouncement::start(&config.name, &address))
            .transpose()?;
        log::info!("lender {} is announced at {address}", config.name);
        Ok(Self { etcd, _mdns: mdns })
    }

    /// Announces one device more. The error names the lender that has its id.
    pub(crate) fn add(&self, device: &DeviceId) -> Result<(), String> {
        match &self.etcd {
            Some(etcd) => etcd.add(device),
            None => Ok(()),
        }
    }

    pub(crate) fn remove(&self, device: &DeviceId) {
        if let Some(etcd) = &self.etcd {
            etcd.remove(device);
        }
    }
}

impl From<AnnounceError> for StartError {
    fn from(error: AnnounceError) -> Self {
        Self::Announce(error)
    }
}

/// Where other hosts reach the lender: what the configuration says, or its first port with TLS.
fn address(config: &Config, listening: &[Address]) -> Result<Option<Address>, StartError> {
    if let Some(named) = &config.announce {
        return match named {
            Address::Tls { port, .. } if *port != 0 => Ok(Some(named.clone())),
            other => Err(StartError::NotTls(other.clone())),
        };
    }
    let is_tls = |address: &&Address| matches!(address, Address::Tls { .. });
    // With the host's name where the configuration has one: the certificate may have no address.
    let configured = config.listen.iter().find(is_tls);
    let bound = listening.iter().find(is_tls);
    let (Some(Address::Tls { port, host: bound }), configured) = (bound, configured) else {
        return Ok(None);
    };
    let host = match configured {
        Some(Address::Tls { host, .. }) => host,
        _ => bound,
    };
    let address = Address::Tls {
        host: host.clone(),
        port: *port,
    };
    let ip = host.parse::<IpAddr>().map(|ip| ip.to_canonical());
    match ip {
        Ok(ip) if ip.is_unspecified() || ip.is_loopback() => {
            Err(StartError::AnnounceWhere(address))
        }
        _ => Ok(Some(address)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announced(
        announce: &str,
        listen: &[&str],
        bound: &[&str],
    ) -> Result<Option<String>, String> {
        let parse = |text: &&str| text.parse::<Address>().unwrap();
        let config = Config {
            announce: (!announce.is_empty()).then(|| announce.parse().unwrap()),
            listen: listen.iter().map(parse).collect(),
            ..Config::default()
        };
        let bound: Vec<Address> = bound.iter().map(parse).collect();
        let found = address(&config, &bound).map_err(|error| error.to_string())?;
        Ok(found.map(|address| address.to_string()))
    }

    #[test]
    fn the_first_port_with_tls_is_announced_by_its_configured_name() {
        for (listen, bound, expected) in [
            (
                &["tls:rack1-b:0"][..],
                &["/l", "tls:10.0.0.2:4711"][..],
                Some("tls:rack1-b:4711"),
            ),
            (
                &["tcp:10.0.0.2:1", "tls:10.0.0.2:2"],
                &["/l", "tcp:10.0.0.2:1", "tls:10.0.0.2:2"],
                Some("tls:10.0.0.2:2"),
            ),
            // A socket of the service manager's.
            (&[], &["/l", "tls:10.0.0.2:3"], Some("tls:10.0.0.2:3")),
            (&["tcp:10.0.0.2:1"], &["/l", "tcp:10.0.0.2:1"], None),
            (&[], &["/l"], None),
        ] {
            let found = announced("", listen, bound).unwrap();
            assert_eq!(found.as_deref(), expected, "{listen:?} {bound:?}");
        }
    }

    #[test]
    fn an_address_that_other_hosts_cannot_reach_needs_a_name() {
        for host in ["0.0.0.0", "[::]", "127.0.0.1", "[::1]", "[::ffff:0.0.0.0]"] {
            let at = format!("tls:{host}:7410");
            let error = announced("", &[&at], &["/l", &at]).unwrap_err();
            assert!(
                error.contains("announce = \"tls:NAME:7410\""),
                "{host}: {error}"
            );
            let named = announced("tls:rack1-b:7410", &[&at], &["/l", &at]).unwrap();
            assert_eq!(named.as_deref(), Some("tls:rack1-b:7410"));
        }
    }

    #[test]
    fn an_address_without_tls_is_not_announced() {
        for bad in [
            "tcp:rack1-b:7410",
            "/run/farside/lender.sock",
            "tls:rack1-b:0",
        ] {
            let error = announced(bad, &[], &["/l"]).unwrap_err();
            assert!(error.contains("only tls:HOST:PORT"), "{error}");
        }
    }
}
