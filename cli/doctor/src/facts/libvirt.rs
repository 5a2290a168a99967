//! libvirt: its settings, hook, confinement and domains.

use std::{
    collections::BTreeMap,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use farside_vm_config::Manager;

use super::{QemuConf, VmFacts};
use crate::host::{Host, files, read};

/// Where libvirt's daemons are.
const DAEMONS: [&str; 2] = ["usr/sbin/libvirtd", "usr/sbin/virtqemud"];

/// AppArmor rules for all VMs, in addition to libvirt's.
pub(crate) const APPARMOR_LOCAL: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";

/// A libvirt.
#[derive(Clone, Debug, Default)]
pub(crate) struct Libvirt {
    pub(crate) conf: QemuConf,
    /// Whether the kernel enforces AppArmor, and libvirt has profiles for it.
    pub(crate) apparmor: bool,
    /// Whether the kernel enforces SELinux.
    pub(crate) selinux: bool,
    /// The contents of [`APPARMOR_LOCAL`].
    pub(crate) apparmor_local: String,
    /// Whether farside's SELinux module is installed.
    pub(crate) selinux_module: bool,
    /// Scripts that libvirt runs before and after domains and that call farside;
    /// and whether it can run them.
    pub(crate) hooks: Vec<(PathBuf, bool)>,
    /// For each VM that it manages, the domain's XML, or why there is none.
    pub(crate) domains: BTreeMap<String, Result<String, String>>,
}

pub(crate) fn look(host: &Host, vms: &[VmFacts]) -> Option<Libvirt> {
    let conf = host.text("etc/libvirt/qemu.conf");
    if conf.is_none() && !DAEMONS.iter().any(|path| host.system(path).exists()) {
        return None;
    }
    let enabled = host.text("sys/module/apparmor/parameters/enabled");
    let modules = "var/lib/selinux/targeted/active/modules/400/farside";
    Some(Libvirt {
        conf: QemuConf::parse(&conf.unwrap_or_default()),
        apparmor: enabled.is_some_and(|text| text.trim() == "Y")
            && host.system("etc/apparmor.d/libvirt").exists(),
        selinux: host.number("sys/fs/selinux/enforce") == Some(1),
        apparmor_local: host.text(APPARMOR_LOCAL).unwrap_or_default(),
        selinux_module: host.system(modules).exists(),
        hooks: hooks(host),
        domains: domains(host, vms),
    })
}

fn hooks(host: &Host) -> Vec<(PathBuf, bool)> {
    let mut scripts = vec![host.system("etc/libvirt/hooks/qemu")];
    scripts.extend(files(&host.system("etc/libvirt/hooks/qemu.d"), ""));
    let ours = scripts
        .into_iter()
        .filter(|path| read(path).is_some_and(|text| text.contains("farside hook")));
    ours.map(|path| {
        let executable = is_executable(&path);
        (path, executable)
    })
    .collect()
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o111 != 0)
}

fn domains(host: &Host, vms: &[VmFacts]) -> BTreeMap<String, Result<String, String>> {
    let managed = vms.iter().filter(|vm| {
        let config = vm.config.as_ref();
        config.is_ok_and(|config| config.manager == Some(Manager::Libvirt))
    });
    std::thread::scope(|scope| {
        let asked: Vec<_> = managed
            .map(|vm| {
                let args = [
                    "--quiet",
                    "dumpxml",
                    "--inactive",
                    "--domain",
                    vm.name.as_str(),
                ];
                let asked = scope.spawn(move || host.ask(&host.virsh, &args));
                (vm.name.clone(), asked)
            })
            .collect();
        let answers = asked.into_iter().map(|(name, asked)| {
            let answer = asked.join().expect("asking does not panic");
            (name, answer.map_err(|error| error.to_string()))
        });
        answers.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_with_libvirt() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        assert!(look(&host, &[]).is_none());
        for (path, text) in [
            ("etc/libvirt/qemu.conf", "user = \"root\"\n"),
            ("sys/module/apparmor/parameters/enabled", "Y\n"),
            ("etc/apparmor.d/libvirt/TEMPLATE.qemu", ""),
            ("etc/libvirt/hooks/qemu", "#!/bin/sh\nother\n"),
            (
                "etc/libvirt/hooks/qemu.d/farside",
                "exec farside hook -- \"$@\"\n",
            ),
        ] {
            let path = host.system(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let libvirt = look(&host, &[]).unwrap();
        assert_eq!(libvirt.conf.word("user"), Some("root"));
        assert!(libvirt.apparmor && !libvirt.selinux);
        let hook = host.system("etc/libvirt/hooks/qemu.d/farside");
        assert_eq!(libvirt.hooks, [(hook.clone(), false)]);
        std::fs::set_permissions(&hook, PermissionsExt::from_mode(0o755)).unwrap();
        assert_eq!(look(&host, &[]).unwrap().hooks, [(hook, true)]);
    }
}
