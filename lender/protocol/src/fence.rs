//! Fences: they keep a VM's old host from borrowing its devices after a migration.
//!
//! A migration transfers the VM's devices by a *handover*
//! ([`Request::Handover`](crate::Request::Handover)): the lender ends the lease, and from
//! then on refuses the VM unless the request holds a generation that is at least that of the
//! handover, its *fence*, and its [`Secret`]. Only the destination host has that, in a file
//! ([`Fences`]). So no backend left running on the source host can take the device back.

use std::{collections::BTreeMap, io, path::Path};

use farside_daemon::{DeviceId, VmName, files};
use serde::{Deserialize, Serialize};

use crate::{ErrorKind, Generation, RemoteError, Secret};

/// Maximum number of fences that a lender keeps for one device: with all of them, and the counts of
/// 2048 vectors, its status fits in [`MAX_MESSAGE`](crate::MAX_MESSAGE).
pub const MAX_FENCES: usize = 192;

/// Largest accepted fence file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// A lender's record of the last handover of a device from one host of a VM to
/// another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    /// The VM.
    pub vm: VmName,
    /// The least generation with which the VM may borrow the device: `epoch` in the lender's state
    /// file, and in format 1 of the JSON documents.
    #[serde(rename = "epoch")]
    pub generation: Generation,
    /// The id of the migration that requested the handover; empty if the lender received
    /// the generation from the VM.
    pub migration: String,
    /// Reserves the device for the VM, until the VM borrows it or the reservation is
    /// ended.
    pub reserved: bool,
}

impl Fence {
    /// The refusal of a borrow by the VM with the fence `shown`.
    pub fn refusal(&self, device: &DeviceId, shown: Option<Generation>) -> RemoteError {
        let shown = match shown {
            Some(generation) => format!("fence {generation}"),
            None => "no fence".to_owned(),
        };
        RemoteError {
            kind: ErrorKind::Fenced,
            message: format!(
                "device {device}: VM {} was moved to another host (migration {}, fence {}), and this host has {shown}: start the VM on that host, or take it back with `farside migration claim {}` once it runs nowhere else",
                self.vm, self.migration, self.generation, self.vm
            ),
        }
    }

    /// The refusal for a peer that does not present the secret.
    pub fn unproven(&self, device: &DeviceId) -> RemoteError {
        RemoteError {
            kind: ErrorKind::Denied,
            message: format!(
                "device {device}: the secret of fence {} of VM {} (migration {}) was not presented, which the host that the VM moved to has in its fences.json; at the lender's UNIX socket, root and the lender's user need none (`farside migration claim {}`), nor does, at a port with TLS, a host with the option claim in `borrowers` (host=NAME,claim)",
                self.generation, self.vm, self.migration, self.vm
            ),
        }
    }

    /// Checks what this host has of the VM's fence, as far as that is possible without its secret:
    /// the lender refuses a borrow with another generation, or without a secret.
    pub fn check_held(
        &self,
        device: &DeviceId,
        held: Option<HeldFence>,
    ) -> Result<(), RemoteError> {
        match held {
            Some(held) if held.generation < self.generation => {
                Err(self.refusal(device, Some(held.generation)))
            }
            None => Err(self.refusal(device, None)),
            Some(held) if held.secret.is_none() => Err(RemoteError {
                kind: ErrorKind::Denied,
                message: format!(
                    "device {device}: VM {} was moved to this host by a farside whose fences had no secret (migration {}, fence {}), and its lender asks for one: take the device with `farside migration claim {}`, as root or the lender's user",
                    self.vm, self.migration, held.generation, self.vm
                ),
            }),
            Some(held) if held.generation > self.generation => Err(self.unproven(device)),
            Some(_) => Ok(()),
        }
    }

