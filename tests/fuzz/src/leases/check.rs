//! The invariants, by the lender's own lists before and after each step.

use std::collections::BTreeMap;

use farside_daemon::VmName;
use farside_lender_protocol::{Availability, Fence, Generation, HeldFence, Revocation, Secret};

use super::host::{is_operator, may};
use crate::registry::Release;

/// A device in the lender's list, as an operator sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shown {
    /// VM and generation.
    pub holder: Option<(VmName, Generation)>,
    /// By VM.
    pub fences: BTreeMap<VmName, Fence>,
    /// None if the lender does not lend the device.
    pub availability: Option<Availability>,
}

/// The step that may have changed a device's record.
#[derive(Clone, Debug)]
pub enum Cause {
    /// Neither request nor device.
    Nothing,
    Borrow {
        host: usize,
        vm: VmName,
        shown: Option<HeldFence>,
    },
    Handover {
        host: usize,
        vm: VmName,
        supersedes: Option<HeldFence>,
        secret: Secret,
    },
    EndReservation {
        host: usize,
        secret: Option<Secret>,
    },
    /// The end of a lease.
    Release(Generation, Release),
    Revoke,
    SetAvailable(bool),
    /// Its generations are larger.
    Add(Generation),
    Remove,
}

/// The history of one device, across restarts of the lender.
#[derive(Default)]
pub struct Ledger {
    before: Shown,
    /// The largest generation of a lease or fence.
    pub issued: Generation,
    /// The secrets of fences.
    secrets: BTreeMap<(VmName, Generation), Option<Secret>>,
    /// The largest fence whose handover was answered.
    pub answered: Generation,
    /// The answer to a revocation of a device that is not lent.
    revoked: Option<Revocation>,
    /// The fences of the device while it is removed.
    kept: BTreeMap<VmName, Fence>,
}

impl Ledger {
    pub fn new() -> Self {
        Self {
            before: Shown {
                availability: Some(Availability::Available),
                ..Shown::default()
            },
            ..Self::default()
        }
    }

    /// Before the step.
    pub fn is_available(&self) -> bool {
        self.before.availability == Some(Availability::Available)
    }

    /// Before the step.
    pub fn holder(&self) -> Option<&(VmName, Generation)> {
        self.before.holder.as_ref()
    }

    /// Checks the answer to a revocation, before that of the step, of a device that may be `kept`.
    pub fn check_revocation(&mut self, answer: Revocation, kept: bool) {
        if kept {
            self.revoked = Some(Revocation::Ended);
        }
        let expected = match self.before.holder {
            Some(_) => Revocation::Pending,
            None => self.revoked.unwrap_or(Revocation::NotLent),
        };
        assert_eq!(answer, expected);
    }

    /// The device as the lender adds it, at its start or later.
    fn added(&mut self) -> Shown {
        self.revoked = None;
        let fences = match self.before.availability {
            Some(_) => self.before.fences.clone(),
            None => std::mem::take(&mut self.kept),
        };
        Shown {
            holder: None,
            fences,
            availability: Some(Availability::Available),
        }
    }

    /// The fence of a VM with its secret, as the host knows it that the VM was moved to.
    pub fn rightful(&self, vm: &VmName) -> Option<HeldFence> {
        self.before.fences.get(vm).map(|fence| HeldFence {
            generation: fence.generation,
            secret: self.secret(fence),
        })
    }

