//! Which leases may go on, by the media that they write: known here from grants and ends of leases,
//! whatever the lender has written down.

use std::{collections::BTreeMap, time::Duration};

use farside_daemon::VmName;
use farside_devices::block::ImageId;
use farside_lender_protocol::{ErrorKind, HeldFence, RemoteError, Request, Secret};

use super::{
    host::{DEVICES, VMS},
    world::{World, name},
};
use crate::{input::Input, registry::GrantedChain};

/// Longer than a run.
const KEEP: Duration = Duration::from_secs(3600);

/// The medium with that number.
pub fn image(number: u8) -> ImageId {
    ImageId::File {
        device: (8, 1),
        inode: number.into(),
        born: (5, 0),
    }
}

/// The lease that may go on with a medium.
#[derive(Clone)]
struct Right {
    device: usize,
    vm: VmName,
    secret: Secret,
}

/// The media of a lender, and who may go on.
pub struct Chains {
    /// By medium: since that lease nobody else has had it.
    rights: BTreeMap<u8, Right>,
    /// All that were issued, with the device and VM of the lease.
    issued: Vec<(usize, VmName, Secret)>,
    /// The medium of each device.
    pub media: [u8; DEVICES.len()],
    /// The lender's `keep-at-most`: none in some runs, as if that time was over.
    pub keep: Duration,
}

impl Chains {
    pub fn new() -> Self {
        Self {
            rights: BTreeMap::new(),
            issued: Vec::new(),
            media: [0, 1],
            keep: KEEP,
        }
    }

    /// The lender starts anew: as before, with the media of its devices exchanged, or with another one.
    pub fn restart(&mut self, choice: u8) {
        match choice % 8 {
            0 | 1 => self.media.swap(0, 1),
            // One that can be written has one user.
            2 | 3 if self.media[1] != choice % 4 => self.media[0] = choice % 4,
            _ => {}
        }
        self.keep = match choice >> 6 {
            0 => Duration::ZERO,
            _ => KEEP,
        };
    }

    pub fn secrets(&self) -> impl Iterator<Item = Secret> + '_ {
        self.issued.iter().map(|(.., secret)| *secret)
    }

    fn right(&self, device: usize) -> Option<&Right> {
        let right = self.rights.get(&self.media[device]);
        right.filter(|right| right.device == device)
    }

    /// The VM for which a device that has no lease is kept.
    pub fn kept_for(&self, device: usize) -> Option<&VmName> {
        let right = self.right(device).filter(|_| !self.keep.is_zero());
        right.map(|right| &right.vm)
    }

    /// No lease of the device goes on.
    pub fn end(&mut self, device: usize) {
        self.rights.retain(|_, right| right.device != device);
    }

    /// A lease of the device, which goes on with a lease before, begins a chain or has none.
    pub fn begin(
        &mut self,
        device: usize,
        vm: &VmName,
        resumes: Option<Secret>,
        chain: Option<GrantedChain>,
    ) {
        let kept_for = self.kept_for(device);
        assert!(kept_for.is_none_or(|of| of == vm), "kept for another VM");
        if let (Some(chain), Some(resumed)) = (chain, resumes) {
            assert!(
                self.is_rightful(device, vm, resumed),
                "a lease goes on after another, or after its end"
            );
            assert!(chain.goes_on && chain.secret == resumed);
        }
        self.end(device);
        let medium = self.media[device];
        self.rights.remove(&medium);
        let Some(GrantedChain { secret, goes_on }) = chain else {
            return;
        };
        if resumes.is_none() {
            assert!(!goes_on && self.secrets().all(|known| known != secret));
            self.issued.push((device, vm.clone(), secret));
        }
        let vm = vm.clone();
        self.rights.insert(medium, Right { device, vm, secret });
    }

    /// A refusal ends a borrower's lease only if that may not go on.
    pub fn check_refusal(
        &self,
        device: usize,
        vm: &VmName,
        resumes: Option<Secret>,
        error: &RemoteError,
    ) {
        let rightful = resumes.is_some_and(|secret| self.is_rightful(device, vm, secret));
        let ended = error.kind == ErrorKind::ChainEnded;
        assert!(!rightful || !ended, "a chain is lost: {error}");
    }

    fn is_rightful(&self, device: usize, vm: &VmName, secret: Secret) -> bool {
        let right = self.right(device);
        right.is_some_and(|right| right.vm == *vm && right.secret == secret)
    }
}

impl World {
    /// Borrows a medium: anew, to go on with the VM's last lease of the device, or with any other.
    pub(super) fn medium_request(
        &self,
        device: usize,
        vm: &str,
        fence: Option<HeldFence>,
        choice: u8,
    ) -> Request {
        let issued = &self.chains.issued;
        let any = usize::from(choice >> 2).checked_rem(issued.len());
        let mut own = issued.iter().rev();
        let own = own.find(|(of, whose, _)| *of == device && *whose == *vm);
        Request::BorrowMedium {
            device: name(DEVICES[device]),
            fence,
            keep_ms: u64::MAX,
            resumes: match choice % 4 {
                0 => None,
                1 => any.map(|at| issued[at].2),
                _ => own.map(|(.., secret)| *secret),
            },
        }
    }

    /// A borrower connects anew, to go on with one of the last leases; the old connection may be open.
    pub fn come_back(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        let ago = usize::from(choice >> 1) % 4;
        let Some((device, vm, secret)) = self.chains.issued.iter().rev().nth(ago).cloned() else {
            return;
        };
        let host = usize::from(choice & 1);
        let Some(at) = self.open(host, Some(&vm)) else {
            return;
        };
        let index = VMS.iter().position(|known| vm == *known);
        let held = index.and_then(|vm| self.hosts[host].held.get(&(vm, device)));
        let request = Request::BorrowMedium {
            device: name(DEVICES[device]),
            fence: held.copied(),
            keep_ms: u64::MAX,
            resumes: Some(secret),
        };
        self.post(at, request, None);
    }

    /// A flush of a leased medium fails.
    pub fn fail_flush(&mut self, input: &mut Input<'_>) {
        let at = usize::from(input.u8()) % DEVICES.len();
        let lease = self.devices[at].lease();
        if lease.is_some_and(|lease| lease.chain.is_some()) {
            self.registry.end_chain(&name(DEVICES[at]));
            self.chains.end(at);
        }
    }
}
