//! The environment of a measurement.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The environment of a measurement. Unknown values are omitted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Environment {
    /// When it began, RFC 3339.
    pub date: String,
    /// Model of the CPUs.
    pub cpu: String,
    /// Number of CPUs.
    pub cores: u32,
    /// RAM, bytes.
    pub memory: u64,
    /// As `uname -r` prints it on the host.
    pub host_kernel: Option<String>,
    /// As `uname -r` prints it in the guest.
    pub guest_kernel: Option<String>,
    /// QEMU's version.
    pub qemu: Option<String>,
    /// The accelerator: `kvm` or `tcg`.
    pub accel: Option<String>,
    /// farside's version, or the commit it was built from.
    pub farside: String,
    /// Whether the sources had changes that no commit has.
    pub changed_sources: bool,
    /// The options: repeats, seconds, image paths.
    pub options: BTreeMap<String, String>,
}

impl Environment {
    /// Named properties that make figures comparable: a difference in one may explain a difference
    /// in figures.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let known = |fact: &Option<String>| fact.clone().unwrap_or_else(|| "unknown".into());
        vec![
            ("CPUs", format!("{} × {}", self.cores, self.cpu)),
            ("RAM", crate::Unit::Bytes.show(self.memory as f64)),
            ("host kernel", known(&self.host_kernel)),
            ("guest kernel", known(&self.guest_kernel)),
            ("QEMU", known(&self.qemu)),
            ("accelerator", known(&self.accel)),
        ]
    }

    /// The measured version, marked if it has uncommitted changes.
    pub fn sources(&self) -> String {
        match self.changed_sources {
            true => format!("{} with changes", self.farside),
            false => self.farside.clone(),
        }
    }
}

/// Model and number of CPUs, from `/proc/cpuinfo`.
pub fn processors(cpuinfo: &str) -> (String, u32) {
    let values = |wanted: &'static str| {
        cpuinfo.lines().filter_map(move |line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == wanted).then(|| value.trim().to_owned())
        })
    };
    let model = values("model name").next();
    let model = model.unwrap_or_else(|| "unknown".into());
    (model, values("processor").count() as u32)
}

/// Bytes of RAM, from `/proc/meminfo`; 0 if missing.
pub fn memory(meminfo: &str) -> u64 {
    let kib = meminfo.lines().find_map(|line| {
        let kib = line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?;
        kib.parse::<u64>().ok()
    });
    kib.unwrap_or(0) << 10
}

/// Of this machine and this moment; [`farside`](Environment::farside), kernels
/// and the like are the caller's to fill in.
pub fn here() -> Environment {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let (cpu, cores) = processors(&read("/proc/cpuinfo"));
    let now = jiff::Timestamp::now();
    let seconds = now.round(jiff::Unit::Second).unwrap_or(now);
    Environment {
        date: seconds.to_string(),
        cpu,
        cores,
        memory: memory(&read("/proc/meminfo")),
        ..Environment::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_read_from_proc() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 3: GHz\n\nprocessor\t: 1\n\
                       model name\t: Some CPU @ 3: GHz\n";
        assert_eq!(processors(cpuinfo), ("Some CPU @ 3: GHz".into(), 2));
        assert_eq!(processors(""), ("unknown".into(), 0));
        assert_eq!(
            memory("MemTotal:       24684000 kB\nMemFree: 1 kB\n"),
            24_684_000 << 10
        );
        assert_eq!(memory("nonsense"), 0);
    }

    #[test]
    fn this_machine_has_processors_and_ram() {
        let here = here();
        assert!(here.cores >= 1 && here.memory > 1 << 20, "{here:?}");
        assert!(
            here.date.ends_with('Z') && !here.date.contains('.'),
            "{here:?}"
        );
    }
}
