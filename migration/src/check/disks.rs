//! The VM's own disks: a migration does not move them.

use std::{fs, path::PathBuf};

use farside_fabric::Size;
use serde_json::Value;

use super::{Disk, Finding};

const CHECK: &str = "disk";

/// The files of QEMU's block nodes, from query-named-block-nodes.
pub(super) fn of(nodes: &Value) -> Vec<Disk> {
    let files = nodes.as_array().into_iter().flatten();
    let files = files.filter(|node| {
        let driver = node["drv"].as_str().unwrap_or_default();
        matches!(driver, "file" | "host_device" | "host_cdrom")
    });
    files
        .filter_map(|node| {
            let path = PathBuf::from(node["file"].as_str()?);
            let len = node["image"]["virtual-size"].as_u64().unwrap_or(0);
            Some(Disk { path, len })
        })
        .collect()
}

/// Whether this host sees them too.
pub(super) fn seen_here(disks: Option<&[Disk]>) -> Vec<Finding> {
    let Some(disks) = disks else {
        let what = "the VM does not run, so the files of its own disks are unknown";
        return vec![Finding::note(
            CHECK,
            what,
            "make sure that both hosts have them at the same paths",
        )];
    };
    let advice = "put it on storage that both hosts see, at the same path";
    disks
        .iter()
        .map(|disk| {
            let path = disk.path.display();
            match fs::metadata(&disk.path) {
                Err(error) => Finding::problem(CHECK, format!("{path}: {error}"), advice),
                Ok(found) if found.is_file() && found.len() != disk.len => {
                    let (here, there) = (Size(found.len()), Size(disk.len));
                    let what = format!("{path} has {here}, and {there} where the VM is");
                    Finding::problem(CHECK, what, advice)
                }
                Ok(_) => Finding::ok(CHECK, format!("{path} is there")),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::Level, *};

    #[test]
    fn a_disk_is_known_by_path_and_length() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("root.img");
        let nodes = json!([
            { "drv": "raw", "file": path, "image": { "virtual-size": 512 } },
            { "drv": "file", "file": path, "image": { "virtual-size": 512 } },
        ]);
        let disks = of(&nodes);
        assert_eq!(disks.len(), 1);
        let level = || seen_here(Some(&disks))[0].level;
        assert_eq!(level(), Level::Problem);
        fs::write(&path, [0; 511]).unwrap();
        assert_eq!(level(), Level::Problem);
        fs::write(&path, [0; 512]).unwrap();
        assert_eq!(level(), Level::Ok);
        assert_eq!(seen_here(None)[0].level, Level::Note);
    }
}
