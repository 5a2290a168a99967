//! Who may do what with a device.
//!
//! On this host the kernel names the user of a peer. Processes of one user can trace each other, so
//! a VM is as protected from another as their users are: the name of a VM is the peer's claim. With
//! TLS a certificate names the host of a peer; of a TCP peer without, nothing is known.

use std::str::FromStr;

use farside_daemon::{DeviceId, NameError, UserError, VmName, user_id, user_name};
use farside_error_chain::Chain;
use farside_lender_protocol::{ErrorKind, Identity, RemoteError};
use serde::Deserialize;

/// Who may borrow a device, beside the lender's own user and root, who may do anything: `user=NAME` or
/// `host=NAME`, with `vm=VM` and `claim` as options, or `network`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Borrower {
    /// A user of this host, at the lender's UNIX socket.
    User {
        /// The user.
        uid: u32,
        /// The only VM for which that user may borrow; none for any.
        vm: Option<VmName>,
        /// Whether that user may take the device from such a VM without proof: its host is lost.
        claim: bool,
    },
    /// A host, by the name in its certificate, at a TCP port with TLS.
    Host {
        /// The name, in lower case.
        name: String,
        /// The only VM for which that host may borrow; none for any.
        vm: Option<VmName>,
        /// As of a user.
        claim: bool,
    },
    /// Every peer that can reach a TCP port of the lender without TLS.
    Network,
}

/// The forms of a rule, for messages.
const FORMS: &str = "user=NAME or host=NAME, with the options vm=VM and claim, or network";

