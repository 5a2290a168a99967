//! The host's uses of a function: unbinding it would lose data or break a connection.
//!
//! Block devices and network interfaces are found in their sysfs classes, and belong to the
//! function if their directories lie below its own; so all devices behind a bridge or a storage
//! controller are found.

use std::fmt;
use std::path::Path;

use crate::error::PciError;
use crate::function::{HostPci, device_dir};
use farside_pci::Bdf;

const BLOCKS: &str = "sys/class/block";
const NETS: &str = "sys/class/net";
/// Bit 0 of an interface's flags (`IFF_UP`).
const INTERFACE_UP: u32 = 1;

/// A use of a function by the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InUse {
    /// The block device or network interface, or the function's own address.
    pub name: String,
    /// How it is used.
    pub how: Use,
}

/// How a block device, an interface or a function is used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Use {
    /// A file system is mounted there.
    Mounted(String),
    /// The host swaps to it.
    Swap,
    /// It is part of another block device of this name (device mapper, MD).
    HeldBy(String),
    /// It is open exclusively: by ZFS, or a mount in a container.
    Claimed,
    /// The network interface is up.
    NetworkUp,
    /// It has this number of virtual functions, which would be removed with it.
    VirtualFunctions(u32),
    /// It is bound to a userspace driver already.
    UserDriver(String),
}

impl InUse {
    fn new(name: impl Into<String>, how: Use) -> Self {
        Self {
            name: name.into(),
            how,
        }
    }

    /// Formats all uses in one sentence.
    pub(crate) fn list(all: &[Self]) -> String {
        crate::function::some_of(all)
    }
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match &self.how {
            Use::Mounted(place) => write!(f, "{name} is mounted at {place}"),
            Use::Swap => write!(f, "{name} is swap"),
            Use::HeldBy(holder) => write!(f, "{name} is part of {holder}"),
            Use::Claimed => write!(f, "{name} is open for one user alone (ZFS, a container?)"),
            Use::NetworkUp => write!(f, "{name} is up"),
            Use::VirtualFunctions(count) => write!(f, "{name} has {count} virtual functions"),
            Use::UserDriver(driver) => write!(f, "{name} is bound to {driver}"),
        }
    }
}

impl HostPci {
    /// The host's uses of the function or of devices below it; empty if unused. Does not see
    /// network interfaces in other network namespaces.
    ///
    /// # Errors
    /// As [`HostPci::function`].
    pub fn usage(&self, bdf: &Bdf) -> Result<Vec<InUse>, PciError> {
        self.must_exist(bdf)?;
        let Some(device) = self.tree.real(&device_dir(bdf))? else {
            return Ok(Vec::new());
        };
        let mut uses = Vec::new();
        self.block_uses(&device, &mut uses)?;
        for net in self.below(NETS, &device)? {
            if self.is_up(&net)? {
                uses.push(InUse::new(net, Use::NetworkUp));
            }
        }
        if let Some(sriov) = self.sriov_numbers(bdf)?.filter(|sriov| sriov.enabled > 0) {
            uses.push(InUse::new(
                bdf.to_string(),
                Use::VirtualFunctions(sriov.enabled),
            ));
        }
        Ok(uses)
    }

    fn block_uses(&self, device: &Path, uses: &mut Vec<InUse>) -> Result<(), PciError> {
        let blocks = self.below(BLOCKS, device)?;
        if blocks.is_empty() {
            return Ok(());
        }
        let mounts = self.mounts()?;
        let swaps = self.swaps()?;
        let mut claimed = Vec::new();
        for block in blocks {
            let before = uses.len();
            let number = self.tree.attribute(&format!("{BLOCKS}/{block}/dev"))?;
            // A disk has a line for each mount and bind mount; one suffices.
            if let Some(mount) = mounts
                .iter()
                .find(|mount| mount.source == block || Some(&mount.number) == number.as_ref())
            {
                uses.push(InUse::new(&block, Use::Mounted(mount.place.clone())));
            }
            if swaps.contains(&block) {
                uses.push(InUse::new(&block, Use::Swap));
            }
            for holder in self.tree.names(&format!("{BLOCKS}/{block}/holders"))? {
                let called = self.tree.attribute(&format!("{BLOCKS}/{holder}/dm/name"))?;
                let holder = match called {
                    Some(called) => format!("{holder} ({called})"),
                    None => holder,
                };
                uses.push(InUse::new(&block, Use::HeldBy(holder)));
            }
            if uses.len() == before && self.tree.is_claimed(&block) == Some(true) {
                claimed.push(block);
            }
        }
        // A whole disk is open exclusively if one of its partitions is: report that only if no
        // other use is known.
        if uses.is_empty() {
            uses.extend(claimed.into_iter().map(|b| InUse::new(b, Use::Claimed)));
        }
        Ok(())
    }

