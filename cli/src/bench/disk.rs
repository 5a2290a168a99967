//! An unused disk that may be measured.

use std::{fs, os::unix::fs::FileTypeExt, path::Path};

use anyhow::{Context, Result, ensure};

/// A block device.
#[derive(Debug)]
pub(super) struct Disk {
    /// As in `/sys/class/block`.
    pub(super) name: String,
}

impl Disk {
    /// Refuses a path that is not a block device, or a disk in use.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let real = fs::canonicalize(path).with_context(|| format!("{shown}"))?;
        let kind = fs::metadata(&real).with_context(|| format!("{shown}"))?;
        ensure!(
            kind.file_type().is_block_device(),
            "{shown} is not a block device: give a disk, such as /dev/nvme0n1"
        );
        let name = real.file_name().and_then(|name| name.to_str());
        let name = name
            .with_context(|| format!("{shown} has no name"))?
            .to_owned();
        let sys = Path::new("/sys/class/block").join(&name);
        if let Some(user) = user(
            &name,
            &parts(&sys),
            &read("/proc/self/mounts"),
            &read("/proc/swaps"),
        ) {
            anyhow::bail!("{shown} is in use: {user}; unmount it, or give another disk");
        }
        if let Some(holder) = holder(&sys, &parts(&sys)) {
            anyhow::bail!("{shown} is in use: it is part of {holder}; give another disk");
        }
        Ok(Self { name })
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Names of the partitions.
fn parts(sys: &Path) -> Vec<String> {
    let entries = fs::read_dir(sys).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.path().join("partition").exists())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// Devices on top of the disk or its partitions: RAID, LVM, encryption.
fn holder(sys: &Path, parts: &[String]) -> Option<String> {
    let directories = parts
        .iter()
        .map(|part| sys.join(part))
        .chain([sys.to_owned()]);
    directories.into_iter().find_map(|directory| {
        let mut holders = fs::read_dir(directory.join("holders")).ok()?.flatten();
        holders.next()?.file_name().into_string().ok()
    })
}

/// Mounts and swap on the disk or its partitions, from the kernel's lists.
fn user(name: &str, parts: &[String], mounts: &str, swaps: &str) -> Option<String> {
    let ours = |device: &str| {
        device
            .strip_prefix("/dev/")
            .is_some_and(|device| device == name || parts.iter().any(|part| part == device))
    };
    let mounted = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let device = fields.next().filter(|device| ours(device))?;
        Some(format!("{device} is mounted at {}", fields.next()?))
    });
    let swapped = || {
        swaps.lines().find_map(|line| {
            let device = line
                .split_whitespace()
                .next()
                .filter(|device| ours(device))?;
            Some(format!("{device} is swapped to"))
        })
    };
    mounted.or_else(swapped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_or_swapped_to_is_in_use() {
        let mounts = "proc /proc proc rw 0 0\n/dev/sda1 / ext4 rw 0 0\n/dev/sdab /b ext4 rw 0 0\n";
        let swaps = "Filename Type Size Used Priority\n/dev/sdc2 partition 1 0 -2\n";
        let user = |name: &str, parts: &[&str]| {
            let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
            user(name, &parts, mounts, swaps)
        };
        assert_eq!(user("sda", &["sda1"]).unwrap(), "/dev/sda1 is mounted at /");
        assert_eq!(user("sda1", &[]).unwrap(), "/dev/sda1 is mounted at /");
        assert_eq!(
            user("sdc", &["sdc1", "sdc2"]).unwrap(),
            "/dev/sdc2 is swapped to"
        );
        // Another disk whose name has the same prefix.
        assert_eq!(user("sdaa", &[]), None);
        assert_eq!(user("sdd", &["sdd1"]), None);
    }

    #[test]
    fn what_is_held_is_in_use() {
        let sys = tempfile::tempdir().unwrap();
        let part = sys.path().join("sda1");
        fs::create_dir_all(part.join("holders")).unwrap();
        fs::write(part.join("partition"), "1").unwrap();
        let found = parts(sys.path());
        assert_eq!(found, ["sda1"]);
        assert_eq!(holder(sys.path(), &found), None);
        fs::write(part.join("holders/dm-0"), "").unwrap();
        assert_eq!(holder(sys.path(), &found).unwrap(), "dm-0");
    }

    #[test]
    fn what_is_no_drive_is_refused() {
        let error = |path: &str| format!("{:#}", Disk::open(Path::new(path)).unwrap_err());
        assert!(error("/dev/null").contains("/dev/null is not a block device"));
        assert!(error("/no/disk").contains("/no/disk"));
    }
}
