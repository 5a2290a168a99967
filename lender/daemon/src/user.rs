//! Users and groups of this host.

use std::io;

use nix::unistd::{Gid, Group, Uid, User};

/// Why a user has no uid.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the fields")]
pub enum UserError {
    /// No such user.
    #[error("no user {0:?} on this host; `getent passwd` lists all users")]
    Unknown(String),
    /// The look-up failed.
    #[error("cannot look up user {name:?}")]
    Lookup { name: String, source: io::Error },
}

/// The uid of a user (`nss(5)`), who is named or, as in chown(1), given by number.
pub fn user_id(name: &str) -> Result<u32, UserError> {
    match User::from_name(name) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => name
            .parse()
            .map_err(|_| UserError::Unknown(name.to_owned())),
        Err(errno) => Err(UserError::Lookup {
            name: name.to_owned(),
            source: errno.into(),
        }),
    }
}

/// The name of a user, or the uid as text if it has none.
pub fn user_name(uid: u32) -> String {
    match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        Ok(None) | Err(_) => uid.to_string(),
    }
}

/// The name of a group, or the gid as text if it has none.
pub fn group_name(gid: u32) -> String {
    match Group::from_gid(Gid::from_raw(gid)) {
        Ok(Some(group)) => group.name,
        Ok(None) | Err(_) => gid.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_a_name_or_a_number() {
        assert_eq!(user_id("root").unwrap(), 0);
        assert_eq!(user_id("4242").unwrap(), 4242);
        assert_eq!(user_name(0), "root");
        assert_eq!(user_name(4_242_424), "4242424");
        assert_eq!(group_name(0), "root");
        assert_eq!(group_name(4_242_424), "4242424");
        for unknown in ["no-such-user", "", "-1"] {
            let error = user_id(unknown).unwrap_err().to_string();
            assert!(error.contains(&format!("no user {unknown:?}")), "{error}");
        }
    }
}
