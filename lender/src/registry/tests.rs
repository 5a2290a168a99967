use farside_lender_protocol::{BarOwner, Identity};

use super::*;

fn user(vm: &str, uid: u32) -> LeaseOwner {
    let identity = Identity::User { uid, pid: 7 };
    LeaseOwner::new(vm.parse().unwrap(), Some(&identity))
}

/// With TLS.
fn host(vm: &str, name: &str) -> LeaseOwner {
    let identity = Identity::Host {
        name: name.to_owned(),
        address: "10.0.0.3:4444".parse().unwrap(),
    };
    LeaseOwner::new(vm.parse().unwrap(), Some(&identity))
}

fn network(vm: &str, address: &str) -> LeaseOwner {
    let identity = Identity::Network {
        address: address.parse().unwrap(),
    };
    LeaseOwner::new(vm.parse().unwrap(), Some(&identity))
}

fn unknown(vm: &str) -> LeaseOwner {
    LeaseOwner::new(vm.parse().unwrap(), None)
}

fn add(registry: &Registry, id: &DeviceId) -> mpsc::Receiver<DeviceRequest> {
    add_of(registry, id, "model")
}

fn add_of(
    registry: &Registry,
    id: &DeviceId,
    source: &'static str,
) -> mpsc::Receiver<DeviceRequest> {
    let (sender, requests) = mpsc::sync_channel(MAX_REQUESTS);
    let description = farside_pci::Description {
        config: vec![0; 256],
        bars: Default::default(),
        intx: false,
        msi_vectors: 0,
        msix_vectors: 0,
        summary: String::new(),
    };
    let described = Described {
        description,
        bars: BarOwner::Borrower,
        rom: 0,
        state: 0,
    };
    let queue = RequestQueue::new(sender, Wakeup::new().unwrap());
    let access = Access::new(id, 0, Vec::new());
    registry
        .add(id, source, described, queue, access, Generation(1))
        .unwrap();
    requests
}

/// A handover between the record of a lease and its message would be answered, no lease being
/// there, and the lease would begin behind the fence.
#[test]
fn a_handover_does_not_overtake_the_lease_that_it_ends() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lender.json");
    let registry = Registry::new(FenceBook::load(Some(file)).unwrap());
    let (id, owner) = ("disk0".parse().unwrap(), user("a", 1));
    let requests = add(&registry, &id);

    let grant = registry.grant(&id, &owner, None).unwrap();
    let lease = Lease {
        connection: Channel::pair().unwrap().0,
        owner: owner.clone(),
        generation: grant.generation(),
        transport: Transport::Ntb,
        bar_memory: Vec::new(),
        state: None,
        chain: None,
    };
    let claim = Claim {
        device: &id,
        vm: owner.vm(),
        migration: "m1",
        supersedes: None,
        secret: Secret::random().unwrap(),
        operator: true,
    };
    let (began, begins) = mpsc::channel();
    std::thread::scope(|scope| {
        let handover = scope.spawn(|| {
            began.send(()).unwrap();
            registry.hand_over(&claim, mpsc::sync_channel(1).0)
        });
        begins.recv().unwrap();
        grant.post(lease).unwrap();
        handover.join().unwrap().unwrap();
    });
    let generations: Vec<_> = requests
        .try_iter()
        .map(|request| match request {
            DeviceRequest::Lease(lease) => ("lease", lease.generation.0),
            DeviceRequest::HandOver { fence, .. } => ("handover", fence.0),
            _ => unreachable!(),
        })
        .collect();
    assert_eq!(generations, [("lease", 2), ("handover", 3)]);
}

#[test]
fn a_function_goes_on_within_the_host_alone() {
    let registry = Registry::new(FenceBook::load(None).unwrap());
    let id: DeviceId = "nic0".parse().unwrap();
    let _requests = add(&registry, &id);
    assert!(!registry.can_go_on(&id, Transport::SharedMemory));
    registry.set_runs_on(&id);
    assert!(registry.can_go_on(&id, Transport::SharedMemory));
    for transport in [Transport::Network, Transport::Ntb] {
        assert!(!registry.can_go_on(&id, transport), "{transport:?}");
    }
}

