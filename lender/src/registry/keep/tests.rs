use std::{path::Path, sync::mpsc};

use farside_daemon::Wakeup;
use farside_lender_protocol::{
    BarOwner, Channel, Described, Generation, Identity, Revocation, Transport,
};

use super::*;
use crate::{
    access::Access,
    fences::Claim,
    registry::{Lease, MAX_REQUESTS, Release, RequestQueue},
};

const KEEP: Duration = Duration::from_secs(60);

/// A lender of `disk0` with that medium, and what its device's thread is asked.
struct Lender {
    registry: Registry,
    id: DeviceId,
    requests: mpsc::Receiver<DeviceRequest>,
}

fn medium(inode: u64) -> ImageId {
    ImageId::File {
        device: (8, 1),
        inode,
        born: (5, 0),
    }
}

fn vm(name: &str) -> VmName {
    name.parse().unwrap()
}

fn owner(name: &str) -> LeaseOwner {
    let identity = Identity::User { uid: 1, pid: 7 };
    LeaseOwner::new(vm(name), Some(&identity))
}

fn no_description() -> Described {
    let description = farside_pci::Description {
        config: vec![0; 256],
        bars: Default::default(),
        intx: false,
        msi_vectors: 0,
        msix_vectors: 0,
        summary: String::new(),
    };
    Described {
        description,
        bars: BarOwner::Borrower,
        rom: 0,
        state: 0,
    }
}

fn add(registry: &Registry, id: &DeviceId, medium: ImageId) -> mpsc::Receiver<DeviceRequest> {
    let (sender, requests) = mpsc::sync_channel(MAX_REQUESTS);
    let queue = RequestQueue::new(sender, Wakeup::new().unwrap());
    let access = Access::new(id, 0, Vec::new());
    let (described, first) = (no_description(), Generation(1));
    let added = registry.add(id, "model", described, queue, access, first);
    added.unwrap();
    registry.set_medium(id, medium);
    requests
}

impl Lender {
    fn start(file: &Path, medium: ImageId) -> Self {
        Self::start_as("disk0", file, medium)
    }

    fn start_as(id: &str, file: &Path, medium: ImageId) -> Self {
        let book = FenceBook::load(Some(file.to_owned())).unwrap();
        let registry = Registry::new(book).keeping(KEEP);
        let id: DeviceId = id.parse().unwrap();
        Self {
            requests: add(&registry, &id, medium),
            registry,
            id,
        }
    }

    /// A second device.
    fn add(&self, id: &str, medium: ImageId) {
        add(&self.registry, &id.parse().unwrap(), medium);
    }

    /// The time for which the device is kept is over.
    fn forget_kept(&self) {
        let mut records = self.registry.lock();
        records.slots.get_mut(&self.id).unwrap().kept = None;
    }

    /// Until nothing more can be posted to the device's thread.
    fn fill_queue(&self) {
        let queue = self.registry.queue(&self.id).unwrap();
        let (reply, _) = mpsc::sync_channel(1);
        while queue.post(DeviceRequest::Report(reply.clone())).is_ok() {}
    }

    fn borrow(
        &self,
        name: &str,
        resumes: Option<Secret>,
    ) -> Result<(Generation, Secret), RemoteError> {
        let going = Going {
            keep: Duration::from_secs(300),
            resumes,
        };
        let granted =
            self.registry
                .grant_medium(&self.id, (&owner(name), Transport::Network), None, going);
        granted.map(|(grant, chain)| (grant.generation(), chain.secret))
    }

    /// As a VM of this host does.
    fn borrow_here(&self, name: &str) -> Result<Generation, RemoteError> {
        let granted = self.registry.grant(&self.id, &owner(name), None);
        granted.map(|grant| grant.generation())
    }

    fn cut(&self, generation: Generation) {
        self.registry.release(&self.id, generation, Release::Cut);
    }

    fn give_back(&self, generation: Generation) {
        let over = Release::Over(Revocation::Released);
        self.registry.release(&self.id, generation, over);
    }

