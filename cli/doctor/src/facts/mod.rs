//! The facts about a host, without judgement.

mod certificates;
mod hardware;
mod lenders;
mod libvirt;
mod listeners;
mod memory;
mod qemu;
mod qemu_conf;
mod sockets;
mod systemd;
mod users;
mod vms;

use std::path::PathBuf;

use farside_error_chain::Chain;
use farside_lender::config::{Config as LenderConfig, Source};
use farside_vm_config::HostConfig;

use crate::{Host, Report, checks};

#[cfg(test)]
pub(crate) use certificates::look as look_at_certificates;
pub(crate) use certificates::{Certificates, FileMode};
pub(crate) use hardware::{Access, Hardware};
pub(crate) use lenders::{LenderFacts, Refusal};
pub(crate) use libvirt::{APPARMOR_LOCAL, Libvirt};
pub(crate) use memory::Memory;
#[cfg(test)]
pub(crate) use memory::{Mount, huge_pool};
pub(crate) use qemu::QemuFacts;
pub(crate) use qemu_conf::QemuConf;
#[cfg(test)]
pub(crate) use sockets::Socket;
pub(crate) use sockets::{Runtime, State};
pub(crate) use systemd::{Limit, Systemd, Unit};
pub(crate) use users::{User, Users};
pub(crate) use vms::VmFacts;

/// The user of the units.
pub(crate) const UNIT_USER: &str = "farside";

/// All that is known of a host.
#[derive(Debug, Default)]
pub struct Facts {
    /// The selected VM; `None` for all.
    pub(crate) only: Option<String>,
    /// VM configurations: all, or the selected one.
    pub(crate) vms: Vec<VmFacts>,
    /// `lender.toml`, where there is one.
    pub(crate) lender_file: PathBuf,
    pub(crate) lender: Option<Result<LenderConfig, String>>,
    pub(crate) users: Users,
    pub(crate) memory: Memory,
    pub(crate) runtime: Runtime,
    pub(crate) hardware: Hardware,
    pub(crate) systemd: Systemd,
    pub(crate) qemus: Vec<QemuFacts>,
    /// The code name of Debian's release, such as `trixie`.
    pub(crate) release: Option<String>,
    pub(crate) lenders: Vec<LenderFacts>,
    /// Whether etcd answers, where `host.toml` names it.
    pub(crate) etcd: Option<Result<(), String>>,
    pub(crate) certificates: Vec<Certificates>,
    /// Where it is installed.
    pub(crate) libvirt: Option<Libvirt>,
    /// Where the programs of the system are, `farside` among them.
    pub(crate) in_path: bool,
    pub(crate) program: PathBuf,
    /// Whether farside's directories are others than those of its systemd units.
    pub(crate) moved: bool,
}

/// The code name in `os-release(5)`, if that is Debian's.
fn debian(os_release: &str) -> Option<String> {
    let value = |key: &str| {
        let mut lines = os_release.lines();
        let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
        Some(value.trim().trim_matches('"').to_owned())
    };
    (value("ID")? == "debian").then(|| value("VERSION_CODENAME"))?
}

impl Facts {
    /// Looks at a host: at all its VMs, or at one.
    pub fn look(host: &Host, only: Option<&str>) -> Self {
        let mut vms = vms::look(host, only);
        let discovery = HostConfig::read().ok().and_then(|host| host.discovery());
        let etcd = discovery.as_ref().and_then(|discovery| discovery.check());
        let etcd = etcd.map(|answer| answer.map_err(|error| Chain(&error).to_string()));
        if let Some(discovery) = &discovery {
            vms::add_lenders(&mut vms, &discovery.lenders().now);
        }
        let lender_file = host.config.join("lender.toml");
        let lender = lender_file
            .exists()
            .then(|| LenderConfig::load(&lender_file).map_err(|error| Chain(&error).to_string()));
        let runtime = sockets::look(host);
        // Each of these may have to wait.
        let (qemus, lenders, libvirt, systemd) = std::thread::scope(|scope| {
            let qemus = scope.spawn(|| qemu::look(host, &vms));
            let libvirt = scope.spawn(|| libvirt::look(host, &vms));
            let systemd = scope.spawn(|| systemd::look(host, &vms));
            let lenders = lenders::look(host, &vms, lender.as_ref());
            let done = "looking does not panic";
            (
                qemus.join().expect(done),
                lenders,
                libvirt.join().expect(done),
                systemd.join().expect(done),
            )
        });
        let directories = ["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin"];
        Self {
            only: only.map(str::to_owned),
            certificates: certificates::look(host, &vms, lender.as_ref()),
            users: users::look(host),
            memory: memory::look(host),
            hardware: hardware::look(host),
            in_path: directories
                .iter()
                .any(|directory| host.system(directory).join("farside").exists()),
            program: std::env::current_exe().unwrap_or_else(|_| "farside".into()),
            moved: host.moved,
            release: host.text("etc/os-release").and_then(|text| debian(&text)),
            vms,
            lender_file,
            lender,
            runtime,
            systemd,
            qemus,
            lenders,
            etcd,
            libvirt,
        }
    }

    /// Judges the facts.
    pub fn judge(&self) -> Report {
        Report {
            findings: checks::all(self),
        }
    }

    /// The VMs whose description can be used.
    pub(crate) fn good_vms(
        &self,
    ) -> impl Iterator<Item = (&VmFacts, &farside_vm_config::VmConfig)> {
        self.vms
            .iter()
            .filter_map(|vm| Some((vm, vm.config.as_ref().ok()?)))
    }

    /// Whether this host lends physical devices, or borrows through an NTB of
    /// its own: only then does it need an IOMMU.
    pub(crate) fn uses_hardware(&self) -> bool {
        self.lends_hardware() || self.good_vms().any(|(_, config)| config.ntb)
    }

    /// Whether this host lends physical devices.
    pub(crate) fn lends_hardware(&self) -> bool {
        let Some(Ok(lender)) = &self.lender else {
            return false;
        };
        let mut devices = lender.device.iter();
        lender.ntb.is_some() || devices.any(|device| matches!(device.source, Source::Vfio(_)))
    }

    /// Whether this host's lender has a physical device of that id. Of several functions, ids have
    /// a number appended (`disk-0`).
    pub(crate) fn lends_physical(&self, id: &str) -> bool {
        let Some(Ok(lender)) = &self.lender else {
            return false;
        };
        let is = |of: &str| {
            let number = id.strip_prefix(of).and_then(|rest| rest.strip_prefix('-'));
            id == of || number.is_some_and(|number| number.parse::<u32>().is_ok())
        };
        let mut devices = lender.device.iter();
        devices.any(|device| matches!(device.source, Source::Vfio(_)) && is(&device.id))
    }

    /// Whether systemd runs lender and backends here: it manages the host, has the units, and this
    /// process runs as root.
    pub(crate) fn by_units(&self) -> bool {
        let units = &self.systemd;
        units.runs && units.backend.is_some() && !self.moved && self.users.me.uid == 0
    }
}
