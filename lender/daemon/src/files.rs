//! Small files: written so that they survive a crash of the process or of the host, and opened so
//! that a user with fewer rights, who owns a directory of the path, cannot make this process use
//! another file: no link is followed, and files are created anew, or are regular ones with one name.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, fchown},
    path::Path,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, openat, renameat, statat, symlinkat, unlinkat},
    io::Errno,
};

use crate::directory::{Directory, Owner};

/// Mode of created directories: where others may write, none of these functions works.
const DIRECTORY_MODE: u32 = 0o755;

/// Flags for opening a file that another user may have replaced: by a link, or by a FIFO, whose
/// other end never opens.
const CAREFUL: OFlags = OFlags::NOFOLLOW
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

/// Creates `directory`, and those above it, unless they exist. Whatever the umask, only this user
/// may write there.
pub fn create_directory(directory: &Path) -> io::Result<()> {
    Directory::create(directory, DIRECTORY_MODE, Owner::AnyForRoot).map(drop)
}

/// Opens the file `path` for reading and appending; creates it with mode 0600 if it is missing.
/// Fails if it is a link, has another name, is not a regular file, or belongs to a user other than
/// this one, root and the directory's.
pub fn append(path: &Path) -> io::Result<File> {
    let (parent, name) = split(path)?;
    let directory = Directory::open(parent, Owner::AnyForRoot)?;
    let flags = OFlags::RDWR | OFlags::APPEND | OFlags::CREATE | CAREFUL;
    let odd = || io::Error::other("not a regular file with one name: remove it");
    let file = match openat(&directory, name, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP) => return Err(odd()),
        Err(errno) => return Err(errno.into()),
    };
    let meta = file.metadata()?;
    if !meta.is_file() || meta.nlink() != 1 {
        return Err(odd());
    }
    let user = rustix::process::geteuid().as_raw();
    match [user, 0, directory.owners()?.0].contains(&meta.uid()) {
        true => Ok(file),
        false => Err(io::Error::other(format!(
            "belongs to user {uid}: remove it",
            uid = meta.uid()
        ))),
    }
}

/// Creates the file `path` with mode 0644; removes another file of that name, and does not follow a
/// link.
pub fn create(path: &Path) -> io::Result<File> {
    let (parent, name) = split(path)?;
    create_in(&Directory::open(parent, Owner::AnyForRoot)?, name, 0o644)
}

fn create_in(directory: &Directory, name: &OsStr, mode: u32) -> io::Result<File> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(errno.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    Ok(openat(directory, name, flags, Mode::from_raw_mode(mode))?.into())
}

/// Atomically replaces the content of the file `path` with `bytes`: a reader, also
/// after a crash, finds either the old or the new content. Creates missing directories.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by(path, bytes, |directory, fresh| {
        create_in(directory, fresh, 0o644)
    })
}

/// As [`replace`], for a file that only this user may read.
pub fn replace_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by(path, bytes, |directory, fresh| {
        create_in(directory, fresh, 0o600)
    })
}

/// As [`replace_private`], for a backend of this host. Root gives the file to the user to whom the
/// lowest directory above belongs that is not root's: that of the systemd units.
pub fn replace_secret(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by(path, bytes, |directory, fresh| {
        let file = create_in(directory, fresh, 0o600)?;
        if rustix::process::geteuid().is_root() {
            for above in path.ancestors().skip(1) {
                let meta = match above.as_os_str().is_empty() {
                    true => fs::metadata(".")?,
                    false => fs::metadata(above)?,
                };
                if meta.uid() != 0 {
                    fchown(&file, Some(meta.uid()), Some(meta.gid()))?;
                    break;
                }
            }
        }
        Ok(file)
    })
}

fn replace_by(
    path: &Path,
    bytes: &[u8],
    create: impl FnOnce(&Directory, &OsStr) -> io::Result<File>,
) -> io::Result<()> {
    let written = || {
        let (parent, name) = split(path)?;
        let directory = Directory::create(parent, DIRECTORY_MODE, Owner::AnyForRoot)?;
        let mut fresh = name.to_owned();
        fresh.push(".new");
        let mut file = create(&directory, &fresh)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        renameat(&directory, &fresh, &directory, name)?;
        directory.sync()
    };
    written().map_err(at(path, "write"))
}

/// Makes `path` a symbolic link to `target`, in place of another link. Does not follow one.
pub fn link(path: &Path, target: &Path) -> io::Result<()> {
    let linked = || {
        let (parent, name) = split(path)?;
        let directory = Directory::open(parent, Owner::AnyForRoot)?;
        match statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) if FileType::from_raw_mode(found.st_mode) != FileType::Symlink => {
                return Err(io::Error::other("not a symbolic link: remove it"));
            }
            Ok(_) => unlinkat(&directory, name, AtFlags::empty())?,
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(symlinkat(target, &directory, name)?)
    };
    linked().map_err(at(path, "link"))
}

/// Durably removes a file. Succeeds if it is missing.
pub fn remove(path: &Path) -> io::Result<()> {
    let removed = || {
        let (parent, name) = split(path)?;
        let directory = Directory::open(parent, Owner::AnyForRoot)?;
        unlinkat(&directory, name, AtFlags::empty())?;
        directory.sync()
    };
    match removed() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(at(path, "remove")),
    }
}

