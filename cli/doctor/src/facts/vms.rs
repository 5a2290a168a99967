//! The descriptions of VMs.

use std::path::PathBuf;

use farside_daemon::{NameError, VmName};
use farside_error_chain::Chain;
use farside_lender_protocol::Address;
use farside_vm_config::{LoadError, VmConfig};

use crate::host::{Host, files};

/// A VM of this host.
#[derive(Clone, Debug)]
pub(crate) struct VmFacts {
    pub(crate) name: String,
    /// Its description.
    pub(crate) path: PathBuf,
    pub(crate) config: Result<VmConfig, String>,
    /// Whether its QEMU runs, as far as can be seen from outside.
    pub(crate) running: bool,
}

pub(crate) fn look(host: &Host, only: Option<&str>) -> Vec<VmFacts> {
    let directory = host.config.join("vm");
    let path_of = |name: &str| directory.join(format!("{name}.toml"));
    let described = match only {
        Some(name) => vec![(name.to_owned(), path_of(name))],
        None => files(&directory, ".toml")
            .into_iter()
            .filter_map(|path| Some((path.file_stem()?.to_str()?.to_owned(), path)))
            .collect(),
    };
    let vms = described.into_iter().map(|(name, path)| VmFacts {
        config: load(&name, &path),
        running: running(host, &name),
        name,
        path,
    });
    vms.collect()
}

fn load(name: &str, path: &std::path::Path) -> Result<VmConfig, String> {
    let vm: VmName = name.parse().map_err(|error: NameError| error.to_string())?;
    let path = path.to_owned();
    if !path.exists() {
        return Err(LoadError::Unknown { vm, path }.to_string());
    }
    let mut config = VmConfig::load(&path).map_err(|error| Chain(&error).to_string())?;
    match config.name.replace(vm.clone()) {
        Some(found) if found != vm => Err(LoadError::OtherVm {
            path,
            found,
            wanted: vm,
        }
        .to_string()),
        _ => Ok(config),
    }
}

/// Adds lenders that were found to the VMs whose files name none.
pub(crate) fn add_lenders(vms: &mut [VmFacts], found: &[Address]) {
    for config in vms.iter_mut().filter_map(|vm| vm.config.as_mut().ok()) {
        if config.discovery.is_some() {
            config.lenders = config.lenders();
            config.lenders.extend_from_slice(found);
        }
    }
}

/// By the file that libvirt, or farside, has QEMU write its process id to.
fn running(host: &Host, name: &str) -> bool {
    let libvirts = host.system("run/libvirt/qemu").join(format!("{name}.pid"));
    let ours = host.runtime.join("vm").join(name).join("qemu.pid");
    [libvirts, ours].iter().any(|file| {
        crate::host::read(file)
            .and_then(|text| text.trim().parse::<u32>().ok())
            .is_some_and(|pid| host.system(&format!("proc/{pid}")).exists())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_found_and_read() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        let directory = host.config.join("vm");
        std::fs::create_dir_all(&directory).unwrap();
        for (name, text) in [
            ("web1.toml", "devices = [\"disk0\"]"),
            ("web2.toml", "devices = 3"),
            ("web3.toml", "name = \"web1\""),
            ("-x.toml", ""),
            ("notes.txt", "?"),
        ] {
            std::fs::write(directory.join(name), text).unwrap();
        }
        let pids = host.system("run/libvirt/qemu");
        std::fs::create_dir_all(&pids).unwrap();
        std::fs::create_dir_all(host.system("proc/77")).unwrap();
        std::fs::write(pids.join("web1.pid"), "77\n").unwrap();
        std::fs::write(pids.join("web2.pid"), "78\n").unwrap();
        let vms = look(&host, None);
        let names: Vec<_> = vms
            .iter()
            .map(|vm| (vm.name.as_str(), vm.running))
            .collect();
        let expected = [
            ("-x", false),
            ("web1", true),
            ("web2", false),
            ("web3", false),
        ];
        assert_eq!(names, expected);
        assert_eq!(vms[1].config.as_ref().unwrap().device_ids(), ["disk0"]);
        for (vm, word) in [
            (0, "first a letter"),
            (2, "line 1"),
            (3, "describes VM web1"),
        ] {
            let error = vms[vm].config.as_ref().unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        let unknown = look(&host, Some("web9")).remove(0).config.unwrap_err();
        assert!(unknown.contains("no configuration"), "{unknown}");
    }
}
