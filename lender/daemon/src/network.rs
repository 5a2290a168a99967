//! Networks in which a daemon may speak without encryption.

use std::net::IpAddr;

/// Whether an address is of no public network: the host's own (loopback),
/// private (RFC 1918, RFC 4193) or of one link (RFC 3927, RFC 4291). Decides what
/// goes unencrypted without being asked for, such as a lender's port and guest RAM
/// in a live migration.
///
/// An IPv4-mapped address (RFC 4291, 2.5.5.2) is judged as the IPv4 address in it,
/// since that is where the kernel sends the packets: `::ffff:10.0.0.1` is private,
/// `::ffff:203.0.113.5` is not. Nothing public is taken for private.
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
    fn an_address_that_the_internet_reaches_is_not_private_in_any_spelling() {
        for (address, private) in [
            ("10.0.0.1", true),
            ("::ffff:10.0.0.1", true),
            ("169.254.1.1", true),
            ("fe80::1", true),
            ("fd00::1", true),
            ("203.0.113.5", false),
            ("::ffff:203.0.113.5", false),
            ("2001:db8::1", false),
            // A NAT64 translates it (RFC 6052), wherever that is.
            ("64:ff9b::10.0.0.1", false),
            ("0.0.0.0", false),
            ("::", false),
        ] {
            assert_eq!(is_private(address.parse().unwrap()), private, "{address}");
        }
    }
}