/// Reads a regular file of at most `most` bytes; does not follow a link. Returns `None` if it is
/// missing.
pub fn read_bounded(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let opened = || {
        let (parent, name) = split(path)?;
        let directory = Directory::open(parent, Owner::Any)?;
        let file = openat(&directory, name, OFlags::RDONLY | CAREFUL, Mode::empty());
        let odd = || io::Error::other("not a regular file: remove it");
        match file.map(File::from) {
            Ok(file) if file.metadata()?.is_file() => Ok(file),
            Ok(_) | Err(Errno::LOOP) => Err(odd()),
            Err(errno) => Err(errno.into()),
        }
    };
    let file = match opened() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(at(path, "read"))?,
    };
    let mut bytes = Vec::new();
    file.take(most + 1)
        .read_to_end(&mut bytes)
        .map_err(at(path, "read"))?;
    if bytes.len() as u64 > most {
        let error = io::Error::other(format!("it has more than {most} bytes"));
        return Err(at(path, "read")(error));
    }
    Ok(Some(bytes))
}

fn at<'a>(path: &'a Path, verb: &'a str) -> impl FnOnce(io::Error) -> io::Error + 'a {
    move |error| {
        let text = format!("cannot {verb} {}: {error}", path.display());
        io::Error::new(error.kind(), text)
    }
}

/// The directory and the name of a file.
pub(crate) fn split(path: &Path) -> io::Result<(&Path, &OsStr)> {
    let invalid = || io::Error::other("it is not the path of a file");
    let (parent, name) = path.parent().zip(path.file_name()).ok_or_else(invalid)?;
    match parent.as_os_str().is_empty() {
        true => Ok((Path::new("."), name)),
        false => Ok((parent, name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planted_links_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("precious"), "data").unwrap();
        for plant in [
            |from: &Path, to: &Path| std::os::unix::fs::symlink(from, to),
            |from: &Path, to: &Path| fs::hard_link(from, to),
        ] {
            plant(&at("precious"), &at("log")).unwrap();
            append(&at("log")).unwrap_err();
            create(&at("log")).unwrap().write_all(b"new").unwrap();
            plant(&at("precious"), &at("state.new")).unwrap();
            replace(&at("state"), b"new").unwrap();
            assert_eq!(fs::read(at("precious")).unwrap(), b"data");
            assert_eq!(fs::read(at("state")).unwrap(), b"new");
            fs::remove_file(at("log")).unwrap();
        }
    }

    #[test]
    fn a_fifo_is_neither_waited_for_nor_used() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
        append(&path).unwrap_err();
        let error = read_bounded(&path, 10).unwrap_err().to_string();
        assert!(error.contains("not a regular file: remove it"), "{error}");
        replace(&path, b"new").unwrap();
        assert_eq!(read_bounded(&path, 10).unwrap(), Some(b"new".to_vec()));
    }

    #[test]
    fn a_link_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("precious"), "data").unwrap();
        std::os::unix::fs::symlink(at("precious"), at("state")).unwrap();
        let error = read_bounded(&at("state"), 10).unwrap_err().to_string();
        assert!(error.contains("not a regular file: remove it"), "{error}");
    }

    #[test]
    fn root_appends_to_no_file_of_a_third_user() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let give = |path: &Path, user| std::os::unix::fs::chown(path, Some(user), None).unwrap();
        give(directory.path(), 4_242_001);
        append(&path).unwrap();
        for (user, good) in [(4_242_001, true), (4_242_002, false), (0, true)] {
            give(&path, user);
            assert_eq!(append(&path).is_ok(), good, "{user}");
        }
    }

    #[test]
    fn only_this_user_writes_to_created_directories() {
        let parent = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        // The umask is the process's: a child has its own.
        let test = "files::tests::only_this_user_writes_to_created_directories";
        let Some(path) = std::env::var_os("CREATED_BY_THE_CHILD") else {
            let path = parent.path().join("state/vm");
            let exe = std::env::current_exe().unwrap();
            let script = format!("umask 0; exec {} --exact {test}", exe.display());
            let child = std::process::Command::new("sh")
                .args(["-c", &script])
                .env("CREATED_BY_THE_CHILD", &path)
                .status();
            assert!(child.unwrap().success());
            assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o755, 0o755));
            return append(&path.join("log")).map(drop).unwrap();
        };
        create_directory(Path::new(&path)).unwrap();
    }

    #[test]
    fn a_private_file_stays_with_its_writer() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state/lender.json");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(directory.path(), Some(4_242_424), None).unwrap();
        }
        replace_private(&path, b"a secret").unwrap();
        let meta = fs::metadata(&path).unwrap();
        let user = rustix::process::geteuid().as_raw();
        assert_eq!((meta.mode() & 0o777, meta.uid()), (0o600, user));
    }

    #[test]
    fn a_secret_is_readable_to_the_user_of_the_state_directory_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm/web1/fences.json");
        let root = rustix::process::geteuid().is_root();
        let user = match root {
            true => 4_242_424,
            false => rustix::process::geteuid().as_raw(),
        };
        std::os::unix::fs::chown(directory.path(), Some(user), None).unwrap();
        replace_secret(&path, b"a secret").unwrap();
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.mode() & 0o777, meta.uid()), (0o600, user));
        assert_eq!(meta.len(), 8);
    }

    #[test]
    fn a_file_is_replaced_read_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/file");
        assert_eq!(read_bounded(&path, 10).unwrap(), None);
        replace(&path, b"old").unwrap();
        replace(&path, b"newer").unwrap();
        assert_eq!(read_bounded(&path, 5).unwrap(), Some(b"newer".to_vec()));
        let error = read_bounded(&path, 4).unwrap_err().to_string();
        assert!(error.contains("more than 4 bytes"), "{error}");
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
    }
}
