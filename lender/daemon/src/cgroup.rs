//! A control group for each child process, where the service manager has delegated one to this
//! process (`Delegate=` of systemd.resource-control(5)).
//!
//! Control groups are of version 2. Of a delegated group the inner ones have either processes or
//! controllers of further groups, so this process moves to a group of its own, [`OWN`], below it.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process,
    sync::Arc,
};

use rustix::fs::getxattr;

/// The group of this process, as `DelegateSubgroup=` names it.
pub const OWN: &str = "broker";

/// systemd marks delegated groups by this attribute, with the value 1 (since version 251).
const DELEGATED: &str = "user.delegate";

/// Controllers that children get, as far as they are delegated.
const CONTROLLERS: [&str; 3] = ["+cpu", "+memory", "+pids"];

/// Most threads of a child.
const MAX_THREADS: u32 = 256;

/// A control group that was delegated to this process.
#[derive(Clone, Debug)]
pub struct Delegated {
    root: Arc<Path>,
    /// Most memory of a child, bytes.
    memory_max: Option<u64>,
}

impl Delegated {
    /// Finds the group, and moves this process to [`OWN`] below it. `None` if the service manager has
    /// delegated none.
    ///
    /// # Errors
    /// Those of moving this process; [`io::ErrorKind::Unsupported`] if memory is to be limited and that
    /// controller is not delegated.
    pub fn take(memory_max: Option<u64>) -> io::Result<Option<Self>> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let groups = fs::read_to_string("/proc/self/cgroup")?;
        let Some(own) = own_group(&mounts, &groups) else {
            return Ok(None);
        };
        let Some(root) = delegated(&own) else {
            return Ok(None);
        };
        if root == own {
            let leaf = root.join(OWN);
            make(&leaf)?;
            fs::write(leaf.join("cgroup.procs"), process::id().to_string())?;
        }
        for controller in CONTROLLERS {
            if let Err(error) = fs::write(root.join("cgroup.subtree_control"), controller) {
                log::debug!("{}: no {controller}: {error}", root.display());
            }
        }
        let enabled = fs::read_to_string(root.join("cgroup.subtree_control"))?;
        if memory_max.is_some() && !enabled.split_whitespace().any(|it| it == "memory") {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "the memory controller is not delegated to {}",
                    root.display()
                ),
            ));
        }
        let root = root.into();
        Ok(Some(Self { root, memory_max }))
    }

    /// Whether a child must not run without its group.
    pub fn limits_memory(&self) -> bool {
        self.memory_max.is_some()
    }

    /// The group.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The group at `path`, which a former process has made below this one.
    pub fn find(&self, path: &Path) -> Option<Group> {
        let is_ours = path.parent() == Some(&*self.root) && path.is_dir();
        is_ours.then(|| Group(path.to_owned()))
    }

    /// Moves the process `pid`, a child of this one, to a new group `name`.
    ///
    /// # Errors
    /// Those of the file system of control groups.
    pub fn place(&self, name: &str, pid: u32) -> io::Result<Group> {
        let path = self.root.join(name);
        make(&path)?;
        let group = Group(path);
        if let Err(error) = group.limit("pids.max", MAX_THREADS.into()) {
            // The controller is not delegated.
            log::debug!("{}: threads are not limited: {error}", group.0.display());
        }
        if let Some(limit) = self.memory_max {
            group.limit("memory.max", limit)?;
        }
        fs::write(group.0.join("cgroup.procs"), pid.to_string())?;
        Ok(group)
    }
}

/// The control group of a child process. Dropping it removes it: the process must have ended.
#[derive(Debug)]
pub struct Group(PathBuf);

impl Group {
    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn limit(&self, file: &str, limit: u64) -> io::Result<()> {
        fs::write(self.0.join(file), limit.to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            log::warn!(
                "cannot remove the control group {}: {error}",
                self.0.display()
            );
        }
    }
}

fn make(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        // Of a former process.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// The directory of this process's control group, from `/proc/self/mountinfo` and `/proc/self/cgroup`.
fn own_group(mounts: &str, groups: &str) -> Option<PathBuf> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        if kind.split(' ').next() != Some("cgroup2") {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        // What is mounted there, and where.
        let (root, point) = (fields.next()?, fields.next()?);
        let below = Path::new(group).strip_prefix(root).ok()?;
        Some(Path::new(point).join(below))
    })
}

/// The group that is delegated: `own`, or the one above it if `own` is [`OWN`].
fn delegated(own: &Path) -> Option<PathBuf> {
    let marked = |path: &Path| {
        let mut value = [0; 1];
        let marked = getxattr(path, DELEGATED, &mut value) == Ok(1) && value == *b"1";
        // The mark could be that of another user's manager.
        let ours = || {
            fs::metadata(path).is_ok_and(|found| found.uid() == rustix::process::geteuid().as_raw())
        };
        marked && ours()
    };
    let above = own
        .parent()
        .filter(|_| own.file_name() == Some(OWN.as_ref()));
    above
        .into_iter()
        .chain([own])
        .find(|path| marked(path))
        .map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 1 0:26 / /sys rw - sysfs sysfs rw
41 30 0:27 /system.slice/x.service /mnt/part rw,relatime - cgroup2 cgroup2 rw
42 30 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
";

    #[test]
    fn the_own_group_is_found_where_it_is_mounted() {
        let own = |groups| own_group(MOUNTS, groups);
        assert_eq!(
            own("1:name=systemd:/\n0::/system.slice/farside-lender.service/broker\n"),
            Some("/sys/fs/cgroup/system.slice/farside-lender.service/broker".into())
        );
        // The first mount that has it.
        assert_eq!(
            own("0::/system.slice/x.service/a\n"),
            Some("/mnt/part/a".into())
        );
        // Version 1 alone, and none.
        assert_eq!(own("4:memory:/x\n"), None);
        assert_eq!(own_group("", "0::/\n"), None);
    }

    #[test]
    fn a_group_without_the_managers_mark_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join(OWN);
        fs::create_dir(&own).unwrap();
        assert_eq!(delegated(&own), None);
        // Not every file system has such attributes.
        let mark = rustix::fs::setxattr(
            directory.path(),
            DELEGATED,
            b"1",
            rustix::fs::XattrFlags::empty(),
        );
        if mark.is_ok() {
            assert_eq!(delegated(&own), Some(directory.path().to_owned()));
            assert_eq!(
                delegated(directory.path()),
                Some(directory.path().to_owned())
            );
            assert_eq!(delegated(&directory.path().join("other")), None);
        }
    }
}