    /// The refusal of a borrow by another VM while the device is reserved.
    pub fn reservation(&self, device: &DeviceId) -> RemoteError {
        RemoteError {
            kind: ErrorKind::Busy,
            message: format!(
                "device {device} is reserved for VM {}, which is moving to another host (migration {}): finish the migration with `farside migration resume {}`, or end the reservation with `farside migration release {device}`",
                self.vm, self.migration, self.vm
            ),
        }
    }
}

/// A VM's fence for a device, at the host where the VM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldFence {
    /// The generation.
    pub generation: Generation,
    /// The secret, which proves that the VM was moved here. None from a farside that had none.
    pub secret: Option<Secret>,
}

/// The fences of one VM on the host where it runs, by device id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Fences(pub BTreeMap<DeviceId, HeldFence>);

/// An entry of the file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Fence(HeldFence),
    /// Of a farside without secrets.
    Generation(Generation),
}

impl From<Entry> for HeldFence {
    fn from(entry: Entry) -> Self {
        match entry {
            Entry::Fence(fence) => fence,
            Entry::Generation(generation) => Self {
                generation,
                secret: None,
            },
        }
    }
}

impl Fences {
    /// Reads a file. A missing file holds no fences.
    pub fn load(path: &Path) -> io::Result<Self> {
        let Some(bytes) = files::read_bounded(path, MAX_FILE)? else {
            return Ok(Self::default());
        };
        let entries: BTreeMap<DeviceId, Entry> =
            serde_json::from_slice(&bytes).map_err(|error| {
                let text = format!("invalid fence file {}: {error}", path.display());
                io::Error::new(io::ErrorKind::InvalidData, text)
            })?;
        let fences = entries.into_iter().map(|(id, entry)| (id, entry.into()));
        Ok(Self(fences.collect()))
    }

    /// Writes a file durably, across a crash of the host.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        text.push(b'\n');
        files::replace_secret(path, &text)
    }

    /// The fence of a device.
    pub fn of(&self, device: &str) -> Option<HeldFence> {
        self.0.get(device).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn saved_fences_are_loaded_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/fences.json");
        assert_eq!(Fences::load(&path).unwrap(), Fences::default());
        let held = HeldFence {
            generation: Generation(7),
            secret: Some(Secret::random().unwrap()),
        };
        let fences = Fences([("disk0".parse().unwrap(), held)].into());
        fences.save(&path).unwrap();
        assert_eq!(Fences::load(&path).unwrap(), fences);
        assert_eq!(fences.of("disk0"), Some(held));
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        std::fs::write(&path, "{\"disk0\":7}").unwrap();
        let former = Fences::load(&path).unwrap().of("disk0").unwrap();
        assert_eq!((former.generation, former.secret), (Generation(7), None));
        std::fs::write(&path, "{\"disk0\":").unwrap();
        let error = Fences::load(&path).unwrap_err().to_string();
        assert!(error.contains("fences.json"), "{error}");
    }

    #[test]
    fn a_fence_that_no_lender_accepts_is_refused_with_the_remedy() {
        let device = "disk0".parse().unwrap();
        let fence = Fence {
            vm: "web1".parse().unwrap(),
            generation: Generation(7),
            migration: "m1".into(),
            reserved: false,
        };
        let secret = Secret::random().unwrap();
        let check = |generation, secret| {
            let generation = Generation(generation);
            fence.check_held(&device, Some(HeldFence { generation, secret }))
        };
        check(7, Some(secret)).unwrap();
        for (held, kind, words) in [
            (
                fence.check_held(&device, None),
                ErrorKind::Fenced,
                "no fence",
            ),
            (check(6, Some(secret)), ErrorKind::Fenced, "fence 6"),
            (
                check(8, Some(secret)),
                ErrorKind::Denied,
                "the secret of fence 7",
            ),
            (check(7, None), ErrorKind::Denied, "had no secret"),
        ] {
            let error = held.unwrap_err();
            assert_eq!(error.kind, kind, "{error}");
            for words in [words, "`farside migration claim web1`"] {
                assert!(error.message.contains(words), "no {words:?} in {error}");
            }
        }
    }
}
