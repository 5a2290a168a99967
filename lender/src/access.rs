//! Who may do what with a device.
//!
//! On this host the kernel names the user of a peer. Processes of one user can trace each other, so
//! a VM is as protected from another as their users are: the name of a VM is the peer's claim. Of a
//! TCP peer nothing is known.

use std::str::FromStr;

use farside_daemon::{DeviceId, NameError, UserError, VmName, user_id, user_name};
use farside_error_chain::Chain;
use farside_lender_protocol::{ErrorKind, Identity, RemoteError};
use serde::Deserialize;

/// Who may borrow a device, beside the lender's own user and root, who may do anything: `user=NAME`,
/// `user=NAME,vm=VM` or `network`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Borrower {
    /// A user of this host, at the lender's UNIX socket.
    User {
        /// The user.
        uid: u32,
        /// The only VM for which that user may borrow; none for any.
        vm: Option<VmName>,
    },
    /// Every peer that can reach a TCP port of the lender.
    Network,
}

/// An invalid rule.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the fields")]
pub enum BorrowerError {
    /// An option without a meaning.
    #[error(
        "unknown option {option:?} in borrower {rule:?}: use user=NAME, user=NAME,vm=VM or network"
    )]
    Option { rule: String, option: String },
    /// The same key again.
    #[error("{key} is given twice in borrower {rule:?}: write one rule for each")]
    Twice { rule: String, key: &'static str },
    /// No user.
    #[error("borrower {0:?} names no user: use user=NAME, user=NAME,vm=VM or network")]
    NoUser(String),
    /// A network peer with options.
    #[error(
        "borrower {0:?} has options: `network` takes none, since nothing authenticates a TCP peer"
    )]
    Network(String),
    /// The user does not exist.
    #[error(transparent)]
    User(#[from] UserError),
    /// The VM's name is invalid.
    #[error(transparent)]
    Vm(#[from] NameError),
}

impl FromStr for Borrower {
    type Err = BorrowerError;

    /// Looks the user up.
    fn from_str(rule: &str) -> Result<Self, BorrowerError> {
        let text = || rule.to_owned();
        let (mut user, mut vm, mut network) = (None, None, false);
        for option in rule.split(',') {
            let (key, slot, value) = match option.split_once('=') {
                Some(("user", value)) => ("user", &mut user, value),
                Some(("vm", value)) => ("vm", &mut vm, value),
                None if option == "network" => {
                    network = true;
                    continue;
                }
                _ => {
                    return Err(BorrowerError::Option {
                        rule: text(),
                        option: option.to_owned(),
                    });
                }
            };
            if slot.replace(value).is_some() {
                return Err(BorrowerError::Twice { rule: text(), key });
            }
        }
        if network {
            return match rule {
                "network" => Ok(Self::Network),
                _ => Err(BorrowerError::Network(text())),
            };
        }
        let user = user.ok_or_else(|| BorrowerError::NoUser(text()))?;
        Ok(Self::User {
            uid: user_id(user)?,
            vm: vm.map(str::parse).transpose()?,
        })
    }
}

impl TryFrom<String> for Borrower {
    type Error = String;

    fn try_from(rule: String) -> Result<Self, String> {
        rule.parse()
            .map_err(|error: BorrowerError| Chain(&error).to_string())
    }
}

/// The rights to one device.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    device: DeviceId,
    /// The user of the lender.
    operator: u32,
    borrowers: Vec<Borrower>,
}

impl Access {
    pub(crate) fn new(device: &DeviceId, operator: u32, borrowers: Vec<Borrower>) -> Self {
        Self {
            device: device.to_owned(),
            operator,
            borrowers,
        }
    }

    /// Whether the peer is the lender's own user or root.
    pub(crate) fn is_operator(&self, identity: &Identity) -> bool {
        matches!(identity, Identity::User { uid, .. } if [0, self.operator].contains(uid))
    }

    /// Whether `identity` may borrow the device for `vm`, or for some VM, and so see it.
    pub(crate) fn allows(&self, identity: &Identity, vm: Option<&VmName>) -> bool {
        let rule_allows = |rule: &Borrower| match (identity, rule) {
            (
                Identity::User { uid, .. },
                Borrower::User {
                    uid: named,
                    vm: only,
                },
            ) => uid == named && (vm.is_none() || only.is_none() || vm == only.as_ref()),
            (Identity::Network { .. }, Borrower::Network) => true,
            (Identity::User { .. }, Borrower::Network)
            | (Identity::Network { .. }, Borrower::User { .. }) => false,
        };
        self.is_operator(identity) || self.borrowers.iter().any(rule_allows)
    }

