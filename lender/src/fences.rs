//! Persistent record of the VMs that moved: the [`Fence`] of each VM and device, in one small file.
//!
//! Safe because of the order: a fence is written to the file before it is sent to a peer, and
//! before the lease of the old host ends.

use std::{collections::BTreeMap, io, path::PathBuf};

use farside_daemon::{DeviceId, RateLimit, VmName, files};
use farside_lender_protocol::{ErrorKind, Fence, Generation, MAX_FENCES, RemoteError};
use serde::{Deserialize, Serialize};

use crate::refusals::{internal, invalid};

/// The version of the file.
const VERSION: u32 = 1;

/// Maximum size of the file, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// The fences of all devices, by device id.
#[derive(Debug, Default)]
pub(crate) struct FenceBook {
    devices: BTreeMap<DeviceId, Vec<Fence>>,
    /// The file; without one, handovers are refused.
    file: Option<PathBuf>,
    /// Limits the log lines on a failed write, of which each borrow causes one.
    unwritten: RateLimit,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    devices: BTreeMap<DeviceId, Vec<Fence>>,
}

/// A tool's handover request.
#[derive(Clone, Copy)]
pub(crate) struct Claim<'a> {
    pub(crate) device: &'a DeviceId,
    pub(crate) vm: &'a VmName,
    pub(crate) migration: &'a str,
    pub(crate) supersedes: Option<Generation>,
}

impl FenceBook {
    /// Reads the file. Fails if it is unreadable, because ignoring it would lose fences.
    pub(crate) fn load(file: Option<PathBuf>) -> io::Result<Self> {
        let mut devices = BTreeMap::new();
        if let Some(path) = &file
            && let Some(bytes) = files::read_bounded(path, MAX_FILE)?
        {
            let bad = |why: String| {
                let text = format!(
                    "{}: {why}; it says which VMs were moved away and may not have their devices any more: restore it, or remove it if none was",
                    path.display()
                );
                io::Error::new(io::ErrorKind::InvalidData, text)
            };
            let kept: Kept =
                serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
            if kept.version != VERSION {
                return Err(bad(format!("version {}, not {VERSION}", kept.version)));
            }
            devices = kept.devices;
        }
        Ok(Self {
            devices,
            file,
            unwritten: RateLimit::new(),
        })
    }

    /// The fences of a device.
    pub(crate) fn of(&self, device: &DeviceId) -> &[Fence] {
        self.devices.get(device).map_or(&[], Vec::as_slice)
    }

    /// The fences of a device that fit in a message: all, unless the file has more than are allowed
    /// now.
    pub(crate) fn newest(&self, device: &DeviceId) -> &[Fence] {
        let fences = self.of(device);
        &fences[fences.len().saturating_sub(MAX_FENCES)..]
    }

    /// The largest generation of a device that was ever issued as a fence.
    pub(crate) fn largest(&self, device: &DeviceId) -> Generation {
        let generations = self.of(device).iter().map(|fence| fence.generation);
        generations.max().unwrap_or_default()
    }

    /// Checks that `vm`, which presents `shown`, may borrow the device.
    pub(crate) fn check(
        &self,
        device: &DeviceId,
        vm: &VmName,
        shown: Option<Generation>,
    ) -> Result<(), RemoteError> {
        for fence in self.of(device) {
            if fence.vm == *vm && shown.unwrap_or_default() < fence.generation {
                return Err(fence.refusal(device, shown));
            }
            if fence.vm != *vm && fence.reserved {
                return Err(fence.reservation(device));
            }
        }
        Ok(())
    }

    /// Records that `vm` has borrowed the device: ends its reservation, and restores a fence that
    /// was lost with the file.
    pub(crate) fn borrowed(&mut self, device: &DeviceId, vm: &VmName, shown: Option<Generation>) {
        let known = self.of(device).iter().find(|fence| fence.vm == *vm);
        let changed = match (known, shown) {
            (Some(known), shown) if known.reserved || shown > Some(known.generation) => Fence {
                generation: known.generation.max(shown.unwrap_or_default()),
                reserved: false,
                ..known.clone()
            },
            (None, Some(generation)) => Fence {
                vm: vm.to_owned(),
                generation,
                migration: String::new(),
                reserved: false,
            },
            _ => return,
        };
        if let Err(error) = self.put(device, changed) {
            // At worst the reservation reappears after a restart.
            if let Some(held_back) = self.unwritten.allow() {
                log::warn!("device {device}: {error}{held_back}");
            }
        }
    }

