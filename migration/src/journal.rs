//! The manifest of a migration, which is its journal too: one file on each of the
//! two hosts, replaced as a whole before each step.

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use farside_daemon::{DeviceId, VmName, files};
use farside_lender_protocol::{Address, Described, Generation, HeldFence, Secret};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{Configuration, Error, Result, Step, Store, Strategy};

/// The version of the manifest.
pub const MANIFEST_VERSION: u32 = 3;

/// The oldest version that is still read.
const OLDEST_VERSION: u32 = 1;

/// Maximum [`Journal::shutdown_timeout`], seconds: a day.
pub const MAX_SHUTDOWN_TIMEOUT: u64 = 24 * 60 * 60;

/// Longest file that is read, bytes.
const MAX_FILE: u64 = 1 << 20;

/// The migration, and its current step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    /// The migration's id: 32 random hexadecimal digits.
    pub id: String,
    /// The VM.
    pub vm: VmName,
    /// Whose journal it is.
    pub role: Role,
    /// The present step.
    pub step: Step,
    /// The steps that were begun at this host, and when: seconds since 1970.
    pub begun: Vec<(Step, u64)>,
    /// The name of the host that the VM leaves, for messages.
    pub source: String,
    /// The destination host, as named for the remote shell.
    pub destination: String,
    /// The words of the remote shell, at the host that the VM leaves.
    pub shell: Option<String>,
    /// The VM runs when the migration begins, and is to run afterwards.
    pub was_running: bool,
    /// Time limit for the guest to power off, seconds.
    #[serde(deserialize_with = "shutdown_timeout")]
    pub shutdown_timeout: u64,
    /// The VM's configuration.
    pub configuration: Configuration,
    /// Its devices.
    pub devices: Vec<MovedDevice>,
    /// Cold or live.
    pub strategy: Strategy,
}

/// Whose journal it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The host that the VM leaves.
    Source,
    /// The destination host.
    Destination,
}

/// A device that moves with its VM: it stays where it is, and is borrowed from
/// another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MovedDevice {
    /// Its cluster-wide id.
    pub id: DeviceId,
    /// The number of its port, from which the guest's PCI address follows.
    pub port: u16,
    /// Its lender, as this host reaches it.
    pub lender: Address,
    /// The name that the lender gives itself.
    pub lender_name: String,
    /// Its description.
    pub identity: Identity,
    /// The generation of the lease when the migration began.
    pub lease: Option<Generation>,
    /// The fence of the old host.
    pub held: Option<HeldFence>,
    /// The secret of the new host's fence.
    pub secret: Option<Secret>,
    /// The fence of the new host, after the handover.
    pub fence: Option<Generation>,
    /// The secret of the old host's fence, before a handover back.
    pub back_secret: Option<Secret>,
    /// The fence of the old host, after a handover back.
    pub back: Option<Generation>,
}

impl MovedDevice {
    /// The fence of the new host.
    pub(crate) fn given(&self) -> Option<HeldFence> {
        let secret = self.secret;
        self.fence
            .map(|generation| HeldFence { generation, secret })
    }

    /// The fence of the old host, after a handover back.
    pub(crate) fn given_back(&self) -> Option<HeldFence> {
        let secret = self.back_secret;
        self.back.map(|generation| HeldFence { generation, secret })
    }
}

/// The identity of a device, which is the same at both hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// PCI vendor and device id, as `1b36:0010`.
    pub pci: String,
    /// The lender's summary: model and size. A disk may grow meanwhile.
    pub summary: String,
    /// SHA-256 of the lender's description without the summary.
    pub digest: String,
}

impl Identity {
    /// From a lender's description of a device.
    pub fn of(described: &Described) -> Self {
        let config = &described.description.config;
        let word = |at: usize| {
            let low = config.get(at).copied().unwrap_or(0xff);
            let high = config.get(at + 1).copied().unwrap_or(0xff);
            u16::from_le_bytes([low, high])
        };
        let mut all = described.clone();
        all.description.summary.clear();
        let all = serde_json::to_vec(&all).unwrap_or_default();
        Self {
            pci: format!("{:04x}:{:04x}", word(0), word(2)),
            summary: described.description.summary.clone(),
            digest: hex(&Sha256::digest(all)),
        }
    }

