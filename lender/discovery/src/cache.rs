//! The file with the lenders that etcd named, for when it does not answer, or is split.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use farside_daemon::files;
use farside_lender_protocol::Address;
use serde::{Deserialize, Serialize};

use crate::{MAX_KNOWN, record::is_announced};

/// The version of the file.
const FORMAT: u32 = 1;

/// Longest file, bytes.
const MAX_FILE: u64 = 64 * 1024;

/// Time for which a lender is remembered that etcd does not name any more.
const REMEMBERED: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Age from which an entry is written anew, so that not each look writes the file.
const RENEWED: Duration = Duration::from_secs(60 * 60);

/// A lender that etcd has named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    address: Address,
    /// When etcd named it, in seconds since 1970: to an hour.
    named: u64,
    /// The last answer had it.
    current: bool,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: u32,
    lenders: Vec<Entry>,
}

/// The lenders in the file.
#[derive(Debug)]
pub(crate) struct Cache {
    path: PathBuf,
    file: File,
}

impl Cache {
    /// Reads the file. A file that is missing or invalid is empty.
    pub(crate) fn read(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            file: match read(path) {
                Ok(file) => file,
                Err(error) => {
                    log::warn!("{}: {error}: ignoring it", path.display());
                    File::default()
                }
            },
        }
    }

    /// The lenders of the last answer.
    pub(crate) fn current(&self) -> Vec<Address> {
        self.addresses(true)
    }

    /// Those of earlier answers.
    pub(crate) fn former(&self) -> Vec<Address> {
        self.addresses(false)
    }

    fn addresses(&self, current: bool) -> Vec<Address> {
        let entries = self.file.lenders.iter();
        let chosen = entries.filter(|entry| entry.current == current);
        chosen.map(|entry| entry.address.clone()).collect()
    }

    /// Records an answer, and writes the file if it has changed.
    pub(crate) fn update(&mut self, answer: &[Address]) {
        let since = SystemTime::UNIX_EPOCH.elapsed();
        let merged = merge(
            &self.file.lenders,
            answer,
            since.map_or(0, |since| since.as_secs()),
        );
        if merged == self.file.lenders {
            return;
        }
        self.file = File {
            format: FORMAT,
            lenders: merged,
        };
        let written = serde_json::to_vec(&self.file)
            .map_err(io::Error::from)
            .and_then(|bytes| files::replace(&self.path, &bytes));
        if let Err(error) = written {
            // Such as a user who may not write there.
            log::debug!("lenders are not remembered: {error}");
        }
    }
}

/// Remembers those of `before` that are not in `answer`, for a time, and as far as there is room.
fn merge(before: &[Entry], answer: &[Address], now: u64) -> Vec<Entry> {
    let of = |address: &Address| before.iter().find(|entry| entry.address == *address);
    let mut entries: Vec<Entry> = Vec::new();
    for address in answer {
        let named = of(address).map_or(0, |entry| entry.named);
        let is_fresh = (named..named + RENEWED.as_secs()).contains(&now);
        entries.push(Entry {
            address: address.clone(),
            named: if is_fresh { named } else { now },
            current: true,
        });
    }
    let mut former: Vec<Entry> = before
        .iter()
        .filter(|entry| !answer.contains(&entry.address))
        .filter(|entry| entry.named <= now && now - entry.named < REMEMBERED.as_secs())
        .cloned()
        .map(|entry| Entry {
            current: false,
            ..entry
        })
        .collect();
    // The latest first.
    former.sort_by_key(|entry| std::cmp::Reverse(entry.named));
    entries.extend(former);
    entries.truncate(MAX_KNOWN);
    entries
}

fn read(path: &Path) -> io::Result<File> {
    let Some(bytes) = files::read_bounded(path, MAX_FILE)? else {
        return Ok(File::default());
    };
    let file: File = serde_json::from_slice(&bytes)?;
    let is_valid = file.format == FORMAT
        && file.lenders.len() <= MAX_KNOWN
        && file
            .lenders
            .iter()
            .all(|entry| is_announced(&entry.address));
    match is_valid {
        true => Ok(file),
        false => Err(io::Error::other("not a list of lenders of this version")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 60 * 60;

    fn addresses(names: &[&str]) -> Vec<Address> {
        let parsed = names.iter().map(|name| format!("tls:{name}:7410").parse());
        parsed.collect::<Result<_, _>>().unwrap()
    }

    fn entry(name: &str, named: u64, current: bool) -> Entry {
        let address = addresses(&[name]).remove(0);
        Entry {
            address,
            named,
            current,
        }
    }

    #[test]
    fn a_lender_that_etcd_no_longer_names_is_remembered_for_a_week() {
        let day = 24 * HOUR;
        let first = merge(&[], &addresses(&["a", "b"]), 100 * day);
        let without_b = merge(&first, &addresses(&["a"]), 100 * day + 5);
        assert_eq!(
            without_b,
            [entry("a", 100 * day, true), entry("b", 100 * day, false)]
        );
        assert_eq!(merge(&without_b, &[], 106 * day).len(), 2);
        assert_eq!(merge(&without_b, &[], 107 * day), []);
        // A clock that was set back.
        assert_eq!(merge(&without_b, &[], 99 * day), []);
    }

    #[test]
    fn an_answer_that_stays_does_not_change_the_file() {
        let first = merge(&[], &addresses(&["a"]), 1000 * HOUR);
        assert_eq!(merge(&first, &addresses(&["a"]), 1000 * HOUR + 3599), first);
        let later = merge(&first, &addresses(&["a"]), 1001 * HOUR);
        assert_eq!(later, [entry("a", 1001 * HOUR, true)]);
    }

    #[test]
    fn there_is_room_for_present_lenders_first() {
        let old: Vec<String> = (0..MAX_KNOWN).map(|n| format!("old{n}")).collect();
        let old: Vec<&str> = old.iter().map(String::as_str).collect();
        let before = merge(&[], &addresses(&old), 1000 * HOUR);
        let after = merge(&before, &addresses(&["new"]), 1001 * HOUR);
        assert_eq!(after.len(), MAX_KNOWN);
        assert_eq!(after[0], entry("new", 1001 * HOUR, true));
    }

    #[test]
    fn what_was_written_is_read_and_garbage_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("known/lenders.json");
        let mut cache = Cache::read(&path);
        assert!(cache.current().is_empty());
        cache.update(&addresses(&["a", "b"]));
        cache.update(&addresses(&["b"]));
        let read = Cache::read(&path);
        assert_eq!(read.current(), addresses(&["b"]));
        assert_eq!(read.former(), addresses(&["a"]));
        let text = std::fs::read_to_string(&path).unwrap();
        for bad in [
            text.replace("tls:", "tcp:"),
            text.replace("\"format\":1", "\"format\":2"),
            text.replace("tls:a:7410", "/run/farside/lender.sock"),
            "[".repeat(60_000),
            String::new(),
            " ".repeat(100_000),
        ] {
            std::fs::write(&path, bad).unwrap();
            let cache = Cache::read(&path);
            assert!(cache.current().is_empty() && cache.former().is_empty());
        }
    }
}