    pub fn secrets(&self) -> impl Iterator<Item = Secret> + '_ {
        self.secrets.values().flatten().copied()
    }

    fn secret(&self, fence: &Fence) -> Option<Secret> {
        let key = (fence.vm.clone(), fence.generation);
        self.secrets.get(&key).copied().flatten()
    }

    /// The lender has ended, and the one that starts has read its file.
    pub fn check_restart(&mut self, now: Shown) {
        self.before = self.added();
        assert_eq!(now, self.before, "the restarted lender has other records");
    }

    /// Checks a step of device `device`.
    pub fn check(&mut self, device: usize, now: Shown, cause: Cause) {
        let before = std::mem::take(&mut self.before);
        let changed = now != before;
        match cause {
            _ if !changed => {}
            Cause::Borrow { host, vm, shown } => {
                self.check_borrow(device, &before, &now, (host, &vm, shown));
            }
            Cause::Handover {
                host,
                vm,
                supersedes,
                secret,
            } => {
                self.check_handover(device, &before, &now, (host, &vm, supersedes));
                let fence = &now.fences[&vm];
                let key = (vm, fence.generation);
                self.secrets.insert(key, Some(secret));
                self.issued = fence.generation;
            }
            Cause::EndReservation { host, secret } => {
                let reserved = before.fences.iter().find(|(_, fence)| fence.reserved);
                let (vm, fence) = reserved.expect("a reservation that can end");
                let proof = self.secret(fence);
                assert!(
                    is_operator(host) || secret.is_some() && secret == proof,
                    "a reservation ended without proof"
                );
                let mut expected = before.clone();
                let fence = expected.fences.get_mut(vm).expect("it was there");
                fence.reserved = false;
                assert_eq!(now, expected, "more than the reservation has ended");
            }
            Cause::Release(generation, how) => {
                let revoked = before.availability == Some(Availability::Revoking);
                let mut expected = Shown {
                    holder: None,
                    ..before.clone()
                };
                if revoked {
                    self.revoked = Some(match how {
                        Release::Over(how) => how,
                        Release::Cut => Revocation::Released,
                    });
                    expected.availability = Some(Availability::Unavailable);
                }
                assert_eq!(
                    before.holder.as_ref().map(|(_, held)| *held),
                    Some(generation)
                );
                assert_eq!(now, expected, "more than the lease has ended");
            }
            Cause::Revoke => {
                let expected = Shown {
                    availability: Some(match before.holder {
                        Some(_) => Availability::Revoking,
                        None => Availability::Unavailable,
                    }),
                    ..before.clone()
                };
                assert_eq!(now, expected, "more than a revocation has begun");
            }
            Cause::SetAvailable(available) => {
                let revoking = before.availability == Some(Availability::Revoking);
                assert!(!revoking, "a revocation undone");
                if available {
                    self.revoked = None;
                }
                let expected = Shown {
                    availability: Some(match available {
                        true => Availability::Available,
                        false => Availability::Unavailable,
                    }),
                    ..before.clone()
                };
                assert_eq!(now, expected);
            }
            Cause::Add(generation) => {
                assert_eq!(before.availability, None, "added twice");
                self.before = before.clone();
                assert_eq!(now, self.added(), "fences changed by adding the device");
                self.issued = generation;
            }
            Cause::Remove => {
                assert_eq!(before.holder, None, "removed while it is lent");
                assert_eq!(now, Shown::default());
                self.kept.clone_from(&before.fences);
            }
            Cause::Nothing => panic!("{before:?} has become {now:?} without a request"),
        }
        self.before = now;
    }

    fn check_borrow(
        &mut self,
        device: usize,
        before: &Shown,
        now: &Shown,
        (host, vm, shown): (usize, &VmName, Option<HeldFence>),
    ) {
        assert!(may(host, device, Some(vm)), "no rule lends it");
        assert_eq!(before.holder, None, "a second holder");
        let available = Some(Availability::Available);
        assert_eq!([before.availability, now.availability], [available; 2]);
        let (holder, generation) = now
            .holder
            .clone()
            .expect("a borrow that changes only fences");
        assert_eq!(holder, *vm, "another VM holds it");
        assert!(generation > self.issued, "a generation was issued again");
        self.issued = generation;
        let others = before.fences.iter().filter(|(other, _)| *other != vm);
        for (_, fence) in others {
            assert!(!fence.reserved, "it was reserved for another VM");
        }
        let known = before.fences.get(vm);
        if let Some(fence) = known {
            let shown = shown.expect("a fenced VM has come in without its fence");
            let proof = self.secret(fence);
            assert!(shown.generation >= fence.generation, "with an older fence");
            let proven = proof.is_some() && shown.secret == proof;
            assert!(proven, "without the secret");
        }
        // The fence stays, no longer reserved.
        let mut expected = before.fences.clone();
        if let Some(fence) = expected.get_mut(vm) {
            fence.reserved = false;
        }
        assert_eq!(now.fences, expected, "fences changed by a borrow");
    }

    fn check_handover(
        &self,
        device: usize,
        before: &Shown,
        now: &Shown,
        (host, vm, supersedes): (usize, &VmName, Option<HeldFence>),
    ) {
        assert!(may(host, device, Some(vm)), "no rule lends it");
        assert_eq!(now.holder, before.holder, "the registry ended a lease");
        assert_eq!(now.availability, before.availability);
        if let Some((holder, _)) = &before.holder {
            assert_eq!(holder, vm, "taken from another VM");
        }
        let fence = &now.fences[vm];
        assert!(fence.reserved, "not reserved");
        assert!(fence.generation > self.issued, "a generation issued again");
        let old = before.fences.get(vm);
        let supersedes_generation = supersedes.map_or(Generation(0), |held| held.generation);
        if let Some(old) = old {
            assert!(supersedes_generation >= old.generation, "not in line");
        }
        if !is_operator(host) {
            match old {
                None => assert_eq!(before.holder, None, "taken from a VM that runs"),
                Some(old) => {
                    let proof = self.secret(old);
                    let secret = supersedes.and_then(|held| held.secret);
                    assert!(secret.is_some() && secret == proof, "without proof");
                }
            }
        }
        let mut expected = before.fences.clone();
        for (other, fence) in &expected {
            assert!(other == vm || !fence.reserved, "reserved for another VM");
        }
        expected.insert(vm.clone(), fence.clone());
        assert_eq!(now.fences, expected, "another VM's fence has changed");
    }
}