/// It does DMA while it is kept.
#[test]
fn a_revocation_of_a_kept_function_waits_until_it_is_let_go() {
    let registry = Registry::new(FenceBook::load(None).unwrap());
    let id: DeviceId = "nic0".parse().unwrap();
    let requests = add(&registry, &id);
    registry.set_runs_on(&id);
    let a = user("a", 1);
    let going = Going {
        keep: Duration::from_secs(60),
        resumes: None,
    };
    let of = (&a, Transport::SharedMemory);
    let (grant, _) = registry.grant_medium(&id, of, None, going).unwrap();
    let generation = grant.generation();
    drop(grant);
    registry.release(&id, generation, Release::Cut);
    let revoke = |patience| registry.revoke(&id, Duration::ZERO, patience).unwrap();
    assert_eq!(revoke(Duration::ZERO), Revocation::Pending);
    assert!(matches!(requests.try_recv(), Ok(DeviceRequest::LetGo(_))));
    // It is kept no more, and may do DMA nevertheless.
    std::thread::scope(|scope| {
        let revokes = scope.spawn(|| revoke(Duration::from_secs(60)));
        let let_go = requests.recv().unwrap();
        assert!(matches!(let_go, DeviceRequest::LetGo(_)));
        assert!(!revokes.is_finished());
        drop(let_go);
        assert_eq!(revokes.join().unwrap(), Revocation::Ended);
    });
    // A chain that has ended is not kept.
    assert!(!registry.keep_running(&id, generation));
}

/// The name of a VM is what its borrower states.
#[test]
fn functions_of_a_group_are_lent_to_one_owner() {
    let registry = Registry::new(FenceBook::default());
    let ids: [DeviceId; 3] = ["gpu", "audio", "disk0"].map(|id| id.parse().unwrap());
    let [gpu, audio, disk] = &ids;
    let _requests = ids.each_ref().map(|id| add(&registry, id));
    let group = Arc::new(Group {
        number: 17,
        devices: vec![gpu.clone(), audio.clone()],
    });
    for id in [gpu, audio] {
        registry.set_group(id, Arc::clone(&group));
    }
    let begin = |id, owner: &LeaseOwner| {
        let grant = registry.grant(id, owner, None)?;
        Ok::<_, RemoteError>(grant.generation())
    };
    let release = |id: &DeviceId, generation| {
        registry.release(id, generation, Release::Over(Revocation::Released));
    };
    let mine = user("web1", 1000);
    let generation = begin(gpu, &mine).unwrap();
    for owner in [
        user("web2", 1000),
        user("web1", 1001),
        host("web1", "a"),
        network("web1", "10.0.0.3:1"),
        unknown("web1"),
    ] {
        let error = begin(audio, &owner).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy);
        let words = ["device audio", "IOMMU group 17", "gpu", "VM web1"];
        let named = words.iter().all(|word| error.message.contains(word));
        assert!(named, "{owner:?}: {error}");
    }
    begin(disk, &user("web2", 1001)).unwrap();
    begin(audio, &mine).unwrap();
    let error = registry.remove(audio).unwrap_err();
    assert!(error.message.contains("lent to VM web1"), "{error}");
    // Until the last one is returned.
    release(gpu, generation);
    begin(gpu, &user("web2", 1000)).unwrap_err();
    let generation = begin(gpu, &mine).unwrap();
    release(gpu, generation);
    let error = registry.remove(gpu).unwrap_err();
    assert!(error.message.contains("remove all of them"), "{error}");
}

#[test]
fn functions_of_a_group_are_lent_to_one_owner_beyond_the_host() {
    for (mine, others) in [
        (host("web1", "a"), host("web1", "b")),
        (network("web1", "10.0.0.3:1"), network("web1", "10.0.0.4:1")),
        // Nobody knows whether it is the same.
        (unknown("web1"), unknown("web1")),
    ] {
        let registry = Registry::new(FenceBook::default());
        let ids: [DeviceId; 2] = ["gpu", "audio"].map(|id| id.parse().unwrap());
        let [gpu, audio] = &ids;
        let _requests = ids.each_ref().map(|id| add(&registry, id));
        let group = Arc::new(Group {
            number: 17,
            devices: ids.to_vec(),
        });
        for id in [gpu, audio] {
            registry.set_group(id, Arc::clone(&group));
        }
        registry.grant(gpu, &mine, None).map(drop).unwrap();
        let error = registry.grant(audio, &others, None).map(drop).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy, "{others:?}");
        let same = registry.grant(audio, &mine, None).map(drop);
        assert_eq!(same.is_ok(), mine.is(&mine), "{mine:?}");
    }
}

/// Two functions and a model, and the requests to them.
fn reachable() -> (Registry, [DeviceId; 3], [mpsc::Receiver<DeviceRequest>; 3]) {
    let registry = Registry::new(FenceBook::default());
    let ids: [DeviceId; 3] = ["nic", "gpu", "disk0"].map(|id| id.parse().unwrap());
    let [nic, gpu, disk] = &ids;
    let requests = [
        add_of(&registry, nic, FUNCTION),
        add_of(&registry, gpu, FUNCTION),
        add(&registry, disk),
    ];
    (registry, ids, requests)
}

