//! Access to sockets for members of a group.

use std::{
    ffi::OsStr,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nix::unistd::Group;
use rustix::fs::{AtFlags, FileType, Gid, Mode, chmodat, chownat, statat};

use crate::{
    directory::{Directory, Owner},
    files, paths,
};

/// A group of this host whose members may connect to sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketGroup {
    name: String,
    gid: u32,
}

/// Why a group cannot be given access.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages document the fields")]
pub enum GroupError {
    /// No such group.
    #[error(
        "socket group {0:?}: no such group on this host; `getent group` lists all groups (libvirt's QEMU runs in libvirt-qemu or qemu, others often in kvm)"
    )]
    Unknown(String),
    /// The look-up failed.
    #[error("cannot look up socket group {name:?}")]
    Lookup { name: String, source: io::Error },
    /// The group or mode of a file cannot be changed.
    #[error("cannot give {path} to the group {group}{hint}", path = path.display(), hint = membership(source, group))]
    Give {
        path: PathBuf,
        group: String,
        source: io::Error,
    },
}

/// The remedy for EPERM: only a member may chown a file to a group.
fn membership(error: &io::Error, group: &str) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => format!(
            "; farside's user must be a member (`usermod --append --groups {group} farside`), and its unit needs SystemCallFilter=@chown; or use the socket unit"
        ),
        _ => String::new(),
    }
}

impl SocketGroup {
    /// Looks a group up by name (`nss(5)`).
    pub fn named(name: &str) -> Result<Self, GroupError> {
        match Group::from_name(name) {
            Ok(Some(group)) => Ok(Self {
                name: group.name,
                gid: group.gid.as_raw(),
            }),
            Ok(None) => Err(GroupError::Unknown(name.to_owned())),
            Err(errno) => Err(GroupError::Lookup {
                name: name.to_owned(),
                source: errno.into(),
            }),
        }
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets only the owner and members connect to the socket at `path` (mode 0660).
    pub fn admit(&self, path: &Path) -> Result<(), GroupError> {
        let give = || {
            let (parent, name) = files::split(path)?;
            self.give(&Directory::open(parent, Owner::Ours)?, name, 0o660)
        };
        give().map_err(|source| self.not_given(path, source))
    }

    /// Whether members can read and write the file at `path` already.
    pub fn can_open(&self, path: &Path) -> bool {
        std::fs::metadata(path).is_ok_and(|file| {
            let wanted = match file.gid() == self.gid {
                true => 0o060,
                false => 0o006,
            };
            file.mode() & wanted == wanted
        })
    }

    /// Lets members search, but not list, `directory` (mode 0710), and everyone search
    /// the next `parents` directories above it, as far as this user owns them.
    pub fn admit_into(&self, directory: &Path, parents: usize) -> Result<(), GroupError> {
        Directory::open(directory, Owner::Ours)
            .and_then(|opened| self.give(&opened, OsStr::new("."), 0o710))
            .map_err(|source| self.not_given(directory, source))?;
        for parent in directory.ancestors().skip(1).take(parents) {
            paths::make_searchable(parent).map_err(|source| self.not_given(parent, source))?;
        }
        Ok(())
    }

    /// `name` is an entry of a directory in which only this user replaces entries.
    fn give(&self, directory: &Directory, name: &OsStr, mode: u32) -> io::Result<()> {
        let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            return Err(io::Error::other("it is a symbolic link: remove it"));
        }
        // In a directory with setgid it has inherited the group, of which this user need not be a
        // member. chmod(2) would clear that bit.
        if stat.st_gid != self.gid {
            let group = Some(Gid::from_raw(self.gid));
            chownat(directory, name, None, group, AtFlags::SYMLINK_NOFOLLOW)?;
        } else if stat.st_mode & 0o777 == mode {
            return Ok(());
        }
        let mode = Mode::from_raw_mode(mode);
        Ok(chmodat(directory, name, mode, AtFlags::empty())?)
    }

    fn not_given(&self, path: &Path, source: io::Error) -> GroupError {
        GroupError::Give {
            path: path.to_owned(),
            group: self.name.clone(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::Permissions,
        os::unix::fs::{MetadataExt, PermissionsExt},
    };

    use super::*;

    #[test]
    fn membership_is_named_where_it_is_missing() {
        for (kind, named) in [
            (io::ErrorKind::PermissionDenied, true),
            (io::ErrorKind::ReadOnlyFilesystem, false),
            (io::ErrorKind::NotFound, false),
        ] {
            let error = GroupError::Give {
                path: "/run/farside/x".into(),
                group: "kvm".to_owned(),
                source: kind.into(),
            };
            assert_eq!(error.to_string().contains("usermod"), named, "{error}");
        }
    }

    #[test]
    fn an_unknown_group_is_named() {
        let error = SocketGroup::named("no-such-group").unwrap_err().to_string();
        assert!(error.contains("\"no-such-group\"") && error.contains("getent group"));
    }

    #[test]
    fn members_reach_a_socket_and_its_directory() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        // This process's own group: chown(2) to it is always permitted.
        let gid = rustix::process::getegid().as_raw();
        let own = Group::from_gid(gid.into()).unwrap().expect("a group entry");
        let group = SocketGroup::named(&own.name).unwrap();
        assert_eq!(group.name(), own.name);
        for (before, open) in [(0o606, false), (0o660, true)] {
            std::fs::set_permissions(&path, Permissions::from_mode(before)).unwrap();
            assert_eq!(group.can_open(&path), open, "{before:o}");
        }
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        group.admit(&path).unwrap();
        assert!(group.can_open(&path));
        let inner = directory.path().join("vm");
        std::fs::create_dir(&inner).unwrap();
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).unwrap();
        group.admit_into(&inner, 1).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&path), 0o660);
        assert_eq!(mode(&inner), 0o710);
        assert_eq!(mode(directory.path()), 0o711);
        assert_eq!(std::fs::metadata(&path).unwrap().gid(), gid);

        // Already as wanted: stays, with its setgid bit.
        std::fs::set_permissions(&inner, Permissions::from_mode(0o2710)).unwrap();
        group.admit_into(&inner, 0).unwrap();
        assert_eq!(std::fs::metadata(&inner).unwrap().mode() & 0o7777, 0o2710);

        let error = group.admit(&directory.path().join("none")).unwrap_err();
        assert!(error.to_string().contains("/none to the group"), "{error}");

        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&inner, &link).unwrap();
        group.admit(&link).unwrap_err();
        group.admit_into(&link.join("vm"), 0).unwrap_err();
        assert_eq!(mode(&inner), 0o710);
    }

    #[test]
    fn a_directory_that_is_open_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        paths::make_searchable(directory.path()).unwrap();
        assert_eq!(
            std::fs::metadata(directory.path()).unwrap().mode() & 0o777,
            0o755
        );
    }
}