    /// Whether it is the same device.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.pci, &self.digest) == (&other.pci, &other.digest)
    }
}

impl Journal {
    /// Records the step that begins now. [`crate::Store::write_journal`] makes it durable.
    pub fn begin(&mut self, step: Step) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        self.begun
            .push((step, now.map_or(0, |since| since.as_secs())));
        self.step = step;
        if step.is_end() {
            // The host that the VM stays on has them with its fences; the other one has no right to
            // the devices any more.
            for device in &mut self.devices {
                device.held = device.held.map(|held| HeldFence {
                    secret: None,
                    ..held
                });
                (device.secret, device.back_secret) = (None, None);
            }
        }
    }

    /// A secret of the device at `index`, chosen and made durable before it is first used: a
    /// handover that is repeated has to present the same.
    pub(crate) fn chosen_secret(
        &mut self,
        store: &(impl Store + ?Sized),
        index: usize,
        secret: fn(&mut MovedDevice) -> &mut Option<Secret>,
    ) -> Result<Secret> {
        let mut journal = self.clone();
        let slot = secret(&mut journal.devices[index]);
        if let Some(secret) = *slot {
            return Ok(secret);
        }
        let chosen = Secret::random()?;
        *slot = Some(chosen);
        store.write_journal(&journal)?;
        *self = journal;
        Ok(chosen)
    }

    /// Whether a step was ever begun at this host.
    pub fn has_begun(&self, step: Step) -> bool {
        self.begun.iter().any(|(begun, _)| *begun == step)
    }

    /// The migration is neither done nor undone.
    pub fn is_open(&self) -> bool {
        !self.step.is_end()
    }

    /// The text of the file.
    pub fn to_text(&self) -> Result<String> {
        let body = serde_json::to_value(self).map_err(|error| Error::journal(error.to_string()))?;
        let file = json!({
            "manifest": MANIFEST_VERSION,
            "checksum": checksum(&body),
            "migration": body,
        });
        let text = serde_json::to_string_pretty(&file)
            .map_err(|error| Error::journal(error.to_string()))?;
        Ok(text + "\n")
    }

    /// Parses the text of a file. Refuses an unknown version or a wrong checksum.
    pub fn from_text(text: &str) -> Result<Self> {
        let mut file: Value = serde_json::from_str(text)
            .map_err(|error| Error::journal(format!("it is cut off or was changed: {error}")))?;
        let read = u64::from(OLDEST_VERSION)..=u64::from(MANIFEST_VERSION);
        let version = match file["manifest"].as_u64() {
            Some(version) if read.contains(&version) => version,
            Some(version) => {
                return Err(Error::new(
                    crate::ErrorKind::Version,
                    format!(
                        "it is a manifest of version {version}, and this farside reads {OLDEST_VERSION} to {MANIFEST_VERSION}: use the farside that wrote it"
                    ),
                ));
            }
            None => return Err(Error::journal("it is not a manifest of a migration")),
        };
        let mut body = file["migration"].take();
        let (written, found) = (file["checksum"].as_str(), checksum(&body));
        if written != Some(&found) {
            return Err(Error::journal(format!(
                "it was changed: its checksum is {}, that of its text {found}",
                written.unwrap_or("nothing")
            )));
        }
        if version < 2 {
            upgrade_to_2(&mut body);
        }
        if version < 3 {
            upgrade_to_3(&mut body);
        }
        serde_json::from_value(body).map_err(|error| Error::journal(error.to_string()))
    }

    /// Reads a file; none if it is missing.
    pub fn load(path: &Path) -> Result<Option<Self>> {
        let Some(bytes) = files::read_bounded(path, MAX_FILE)? else {
            return Ok(None);
        };
        Self::from_text(&String::from_utf8_lossy(&bytes))
            .map(Some)
            .map_err(|error| error.at(&path.display().to_string()))
    }

    /// Replaces the file.
    pub fn save(&self, path: &Path) -> Result<()> {
        Ok(files::replace_secret(path, self.to_text()?.as_bytes())?)
    }
}

fn shutdown_timeout<'de, D>(from: D) -> std::result::Result<u64, D::Error>
where
    D: Deserializer<'de>,
{
    match u64::deserialize(from)? {
        seconds if seconds <= MAX_SHUTDOWN_TIMEOUT => Ok(seconds),
        seconds => Err(D::Error::custom(format!(
            "shutdown_timeout is {seconds} s, at most {MAX_SHUTDOWN_TIMEOUT} s are allowed"
        ))),
    }
}

