//! Lenders on a LAN, by mDNS and DNS-SD (RFC 6762, RFC 6763): service `_farside._tcp`, one instance for
//! each lender.
//!
//! Nothing authenticates it, so what is found is an address with TLS, where the lender's certificate
//! decides, and nothing else.

use std::time::{Duration, Instant};

use farside_daemon::LenderName;
use farside_lender_protocol::Address;
use mdns_sd::{ServiceDaemon, ServiceEvent, ServiceInfo};

use crate::{lookup::MAX_KNOWN, record::is_announced};

const SERVICE: &str = "_farside._tcp.local.";

/// The key of the address in the TXT record.
const ADDRESS: &str = "address";

/// Time in which lenders answer (RFC 6762, 6: at most 120 ms, unless the query is lost).
const ANSWERS: Duration = Duration::from_millis(1200);

/// Time limit for the goodbye packet (RFC 6762, 10.1), of the 5 s in which a lender ends.
const GOODBYE: Duration = Duration::from_millis(500);

/// An error of mDNS.
#[derive(Debug, thiserror::Error)]
#[error(
    "mDNS does not work on this host: unset `mdns` in host.toml, or allow multicast on UDP port 5353"
)]
pub struct MdnsError(#[from] mdns_sd::Error);

/// A lender's announcement. It ends with the value.
pub struct MdnsAnnouncement {
    daemon: ServiceDaemon,
    name: String,
}

impl MdnsAnnouncement {
    /// Announces a lender at a `tls:` address, on all interfaces.
    ///
    /// # Errors
    /// Those of the sockets.
    pub fn start(lender: &LenderName, address: &Address) -> Result<Self, MdnsError> {
        let daemon = ServiceDaemon::new()?;
        let service = service(lender, address)?;
        let name = service.get_fullname().to_owned();
        daemon.register(service)?;
        Ok(Self { daemon, name })
    }
}

fn service(lender: &LenderName, address: &Address) -> Result<ServiceInfo, MdnsError> {
    let port = match address {
        Address::Tls { port, .. } | Address::Tcp { port, .. } => *port,
        Address::Unix(_) => 0,
    };
    let text = address.to_string();
    let properties = [(ADDRESS, text.as_str()), ("tls", "1")];
    // A label has no dots.
    let host = format!("{}.local.", lender.as_str().replace('.', "-"));
    let service = ServiceInfo::new(SERVICE, lender.as_str(), &host, "", port, &properties[..])?;
    Ok(service.enable_addr_auto())
}

impl Drop for MdnsAnnouncement {
    fn drop(&mut self) {
        if let Ok(sent) = self.daemon.unregister(&self.name) {
            let _ = sent.recv_timeout(GOODBYE);
        }
        // Fails if the thread has ended.
        let _ = self.daemon.shutdown();
    }
}

/// The lenders that answer within about a second.
pub(crate) fn browse() -> Result<Vec<Address>, MdnsError> {
    let daemon = ServiceDaemon::new()?;
    let events = daemon.browse(SERVICE)?;
    let deadline = Instant::now() + ANSWERS;
    let mut found = Vec::new();
    while let Ok(event) = events.recv_deadline(deadline) {
        let ServiceEvent::ServiceResolved(service) = event else {
            continue;
        };
        let text = service.get_property_val_str(ADDRESS);
        let address = text.and_then(announced);
        match address {
            Some(address) if found.len() < MAX_KNOWN => {
                if !found.contains(&address) {
                    found.push(address);
                }
            }
            Some(_) => {
                log::warn!(
                    "more than {MAX_KNOWN} lenders answer by mDNS: the others are not asked"
                );
                break;
            }
            None => log::warn!(
                "{:?} answers by mDNS without an address with TLS: ignoring it",
                service.get_fullname().chars().take(80).collect::<String>()
            ),
        }
    }
    // Fails if the thread has ended.
    let _ = daemon.shutdown();
    Ok(found)
}

/// The address in a TXT record.
fn announced(text: &str) -> Option<Address> {
    text.parse().ok().filter(is_announced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_has_the_lenders_name_port_and_address() {
        let address: Address = "tls:10.0.0.2:7410".parse().unwrap();
        let service = service(&"rack1.b".parse().unwrap(), &address).unwrap();
        assert_eq!(service.get_port(), 7410);
        assert_eq!(service.get_hostname(), "rack1-b.local.");
        let text = service.get_property_val_str(ADDRESS).unwrap();
        assert_eq!(announced(text), Some(address));
    }

    #[test]
    fn addresses_without_tls_are_not_taken() {
        for bad in [
            "",
            "tcp:10.0.0.2:7410",
            "/run/farside/lender.sock",
            "tls:10.0.0.2:0",
            "tls:a b:7410",
            "tls:\u{1b}[2J:7410",
        ] {
            assert_eq!(announced(bad), None, "{bad:?}");
        }
    }
}
