//! The address at which the other host's QEMU listens.

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};

use farside_daemon::is_private;

use crate::{Error, Result};

/// The address of host `to`, its name for the remote shell. Refuses one that is not private: QEMU's
/// stream is not encrypted.
pub fn address_for(to: &str) -> Result<IpAddr> {
    // As ssh writes it.
    let name = to.rsplit('@').next().unwrap_or(to);
    let found: Vec<IpAddr> = (name, 0)
        .to_socket_addrs()
        .map(|found| found.map(|address| address.ip()).collect())
        .map_err(|error| {
            Error::refused(format!(
                "no address found for host {name} ({error}): give it with --migrate-address"
            ))
        })?;
    match found.iter().find(|address| is_private(**address)) {
        Some(address) => Ok(*address),
        None => Err(Error::refused(format!(
            "host {name} has no private address (found: {found:?}), and QEMU sends guest memory unencrypted: if that network can be trusted, name its address with --migrate-address"
        ))),
    }
}

/// Listens at an address of this host, as its QEMU would, at any port.
pub(crate) fn try_listen(address: IpAddr) -> Result<TcpListener> {
    TcpListener::bind((address, 0)).map_err(|error| {
        Error::refused(format!(
            "QEMU cannot listen at {address} there: {error}; name an address of that host with --migrate-address"
        ))
    })
}

/// As QEMU takes it.
pub(super) fn uri(address: SocketAddr) -> String {
    format!("tcp:{address}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_addresses_are_taken_unasked() {
        assert_eq!(address_for("root@127.0.0.1"), Ok([127, 0, 0, 1].into()));
        assert_eq!(address_for("10.1.2.3"), Ok([10, 1, 2, 3].into()));
        let error = address_for("203.0.113.5").unwrap_err().to_string();
        assert!(error.contains("unencrypted"), "{error}");
        assert!(error.contains("--migrate-address"), "{error}");
        // An IPv4-mapped address is the IPv4 address in it.
        for (address, taken) in [
            ("fd00::1", true),
            ("2001:db8::1", false),
            ("::ffff:10.0.0.1", true),
            ("::ffff:203.0.113.5", false),
        ] {
            assert_eq!(address_for(address).is_ok(), taken, "{address}");
        }
    }

    #[test]
    fn an_address_of_another_host_is_refused_by_name() {
        assert!(try_listen([127, 0, 0, 1].into()).is_ok());
        // Reserved for documentation by RFC 5737.
        let error = try_listen([192, 0, 2, 1].into()).unwrap_err().to_string();
        assert!(error.contains("192.0.2.1"), "{error}");
        assert!(error.contains("--migrate-address"), "{error}");
    }

    #[test]
    fn brackets_where_qemu_wants_them() {
        assert_eq!(uri(([10, 0, 0, 1], 7).into()), "tcp:10.0.0.1:7");
        assert_eq!(uri("[fd00::1]:0".parse().unwrap()), "tcp:[fd00::1]:0");
    }
}