/// An invalid rule.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the fields")]
pub enum BorrowerError {
    /// An option without a meaning.
    #[error("unknown option {option:?} in borrower {rule:?}: use {FORMS}")]
    Option { rule: String, option: String },
    /// The same key again.
    #[error("{key} is given twice in borrower {rule:?}: write one rule for each")]
    Twice { rule: String, key: &'static str },
    /// Neither a user nor a host.
    #[error("borrower {0:?} names no user or host: use {FORMS}")]
    Nobody(String),
    /// A user and a host.
    #[error("borrower {0:?} names a user and a host: write one rule for each")]
    Both(String),
    /// The host's name cannot be in a certificate.
    #[error(
        "invalid host {name:?} in borrower {rule:?}: use the DNS name in the host's certificate (`farside pki show`)"
    )]
    Host { rule: String, name: String },
    /// A network peer with options.
    #[error(
        "borrower {0:?} has options: `network` takes none, since nothing authenticates a peer without TLS"
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
        let (mut user, mut host, mut vm) = (None, None, None);
        let (mut network, mut claim) = (false, false);
        for option in rule.split(',') {
            let (key, slot, value) = match option.split_once('=') {
                Some(("user", value)) => ("user", &mut user, value),
                Some(("host", value)) => ("host", &mut host, value),
                Some(("vm", value)) => ("vm", &mut vm, value),
                None if option == "network" => {
                    network = true;
                    continue;
                }
                None if option == "claim" => {
                    if std::mem::replace(&mut claim, true) {
                        let key = "claim";
                        return Err(BorrowerError::Twice { rule: text(), key });
                    }
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
        let vm = vm.map(str::parse).transpose()?;
        match (user, host) {
            (Some(user), None) => Ok(Self::User {
                uid: user_id(user)?,
                vm,
                claim,
            }),
            (None, Some(host)) if farside_pki::is_host_name(host) => Ok(Self::Host {
                name: host.to_ascii_lowercase(),
                vm,
                claim,
            }),
            (None, Some(host)) => Err(BorrowerError::Host {
                rule: text(),
                name: host.to_owned(),
            }),
            (None, None) => Err(BorrowerError::Nobody(text())),
            (Some(_), Some(_)) => Err(BorrowerError::Both(text())),
        }
    }
}

impl Borrower {
    /// Whether the rule is for this peer.
    fn names(&self, identity: &Identity) -> bool {
        match (self, identity) {
            (Self::User { uid: named, .. }, Identity::User { uid, .. }) => uid == named,
            (Self::Host { name: named, .. }, Identity::Host { name, .. }) => name == named,
            (Self::Network, Identity::Network { .. }) => true,
            _ => false,
        }
    }

    fn only_vm(&self) -> Option<&VmName> {
        match self {
            Self::User { vm, .. } | Self::Host { vm, .. } => vm.as_ref(),
            Self::Network => None,
        }
    }

    fn may_claim(&self) -> bool {
        match self {
            Self::User { claim, .. } | Self::Host { claim, .. } => *claim,
            Self::Network => false,
        }
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
        let covers = |rule: &&Borrower| {
            let only = rule.only_vm();
            vm.is_none() || only.is_none() || vm == only
        };
        let mut rules = self.borrowers.iter().filter(covers);
        self.is_operator(identity) || rules.any(|rule| rule.names(identity))
    }

    /// Whether `identity` may take the device from `vm`, or end its reservation for any VM, without
    /// proof.
    pub(crate) fn may_claim(&self, identity: &Identity, vm: Option<&VmName>) -> bool {
        let covers = |rule: &&Borrower| rule.only_vm().is_none_or(|only| vm == Some(only));
        let mut rules = self.borrowers.iter().filter(covers);
        self.is_operator(identity) || rules.any(|rule| rule.may_claim() && rule.names(identity))
    }

    /// As [`Access::allows`], with the refusal.
    pub(crate) fn may(&self, identity: &Identity, vm: Option<&VmName>) -> Result<(), RemoteError> {
        if self.allows(identity, vm) {
            return Ok(());
        }
        let device = &self.device;
        let mut rule = match identity {
            Identity::Network { .. } => "network".to_owned(),
            Identity::Host { name, .. } => format!("host={name}"),
            Identity::User { uid, .. } => format!("user={}", user_name(*uid)),
        };
        let message = match identity {
            Identity::Network { .. } => format!(
                "device {device} is not lent to {identity}: connect with TLS (tls:HOST:PORT), whose certificates name hosts; with `borrowers = [\"{rule}\"]` in lender.toml (or --borrower {rule}) every host that can connect to the lender's port without TLS may borrow it"
            ),
            Identity::Host { .. } | Identity::User { .. } => {
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

    fn host(name: &str) -> Identity {
        Identity::Host {
            name: name.into(),
            address: "10.0.0.3:4444".parse().unwrap(),
        }
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
            (&[], host("rack1-a"), NONE),
            (&["host=rack1-a"], host("rack1-a"), ALL),
            (&["host=Rack1-A"], host("rack1-a"), ALL),
            (&["host=rack1-a"], host("rack1-b"), NONE),
            (&["host=rack1-a"], host("rack1-a.example.org"), NONE),
            (&["host=rack1-a"], network(), NONE),
            (&["host=rack1-a"], user(ALICE), NONE),
            (&["host=rack1-a,vm=web1"], host("rack1-a"), web1),
            (&["vm=web1,host=rack1-a"], host("rack1-b"), NONE),
            // A rule for peers without TLS is none for hosts with certificates, nor the reverse.
            (&["network"], host("rack1-a"), NONE),
            (&["host=network"], network(), NONE),
            (&[alice], host("4242001"), NONE),
            // Not the operator, whatever its name.
            (&[], host("root"), NONE),
        ] {
            let access = access(rules);
            let vm = |name: &str| name.parse::<VmName>().unwrap();
            let (one, two) = (vm("web1"), vm("web2"));
            let vms = [None, Some(&one), Some(&two)];
            let found = vms.map(|vm| access.may(&identity, vm).is_ok());
            assert_eq!(found, rights, "{rules:?}, {identity:?}");
        }
    }

    /// For each rule and identity: whether it may take the device from `web1`, from `web2`, and end a
    /// reservation, whosever it is.
    #[test]
    fn devices_are_claimed_by_operators_and_those_whom_a_rule_allows_that() {
        const NONE: [bool; 3] = [false; 3];
        const ALL: [bool; 3] = [true; 3];
        let web1 = [true, false, false];
        for (rule, identity, rights) in [
            ("host=rack1-a", user(OPERATOR), ALL),
            ("host=rack1-a", user(0), ALL),
            ("host=rack1-a", host("rack1-a"), NONE),
            ("host=rack1-a,claim", host("rack1-a"), ALL),
            ("host=rack1-a,claim", host("rack1-b"), NONE),
            ("host=rack1-a,claim", user(ALICE), NONE),
            ("host=rack1-a,claim", network(), NONE),
            ("claim,vm=web1,host=rack1-a", host("rack1-a"), web1),
            ("user=4242001,vm=web1,claim", user(ALICE), web1),
            ("user=4242001,vm=web1", user(ALICE), NONE),
            ("network", network(), NONE),
        ] {
            let access = access(&[rule]);
            let vm = |name: &str| name.parse::<VmName>().unwrap();
            let (one, two) = (vm("web1"), vm("web2"));
            let vms = [Some(&one), Some(&two), None];
            let found = vms.map(|vm| access.may_claim(&identity, vm));
            assert_eq!(found, rights, "{rule:?}, {identity:?}");
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
                host("rack1-a"),
                Some(&web1),
                &[
                    "host rack1-a (10.0.0.3:4444)",
                    "for VM web1",
                    "`borrowers = [\"host=rack1-a,vm=web1\"]`",
                ],
            ),
            (
                network(),
                Some(&web1),
                &[
                    "10.0.0.3:4444",
                    "tls:HOST:PORT",
                    "`borrowers = [\"network\"]`",
                    "every host",
                ],
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
            ("vm=web1", "names no user or host"),
            ("host=", "invalid host \"\""),
            ("host=*.rack1", "invalid host \"*.rack1\""),
            ("host=a b", "invalid host"),
            ("host=a,host=b", "host is given twice"),
            ("host=a,user=root", "a user and a host"),
            ("network,host=a", "`network` takes none"),
            ("user=no-such-user", "no user \"no-such-user\""),
            ("user=", "no user \"\""),
            ("user=root,user=root", "user is given twice"),
            ("user=root,vm=a,vm=b", "vm is given twice"),
            ("user=root,vm=../a", "\"../a\""),
            ("user=root,vm=", "invalid length"),
            ("network,vm=web1", "`network` takes none"),
            ("user=root,network", "`network` takes none"),
            ("network,claim", "`network` takes none"),
            ("claim", "names no user or host"),
            ("claim,host=a,claim", "claim is given twice"),
            ("host=a,claim=yes", "unknown option \"claim=yes\""),
        ] {
            let error = rule.parse::<Borrower>().unwrap_err().to_string();
            assert!(error.contains(fault), "{rule:?}: {error}");
        }
    }
}