    fn kept(&self) -> Option<String> {
        let entry = self.registry.borrowers_entry(&self.id).unwrap();
        entry.kept.map(|kept| kept.vm.to_string())
    }

    #[track_caller]
    fn has_ended(&self, chain: Secret, why: &str) {
        let error = self.borrow("a", Some(chain)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::ChainEnded, "{error}");
        assert!(error.message.contains(why), "{error}");
    }
}

fn file() -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lender.json");
    (directory, file)
}

const SINCE: &str = "its lease has ended since";

#[test]
fn a_lease_goes_on_after_cuts_and_restarts() {
    let (_directory, file) = file();
    let mut lender = Lender::start(&file, medium(7));
    let (first, chain) = lender.borrow("a", None).unwrap();
    lender.cut(first);
    for restart in [false, true, true] {
        if restart {
            lender = Lender::start(&file, medium(7));
        }
        assert_eq!(lender.kept().as_deref(), Some("a"));
        let (next, same) = lender.borrow("a", Some(chain)).unwrap();
        assert_eq!(same, chain);
        assert_eq!(lender.kept(), None);
        lender.cut(next);
    }
}

#[test]
fn a_kept_device_is_lent_to_nobody_else() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, _) = lender.borrow("a", None).unwrap();
    lender.cut(lease);
    let error = lender.borrow("b", None).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Busy);
    // `keep-at-most` is less than the VM has asked for.
    assert!(
        error
            .message
            .contains("kept for VM a, whose connection was cut 0 s ago, for another 60 s"),
        "{error}"
    );
    assert_eq!(lender.borrow_here("b").unwrap_err().kind, ErrorKind::Busy);
    // Nor by a secret of its own.
    let guess = Secret::random().unwrap();
    assert_eq!(
        lender.borrow("b", Some(guess)).unwrap_err().kind,
        ErrorKind::ChainEnded
    );
    assert_eq!(
        lender.registry.remove(&lender.id).unwrap_err().kind,
        ErrorKind::Busy
    );
}

#[test]
fn the_vm_itself_may_begin_anew_and_does_not_go_on_then() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, chain) = lender.borrow("a", None).unwrap();
    lender.cut(lease);
    let (lease, other) = lender.borrow("a", None).unwrap();
    assert_ne!(chain, other);
    lender.cut(lease);
    lender.has_ended(chain, SINCE);
    let lease = lender.borrow_here("a").unwrap();
    lender.give_back(lease);
    lender.has_ended(other, SINCE);
}

#[test]
fn what_changes_the_medium_or_the_right_ends_a_chain_for_good() {
    type End = fn(&Lender, Generation);
    let ends: [(&str, End); 6] = [
        ("returned", |lender, lease| lender.give_back(lease)),
        ("a failed flush", |lender, lease| {
            lender.registry.end_chain(&lender.id);
            lender.cut(lease);
        }),
        ("revoked while cut", |lender, lease| {
            lender.cut(lease);
            let none = Duration::ZERO;
            let revoked = lender.registry.revoke(&lender.id, none, none).unwrap();
            assert_eq!(revoked, Revocation::Ended);
            lender.registry.set_available(&lender.id, true).unwrap();
        }),
        ("cut while revoked", |lender, lease| {
            let none = Duration::ZERO;
            lender.registry.revoke(&lender.id, none, none).unwrap();
            lender.cut(lease);
            lender.registry.set_available(&lender.id, true).unwrap();
        }),
        ("unavailable", |lender, lease| {
            lender.cut(lease);
            lender.registry.set_available(&lender.id, false).unwrap();
            lender.registry.set_available(&lender.id, true).unwrap();
        }),
        ("handed over", |lender, lease| {
            lender.cut(lease);
            let claim = Claim {
                device: &lender.id,
                vm: &vm("a"),
                migration: "m1",
                supersedes: None,
                secret: Secret::random().unwrap(),
                operator: true,
            };
            let reply = mpsc::sync_channel(1).0;
            lender.registry.hand_over(&claim, reply).unwrap();
        }),
    ];
    for (what, end) in ends {
        let (_directory, file) = file();
        let lender = Lender::start(&file, medium(7));
        let (lease, chain) = lender.borrow("a", None).unwrap();
        end(&lender, lease);
        assert_eq!(lender.kept(), None, "{what}");
        lender.has_ended(chain, SINCE);
        let lender = Lender::start(&file, medium(7));
        assert_eq!(lender.kept(), None, "{what}");
        lender.has_ended(chain, SINCE);
    }
}

