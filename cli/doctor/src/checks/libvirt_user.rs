//! The user that libvirt's QEMU runs as, and the devices' sockets.

use farside_vm_config::{Manager, VmConfig};

use super::hook::for_libvirt;
use crate::{
    Facts, Finding,
    facts::{Libvirt, UNIT_USER, User, VmFacts},
    finding::{edit, quoted, quoted_path},
};

const CHECK: &str = "socket-group";
const WHY: &str = "QEMU may not connect to the devices' sockets, and the domain does not start";

/// Names of QEMU's user in distributions: Debian, then others.
const QEMU_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let Some(libvirt) = facts.libvirt.as_ref().filter(|_| for_libvirt(facts)) else {
        return Vec::new();
    };
    let vms = facts.good_vms();
    let vms = vms.filter(|(_, config)| config.manager == Some(Manager::Libvirt));
    let qemu = qemu_user(facts, libvirt);
    vms.map(|(vm, config)| of_vm(facts, libvirt, &qemu, vm, config).of_vm(&vm.name))
        .collect()
}

/// The user in `qemu.conf`, or the default one that exists.
fn qemu_user(facts: &Facts, libvirt: &Libvirt) -> User {
    let root = || User {
        name: "root".to_owned(),
        ..User::default()
    };
    let users = &facts.users;
    match libvirt.conf.word("user") {
        // A number with a plus sign is an id.
        Some(name) => users
            .user(name.trim_start_matches('+'))
            .cloned()
            .unwrap_or_else(|| match name {
                "root" | "0" | "+0" => root(),
                other => User {
                    name: other.to_owned(),
                    uid: other.trim_start_matches('+').parse().unwrap_or(u32::MAX),
                    gid: u32::MAX,
                },
            }),
        None => {
            let known = QEMU_USERS.iter().find_map(|name| users.user(name));
            known.cloned().unwrap_or_else(root)
        }
    }
}

fn of_vm(
    facts: &Facts,
    libvirt: &Libvirt,
    qemu: &User,
    vm: &VmFacts,
    config: &VmConfig,
) -> Finding {
    let users = &facts.users;
    let by_units = facts.by_units();
    // libvirt runs the hook as root.
    let owner = if by_units { UNIT_USER } else { "root" };
    let name = &qemu.name;
    let Some(group) = &config.socket_group else {
        if name == owner {
            return Finding::ok(CHECK, format!("QEMU and backend both run as {owner}"));
        }
        let what =
            format!("QEMU runs as {name}, the sockets are {owner}'s, and no socket-group is set");
        // Before any table of the file.
        return Finding::problem(CHECK, what, WHY).fix(format!(
            "sed -i '1i socket-group = \"{}\"' {}",
            group_of(facts, libvirt, qemu),
            quoted_path(&vm.path)
        ));
    };
    let quoted_group = quoted(group);
    if !users.has_group(group) {
        let what = format!("this host has no group {group}, which is the socket-group");
        return Finding::problem(CHECK, what, WHY)
            .fix(format!(
                "groupadd --system {quoted_group} && usermod --append --groups {quoted_group} {name}"
            ))
            .fix(edit(&vm.path));
    }
    let member =
        name == owner || users.is_member(qemu, group) || libvirt.conf.word("group") == Some(group);
    if !member {
        let what = format!("QEMU's user {name} is not in the socket-group {group}");
        return Finding::problem(CHECK, what, WHY)
            .fix(format!("usermod --append --groups {quoted_group} {name}"));
    }
    if by_units && !facts.systemd.generated.contains_key(&vm.name) {
        let what = format!("systemd has no sockets for the socket-group {group} yet");
        let why = "a packaged backend that creates its own sockets cannot give them to the group";
        let unit = quoted(&format!("farside@{}.socket", vm.name));
        return Finding::note(CHECK, what, why).fix(format!(
            "systemctl daemon-reload && systemctl enable --now {unit}"
        ));
    }
    Finding::ok(
        CHECK,
        format!("QEMU's user {name} reaches the sockets by the group {group}"),
    )
}

/// A group that QEMU's user is in.
fn group_of(facts: &Facts, libvirt: &Libvirt, qemu: &User) -> String {
    let users = &facts.users;
    let set = libvirt.conf.word("group");
    let named = [set, Some(&qemu.name), Some("kvm")].into_iter().flatten();
    let mut there = named.filter(|group| users.has_group(group));
    let member = |group: &&str| set == Some(group) || users.is_member(qemu, group);
    there.find(member).unwrap_or(&qemu.name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Level,
        checks::tests::{host_of, says},
        facts::{Limit, QemuConf, Unit, Users},
    };

    const GROUP: &str = "manager = \"libvirt\"\nsocket-group = \"farside\"";

    fn host(description: &str, conf: &str, group: &str) -> Facts {
        let mut facts = host_of(description);
        let passwd = "libvirt-qemu:x:64055:993::/:\nfarside:x:990:990::/:\n";
        facts.users = Users::parse(passwd, group);
        facts.libvirt = Some(Libvirt {
            conf: QemuConf::parse(conf),
            ..Libvirt::default()
        });
        facts
    }

    #[test]
    fn without_a_group() {
        let of = |conf| judge(&host("manager = \"libvirt\"", conf, "kvm:x:993:\n"));
        says(of("user = \"root\""), Level::Ok, "both run as root");
        let said = says(of(""), Level::Problem, "QEMU runs as libvirt-qemu");
        assert_eq!(
            said.fix,
            ["sed -i '1i socket-group = \"kvm\"' /etc/farside/vm/web1.toml"]
        );
        assert_eq!(judge(&host_of("")), []);
    }

    #[test]
    fn with_a_group() {
        let of = |group| judge(&host(GROUP, "", group));
        says(of(""), Level::Problem, "no group farside");
        let said = says(
            of("farside:x:990:\n"),
            Level::Problem,
            "is not in the socket-group",
        );
        assert_eq!(said.fix, ["usermod --append --groups farside libvirt-qemu"]);
        says(
            of("farside:x:990:libvirt-qemu\n"),
            Level::Ok,
            "by the group farside",
        );
        let set = host(GROUP, "group = \"farside\"", "farside:x:990:\n");
        says(judge(&set), Level::Ok, "by the group farside");
    }

    #[test]
    fn a_backend_of_a_unit() {
        let mut facts = host(GROUP, "", "farside:x:7:libvirt-qemu\n");
        facts.systemd.runs = true;
        facts.systemd.backend = Some(Unit {
            path: "/u".into(),
            memlock: Limit::None,
            user: UNIT_USER.into(),
            binds: false,
        });
        let said = says(judge(&facts), Level::Note, "no sockets for");
        assert!(said.fix[0].ends_with("enable --now farside@web1.socket"));
        facts
            .systemd
            .generated
            .insert("web1".into(), Default::default());
        says(judge(&facts), Level::Ok, "by the group");
        // Root without its powers is not the sockets' owner.
        let facts = Facts {
            systemd: facts.systemd,
            ..host("manager = \"libvirt\"", "user = \"root\"", "")
        };
        says(judge(&facts), Level::Problem, "QEMU runs as root");
    }
}
