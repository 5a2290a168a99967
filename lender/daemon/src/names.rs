//! Names of devices and VMs.

/// Longest name, in bytes. Names become file names of sockets, whose paths are limited to
/// 107 bytes.
pub const MAX_NAME: usize = 48;

/// Checks a device id or VM name, which is used in file names and log lines. The error
/// is the reason.
pub fn check_name(name: &str) -> Result<(), &'static str> {
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

/// An invalid name of a VM, a device or a group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {name:?} {why}; {NAME_RULE}")]
pub struct NameError {
    what: &'static str,
    name: String,
    why: &'static str,
}

/// Like [`check_name`], with an error that begins with `what`, such as "VM name".
pub fn check_name_of(what: &'static str, name: &str) -> Result<(), NameError> {
    check_name(name).map_err(|why| NameError {
        what,
        name: name.to_owned(),
        why,
    })
}

/// The rule of [`check_name`], for error messages.
pub const NAME_RULE: &str =
    "use 1 to 48 letters, digits, `-`, `_` and `.`, first a letter or digit";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_as_file_names_and_in_logs() {
        for good in ["a", "disk0", "rack1-a.nvme_2", &"x".repeat(MAX_NAME)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        let long = "x".repeat(MAX_NAME + 1);
        for bad in ["", "..", "../x", "a/b", "a b", "a\nb", "-a", "ä", &long] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert!(NAME_RULE.contains(&MAX_NAME.to_string()));
    }
}