    /// The generation of an earlier handover with the same id, or `None` for a new handover.
    pub(crate) fn asked_before(
        &self,
        claim: &Claim<'_>,
    ) -> Result<Option<Generation>, RemoteError> {
        let Claim {
            device,
            vm,
            migration,
            supersedes,
        } = *claim;
        for fence in self.of(device) {
            if fence.vm == *vm && fence.migration == migration {
                return Ok(Some(fence.generation));
            }
            if fence.vm == *vm && fence.generation > supersedes.unwrap_or_default() {
                return Err(RemoteError {
                    kind: ErrorKind::Fenced,
                    message: format!(
                        "device {device}: VM {vm} was moved by another migration meanwhile ({}, fence {}), which migration {migration} (it knows of {}) does not follow",
                        fence.migration,
                        fence.generation,
                        supersedes.map_or("no fence".to_owned(), |generation| format!(
                            "fence {generation}"
                        )),
                    ),
                });
            }
            if fence.vm != *vm && fence.reserved {
                return Err(fence.reservation(device));
            }
        }
        Ok(None)
    }

    /// Records a handover persistently.
    pub(crate) fn hand_over(
        &mut self,
        claim: &Claim<'_>,
        generation: Generation,
    ) -> Result<(), RemoteError> {
        if self.file.is_none() {
            return Err(invalid(
                "this lender has nowhere to remember a handover: name a file with `state` in lender.toml, or --state".into(),
            ));
        }
        let fence = Fence {
            vm: claim.vm.to_owned(),
            generation,
            migration: claim.migration.to_owned(),
            reserved: true,
        };
        self.put(claim.device, fence)
    }

    /// Allows other VMs to borrow the device again.
    pub(crate) fn end_reservation(&mut self, device: &DeviceId) -> Result<(), RemoteError> {
        let reserved = self.of(device).iter().find(|fence| fence.reserved);
        let Some(fence) = reserved.cloned() else {
            return Ok(());
        };
        self.put(
            device,
            Fence {
                reserved: false,
                ..fence
            },
        )
    }

    /// Replaces the VM's fence, in the file first. Has no effect on error.
    fn put(&mut self, device: &DeviceId, fence: Fence) -> Result<(), RemoteError> {
        let mut devices = self.devices.clone();
        let fences = devices.entry(device.to_owned()).or_default();
        let full = fences.len() >= MAX_FENCES;
        match fences.iter_mut().find(|known| known.vm == fence.vm) {
            Some(known) => *known = fence,
            None if !full => fences.push(fence),
            None => {
                return Err(RemoteError {
                    kind: ErrorKind::Limit,
                    message: format!(
                        "device {device} has moved with {MAX_FENCES} different VMs, which is the most that a lender remembers"
                    ),
                });
            }
        }
        let Some(path) = &self.file else {
            self.devices = devices;
            return Ok(());
        };
        let kept = Kept {
            version: VERSION,
            devices,
        };
        let text = serde_json::to_vec_pretty(&kept).map_err(internal)?;
        files::replace(path, &text).map_err(internal)?;
        self.devices = kept.devices;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    static DISK0: LazyLock<DeviceId> = LazyLock::new(|| "disk0".parse().unwrap());
    static A: LazyLock<VmName> = LazyLock::new(|| "a".parse().unwrap());
    static B: LazyLock<VmName> = LazyLock::new(|| "b".parse().unwrap());

    fn claim<'a>(vm: &'a VmName, migration: &'a str, supersedes: Option<u64>) -> Claim<'a> {
        Claim {
            device: &DISK0,
            vm,
            migration,
            supersedes: supersedes.map(Generation),
        }
    }

    fn book() -> (tempfile::TempDir, FenceBook) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("lender.json");
        (directory, FenceBook::load(Some(file)).unwrap())
    }