/// A mapping of a BAR, which nobody has unmapped, outlives the lease of the function that has it.
#[test]
fn a_function_that_another_one_may_reach_is_not_lent_to_another_owner() {
    for (mine, others) in [
        (
            user("web1", 1),
            [user("web2", 1), user("web1", 2), host("web1", "a")],
        ),
        (
            host("web1", "a"),
            [host("web2", "a"), host("web1", "b"), user("web1", 1)],
        ),
        (
            network("web1", "10.0.0.3:1"),
            [
                network("web2", "10.0.0.3:1"),
                network("web1", "10.0.0.4:1"),
                unknown("web1"),
            ],
        ),
    ] {
        let (registry, ids, _requests) = reachable();
        let [nic, gpu, disk] = &ids;
        let begin = |id, owner: &LeaseOwner| {
            let grant = registry.grant(id, owner, None)?;
            Ok::<_, RemoteError>(grant.generation())
        };
        let give_back = |id: &DeviceId, generation| {
            registry.release(id, generation, Release::Over(Revocation::Released));
        };
        let of_nic = begin(nic, &mine).unwrap();
        give_back(gpu, begin(gpu, &mine).unwrap());
        give_back(disk, begin(disk, &mine).unwrap());
        for other in &others {
            let error = begin(gpu, other).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Busy);
            let words = ["device gpu", "by nic", "VM web1"];
            assert!(
                words.iter().all(|word| error.message.contains(word)),
                "{other:?}: {error}"
            );
        }
        // A model reaches nothing without its process. The owner itself has it again.
        begin(disk, &others[0]).unwrap();
        give_back(gpu, begin(gpu, &mine).unwrap());
        give_back(nic, of_nic);
        begin(gpu, &others[1]).unwrap();
        // Moved to another host, a VM is another borrower's.
        let of_nic = begin(nic, &user("db", 1)).unwrap();
        give_back(nic, of_nic);
        begin(nic, &host("db", "a")).unwrap();
    }
}

/// As a backend with a keeper borrows functions of its host. What runs without a worker has mapped what it has.
#[test]
fn a_function_whose_lease_goes_on_is_not_lent_while_another_one_may_reach_it() {
    let (registry, [nic, gpu, _], _requests) = reachable();
    for id in [&nic, &gpu] {
        registry.set_runs_on(id);
    }
    let begin = |id, owner: &LeaseOwner, resumes| {
        let going = Going {
            keep: Duration::from_secs(60),
            resumes,
        };
        let of = (owner, Transport::SharedMemory);
        let (grant, chain) = registry.grant_medium(id, of, None, going)?;
        Ok::<_, RemoteError>((grant.generation(), chain.secret))
    };
    let (mine, other) = (user("web1", 1), user("web1", 2));
    let (of_nic, chain) = begin(&nic, &mine, None).unwrap();
    let over = Release::Over(Revocation::Released);
    registry.release(&gpu, begin(&gpu, &mine, None).unwrap().0, over);
    let refused = || {
        let error = begin(&gpu, &other, None).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy);
        assert!(error.message.contains("by nic"), "{error}");
    };
    refused();
    assert!(registry.keep_running(&nic, of_nic));
    refused();
    // Whoever resumes it, its memory is mapped as before.
    let (of_nic, _) = begin(&nic, &other, Some(chain)).unwrap();
    refused();
    assert!(registry.keep_running(&nic, of_nic));
    let (of_nic, _) = begin(&nic, &mine, Some(chain)).unwrap();
    refused();
    let (of_gpu, chain) = begin(&gpu, &mine, None).unwrap();
    // The secret is its VM's, whoever runs that now.
    registry.release(&gpu, of_gpu, Release::Cut);
    let (of_gpu, _) = begin(&gpu, &other, Some(chain)).unwrap();
    registry.release(&gpu, of_gpu, over);
    registry.release(&nic, of_nic, over);
    begin(&gpu, &mine, None).unwrap();
}

/// A lender that is started anew does not know the borrower of a lease whose connection is closed.
#[test]
fn what_a_borrower_that_is_not_known_may_reach_is_lent_to_nobody_else() {
    let (registry, [nic, gpu, _], _requests) = reachable();
    let adopt = |id, owner| registry.adopt(id, owner, Generation(2), Instant::now());
    let over = Release::Over(Revocation::Released);
    let mine = user("web1", 1);
    adopt(&nic, mine.clone());
    adopt(&gpu, unknown("web1"));
    registry.release(&gpu, Generation(2), over);
    for other in [user("web2", 1), user("web1", 2)] {
        let error = registry.grant(&gpu, &other, None).map(drop).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy, "{other:?}");
    }
    // Who has the other one may have this one.
    registry.grant(&gpu, &mine, None).map(drop).unwrap();
    registry.release(&gpu, Generation(3), over);
    // It may be anybody who reaches it from the other one.
    adopt(&nic, unknown("web1"));
    let error = registry.grant(&gpu, &mine, None).map(drop).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Busy);
    registry.release(&nic, Generation(2), over);
    registry.grant(&gpu, &mine, None).map(drop).unwrap();
}