/// The file says so before another VM has the device: two restarts do not bring a chain back.
#[test]
fn another_vms_lease_ends_a_chain_before_it_begins() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, chain) = lender.borrow("a", None).unwrap();
    lender.cut(lease);
    lender.forget_kept();
    lender.borrow("b", None).unwrap();
    let lender = Lender::start(&file, medium(7));
    assert_eq!(lender.kept().as_deref(), Some("b"));
    lender.has_ended(chain, SINCE);
    // A lease of this host has no chain.
    lender.forget_kept();
    lender.borrow_here("c").unwrap();
    let lender = Lender::start(&file, medium(7));
    assert_eq!(lender.kept(), None);
    lender.has_ended(chain, SINCE);
}

#[test]
fn another_medium_or_system_ends_a_chain() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, chain) = lender.borrow("a", None).unwrap();
    lender.cut(lease);
    let other = Lender::start(&file, medium(8));
    assert_eq!(other.kept(), None);
    other.has_ended(chain, "another medium");
    let text = std::fs::read_to_string(&file).unwrap();
    let kept: serde_json::Value = serde_json::from_str(&text).unwrap();
    let boot = kept["chains"]["disk0"]["boot"].as_str().unwrap();
    std::fs::write(&file, text.replace(boot, "another")).unwrap();
    let restarted = Lender::start(&file, medium(7));
    assert_eq!(restarted.kept(), None);
    restarted.has_ended(chain, "host has restarted");
}

/// What a restart of the host loses is what was not flushed to a medium.
#[test]
fn a_lease_without_a_medium_goes_on_with_another_system() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, ImageId::None);
    let (lease, chain) = lender.borrow("a", None).unwrap();
    lender.cut(lease);
    let text = std::fs::read_to_string(&file).unwrap();
    let kept: serde_json::Value = serde_json::from_str(&text).unwrap();
    let boot = kept["chains"]["disk0"]["boot"].as_str().unwrap();
    std::fs::write(&file, text.replace(boot, "another")).unwrap();
    let lender = Lender::start(&file, ImageId::None);
    assert_eq!(lender.kept().as_deref(), Some("a"));
    let (lease, same) = lender.borrow("a", Some(chain)).unwrap();
    assert_eq!(same, chain);
    lender.give_back(lease);
    lender.has_ended(chain, SINCE);
}

/// Devices that have none do not share one.
#[test]
fn a_lease_without_a_medium_ends_no_other_chain() {
    let (_directory, file) = file();
    let lender = Lender::start_as("dma0", &file, ImageId::None);
    let (lease, chain) = lender.borrow("a", None).unwrap();
    lender.cut(lease);
    // Without dma0, another one is lent; then dma0 is back.
    let other = Lender::start_as("dma1", &file, ImageId::None);
    let (lease, _) = other.borrow("b", None).unwrap();
    other.give_back(lease);
    let lender = Lender::start_as("dma0", &file, ImageId::None);
    assert_eq!(lender.borrow("a", Some(chain)).unwrap().1, chain);
}

/// Within the host, a model without a medium has no state that outlives its process.
#[test]
fn a_lease_without_a_medium_goes_on_over_the_network_alone() {
    let (_directory, file) = file();
    for (medium, within_the_host) in [(medium(7), true), (ImageId::None, false)] {
        let Lender { registry, id, .. } = Lender::start(&file, medium);
        assert!(registry.can_go_on(&id, Transport::Network));
        assert_eq!(
            registry.can_go_on(&id, Transport::SharedMemory),
            within_the_host
        );
    }
}