    /// The devices of a class whose directories lie below `device`.
    fn below(&self, class: &str, device: &Path) -> Result<Vec<String>, PciError> {
        let mut found = Vec::new();
        for name in self.tree.names(class)? {
            let is_below = self
                .tree
                .real(&format!("{class}/{name}"))?
                .is_some_and(|real| real.starts_with(device));
            if !is_below {
                continue;
            }
            if let Some(head) = multipath_head(&name) {
                found.push(head);
            }
            found.push(name);
        }
        // Partitions of a multipath disk lie below the disk, not the function.
        let heads: Vec<String> = found.iter().filter_map(|n| multipath_head(n)).collect();
        for head in heads {
            let partitions = self.tree.names(&format!("{class}/{head}"))?;
            found.extend(partitions.into_iter().filter(|name| {
                name.strip_prefix(&head)
                    .and_then(|rest| rest.strip_prefix('p'))
                    .is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
            }));
        }
        found.sort();
        found.dedup();
        Ok(found)
    }

    fn is_up(&self, net: &str) -> Result<bool, PciError> {
        let flags = self.tree.attribute(&format!("{NETS}/{net}/flags"))?;
        let flags = flags
            .as_deref()
            .and_then(|text| text.strip_prefix("0x"))
            .and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let state = self.tree.attribute(&format!("{NETS}/{net}/operstate"))?;
        Ok(flags.is_some_and(|flags| flags & INTERFACE_UP != 0) || state.as_deref() == Some("up"))
    }

    fn mounts(&self) -> Result<Vec<Mount>, PciError> {
        // mountinfo has device numbers, which survive names such as /dev/root.
        if let Some(text) = self.tree.table("proc/self/mountinfo")? {
            return Ok(text.lines().filter_map(Mount::from_mountinfo).collect());
        }
        let text = self.tree.table("proc/mounts")?.unwrap_or_default();
        Ok(text.lines().filter_map(Mount::from_mounts).collect())
    }

    fn swaps(&self) -> Result<Vec<String>, PciError> {
        let text = self.tree.table("proc/swaps")?.unwrap_or_default();
        let names = text.lines().skip(1).filter_map(|line| {
            let path = line.split_ascii_whitespace().next()?;
            Some(block_name(path))
        });
        Ok(names.collect())
    }
}

/// A mounted file system.
struct Mount {
    /// `major:minor`; an anonymous number for btrfs and the like.
    number: String,
    /// The last part of its source's path.
    source: String,
    place: String,
}

impl Mount {
    /// Fields: id, parent, number, root, place, options, tags..., `-`, type, source.
    fn from_mountinfo(line: &str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(2);
        Some(Self {
            number: left.next()?.to_owned(),
            place: unescape(left.nth(1)?),
            source: block_name(right.split(' ').nth(1)?),
        })
    }

    fn from_mounts(line: &str) -> Option<Self> {
        let mut fields = line.split(' ');
        Some(Self {
            source: block_name(fields.next()?),
            place: unescape(fields.next()?),
            number: String::new(),
        })
    }
}

/// The block device that a path in /dev names; empty for any other source, such as `tmpfs`.
fn block_name(path: &str) -> String {
    match path.strip_prefix("/dev/") {
        // Some drivers' names have a slash, which sysfs writes as an
        // exclamation mark.
        Some(name) => unescape(name).replace('/', "!"),
        None => String::new(),
    }
}

/// Undoes the octal escapes of white space and backslash in mount tables.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\012", "\n")
        .replace("\\134", "\\")
}

/// The disk that a path to a multipath NVMe namespace is part of.
///
/// Such a namespace's disk (`nvme0n1`) belongs to the subsystem and lies below
/// no PCI function; below the function is a hidden one for the path through that
/// controller, named `nvme<subsystem>c<controller>n<namespace>`.
fn multipath_head(path: &str) -> Option<String> {
    let (subsystem, rest) = path.strip_prefix("nvme")?.split_once('c')?;
    let (controller, namespace) = rest.split_once('n')?;
    [subsystem, controller, namespace]
        .iter()
        .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
        .then(|| format!("nvme{subsystem}n{namespace}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_path_of_a_multipath_disk_names_the_disk() {
        assert_eq!(multipath_head("nvme0c3n1").as_deref(), Some("nvme0n1"));
        for name in [
            "nvme0n1",
            "nvme0n1p1",
            "nvmecn",
            "nvme0cn1",
            "sdc",
            "nvme0c0n1p1",
        ] {
            assert_eq!(multipath_head(name), None, "{name}");
        }
    }

    #[test]
    fn reads_mountinfo() {
        let line =
            r"36 35 259:2 / /mnt/my\040disk rw,noatime shared:1 master:2 - ext4 /dev/root rw";
        let mount = Mount::from_mountinfo(line).unwrap();
        assert_eq!(mount.number, "259:2");
        assert_eq!(mount.place, "/mnt/my disk");
        assert_eq!(mount.source, "root");
        let tmpfs = Mount::from_mountinfo("1 2 0:5 / /dev rw - tmpfs nvme0n1 rw").unwrap();
        assert_eq!(tmpfs.source, "");
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(line: String) {
            let _ = Mount::from_mountinfo(&line);
            let _ = Mount::from_mounts(&line);
            let _ = multipath_head(&line);
        }
    }
}
