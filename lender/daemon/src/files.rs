//! Small files: written so that they survive a crash of the process or of the host, and opened so
//! that a user with fewer rights, who owns the directory, cannot make this process write to another
//! file.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, fchown},
    path::Path,
};

use rustix::{fs::OFlags, io::Errno};

/// Opens the file `path` for reading and appending; creates it with mode 0600 if it is missing.
/// Fails if it is a link, has another name, or is not a regular file.
pub fn append(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).append(true).create(true).mode(0o600);
    options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
    let odd = || io::Error::other("not a regular file with one name: remove it");
    let file = options.open(path).map_err(|error| {
        match error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) {
            true => odd(),
            false => error,
        }
    })?;
    let meta = file.metadata()?;
    match meta.is_file() && meta.nlink() == 1 {
        true => Ok(file),
        false => Err(odd()),
    }
}

/// Creates the file `path` with mode 0644; removes another file of that name, and does not follow a
/// link.
pub fn create(path: &Path) -> io::Result<File> {
    create_with(path, 0o644)
}

fn create_with(path: &Path, mode: u32) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = File::options();
    options.write(true).create_new(true).mode(mode);
    options.open(path)
}

/// Atomically replaces the content of the file `path` with `bytes`: a reader, also
/// after a crash, finds either the old or the new content. Creates missing directories.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by(path, bytes, create)
}

/// As [`replace`], for a file that only this user may read.
pub fn replace_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by(path, bytes, |fresh| create_with(fresh, 0o600))
}

/// As [`replace_private`], for a backend of this host. Root gives the file to the user to whom the
/// lowest directory above belongs that is not root's: that of the systemd units.
pub fn replace_secret(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by(path, bytes, |fresh| {
        let file = create_with(fresh, 0o600)?;
        if rustix::process::geteuid().is_root() {
            for directory in path.ancestors().skip(1) {
                let meta = match directory.as_os_str().is_empty() {
                    true => fs::metadata(".")?,
                    false => fs::metadata(directory)?,
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
    create: impl FnOnce(&Path) -> io::Result<File>,
) -> io::Result<()> {
    let at = |error: io::Error| {
        io::Error::new(
            error.kind(),
            format!("cannot write {}: {error}", path.display()),
        )
    };
    let no_parent = || io::Error::other("it has no parent directory");
    let directory = path.parent().ok_or_else(no_parent).map_err(at)?;
    fs::create_dir_all(directory).map_err(at)?;
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let fresh = Path::new(&name);
    let written = create(fresh)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(fresh, path))
        .and_then(|()| sync_directory(directory));
    written.map_err(at)
}

/// Durably removes a file. Succeeds if it is missing.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => path.parent().map_or(Ok(()), sync_directory),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => {
            let text = format!("cannot remove {}: {error}", path.display());
            Err(io::Error::new(error.kind(), text))
        }
    }
}

/// Flushes renames and removals in `directory`.
fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Reads a file of at most `most` bytes. Returns `None` if it is missing.
pub fn read_bounded(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let at = |error: io::Error| {
        let text = format!("cannot read {}: {error}", path.display());
        io::Error::new(error.kind(), text)
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(at(error)),
    };
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(at)?;
    if bytes.len() as u64 > most {
        return Err(at(io::Error::other(format!(
            "it has more than {most} bytes"
        ))));
    }
    Ok(Some(bytes))
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