#[test]
fn a_half_open_lease_is_ended_for_its_own_vm_alone() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, chain) = lender.borrow("a", None).unwrap();
    assert_eq!(lender.borrow("b", None).unwrap_err().kind, ErrorKind::Busy);
    lender.has_ended(Secret::random().unwrap(), SINCE);
    assert!(lender.requests.try_recv().is_err());
    let error = lender.borrow("a", Some(chain)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Busy);
    assert!(error.message.contains("ask again"), "{error}");
    let request = lender.requests.try_recv().unwrap();
    assert!(matches!(request, DeviceRequest::Supersede { generation } if generation == lease));
    lender.cut(lease);
    lender.borrow("a", Some(chain)).unwrap();
}

#[test]
fn a_lease_whose_chain_cannot_be_written_is_not_granted() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lender.json");
    let lender = Lender::start(&file, medium(7));
    // A directory at the file's path.
    std::fs::create_dir_all(file.join("x")).unwrap();
    assert_eq!(
        lender.borrow("a", None).unwrap_err().kind,
        ErrorKind::Internal
    );
    let entry = lender.registry.borrowers_entry(&lender.id).unwrap();
    assert_eq!(entry.borrowed_by, None);
}

/// A tool repeats its request until it has the answer, which may be late.
#[test]
fn a_repeated_handover_leaves_the_chain_of_the_lease_under_it() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, old) = lender.borrow("a", None).unwrap();
    let secret = Secret::random().unwrap();
    let hand_over = || {
        let claim = Claim {
            device: &lender.id,
            vm: &vm("a"),
            migration: "m1",
            supersedes: None,
            secret,
            operator: true,
        };
        let reply = mpsc::sync_channel(1).0;
        lender.registry.hand_over(&claim, reply).unwrap()
    };
    let fence = HeldFence {
        generation: hand_over(),
        secret: Some(secret),
    };
    lender.cut(lease);
    assert_eq!(lender.kept(), None);
    let borrow = |resumes| {
        let going = Going {
            keep: KEEP,
            resumes,
        };
        let owner = owner("a");
        let granted = lender.registry.grant_medium(
            &lender.id,
            (&owner, Transport::Network),
            Some(fence),
            going,
        );
        granted.map(|(grant, chain)| (grant.generation(), chain.secret))
    };
    let (lease, chain) = borrow(None).unwrap();
    assert_eq!(hand_over(), fence.generation);
    lender.cut(lease);
    assert_eq!(hand_over(), fence.generation);
    assert_eq!(lender.kept().as_deref(), Some("a"));
    borrow(Some(chain)).unwrap();
    lender.has_ended(old, SINCE);
}

/// The kernel reports a failed write once, so that a later flush seems to succeed.
#[test]
fn a_chain_ends_even_if_the_file_cannot_be_written() {
    let (directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, chain) = lender.borrow("a", None).unwrap();
    let aside = directory.path().join("aside");
    std::fs::rename(&file, &aside).unwrap();
    std::fs::create_dir_all(file.join("x")).unwrap();
    lender.registry.end_chain(&lender.id);
    lender.cut(lease);
    assert_eq!(lender.kept(), None);
    lender.has_ended(chain, SINCE);
    // Else the chain would be back after a restart, and the medium would be another VM's.
    for refused in [
        lender.borrow_here("b"),
        lender.borrow("b", None).map(|b| b.0),
    ] {
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Internal);
    }
    std::fs::remove_dir_all(&file).unwrap();
    std::fs::rename(&aside, &file).unwrap();
    lender.borrow_here("b").unwrap();
    Lender::start(&file, medium(7)).has_ended(chain, SINCE);
}

