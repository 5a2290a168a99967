//! Initramfs archives (cpio, newc). Uncompressed: an emulated CPU copies faster
//! than it decompresses.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use cpio::newc::{ModeFileType, trailer};
use cpio::{NewcBuilder, NewcReader};

/// Writes one archive; several, concatenated, make one initramfs.
pub(crate) struct Archive<W: Write> {
    out: Option<W>,
    directories: BTreeSet<PathBuf>,
    inode: u32,
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(out: W) -> Self {
        Archive {
            out: Some(out),
            directories: BTreeSet::new(),
            inode: 0,
        }
    }

    /// Adds a file, and its missing parent directories.
    pub(crate) fn file(&mut self, path: impl AsRef<Path>, mode: u32, data: &[u8]) -> Result<()> {
        self.entry(path.as_ref(), ModeFileType::Regular, mode, data)
    }

    /// Adds a file of the host, with its permissions.
    pub(crate) fn copy(&mut self, path: impl AsRef<Path>, from: &Path) -> Result<()> {
        let context = || format!("reading {}", from.display());
        let data = fs::read(from).with_context(context)?;
        let mode = fs::metadata(from)
            .with_context(context)?
            .permissions()
            .mode();
        self.file(path, mode & 0o777, &data)
    }

    /// Adds a symbolic link.
    pub(crate) fn symlink(&mut self, path: impl AsRef<Path>, target: &str) -> Result<()> {
        self.entry(
            path.as_ref(),
            ModeFileType::Symlink,
            0o777,
            target.as_bytes(),
        )
    }

    /// Adds an empty directory.
    pub(crate) fn directory(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if path.as_os_str().is_empty() || self.directories.contains(path) {
            return Ok(());
        }
        self.directories.insert(path.to_owned());
        self.entry(path, ModeFileType::Directory, 0o755, &[])
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> Result<W> {
        let out = self.out.take().context("the archive is broken")?;
        trailer(out).context("ending an archive")
    }

    fn entry(&mut self, path: &Path, kind: ModeFileType, mode: u32, data: &[u8]) -> Result<()> {
        if let Some(parent) = path.parent() {
            self.directory(parent)?;
        }
        let name = path
            .to_str()
            .with_context(|| format!("{} is not UTF-8", path.display()))?;
        let len = u32::try_from(data.len())
            .with_context(|| format!("{name} is too large for an initramfs"))?;
        self.inode += 1;
        let out = self.out.take().context("the archive is broken")?;
        let mut entry = NewcBuilder::new(name)
            .ino(self.inode)
            .nlink(1)
            .mode(mode)
            .set_mode_file_type(kind)
            .write(out, len);
        entry
            .write_all(data)
            .and_then(|()| entry.finish())
            .map(|out| self.out = Some(out))
            .with_context(|| format!("adding {name} to an archive"))
    }
}

/// The content of a file in an archive.
pub(crate) fn read(archive: &[u8], path: &str) -> Result<Vec<u8>> {
    let mut rest = archive;
    loop {
        let mut entry = NewcReader::new(rest).context("reading an archive")?;
        ensure!(!entry.entry().is_trailer(), "it has no {path}");
        if entry.entry().name() == path {
            let mut content = Vec::new();
            entry
                .read_to_end(&mut content)
                .with_context(|| format!("reading {path} in an archive"))?;
            return Ok(content);
        }
        rest = entry.finish().context("reading an archive")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_come_once_and_before_what_they_hold() {
        let mut archive = Archive::new(Vec::new());
        archive.file("a/b/one", 0o644, b"1").unwrap();
        archive.file("a/b/two", 0o755, b"22").unwrap();
        archive.symlink("a/link", "b/one").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(
            bytes.len() % 4,
            0,
            "archives must follow each other aligned"
        );

        let mut names = Vec::new();
        let mut rest = bytes.as_slice();
        loop {
            let entry = NewcReader::new(rest).unwrap();
            if entry.entry().is_trailer() {
                break;
            }
            names.push((entry.entry().name().to_owned(), entry.entry().mode()));
            rest = entry.finish().unwrap();
        }
        let expected = [
            ("a", 0o040755),
            ("a/b", 0o040755),
            ("a/b/one", 0o100644),
            ("a/b/two", 0o100755),
            ("a/link", 0o120777),
        ];
        assert_eq!(names, expected.map(|(name, mode)| (name.to_owned(), mode)));
    }
}
