//! Names of devices, VMs, lenders and groups. They are used in file names, units and log lines, and
//! rights follow from them: a value of these types is a checked name.

use std::{borrow::Borrow, fmt, ops::Deref, str::FromStr};

use serde::{Deserialize, Serialize};

/// Longest name, in bytes. Names become file names of sockets, whose paths are limited to
/// 107 bytes.
const MAX_NAME: usize = 48;

const NAME_RULE: &str = "use 1 to 48 letters, digits, `-`, `_` and `.`, first a letter or digit";

/// An invalid name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {name:?} {why}; {NAME_RULE}")]
pub struct NameError {
    what: &'static str,
    name: String,
    why: &'static str,
}

/// Checks a name. The error is the reason.
fn check(name: &str) -> Result<(), &'static str> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err("has an invalid length");
    }
    let first = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !first || !name.chars().all(allowed) {
        return Err("has a character that is not allowed");
    }
    Ok(())
}

/// Defines a checked name. `$what` begins the text of its [`NameError`].
macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $type(String);

        impl $type {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $type {
            type Error = NameError;

            fn try_from(name: String) -> Result<Self, NameError> {
                match check(&name) {
                    Ok(()) => Ok(Self(name)),
                    Err(why) => Err(NameError { what: $what, name, why }),
                }
            }
        }

        impl FromStr for $type {
            type Err = NameError;

            fn from_str(name: &str) -> Result<Self, NameError> {
                name.to_owned().try_into()
            }
        }

        impl Deref for $type {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl PartialEq<str> for $type {
            fn eq(&self, other: &str) -> bool {
                self.0 == other
            }
        }

        impl PartialEq<&str> for $type {
            fn eq(&self, other: &&str) -> bool {
                self.0 == *other
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

name! {
    /// The name of a VM.
    VmName, "VM name"
}

name! {
    /// The cluster-wide id of a device.
    DeviceId, "device id"
}

name! {
    /// The name of a lender.
    LenderName, "lender name"
}

name! {
    /// The name of a group of users, as `socket-group` names it.
    GroupName, "socket-group"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_as_file_names_and_in_logs() {
        for good in ["a", "disk0", "rack1-a.nvme_2", &"x".repeat(MAX_NAME)] {
            assert_eq!(good.parse::<DeviceId>().unwrap(), *good);
        }
        let long = "x".repeat(MAX_NAME + 1);
        for bad in ["", "..", "../x", "a/b", "a b", "a\nb", "-a", "ä", &long] {
            let error = bad.parse::<VmName>().unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("VM name {bad:?} has ")),
                "{error}"
            );
        }
        let rule = "has a character that is not allowed; \
                    use 1 to 48 letters, digits, `-`, `_` and `.`, first a letter or digit";
        let error = "a,b".parse::<VmName>().unwrap_err().to_string();
        assert_eq!(error, format!("VM name \"a,b\" {rule}"));
        let error = ".x".parse::<DeviceId>().unwrap_err().to_string();
        assert_eq!(error, format!("device id \".x\" {rule}"));
        assert!(NAME_RULE.contains(&MAX_NAME.to_string()));
    }
}
