//! Small files that must outlive a crash of the process or of the host.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
};

/// Puts `bytes` in the place of the file `path`, whole or not at all: whoever
/// reads it, also after a crash, finds what was there before or all of the new.
/// Its folder is made if it is missing.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let at = |error: io::Error| {
        io::Error::new(
            error.kind(),
            format!("cannot write {}: {error}", path.display()),
        )
    };
    let no_folder = || io::Error::other("it has no folder");
    let folder = path.parent().ok_or_else(no_folder).map_err(at)?;
    fs::create_dir_all(folder).map_err(at)?;
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let fresh = Path::new(&name);
    let written = File::create(fresh)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(fresh, path))
        .and_then(|()| sync_folder(folder));
    written.map_err(at)
}

/// Removes a file, so that it stays away after a crash; one that is missing is
/// no error.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => path.parent().map_or(Ok(()), sync_folder),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => {
            let text = format!("cannot remove {}: {error}", path.display());
            Err(io::Error::new(error.kind(), text))
        }
    }
}

/// Makes what was renamed or removed in `folder` last.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Reads a file of at most `most` bytes; none when it is missing.
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
    fn a_file_is_replaced_read_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/file");
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
