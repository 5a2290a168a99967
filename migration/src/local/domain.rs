//! A VM's domain in libvirt, through virsh.

use farside_daemon::VmName;
use farside_vm_config::places;
use farside_vm_control::virsh;

use crate::{Error, Result};

/// The XML of a domain, as it is when it does not run.
pub(super) fn xml(domain: &str) -> Result<String> {
    Ok(virsh(&["dumpxml", "--inactive", "--domain", domain])?)
}

/// Defines a domain, or changes it to `xml`; with `autostart`, it starts with its host.
pub(super) fn define(domain: &VmName, xml: &str, autostart: bool) -> Result<()> {
    let path = places::vm_state(domain).join("arrived.xml");
    farside_daemon::files::replace(&path, xml.as_bytes())?;
    virsh(&["define", "--file", &path.to_string_lossy()])?;
    if autostart {
        virsh(&["autostart", "--domain", domain])?;
    }
    Ok(())
}

/// Whether a domain of that name exists.
pub(super) fn exists(domain: &str) -> Result<bool> {
    let names = virsh(&["list", "--all", "--name"])?;
    Ok(names.lines().any(|name| name == domain))
}

/// Removes a domain's definition; its variables of UEFI stay.
pub(super) fn undefine(domain: &str) -> Result<()> {
    Ok(virsh(&["undefine", "--keep-nvram", "--domain", domain]).map(drop)?)
}

/// Whether libvirt has an image of the domain's memory, to go on from.
pub(super) fn has_saved_state(domain: &str) -> Result<bool> {
    Ok(Info::of(domain)?.says("Managed save", "yes"))
}

/// Whether it starts with its host.
pub(super) fn starts_with_host(domain: &str) -> Result<bool> {
    Ok(Info::of(domain)?.says("Autostart", "enable"))
}

/// Refuses where another domain has its name or its UUID.
pub(super) fn is_free(domain: &str, xml: &str) -> Result<()> {
    if exists(domain)? {
        return Err(Error::refused(format!(
            "libvirt has a domain {domain} already, which does not belong to farside: undefine it, or rename one of the two (virsh domrename)"
        )));
    }
    let Some(uuid) = uuid_of(domain, xml)? else {
        return Ok(());
    };
    let taken = virsh(&["list", "--all", "--uuid"])?;
    if taken.lines().any(|taken| taken == uuid) {
        let other = virsh(&["domname", "--domain", &uuid])?;
        return Err(Error::refused(format!(
            "libvirt has a domain {other} with the UUID of domain {domain}, {uuid}: undefine it"
        )));
    }
    Ok(())
}

/// Refuses a domain of which a part would stay behind.
pub(super) fn check_movable(domain: &str) -> Result<()> {
    let refused = |why: &str| {
        let text = format!("domain {domain} cannot be moved as it is: {why}");
        Err(Error::refused(text))
    };
    if !Info::of(domain)?.says("Persistent", "yes") {
        return refused("libvirt forgets it when it ends: define it (`virsh define`)");
    }
    for (list, what) in [
        ("snapshot-list", "snapshots"),
        ("checkpoint-list", "checkpoints"),
    ] {
        if !virsh(&[list, "--name", "--domain", domain])?.is_empty() {
            return refused(&format!(
                "libvirt has {what} of it, which do not move along: `virsh {list} {domain}` shows them; delete them"
            ));
        }
    }
    let secret = [
        "dumpxml",
        "--inactive",
        "--security-info",
        "--domain",
        domain,
    ];
    if virsh(&secret)? != xml(domain)? {
        return refused(
            "its XML has a password, such as of its display, which libvirt omits by default: remove it, and set it again on the other host",
        );
    }
    Ok(())
}

/// The UUID in the XML of a domain. Nested elements may have their own UUIDs.
fn uuid_of(domain: &str, xml: &str) -> Result<Option<String>> {
    let tree = roxmltree::Document::parse(xml).map_err(|error| {
        Error::refused(format!("cannot parse the XML of domain {domain}: {error}"))
    })?;
    let mut children = tree.root_element().children();
    let uuid = children.find(|child| child.has_tag_name("uuid"));
    Ok(uuid
        .and_then(|uuid| uuid.text())
        .map(|text| text.trim().to_owned()))
}

/// libvirt's information on a domain.
struct Info(String);

impl Info {
    fn of(domain: &str) -> Result<Self> {
        Ok(Self(virsh(&["dominfo", "--domain", domain])?))
    }

    fn says(&self, name: &str, value: &str) -> bool {
        let mut fields = self.0.lines().filter_map(|line| line.split_once(':'));
        fields.any(|(field, said)| field == name && said.trim() == value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uuid_of_a_domain_is_that_of_its_root_element() {
        let uuid = |xml: &str| uuid_of("web1", xml).unwrap();
        let found = Some("3f0c".to_owned());
        assert_eq!(uuid("<domain>\n  <uuid>\n3f0c </uuid>\n</domain>"), found);
        // Each was taken for the domain's own by a search of the text.
        for other in [
            "<!-- <uuid>0000</uuid> -->",
            "<description><![CDATA[<uuid>0000</uuid>]]></description>",
            "<metadata><x:vm xmlns:x='x:y'><uuid>0000</uuid></x:vm></metadata>",
        ] {
            let xml = format!("<domain type='kvm'>{other}<uuid>3f0c</uuid></domain>");
            assert_eq!(uuid(&xml), found, "{xml}");
        }
        assert_eq!(uuid("<domain/>"), None);
        let error = uuid_of("web1", "<domain>").unwrap_err().to_string();
        assert!(error.contains("XML of domain web1"), "{error}");
    }

    #[test]
    fn what_libvirt_prints_is_read() {
        let info = Info("Name:           web1\nPersistent:     yes\nManaged save:   no".into());
        assert!(info.says("Persistent", "yes"));
        assert!(!info.says("Managed save", "yes") && !info.says("Autostart", "enable"));
    }
}