#[test]
fn a_chain_ends_when_its_device_is_removed() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, chain) = lender.borrow("a", None).unwrap();
    lender.cut(lease);
    lender.forget_kept();
    lender.registry.remove(&lender.id).unwrap();
    let lender = Lender::start(&file, medium(7));
    assert_eq!(lender.kept(), None);
    lender.has_ended(chain, SINCE);
}

#[test]
fn a_chain_ends_when_its_medium_is_lent_as_another_device() {
    let (_directory, file) = file();
    for over_network in [false, true] {
        let lender = Lender::start(&file, medium(7));
        let (lease, chain) = lender.borrow("a", None).unwrap();
        lender.cut(lease);
        // Renamed, and there is another device of the old name.
        let renamed = Lender::start_as("disk1", &file, medium(7));
        renamed.add("disk0", medium(8));
        match over_network {
            true => renamed.borrow("b", None).map(drop).unwrap(),
            false => renamed.borrow_here("b").map(drop).unwrap(),
        }
        let lender = Lender::start(&file, medium(7));
        assert_eq!(lender.kept(), None);
        lender.has_ended(chain, SINCE);
    }
}

/// Both have it open, so neither writes.
#[test]
fn devices_that_share_a_read_only_medium_have_a_chain_each() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    lender.add("disk1", medium(7));
    let (lease, chain) = lender.borrow("a", None).unwrap();
    lender.cut(lease);
    let (id, owner) = ("disk1".parse().unwrap(), owner("b"));
    let granted = lender.registry.grant(&id, &owner, None);
    granted.map(|grant| grant.generation()).unwrap();
    assert_eq!(lender.kept().as_deref(), Some("a"));
    lender.borrow("a", Some(chain)).unwrap();
}

/// A revocation cannot be undone, whatever becomes of the lender meanwhile.
#[test]
fn a_revocation_ends_a_chain_before_the_lease_ends() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (_, chain) = lender.borrow("a", None).unwrap();
    let none = Duration::ZERO;
    let revoked = lender.registry.revoke(&lender.id, none, none).unwrap();
    assert_eq!(revoked, Revocation::Pending);
    let lender = Lender::start(&file, medium(7));
    assert_eq!(lender.kept(), None);
    lender.has_ended(chain, SINCE);
}

#[test]
fn a_device_stays_kept_if_its_thread_does_not_take_the_lease() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, chain) = lender.borrow("a", None).unwrap();
    lender.cut(lease);
    lender.fill_queue();
    for resumes in [Some(chain), None] {
        let going = Going {
            keep: KEEP,
            resumes,
        };
        let a = owner("a");
        let granted =
            lender
                .registry
                .grant_medium(&lender.id, (&a, Transport::Network), None, going);
        let (grant, chain) = granted.unwrap();
        let generation = grant.generation();
        let posted = grant.post(Lease {
            connection: Channel::pair().unwrap().0,
            owner: a,
            generation,
            transport: Transport::Network,
            bar_memory: Vec::new(),
            state: None,
            chain: Some(chain),
        });
        posted.unwrap_err();
        // A VM that has no chain yet does not go on.
        let kept = resumes.map(|_| "a".to_owned());
        assert_eq!(lender.kept(), kept);
    }
    lender.has_ended(chain, SINCE);
    lender.borrow("b", None).unwrap();
}

/// While the medium holds its thread up, a borrower may come back more often than requests fit in the
/// queue.
#[test]
fn a_borrower_that_comes_back_again_and_again_leaves_room_for_a_revocation() {
    let (_directory, file) = file();
    let lender = Lender::start(&file, medium(7));
    let (lease, chain) = lender.borrow("a", None).unwrap();
    for _ in 0..2 * MAX_REQUESTS {
        let error = lender.borrow("a", Some(chain)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy, "{error}");
    }
    assert_eq!(lender.requests.try_iter().count(), 1);
    lender.cut(lease);
    // Each lease anew.
    let _ = lender.borrow("a", Some(chain)).unwrap();
    lender.borrow("a", Some(chain)).unwrap_err();
    assert_eq!(lender.requests.try_iter().count(), 1);
}
