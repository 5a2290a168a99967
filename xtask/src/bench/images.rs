//! Two equal images: same size, same directory, same contents, no holes.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use farside_testbed::Progress;
use tempfile::TempDir;

/// Size of each. A larger size would only take longer to write: both fit in the page cache.
const SIZE: u64 = 512 << 20;

/// A tmpfs. Images there are not limited by storage, so the data paths are compared.
const MEMORY: &str = "/dev/shm";

/// The images; removed when dropped.
pub(super) struct Images {
    directory: TempDir,
    pub(super) borrowed: PathBuf,
    pub(super) own: PathBuf,
}

impl Images {
    /// Creates them, in `directory` or where there is room.
    pub(super) fn make(directory: Option<&Path>, progress: &Progress) -> Result<Self> {
        let parent = match directory {
            Some(directory) => directory.to_owned(),
            // Twice their size, so that not all of the machine's memory is used.
            None if room(Path::new(MEMORY)) >= 4 * SIZE => MEMORY.into(),
            None => std::env::temp_dir(),
        };
        let task = progress.bar("Making two equal images", 2 * SIZE);
        let directory = tempfile::Builder::new()
            .prefix("farside-bench-")
            .tempdir_in(&parent)
            .with_context(|| format!("creating a directory in {}", parent.display()))?;
        let borrowed = directory.path().join("borrowed.img");
        let own = directory.path().join("own.img");
        write_noise(&borrowed, SIZE, |done| task.set(done))
            .with_context(|| format!("writing {}", borrowed.display()))?;
        fs::copy(&borrowed, &own).with_context(|| format!("writing {}", own.display()))?;
        task.done();
        Ok(Self {
            directory,
            borrowed,
            own,
        })
    }

    /// Their directory.
    pub(super) fn directory(&self) -> &Path {
        self.directory
            .path()
            .parent()
            .unwrap_or(self.directory.path())
    }
}

/// Free bytes of the file system at `directory`; 0 if there is none.
fn room(directory: &Path) -> u64 {
    rustix::fs::statvfs(directory).map_or(0, |stat| stat.f_bavail * stat.f_frsize)
}

/// Fills a new file with incompressible bytes.
fn write_noise(path: &Path, len: u64, mut progress: impl FnMut(u64)) -> std::io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    // xorshift64*
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for at in (0..len).step_by(8) {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let word = state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
        file.write_all(&word[..(len - at).min(8) as usize])?;
        if at % (16 << 20) == 0 {
            progress(at);
        }
    }
    file.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_noise_of_the_right_length() {
        let file = tempfile::NamedTempFile::new().unwrap();
        write_noise(file.path(), 8195, |_| {}).unwrap();
        let bytes = fs::read(file.path()).unwrap();
        assert_eq!(bytes.len(), 8195);
        let zeros = bytes.iter().filter(|byte| **byte == 0).count();
        assert!(zeros < 100, "{zeros} of 8195 bytes are zero");
        assert_ne!(bytes[..4096], bytes[4096..8192]);
    }

    #[test]
    fn there_is_no_room_where_there_is_nothing() {
        assert_eq!(room(Path::new("/nothing/here")), 0);
        assert!(room(Path::new("/proc/self/..")) == 0);
    }
}
