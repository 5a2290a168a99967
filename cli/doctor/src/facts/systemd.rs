//! systemd: farside's units, as files, and the generator's output for the descriptions.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::VmFacts;
use crate::host::{Host, files, read};

/// Where units are, those of the administrator first.
const DIRECTORIES: [&str; 4] = [
    "etc/systemd/system",
    "run/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
];

/// systemd's default limit of locked memory for its services, since version 252.
const DEFAULT_MEMLOCK: u64 = 8 << 20;

const LENDER: &str = "farside-lender.service";

/// A limit of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    None,
    Of(u64),
}

/// A unit's file with its drop-ins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) path: PathBuf,
    pub(crate) memlock: Limit,
    /// `User=`.
    pub(crate) user: String,
    /// Whether it requires the unit that binds physical functions.
    pub(crate) binds: bool,
}

/// farside's units.
#[derive(Clone, Debug, Default)]
pub(crate) struct Systemd {
    /// Whether systemd runs this host.
    pub(crate) runs: bool,
    /// `farside@.service`.
    pub(crate) backend: Option<Unit>,
    /// `farside-lender.service`.
    pub(crate) lender: Option<Unit>,
    /// The lender's drop-in for physical devices of a former farside, which makes it root.
    pub(crate) former_drop_in: Option<PathBuf>,
    /// For each VM whose socket unit has a part from the generator, where that
    /// has systemd listen.
    pub(crate) generated: BTreeMap<String, BTreeSet<String>>,
    /// farside's units that have failed, according to systemd.
    pub(crate) failed: Vec<String>,
}

pub(crate) fn look(host: &Host, vms: &[VmFacts]) -> Systemd {
    let runs = host.system("run/systemd/system").exists();
    let generated = vms.iter().filter_map(|vm| {
        let directory = format!("run/systemd/generator/farside@{}.socket.d", vm.name);
        let parts = host.files(&directory, ".conf");
        let texts: Vec<_> = parts.iter().filter_map(|part| read(part)).collect();
        let listens = texts.iter().flat_map(|text| values(text, "ListenStream"));
        let listens = listens.map(|path| path.replace("%%", "%")).collect();
        (!parts.is_empty()).then(|| (vm.name.clone(), listens))
    });
    Systemd {
        runs,
        backend: unit(host, "farside@.service"),
        lender: unit(host, LENDER),
        former_drop_in: drop_ins(host, LENDER).into_iter().find(|path| {
            let text = read(path).unwrap_or_default();
            values(&text, "CapabilityBoundingSet").any(|set| set.contains("CAP_SYS_ADMIN"))
        }),
        generated: generated.collect(),
        failed: if runs { failed(host) } else { Vec::new() },
    }
}

fn unit(host: &Host, name: &str) -> Option<Unit> {
    let files_of = DIRECTORIES.map(|directory| host.system(directory).join(name));
    let path = files_of.into_iter().find(|path| path.exists())?;
    let mut text = read(&path)?;
    for drop_in in drop_ins(host, name) {
        text.push('\n');
        text += &read(&drop_in).unwrap_or_default();
    }
    let memlock = values(&text, "LimitMEMLOCK").last().and_then(limit);
    let user = values(&text, "User").last().unwrap_or("root");
    Some(Unit {
        memlock: memlock.unwrap_or(Limit::Of(DEFAULT_MEMLOCK)),
        user: user.to_owned(),
        binds: values(&text, "Requires").any(|units| units.contains("farside-vfio.service")),
        path,
    })
}

/// The drop-ins of a unit, by name, whichever directory they are in.
fn drop_ins(host: &Host, unit: &str) -> Vec<PathBuf> {
    let found = DIRECTORIES
        .map(|directory| files(&host.system(directory).join(format!("{unit}.d")), ".conf"));
    let mut found: Vec<_> = found.into_iter().flatten().collect();
    found.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
    found
}

/// The values of a key of a unit's file.
fn values<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| {
        let (name, value) = line.trim().split_once('=')?;
        (name.trim_end() == key).then_some(value.trim())
    })
}

/// The soft limit of `infinity`, `8M`, `4G:8G`.
fn limit(text: &str) -> Option<Limit> {
    let soft = text.split(':').next()?;
    match soft {
        "infinity" => Some(Limit::None),
        soft => farside_fabric::parse_size(soft).ok().map(Limit::Of),
    }
}

fn failed(host: &Host) -> Vec<String> {
    let words = [
        "list-units",
        "--state=failed",
        "--plain",
        "--no-legend",
        "--full",
        "farside*",
    ];
    let listed = host.ask(Path::new("systemctl"), &words).unwrap_or_default();
    let names = listed
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_with_their_drop_ins() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        let empty = look(&host, &[]);
        assert!(!empty.runs && empty.backend.is_none());
        for (path, text) in [
            (
                "usr/lib/systemd/system/farside@.service",
                "[Service]\nUser=farside\n# LimitMEMLOCK=1\n",
            ),
            (
                "usr/lib/systemd/system/farside-lender.service",
                "[Service]\nUser=farside\nLimitMEMLOCK=infinity\n",
            ),
            (
                "etc/systemd/system/farside-lender.service.d/vfio.conf",
                "[Unit]\nRequires=farside-vfio.service\n[Service]\nUser=root\nLimitMEMLOCK = 4G:8G\n",
            ),
            (
                "run/systemd/generator/farside@web1.socket.d/10.conf",
                "[Socket]\nListenStream=/run/farside/vm/web1/a%%b.sock\nSocketMode=0660\n",
            ),
        ] {
            let path = host.system(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let vm = |name: &str| VmFacts {
            name: name.into(),
            path: PathBuf::new(),
            config: Err(String::new()),
            running: false,
        };
        let units = look(&host, &[vm("web1"), vm("web2")]);
        let backend = units.backend.unwrap();
        assert_eq!(
            (backend.memlock, backend.user.as_str()),
            (Limit::Of(DEFAULT_MEMLOCK), "farside")
        );
        let lender = units.lender.unwrap();
        assert_eq!(
            (lender.memlock, lender.user.as_str()),
            (Limit::Of(4 << 30), "root")
        );
        assert!(lender.binds && !backend.binds);
        let listens = BTreeSet::from(["/run/farside/vm/web1/a%b.sock".to_owned()]);
        assert_eq!(
            units.generated,
            BTreeMap::from([("web1".to_owned(), listens)])
        );
        assert_eq!(limit("infinity"), Some(Limit::None));
        assert_eq!(units.former_drop_in, None);
        let former = host.system("etc/systemd/system/farside-lender.service.d/vfio.conf");
        let text = "[Service]\nUser=root\nCapabilityBoundingSet=CAP_DAC_OVERRIDE CAP_SYS_ADMIN\n";
        std::fs::write(&former, text).unwrap();
        assert_eq!(look(&host, &[]).former_drop_in, Some(former));
    }
}
