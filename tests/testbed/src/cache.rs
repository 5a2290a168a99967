//! The cache directory: entries named by a key of their inputs, made in a temporary
//! directory and renamed into place, so that no incomplete entry is visible.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

/// Name prefix of incomplete entries.
const MAKING: &str = ".making-";

/// How many entries of one name are kept.
const KEPT: usize = 3;

/// The cache directory, locked by this process while the value lives.
#[derive(Debug)]
pub(crate) struct Cache {
    root: PathBuf,
    _lock: File,
}

/// The cache directory that the environment names.
pub(crate) fn default_root() -> Result<PathBuf> {
    root_from(|name| env::var_os(name).filter(|value| !value.is_empty()))
}

fn root_from(var: impl Fn(&str) -> Option<std::ffi::OsString>) -> Result<PathBuf> {
    if let Some(root) = var("FARSIDE_CACHE") {
        return std::path::absolute(&root)
            .with_context(|| format!("FARSIDE_CACHE={}", root.display()));
    }
    // Relative paths must be ignored (XDG Base Directory Specification).
    if let Some(base) = var("XDG_CACHE_HOME").map(PathBuf::from)
        && base.is_absolute()
    {
        return Ok(base.join("farside"));
    }
    let home = var("HOME").context(
        "no cache directory: neither FARSIDE_CACHE nor XDG_CACHE_HOME nor HOME is set; \
         set FARSIDE_CACHE to a directory with 1 GB of room",
    )?;
    Ok(PathBuf::from(home).join(".cache/farside"))
}

impl Cache {
    /// Opens and locks the cache; waits while another process holds the lock.
    pub(crate) fn open(root: PathBuf, waiting: impl FnOnce()) -> Result<Self> {
        fs::create_dir_all(&root)
            .with_context(|| format!("creating the cache directory {}", root.display()))?;
        let path = root.join("lock");
        let lock = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            waiting();
            flock(&lock, FlockOperation::LockExclusive)
                .with_context(|| format!("locking {}", path.display()))?;
        }
        let cache = Cache { root, _lock: lock };
        // Their makers were killed: a live one would hold the lock.
        for path in cache.entries(MAKING)? {
            fs::remove_dir_all(&path).with_context(|| format!("removing {}", path.display()))?;
        }
        Ok(cache)
    }

    /// The paths in the cache whose names begin with `prefix`.
    fn entries(&self, prefix: &str) -> Result<Vec<PathBuf>> {
        let mut paths: Vec<PathBuf> = fs::read_dir(&self.root)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
            .with_context(|| format!("listing {}", self.root.display()))?;
        paths.retain(|path| {
            let name = path.file_name().unwrap_or_default();
            name.to_string_lossy().starts_with(prefix)
        });
        Ok(paths)
    }

    /// The cache directory.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The entry `name`-`key`; if missing, `make` makes it in an empty directory. Of the
    /// entries of that name with other keys, which other checkouts may use, the newest are
    /// kept.
    pub(crate) fn entry(
        &self,
        name: &str,
        key: &str,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let entry = self.root.join(format!("{name}-{key}"));
        if entry.is_dir() {
            return Ok(entry);
        }
        let temporary = tempfile::Builder::new()
            .prefix(MAKING)
            .tempdir_in(&self.root)
            .with_context(|| format!("creating a directory in {}", self.root.display()))?;
        let content = temporary.path().join("entry");
        fs::create_dir(&content).with_context(|| format!("creating {}", content.display()))?;
        make(&content)?;
        fs::rename(&content, &entry)
            .with_context(|| format!("moving {} into place", entry.display()))?;
        self.prune(name)?;
        Ok(entry)
    }

    fn prune(&self, name: &str) -> Result<()> {
        let mut entries = Vec::new();
        for path in self.entries(&format!("{name}-"))? {
            let made = fs::metadata(&path).and_then(|metadata| metadata.modified());
            entries.push((
                made.with_context(|| format!("asking for the age of {}", path.display()))?,
                path,
            ));
        }
        entries.sort();
        let surplus = entries.len().saturating_sub(KEPT);
        for (_, path) in &entries[..surplus] {
            fs::remove_dir_all(path).with_context(|| format!("removing {}", path.display()))?;
        }
        Ok(())
    }
}

/// A short key for a list of inputs. Each part is hashed with its length, so that adjacent
/// parts stay distinct.
pub(crate) fn key<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        let part = part.as_ref();
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    fn root(vars: &[(&str, &str)]) -> Result<PathBuf> {
        root_from(|name| {
            vars.iter()
                .find(|(var, _)| *var == name)
                .map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_most_specific_variable_names_the_directory() {
        let all = [
            ("FARSIDE_CACHE", "/a"),
            ("XDG_CACHE_HOME", "/b"),
            ("HOME", "/c"),
        ];
        assert_eq!(root(&all).unwrap(), Path::new("/a"));
        assert_eq!(root(&all[1..]).unwrap(), Path::new("/b/farside"));
        assert_eq!(root(&all[2..]).unwrap(), Path::new("/c/.cache/farside"));
        let relative = [("XDG_CACHE_HOME", "b"), ("HOME", "/c")];
        assert_eq!(root(&relative).unwrap(), Path::new("/c/.cache/farside"));
        assert!(root(&[]).unwrap_err().to_string().contains("FARSIDE_CACHE"));
    }

    #[test]
    fn half_an_entry_is_not_an_entry() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().into(), || {}).unwrap();
        let failed = cache.entry("thing", "1", |path| {
            fs::write(path.join("part"), "x")?;
            anyhow::bail!("the network went away")
        });
        assert!(failed.is_err());
        let entry = cache
            .entry("thing", "1", |path| {
                assert!(!path.join("part").exists());
                Ok(fs::write(path.join("whole"), "x")?)
            })
            .unwrap();
        assert!(entry.join("whole").exists());
        let again = cache.entry("thing", "1", |_| panic!("made twice")).unwrap();
        assert_eq!(again, entry);
        let left: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| name != "lock" && name != "thing-1")
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn what_was_left_half_made_and_what_is_old_goes() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(".making-x")).unwrap();
        let cache = Cache::open(dir.path().into(), || {}).unwrap();
        assert!(!dir.path().join(".making-x").exists());
        cache.entry("other", "0", |_| Ok(())).unwrap();
        for i in 0..5u64 {
            let entry = cache.entry("thing", &i.to_string(), |_| Ok(())).unwrap();
            let age = std::time::Duration::from_secs(100 - i);
            let made = std::time::SystemTime::now() - age;
            File::open(entry).unwrap().set_modified(made).unwrap();
        }
        let left = cache.entries("thing-").unwrap();
        assert_eq!(left.len(), KEPT, "{left:?}");
        assert!(left.contains(&dir.path().join("thing-4")), "{left:?}");
        assert!(dir.path().join("other-0").exists());
    }

    #[test]
    fn a_second_opener_waits_for_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let first = Cache::open(dir.path().into(), || panic!("nobody else is here")).unwrap();
        let (waiting, waits) = std::sync::mpsc::channel();
        let path = dir.path().to_path_buf();
        let second = std::thread::spawn(move || {
            Cache::open(path, move || waiting.send(()).unwrap()).unwrap();
        });
        waits.recv().unwrap();
        assert!(!second.is_finished());
        drop(first);
        second.join().unwrap();
    }

    #[test]
    fn parts_of_a_key_do_not_run_into_each_other() {
        assert_ne!(key(["ab", "c"]), key(["a", "bc"]));
        assert_eq!(key(["ab", "c"]), key(["ab", "c"]));
    }
}