    #[test]
    fn handovers_of_one_vm_are_one_line_of_succession() {
        let (_directory, mut book) = book();
        let first = claim(&A, "m1", None);
        assert_eq!(book.asked_before(&first).unwrap(), None);
        book.hand_over(&first, Generation(5)).unwrap();
        assert_eq!(book.asked_before(&first).unwrap(), Some(Generation(5)));
        // A handover that does not supersede the first cannot revoke its device.
        let rival = book.asked_before(&claim(&A, "m2", None)).unwrap_err();
        assert_eq!(rival.kind, ErrorKind::Fenced);
        let second = claim(&A, "m2", Some(5));
        assert_eq!(book.asked_before(&second).unwrap(), None);
        book.hand_over(&second, Generation(9)).unwrap();
        // And the first cannot be repeated.
        let late = book.asked_before(&first).unwrap_err();
        assert!(late.message.contains("m2"), "{late}");
    }

    #[test]
    fn a_reserved_device_is_nobody_elses_until_it_was_borrowed_or_given_up() {
        let (_directory, mut book) = book();
        book.hand_over(&claim(&A, "m1", None), Generation(5))
            .unwrap();
        let others = book.check(&DISK0, &B, None).unwrap_err();
        assert_eq!(others.kind, ErrorKind::Busy);
        assert!(others.message.contains("migration release disk0"));
        for old in [None, Some(Generation(4))] {
            let refused = book.check(&DISK0, &A, old).unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Fenced, "{refused}");
        }
        book.check(&DISK0, &A, Some(Generation(5))).unwrap();
        book.borrowed(&DISK0, &A, Some(Generation(5)));
        book.check(&DISK0, &B, None).unwrap();
        assert!(book.check(&DISK0, &A, None).is_err(), "the fence stays");
        book.hand_over(&claim(&A, "m2", Some(5)), Generation(6))
            .unwrap();
        book.end_reservation(&DISK0).unwrap();
        book.check(&DISK0, &B, None).unwrap();
    }

    #[test]
    fn fences_outlive_the_lender_and_a_broken_file_stops_it() {
        let (directory, mut book) = book();
        book.hand_over(&claim(&A, "m1", None), Generation(5))
            .unwrap();
        let file = directory.path().join("lender.json");
        let again = FenceBook::load(Some(file.clone())).unwrap();
        assert_eq!(again.of(&DISK0), book.of(&DISK0));
        assert_eq!(again.largest(&DISK0), Generation(5));
        let text = std::fs::read_to_string(&file).unwrap();
        for bad in [
            &text[..text.len() - 3],
            &text.replace("\"version\": 1", "\"version\": 2"),
        ] {
            std::fs::write(&file, bad).unwrap();
            let error = FenceBook::load(Some(file.clone())).unwrap_err();
            assert!(error.to_string().contains("restore it"), "{error}");
        }
    }

    #[test]
    fn a_lender_without_a_file_hands_nothing_over() {
        let mut book = FenceBook::load(None).unwrap();
        let error = book
            .hand_over(&claim(&A, "m1", None), Generation(5))
            .unwrap_err();
        assert!(error.message.contains("--state"), "{error}");
        assert!(book.of(&DISK0).is_empty());
        // It adopts the fence that the VM presents.
        book.borrowed(&DISK0, &A, Some(Generation(7)));
        assert!(book.check(&DISK0, &A, Some(Generation(6))).is_err());
    }

    #[test]
    fn a_handover_that_cannot_be_written_down_has_not_happened() {
        let directory = tempfile::tempdir().unwrap();
        // A directory at the file's path.
        let file = directory.path().join("lender.json");
        std::fs::create_dir_all(file.join("x")).unwrap();
        let mut book = FenceBook {
            file: Some(file),
            ..FenceBook::default()
        };
        assert!(
            book.hand_over(&claim(&A, "m1", None), Generation(5))
                .is_err()
        );
        book.check(&DISK0, &A, None).unwrap();
        book.check(&DISK0, &B, None).unwrap();
    }
}