    /// As [`Access::allows`], with the refusal.
    pub(crate) fn may(&self, identity: &Identity, vm: Option<&VmName>) -> Result<(), RemoteError> {
        if self.allows(identity, vm) {
            return Ok(());
        }
        let device = &self.device;
        let message = match identity {
            Identity::Network { .. } => format!(
                "device {device} is not lent to {identity}: with `borrowers = [\"network\"]` in lender.toml (or --borrower network) every host that can connect to the lender's TCP port may borrow it"
            ),
            Identity::User { uid, .. } => {
                let mut rule = format!("user={}", user_name(*uid));
                let mut what = String::new();
                if let Some(vm) = vm {
                    rule += &format!(",vm={vm}");
                    what = format!(" for VM {vm}");
                }
                format!(
                    "device {device} is not lent to {identity}{what}: add `borrowers = [\"{rule}\"]` to it in lender.toml, or --borrower {rule}"
                )
            }
        };
        Err(RemoteError {
            kind: ErrorKind::Denied,
            message,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPERATOR: u32 = 900;
    const ALICE: u32 = 4_242_001;
    const BOB: u32 = 4_242_002;

    fn user(uid: u32) -> Identity {
        Identity::User { uid, pid: 7 }
    }

    fn network() -> Identity {
        Identity::Network {
            address: "10.0.0.3:4444".parse().unwrap(),
        }
    }

    fn access(rules: &[&str]) -> Access {
        let borrowers = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        Access::new(&"disk0".parse().unwrap(), OPERATOR, borrowers)
    }

    /// For each list of rules and each identity: whether it may see the device, borrow it for `web1`,
    /// and borrow it for `web2`.
    #[test]
    fn rights_follow_from_the_rules_and_the_identity() {
        const NONE: [bool; 3] = [false; 3];
        const ALL: [bool; 3] = [true; 3];
        let (alice, web1) = ("user=4242001", [true, true, false]);
        for (rules, identity, rights) in [
            (&[][..], user(OPERATOR), ALL),
            (&[], user(0), ALL),
            (&[], user(ALICE), NONE),
            (&[], network(), NONE),
            (&[alice], user(OPERATOR), ALL),
            (&[alice], user(0), ALL),
            (&[alice], user(ALICE), ALL),
            (&[alice], user(BOB), NONE),
            (&[alice], network(), NONE),
            (&["user=4242001,vm=web1"], user(ALICE), web1),
            (&["vm=web1,user=4242001"], user(ALICE), web1),
            (&["user=4242001,vm=web1"], user(BOB), NONE),
            (&["user=4242002", "user=4242001,vm=web1"], user(ALICE), web1),
            (
                &["user=4242001,vm=web3", "user=4242001,vm=web1"],
                user(ALICE),
                web1,
            ),
            (&["network"], network(), ALL),
            (&["network"], user(ALICE), NONE),
            (&["network"], user(OPERATOR), ALL),
            (&["network", alice], user(ALICE), ALL),
            (&["network", alice], network(), ALL),
        ] {
            let access = access(rules);
            let vm = |name: &str| name.parse::<VmName>().unwrap();
            let (one, two) = (vm("web1"), vm("web2"));
            let vms = [None, Some(&one), Some(&two)];
            let found = vms.map(|vm| access.may(&identity, vm).is_ok());
            assert_eq!(found, rights, "{rules:?}, {identity:?}");
        }
    }

    #[test]
    fn a_refusal_names_device_identity_and_remedy() {
        let web1 = "web1".parse().unwrap();
        for (identity, vm, words) in [
            (
                user(ALICE),
                Some(&web1),
                &[
                    "user 4242001 (uid 4242001, process 7)",
                    "for VM web1",
                    "`borrowers = [\"user=4242001,vm=web1\"]`",
                ][..],
            ),
            (
                user(ALICE),
                None,
                &["[\"user=4242001\"]", "--borrower user=4242001"],
            ),
            (
                network(),
                Some(&web1),
                &["10.0.0.3:4444", "`borrowers = [\"network\"]`", "every host"],
            ),
        ] {
            let error = access(&[]).may(&identity, vm).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Denied);
            for word in [&["disk0"], words].concat() {
                assert!(error.message.contains(word), "no {word:?} in {error}");
            }
        }
    }

    #[test]
    fn an_invalid_rule_is_refused_by_its_fault() {
        for (rule, fault) in [
            ("", "unknown option \"\""),
            ("user=root,", "unknown option \"\""),
            ("alice", "unknown option \"alice\""),
            ("group=kvm", "unknown option \"group=kvm\""),
            ("vm=web1", "names no user"),
            ("user=no-such-user", "no user \"no-such-user\""),
            ("user=", "no user \"\""),
            ("user=root,user=root", "user is given twice"),
            ("user=root,vm=a,vm=b", "vm is given twice"),
            ("user=root,vm=../a", "\"../a\""),
            ("user=root,vm=", "invalid length"),
            ("network,vm=web1", "`network` takes none"),
            ("user=root,network", "`network` takes none"),
        ] {
            let error = rule.parse::<Borrower>().unwrap_err().to_string();
            assert!(error.contains(fault), "{rule:?}: {error}");
        }
    }
}
