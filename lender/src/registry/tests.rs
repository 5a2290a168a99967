use farside_lender_protocol::BarOwner;

use super::*;

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
    let (id, vm) = ("disk0".parse().unwrap(), "a".parse().unwrap());
    let requests = add(&registry, &id);

    let grant = registry.grant(&id, &vm, None, None).unwrap();
    let lease = Lease {
        connection: Channel::pair().unwrap().0,
        vm: vm.clone(),
        generation: grant.generation(),
        transport: Transport::Ntb,
        bar_memory: Vec::new(),
        state: None,
        chain: None,
    };
    let claim = Claim {
        device: &id,
        vm: &vm,
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
    let a: VmName = "a".parse().unwrap();
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

/// The name of a VM is what its borrower states: the user counts, too.
#[test]
fn functions_of_a_group_are_lent_to_one_vm_of_one_user() {
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
    let vm = |name: &str| -> VmName { name.parse().unwrap() };
    let begin = |id, name, user| {
        let grant = registry.grant(id, &vm(name), user, None)?;
        Ok::<_, RemoteError>(grant.generation())
    };
    let generation = begin(gpu, "web1", Some(1000)).unwrap();
    for (name, user) in [("web2", Some(1000)), ("web1", Some(1001)), ("web1", None)] {
        let error = begin(audio, name, user).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy);
        let words = ["device audio", "IOMMU group 17", "gpu", "VM web1"];
        let named = words.iter().all(|word| error.message.contains(word));
        assert!(named, "{name} of {user:?}: {error}");
    }
    begin(disk, "web2", Some(1001)).unwrap();
    begin(audio, "web1", Some(1000)).unwrap();
    let error = registry.remove(audio).unwrap_err();
    assert!(error.message.contains("lent to VM web1"), "{error}");
    // Until the last one is returned.
    registry.release(gpu, generation, Release::Over(Revocation::Released));
    begin(gpu, "web2", Some(1000)).unwrap_err();
    let generation = begin(gpu, "web1", Some(1000)).unwrap();
    registry.release(gpu, generation, Release::Over(Revocation::Released));
    let error = registry.remove(gpu).unwrap_err();
    assert!(error.message.contains("remove all of them"), "{error}");
}

/// A mapping of a BAR, which nobody has unmapped, outlives the lease of the function that has it.
#[test]
fn a_function_that_another_one_may_reach_is_not_lent_to_another_vm() {
    let registry = Registry::new(FenceBook::default());
    let ids: [DeviceId; 3] = ["nic", "gpu", "disk0"].map(|id| id.parse().unwrap());
    let [nic, gpu, disk] = &ids;
    let _requests = [
        add_of(&registry, nic, FUNCTION),
        add_of(&registry, gpu, FUNCTION),
        add(&registry, disk),
    ];
    let begin = |id, name: &str, user| {
        let grant = registry.grant(id, &name.parse().unwrap(), Some(user), None)?;
        Ok::<_, RemoteError>(grant.generation())
    };
    let give_back = |id: &DeviceId, generation| {
        registry.release(id, generation, Release::Over(Revocation::Released));
    };
    let of_nic = begin(nic, "web1", 1).unwrap();
    give_back(gpu, begin(gpu, "web1", 1).unwrap());
    give_back(disk, begin(disk, "web1", 1).unwrap());
    for (name, user) in [("web2", 1), ("web1", 2)] {
        let error = begin(gpu, name, user).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Busy);
        let words = ["device gpu", "by nic", "VM web1"];
        assert!(
            words.iter().all(|word| error.message.contains(word)),
            "{error}"
        );
    }
    // A model reaches nothing without its process. The VM itself has it again.
    begin(disk, "web2", 1).unwrap();
    give_back(gpu, begin(gpu, "web1", 1).unwrap());
    give_back(nic, of_nic);
    begin(gpu, "web2", 1).unwrap();
    // Moved to another host, a VM is another user's.
    let of_nic = begin(nic, "db", 1).unwrap();
    give_back(nic, of_nic);
    begin(nic, "db", 2).unwrap();
}
