//! libvirt's confinement of QEMU: security driver, mount namespace, device list.
//!
//! libvirt allows what it reads in a domain, and arguments for QEMU it does not read: so the
//! sockets of borrowed devices, and the image next to them, have to be allowed explicitly. Its
//! mount namespace changes nothing but `/dev`, and its list of devices concerns only what QEMU
//! opens itself: descriptors that a backend sends are not checked.

use farside_qemu_configs::ANCHOR_FILE;

use super::hook::for_libvirt;
use crate::{
    Facts, Finding,
    facts::{APPARMOR_LOCAL as LOCAL, Libvirt},
    finding::quoted_path,
};

const SECURITY: &str = "security-driver";
const NAMESPACES: &str = "namespaces";
const DEVICES: &str = "cgroup-devices";
const WHY: &str = "QEMU may not connect to the devices' sockets, nor open the image beside them, and the domain does not start";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let Some(libvirt) = facts.libvirt.as_ref().filter(|_| for_libvirt(facts)) else {
        return Vec::new();
    };
    let mut findings = vec![security(facts, libvirt)];
    findings.extend(namespaces(facts, libvirt));
    findings.extend(devices(libvirt));
    findings
}

fn security(facts: &Facts, libvirt: &Libvirt) -> Finding {
    let set = libvirt.conf.list("security_driver");
    let chosen = |driver: &str, enforced: bool| match set {
        Some(drivers) => drivers.iter().any(|word| word == driver),
        // libvirt uses the security module that the kernel enforces.
        None => enforced,
    };
    let sockets = format!(
        "{}/vm/*/{{*.sock,{ANCHOR_FILE}}}",
        facts.runtime.path.display()
    );
    if chosen("apparmor", libvirt.apparmor) {
        let allowed = libvirt.apparmor_local.lines().any(|line| {
            let line = line.trim();
            line.starts_with(&sockets) && line.ends_with(',')
        });
        if allowed {
            return Finding::ok(SECURITY, format!("AppArmor lets QEMU connect to {sockets}"));
        }
        let what = format!("AppArmor keeps libvirt's QEMU from connecting to {sockets}");
        return Finding::problem(SECURITY, what, WHY).fix(format!(
            "mkdir -p {} && echo '{sockets} rw,' >> {LOCAL}",
            LOCAL
                .rsplit_once('/')
                .map_or("/", |(directory, _)| directory)
        ));
    }
    if chosen("selinux", libvirt.selinux) {
        if libvirt.selinux_module {
            return Finding::ok(SECURITY, "SELinux has a module farside");
        }
        let what = "SELinux keeps libvirt's QEMU (svirt_t, svirt_tcg_t) from connecting to farside's sockets";
        return Finding::problem(SECURITY, what, WHY).fix(
            "printf '(typeattributeset cil_gen_require svirt_t)(typeattributeset cil_gen_require svirt_tcg_t)\
             (allow svirt_t var_run_t (sock_file (write)))(allow svirt_tcg_t var_run_t (sock_file (write)))\
             (allow svirt_t var_run_t (file (getattr open read)))(allow svirt_tcg_t var_run_t (file (getattr open read)))\
             (allow svirt_t unconfined_service_t (unix_stream_socket (connectto)))\
             (allow svirt_tcg_t unconfined_service_t (unix_stream_socket (connectto)))\\n' > farside.cil && semodule -i farside.cil",
        );
    }
    Finding::ok(SECURITY, "libvirt confines QEMU by users and groups only")
}

fn namespaces(facts: &Facts, libvirt: &Libvirt) -> Option<Finding> {
    let set = libvirt.conf.list("namespaces");
    let mounts = set.is_none_or(|kinds| kinds.iter().any(|kind| kind == "mount"));
    if !mounts || !facts.runtime.path.starts_with("/dev") {
        return None;
    }
    let directory = facts.runtime.path.display();
    let what =
        format!("libvirt's QEMU has a private /dev, and farside's sockets are in {directory}");
    Some(
        Finding::problem(NAMESPACES, what, "QEMU cannot access them")
            .fix("echo 'namespaces = []' >> /etc/libvirt/qemu.conf && systemctl restart libvirtd"),
    )
}

fn devices(libvirt: &Libvirt) -> Option<Finding> {
    let acl = libvirt.conf.list("cgroup_device_acl")?;
    if acl.iter().any(|path| path == "/dev/kvm") {
        return None;
    }
    let conf = quoted_path("/etc/libvirt/qemu.conf".as_ref());
    let what = "cgroup_device_acl in qemu.conf does not name /dev/kvm";
    let why = "libvirt's QEMU may not open it, and domains of type kvm do not start";
    Some(Finding::problem(DEVICES, what, why).fix(format!(
        "sed -i 's|^cgroup_device_acl = \\[|& \"/dev/kvm\",|' {conf} && systemctl restart libvirtd"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
        facts::QemuConf,
    };

    fn host(libvirt: Libvirt) -> Facts {
        let mut facts = host_of("manager = \"libvirt\"");
        facts.runtime.path = "/run/farside".into();
        facts.libvirt = Some(libvirt);
        facts
    }

    #[test]
    fn security_drivers() {
        let mut libvirt = Libvirt::default();
        says(judge(&host(libvirt.clone())), Level::Ok, "users and groups");
        libvirt.apparmor = true;
        let said = says(
            judge(&host(libvirt.clone())),
            Level::Problem,
            "AppArmor keeps",
        );
        let rule = "/run/farside/vm/*/{*.sock,anchor.vhd} rw,";
        assert!(
            said.fix[0].contains(&format!("echo '{rule}' >> {LOCAL}")),
            "{said:?}"
        );
        libvirt.apparmor_local = format!("# {rule}\n");
        says(
            judge(&host(libvirt.clone())),
            Level::Problem,
            "AppArmor keeps",
        );
        libvirt.apparmor_local = format!("  {rule}\n");
        says(judge(&host(libvirt.clone())), Level::Ok, "AppArmor lets");
        libvirt.conf = QemuConf::parse("security_driver = \"selinux\"");
        says(
            judge(&host(libvirt.clone())),
            Level::Problem,
            "SELinux keeps",
        );
        libvirt.selinux_module = true;
        says(judge(&host(libvirt.clone())), Level::Ok, "SELinux has");
        libvirt.conf = QemuConf::parse("security_driver = \"none\"");
        says(judge(&host(libvirt)), Level::Ok, "users and groups");
    }

    #[test]
    fn a_private_dev_and_a_list_without_kvm() {
        let mut facts = host(Libvirt::default());
        facts.runtime.path = "/dev/shm/farside".into();
        let libvirt = |conf| Libvirt {
            conf: QemuConf::parse(conf),
            ..Libvirt::default()
        };
        let found = judge(&facts);
        assert_eq!(
            (&*found[1].check, found[1].level),
            (NAMESPACES, Level::Problem)
        );
        facts.libvirt = Some(libvirt("namespaces = []"));
        says(judge(&facts), Level::Ok, "users and groups");

        let found = judge(&host(libvirt("cgroup_device_acl = [ \"/dev/null\" ]")));
        assert_eq!(
            (&*found[1].check, found[1].level),
            (DEVICES, Level::Problem)
        );
        let good = libvirt("cgroup_device_acl = [ \"/dev/null\", \"/dev/kvm\" ]");
        says(judge(&host(good)), Level::Ok, "users and groups");
    }
}