/// Turns a manifest of version 2 into one of version 3: fences had no secrets.
fn upgrade_to_3(body: &mut Value) {
    let devices = body.get_mut("devices").and_then(Value::as_array_mut);
    for device in devices.into_iter().flatten() {
        if let Some(held) = device.get_mut("held")
            && held.is_number()
        {
            *held = json!({ "generation": held.take(), "secret": null });
        }
    }
}

/// Turns a manifest of version 1 into one of version 2: a live migration had a field `live`, and
/// the configuration was called `description`.
fn upgrade_to_2(body: &mut Value) {
    let Some(fields) = body.as_object_mut() else {
        return;
    };
    let strategy = match fields.remove("live") {
        None | Some(Value::Null) => json!("cold"),
        Some(live) => json!({ "live": live }),
    };
    fields.insert("strategy".into(), strategy);
    if let Some(configuration) = fields.remove("description") {
        fields.insert("configuration".into(), configuration);
    }
}

fn checksum(body: &Value) -> String {
    hex(&Sha256::digest(body.to_string()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use serde_json::json;

    use super::*;
    use crate::ErrorKind;

    fn journal() -> Journal {
        let mut journal = Journal {
            id: "0123456789abcdef0123456789abcdef".into(),
            vm: "web1".parse().unwrap(),
            role: Role::Source,
            step: Step::Prepare,
            begun: Vec::new(),
            source: "rack1-a".into(),
            destination: "rack1-b".into(),
            shell: Some("ssh -p 22".into()),
            was_running: true,
            shutdown_timeout: 120,
            configuration: Configuration {
                toml: "devices = [\"disk0\"]\n".into(),
                ..Default::default()
            },
            devices: vec![MovedDevice {
                id: "disk0".parse().unwrap(),
                port: 0,
                lender: "tcp:rack1-c:7410".parse().unwrap(),
                lender_name: "rack1-c".into(),
                identity: Identity {
                    pci: "1b36:0010".into(),
                    summary: "NVMe".into(),
                    digest: "00".into(),
                },
                lease: Some(Generation(u64::MAX)),
                held: Some(HeldFence {
                    generation: Generation(5),
                    secret: Some(Secret::random().unwrap()),
                }),
                secret: Some(Secret::random().unwrap()),
                fence: Some(Generation(7)),
                back_secret: None,
                back: None,
            }],
            strategy: Strategy::Cold,
        };
        journal.begin(Step::HandOver);
        journal
    }

    #[test]
    fn a_disk_that_has_grown_is_the_same_device() {
        let identity = |vectors: u16, summary: &str| {
            let description = json!({
                "config": [0x36, 0x1b, 0x10, 0], "bars": [null, null, null, null, null, null], "intx": true,
                "msi_vectors": 0, "msix_vectors": vectors, "summary": summary,
            });
            let described = json!({ "description": description, "bars": "Borrower", "state": 0 });
            Identity::of(&serde_json::from_value(described).unwrap())
        };
        let then = identity(65, "farside NVMe, 1 GiB");
        assert!(then.is_same(&identity(65, "farside NVMe, 2 GiB")));
        assert!(!then.is_same(&identity(2, "farside NVMe, 1 GiB")));
    }

    #[test]
    fn a_time_limit_that_no_clock_can_add_is_refused() {
        let mut journal = journal();
        for (seconds, good) in [(MAX_SHUTDOWN_TIMEOUT, true), (u64::MAX, false)] {
            journal.shutdown_timeout = seconds;
            let read = Journal::from_text(&journal.to_text().unwrap());
            assert_eq!(read.is_ok(), good, "{read:?}");
            if let Err(error) = read {
                let error = error.to_string();
                assert!(error.contains("at most 86400 s"), "{error}");
            }
        }
    }

    #[test]
    fn what_is_saved_is_loaded_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("migrations/web1.json");
        assert_eq!(Journal::load(&path).unwrap(), None);
        let saved = journal();
        saved.save(&path).unwrap();
        let again = Journal::load(&path).unwrap().unwrap();
        assert_eq!(again, saved);
        assert!(again.has_begun(Step::HandOver) && !again.has_begun(Step::Start));
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_journal_keeps_no_secret_after_the_end() {
        for end in [Step::Done, Step::Undone] {
            let mut journal = journal();
            journal.devices[0].back_secret = Some(Secret::random().unwrap());
            let secrets =
                |journal: &Journal| journal.to_text().unwrap().matches("secret\": \"").count();
            assert_eq!(secrets(&journal), 3);
            journal.begin(end);
            assert_eq!(secrets(&journal), 0);
            let held = journal.devices[0].held.unwrap();
            assert_eq!(held.generation, Generation(5));
        }
    }

    #[test]
    fn a_journal_of_version_2_has_fences_without_secrets() {
        let mut body = serde_json::to_value(journal()).unwrap();
        let device = body["devices"][0].as_object_mut().unwrap();
        device.insert("held".into(), json!(5));
        device.remove("secret");
        device.remove("back_secret");
        let file = json!({ "manifest": 2, "checksum": checksum(&body), "migration": body });
        let device = &Journal::from_text(&file.to_string()).unwrap().devices[0];
        let held = HeldFence {
            generation: Generation(5),
            secret: None,
        };
        assert_eq!((device.held, device.secret), (Some(held), None));
        assert_eq!(device.fence, Some(Generation(7)));
    }

    #[test]
    fn a_former_journal_of_another_shape_is_refused() {
        for body in [
            json!("x"),
            json!([]),
            json!({ "devices": ["disk0", 5, null] }),
        ] {
            let file = json!({ "manifest": 1, "checksum": checksum(&body), "migration": body });
            let error = Journal::from_text(&file.to_string()).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Journal, "{error}");
        }
    }

    /// `version-1.json` was written by a farside of that version.
    #[test]
    fn a_journal_of_the_former_version_is_read_and_saved_as_one_of_this() {
        let cold = include_str!("journal/version-1.json");
        let live = include_str!("journal/version-1-live.json");
        let address = [10, 0, 0, 2].into();
        for (text, strategy, step) in [
            (cold, Strategy::Cold, Step::Prepare),
            (live, Strategy::Live { address }, Step::Start),
        ] {
            let journal = Journal::from_text(text).unwrap();
            assert_eq!((&journal.strategy, journal.step), (&strategy, step));
            assert_eq!(journal.configuration.toml, "devices = [\"disk0\"]\n");
            let now = journal.to_text().unwrap();
            assert!(now.contains("\"manifest\": 3"), "{now}");
            assert_eq!(Journal::from_text(&now), Ok(journal));
            // Its checksum is verified, too.
            let changed = text.replace("rack1-b", "rack1-x");
            let error = Journal::from_text(&changed).unwrap_err().to_string();
            assert!(error.contains("was changed"), "{error}");
        }
    }

    #[test]
    fn a_text_that_was_cut_off_anywhere_is_refused() {
        let text = journal().to_text().unwrap();
        // The last two are the end of the line and the closing brace.
        for end in 0..text.len() - 1 {
            if text.is_char_boundary(end) {
                let error = Journal::from_text(&text[..end]).unwrap_err();
                assert_eq!(error.kind, ErrorKind::Journal, "{error}");
            }
        }
    }

    #[test]
    fn a_text_that_was_changed_is_refused() {
        let text = journal().to_text().unwrap();
        for (old, new) in [
            ("rack1-b", "rack1-x"),
            ("\"fence\": 7", "\"fence\": 8"),
            ("hand-over", "start"),
            ("\"was_running\": true", "\"was_running\": false"),
        ] {
            let changed = text.replace(old, new);
            assert_ne!(changed, text, "{old}");
            let error = Journal::from_text(&changed).unwrap_err().to_string();
            assert!(error.contains("was changed"), "{error}");
        }
    }

    #[test]
    fn a_manifest_of_another_version_is_refused_by_its_number() {
        let text = journal().to_text().unwrap();
        let other = text.replace("\"manifest\": 3", "\"manifest\": 4");
        let error = Journal::from_text(&other).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Version);
        let error = error.to_string();
        for words in ["version 4", "use the farside that wrote it"] {
            assert!(error.contains(words), "{error}");
        }
        assert!(Journal::from_text("{}").is_err());
    }
}
