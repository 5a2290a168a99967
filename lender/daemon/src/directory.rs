//! Directories of sockets and state, opened so that a user with fewer rights cannot redirect what
//! this process creates in them.

use std::{
    ffi::OsStr,
    fs::{DirBuilder, File},
    io::{self, Error, ErrorKind},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, chmodat, fstat, mkdirat, openat, statat},
    io::Errno,
};

use crate::{paths, user_name};

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::PATH).union(OFlags::CLOEXEC);

/// An open directory. It, and each directory above it up to the configured one
/// ([`paths::configured`]), has a permitted [`Owner`], and others cannot replace entries in it.
/// Groups of the directories are trusted. No symbolic link below the configured directory was
/// followed, so that their owners can lead to directories in them only.
///
/// Each component is opened by itself, which openat2(2) would do at once: `RestrictSUIDSGID=` of
/// the systemd units refuses that system call.
#[derive(Debug)]
pub(crate) struct Directory {
    fd: OwnedFd,
    path: PathBuf,
}

/// The owners that a directory may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// This user or root. For root, the directories above may belong to any user, such as that of
    /// the systemd units.
    Ours,
    /// This user or root; if this user is root, any. Such an owner can replace the entries.
    AnyForRoot,
    /// Any, for reading.
    Any,
}

impl Directory {
    /// Opens `path`.
    pub(crate) fn open(path: &Path, owner: Owner) -> io::Result<Self> {
        Self::below(&paths::configured(path), path, None, owner)
    }

    /// Opens `path`; creates missing directories with `mode`.
    pub(crate) fn create(path: &Path, mode: u32, owner: Owner) -> io::Result<Self> {
        Self::below(&paths::configured(path), path, Some(mode), owner)
    }

    fn below(base: &Path, path: &Path, create: Option<u32>, last: Owner) -> io::Result<Self> {
        let below = path.strip_prefix(base).unwrap_or(Path::new(""));
        let mut left = below.components().count();
        let owner = |left| match last {
            Owner::Ours if left > 0 => Owner::AnyForRoot,
            last => last,
        };
        if let Ok(meta) = base.symlink_metadata() {
            check(base, meta.uid(), meta.mode(), owner(left))?;
        }
        if let Some(mode) = create {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(mode);
            builder.create(base).map_err(at_creation)?;
        }
        let real = base.canonicalize()?;
        let mut directory = Self {
            fd: openat(CWD, &real, DIRECTORY, Mode::empty())?,
            path: real,
        };
        directory.check(owner(left))?;
        for component in below.components() {
            let Component::Normal(name) = component else {
                let text = format!("{} contains `..`", path.display());
                return Err(Error::new(ErrorKind::InvalidInput, text));
            };
            left -= 1;
            directory = match (directory.child(name), create) {
                (Err(error), Some(mode)) if error.kind() == ErrorKind::NotFound => {
                    match mkdirat(&directory.fd, name, Mode::from_raw_mode(mode)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(at_creation(errno.into())),
                    }
                    directory.child(name)?
                }
                (child, _) => child?,
            };
            directory.check(owner(left))?;
        }
        Ok(directory)
    }

    fn child(&self, name: &OsStr) -> io::Result<Self> {
        let path = self.path.join(name);
        match openat(&self.fd, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(fd) => Ok(Self { fd, path }),
            Err(Errno::NOTDIR | Errno::LOOP) => Err(self.not_a_directory(name)),
            Err(errno) => Err(errno.into()),
        }
    }

    fn not_a_directory(&self, name: &OsStr) -> Error {
        let kind = statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)
            .map(|stat| FileType::from_raw_mode(stat.st_mode));
        let what = match kind {
            Ok(FileType::Symlink) => "is a symbolic link",
            _ => "is not a directory",
        };
        let text = format!("{} {what}: remove it", self.path.join(name).display());
        Error::new(ErrorKind::PermissionDenied, text)
    }

    fn check(&self, allowed: Owner) -> io::Result<()> {
        let stat = fstat(&self.fd)?;
        check(&self.path, stat.st_uid, stat.st_mode, allowed)
    }

    /// The user and the group that own it.
    pub(crate) fn owners(&self) -> io::Result<(u32, u32)> {
        let stat = fstat(&self.fd)?;
        Ok((stat.st_uid, stat.st_gid))
    }

    /// Lets everyone search it, if this user owns it. Its entries have modes of their own.
    pub(crate) fn make_searchable(&self) -> io::Result<()> {
        const SEARCH: u32 = 0o011;

        let stat = fstat(&self.fd)?;
        let ours = stat.st_uid == rustix::process::geteuid().as_raw();
        let mode = stat.st_mode & 0o7777;
        if !ours || mode & SEARCH == SEARCH {
            return Ok(());
        }
        let mode = Mode::from_raw_mode(mode | SEARCH);
        Ok(chmodat(&self.fd, ".", mode, AtFlags::empty())?)
    }

    /// Flushes renames and removals in it.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        File::from(openat(&self.fd, ".", flags, Mode::empty())?).sync_all()
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn at_creation(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => Error::new(
            error.kind(),
            format!("{error}: set {VARIABLES} to a directory of this user"),
        ),
        _ => error,
    }
}

const VARIABLES: &str = "FARSIDE_RUNTIME_DIR or FARSIDE_STATE_DIR";

/// Fails if the owner of the directory or link `path` is not allowed, or every user can replace its
/// entries.
fn check(path: &Path, owner: u32, mode: u32, allowed: Owner) -> io::Result<()> {
    let user = rustix::process::geteuid().as_raw();
    let user = match allowed {
        Owner::Ours => Some(user),
        Owner::AnyForRoot => (user != 0).then_some(user),
        Owner::Any => return Ok(()),
    };
    check_for(user, path, owner, mode)
}

fn check_for(user: Option<u32>, path: &Path, owner: u32, mode: u32) -> io::Result<()> {
    const OTHERS_WRITE: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let path = path.display();
    let denied = |text| Err(Error::new(ErrorKind::PermissionDenied, text));
    if let Some(user) = user.filter(|&user| ![user, 0].contains(&owner)) {
        let name = user_name(owner);
        let or = match user {
            // Root's commands on VMs whose backends are systemd units.
            0 => format!(
                "run this command as that user (`runuser -u {name} -- env FARSIDE_RUNTIME_DIR={} FARSIDE_STATE_DIR={} FARSIDE_CONFIG_DIR={} ...`)",
                paths::runtime_dir().display(),
                paths::state_dir().display(),
                paths::config_dir().display()
            ),
            _ => format!("set {VARIABLES} to another"),
        };
        return denied(format!(
            "{path} belongs to user {name} (uid {owner}), not to uid {user}: remove it, or {or}"
        ));
    }
    let is_link = FileType::from_raw_mode(mode) == FileType::Symlink;
    if !is_link && mode & (OTHERS_WRITE | STICKY) == OTHERS_WRITE {
        return denied(format!(
            "every user may write to {path} (mode {mode:04o}) and replace entries in it: `chmod o-w {path}`",
            mode = mode & 0o7777
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
