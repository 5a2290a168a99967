//! Users and groups, as `/etc` has them: those of daemons are always there.

use std::collections::{BTreeMap, BTreeSet};

use rustix::{
    process::{getegid, geteuid},
    thread::{CapabilitySet, capabilities},
};

use crate::Host;

/// A user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// The users of a host.
#[derive(Clone, Debug, Default)]
pub(crate) struct Users {
    /// The current user.
    pub(crate) me: User,
    /// Whether this process may lock memory without a limit (`CAP_IPC_LOCK`).
    pub(crate) may_lock: bool,
    users: BTreeMap<String, User>,
    /// Ids and members of groups.
    groups: BTreeMap<String, (u32, BTreeSet<String>)>,
}

impl Users {
    pub(crate) fn user(&self, name: &str) -> Option<&User> {
        self.users.get(name)
    }

    pub(crate) fn has_group(&self, name: &str) -> bool {
        self.groups.contains_key(name)
    }

    /// Whether `user` is in `group`, by its entry or as its own.
    pub(crate) fn is_member(&self, user: &User, group: &str) -> bool {
        let group = self.groups.get(group);
        group.is_some_and(|(gid, members)| *gid == user.gid || members.contains(&user.name))
    }

    /// Whether `user` is in the group with that id.
    pub(crate) fn has_gid(&self, user: &User, gid: u32) -> bool {
        let mut groups = self.groups.values();
        user.gid == gid || groups.any(|(id, members)| *id == gid && members.contains(&user.name))
    }

    /// From the text of `passwd(5)` and `group(5)`.
    pub(crate) fn parse(passwd: &str, group: &str) -> Self {
        let users = passwd.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            let uid = fields.nth(1)?.parse().ok()?;
            let gid = fields.next()?.parse().ok()?;
            Some((name.clone(), User { name, uid, gid }))
        });
        let groups = group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            let gid = fields.nth(1)?.parse().ok()?;
            let members = fields.next().unwrap_or_default().split(',');
            let members = members.filter(|member| !member.is_empty());
            Some((name, (gid, members.map(str::to_owned).collect())))
        });
        Self {
            users: users.collect(),
            groups: groups.collect(),
            ..Self::default()
        }
    }
}

pub(crate) fn look(host: &Host) -> Users {
    let passwd = host.text("etc/passwd").unwrap_or_default();
    let group = host.text("etc/group").unwrap_or_default();
    let mut users = Users::parse(&passwd, &group);
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let known = users.users.values().find(|user| user.uid == uid);
    users.me = known.cloned().unwrap_or_else(|| User {
        name: uid.to_string(),
        uid,
        gid,
    });
    users.may_lock =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    users
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_by_entry_and_by_their_own_group() {
        let users = Users::parse(
            "root:x:0:0:root:/root:/bin/bash\nlibvirt-qemu:x:64055:993:,,,:/:/bin/false\nbad\n",
            "root:x:0:\nkvm:x:993:\nfarside:x:990:libvirt-qemu,web\nempty:x:991:\n",
        );
        let qemu = users.user("libvirt-qemu").unwrap();
        assert_eq!((qemu.uid, qemu.gid), (64055, 993));
        assert!(users.is_member(qemu, "kvm") && users.is_member(qemu, "farside"));
        assert!(!users.is_member(qemu, "empty") && !users.is_member(qemu, "none"));
        assert!(users.has_group("empty") && !users.has_group("none"));
        assert_eq!(users.user("bad"), None);
    }
}
