//! Whose a lease is.

use std::fmt;

use farside_daemon::VmName;
use farside_fabric::Owner;
use farside_lender_protocol::{Channel, Identity, RemoteError};

use crate::refusals::unsupported;

/// Whose a lease is: the VM that its borrower has named, which is a claim, of the borrower as this lender has verified it.
///
/// Leases of one owner share what leads to its memory: an IOMMU group's domain, the windows of an NTB, and BARs.
#[derive(Clone, Debug)]
pub(crate) struct LeaseOwner {
    vm: VmName,
    /// Unknown of the borrower of a former lender, whose connection is closed.
    verified: Option<Owner>,
}

impl LeaseOwner {
    /// The VM `vm` of the peer with that identity.
    pub(crate) fn new(vm: VmName, identity: Option<&Identity>) -> Self {
        let verified = identity.map(|it| Owner::new(vm.as_str(), &it.credential()));
        Self { vm, verified }
    }

    /// The VM `vm` of the peer of `connection`.
    pub(crate) fn of(vm: VmName, connection: &Channel) -> Self {
        Self::new(vm, connection.identity().ok().as_ref())
    }

    /// The VM, for messages, and for fences and chains, which have secrets as credentials.
    pub(crate) fn vm(&self) -> &VmName {
        &self.vm
    }

    /// The owner, as the fabric compares it.
    ///
    /// # Errors
    /// The borrower is not known.
    pub(crate) fn verified(&self) -> Result<&Owner, RemoteError> {
        let unknown = || unsupported("the borrower's identity is not known: borrow it anew");
        self.verified.as_ref().ok_or_else(unknown)
    }

    /// Whether both are certainly the same.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.verified.is_some() && self.verified == other.verified
    }

    /// Whether both may be the same: one is not known.
    pub(crate) fn may_be(&self, other: &Self) -> bool {
        let is_unknown = self.verified.is_none() || other.verified.is_none();
        self.vm == other.vm && (is_unknown || self.is(other))
    }
}

/// The VM.
impl fmt::Display for LeaseOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.vm.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32, pid: i32) -> Identity {
        Identity::User { uid, pid }
    }

    fn host(name: &str, address: &str) -> Identity {
        Identity::Host {
            name: name.into(),
            address: address.parse().unwrap(),
        }
    }

    fn network(address: &str) -> Identity {
        Identity::Network {
            address: address.parse().unwrap(),
        }
    }

    fn owner(vm: &str, identity: Option<&Identity>) -> LeaseOwner {
        LeaseOwner::new(vm.parse().unwrap(), identity)
    }

    /// Each line is one borrower: after a restart it has another process and port. No two lines are one.
    #[test]
    fn a_borrower_is_its_credential_and_not_its_name() {
        let borrowers = [
            [user(1000, 7), user(1000, 8)],
            [user(1001, 7), user(1001, 0)],
            [host("a", "10.0.0.1:1"), host("a", "10.0.0.2:2")],
            [host("b", "10.0.0.1:1"), host("b", "10.0.0.1:2")],
            // By no name that a certificate may have.
            [host("1000", "10.0.0.1:1"), host("1000", "10.0.0.1:2")],
            [host("10.0.0.1", "[::1]:1"), host("10.0.0.1", "[::1]:2")],
            [network("10.0.0.1:1"), network("[::ffff:10.0.0.1]:2")],
            [network("10.0.0.2:1"), network("10.0.0.2:2")],
            [network("[fe80::1%2]:1"), network("[fe80::1%2]:2")],
            [network("[fe80::1%3]:1"), network("[fe80::1%3]:2")],
        ];
        for (n, [one, again]) in borrowers.iter().enumerate() {
            for (m, [other, _]) in borrowers.iter().enumerate() {
                for vm in ["web1", "web2"] {
                    let (left, right) = (owner("web1", Some(again)), owner(vm, Some(other)));
                    let same = n == m && vm == "web1";
                    assert_eq!(left.is(&right), same, "{one:?}, {other:?}");
                    assert_eq!(left.may_be(&right), same, "{one:?}, {other:?}");
                }
            }
        }
    }

    #[test]
    fn an_unknown_borrower_is_nobody_and_may_be_anybody_of_its_vm() {
        let (unknown, known) = (owner("web1", None), owner("web1", Some(&user(1000, 1))));
        unknown.verified().unwrap_err();
        assert!(!unknown.is(&unknown) && !unknown.is(&known) && !known.is(&unknown));
        assert!(unknown.may_be(&unknown) && unknown.may_be(&known) && known.may_be(&unknown));
        assert!(!unknown.may_be(&owner("web2", Some(&user(1000, 1)))));
    }
}
