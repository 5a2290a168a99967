use farside_lender_protocol::BarOwner;

use super::*;

/// A handover between the record of a lease and its message would be answered, no lease being
/// there, and the lease would begin behind the fence.
#[test]
fn a_handover_does_not_overtake_the_lease_that_it_ends() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("lender.json");
    let registry = Registry::new(FenceBook::load(Some(file)).unwrap());
    let (id, vm) = ("disk0".parse().unwrap(), "a".parse().unwrap());
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
    let access = Access::new(&id, 0, Vec::new());
    registry
        .add(&id, "model", described, queue, access, Generation(1))
        .unwrap();

    let grant = registry.grant(&id, &vm, None).unwrap();
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
