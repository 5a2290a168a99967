//! Networks on which a daemon may communicate without encryption.

use std::net::IpAddr;

/// Whether an address is loopback, private (RFC 1918, RFC 4193) or link-local
/// (RFC 3927, RFC 4291). Guest RAM in a live migration goes to other addresses unencrypted only on
/// request.
///
/// An IPv4-mapped address (RFC 4291, 2.5.5.2) counts as its IPv4 address, to which the
/// kernel sends the packets: `::ffff:10.0.0.1` is private, `::ffff:203.0.113.5` is not.
pub fn is_private(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_private() || ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_public_address_is_not_private_in_any_notation() {
        for (address, private) in [
            ("10.0.0.1", true),
            ("::ffff:10.0.0.1", true),
            ("169.254.1.1", true),
            ("fe80::1", true),
            ("fd00::1", true),
            ("203.0.113.5", false),
            ("::ffff:203.0.113.5", false),
            ("2001:db8::1", false),
            // NAT64 (RFC 6052): the translator may be on any network.
            ("64:ff9b::10.0.0.1", false),
            ("0.0.0.0", false),
            ("::", false),
        ] {
            assert_eq!(is_private(address.parse().unwrap()), private, "{address}");
        }
    }
}
