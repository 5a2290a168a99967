//! Fences: which incarnation of a VM may borrow a device.
//!
//! A VM that moves to another host takes its devices along by a *handover*
//! ([`Request::Handover`](crate::Request::Handover)): the lender ends the lease,
//! and from then on refuses the VM unless it shows an epoch that is at least as
//! large as that of the handover, its *fence*. Only the host that the VM moved
//! to has it, in a file ([`Fences`]). So a backend that was left behind on the old
//! host cannot take the device back, whatever it does.

use std::{collections::BTreeMap, io, path::Path};

use farside_daemon::files;
use serde::{Deserialize, Serialize};

use crate::{Epoch, ErrorKind, RemoteError};

/// Most VMs that a lender keeps a fence of, for one device.
pub const MAX_FENCES: usize = 1024;

/// Longest file of fences that is read, bytes.
const MAX_FILE: u64 = 1 << 20;

/// A lender's record of the last handover of a device from one host of a VM to
/// another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    /// The VM.
    pub vm: String,
    /// The least epoch that the VM has to show to borrow the device.
    pub epoch: Epoch,
    /// The id of the migration that asked for it; empty when the lender only
    /// learned the epoch from the VM.
    pub migration: String,
    /// Nobody else may borrow the device, until the VM has, or somebody ends
    /// this.
    pub reserved: bool,
}

impl Fence {
    /// What the VM is told when it shows `shown`.
    pub fn refusal(&self, device: &str, shown: Option<Epoch>) -> RemoteError {
        let shown = match shown {
            Some(epoch) => format!("fence {epoch}"),
            None => "no fence".to_owned(),
        };
        RemoteError {
            kind: ErrorKind::Fenced,
            message: format!(
                "device {device}: VM {} was moved to another host (migration {}, fence {}), and this one shows {shown}: start it where it is now, or take it back with `farside migration claim {}` once it runs nowhere else",
                self.vm, self.migration, self.epoch, self.vm
            ),
        }
    }

    /// What another VM is told while the device is reserved.
    pub fn reservation(&self, device: &str) -> RemoteError {
        RemoteError {
            kind: ErrorKind::Busy,
            message: format!(
                "device {device} is reserved for VM {}, which is moving to another host (migration {}): finish that with `farside migration resume {}`, or give the device up with `farside migration release {device}`",
                self.vm, self.migration, self.vm
            ),
        }
    }
}

/// The fences of one VM on the host where it runs: device id and epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fences(pub BTreeMap<String, Epoch>);

impl Fences {
    /// Reads a file; none are in one that is missing.
    pub fn load(path: &Path) -> io::Result<Self> {
        let Some(bytes) = files::read_bounded(path, MAX_FILE)? else {
            return Ok(Self::default());
        };
        serde_json::from_slice(&bytes).map_err(|error| {
            let text = format!("{} is no file of fences: {error}", path.display());
            io::Error::new(io::ErrorKind::InvalidData, text)
        })
    }

    /// Writes a file, so that it outlives a crash of the host.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        text.push(b'\n');
        files::replace(path, &text)
    }

    /// The fence of a device.
    pub fn of(&self, device: &str) -> Option<Epoch> {
        self.0.get(device).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_loaded_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/fences.json");
        assert_eq!(Fences::load(&path).unwrap(), Fences::default());
        let fences = Fences([("disk0".to_owned(), Epoch(7))].into());
        fences.save(&path).unwrap();
        assert_eq!(Fences::load(&path).unwrap(), fences);
        assert_eq!(fences.of("disk0"), Some(Epoch(7)));
        std::fs::write(&path, "{\"disk0\":").unwrap();
        let error = Fences::load(&path).unwrap_err().to_string();
        assert!(error.contains("fences.json"), "{error}");
    }
}
