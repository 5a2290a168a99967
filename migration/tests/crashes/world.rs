//! Two hosts and a lender that consist of their state only. A process can end before or
//! after each of its calls: completed effects remain, its own state is lost.

mod host;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    sync::LazyLock,
    time::Duration,
};

use farside_daemon::VmName;
use farside_lender_protocol::{Fence, Fences, Generation, Secret};
use farside_migration::{
    Arrival, Configuration, Error, ErrorKind, Journal, MovedMarker, Mover, Peer, Plan, Reply,
    Request, Result, Runner, Store, Strategy, resume_here,
};

use crate::live_world::Still;

pub use host::FakeHost;

pub static VM: LazyLock<VmName> = LazyLock::new(|| "web1".parse().unwrap());
/// The text of the VM's configuration.
pub const CONFIGURATION: &str = "of the VM";

pub const DEVICES: [&str; 2] = ["disk0", "disk1"];

/// The point at which the process ends: at the given number of calls from its start, before
/// or after the effect of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    pub call: usize,
    pub after: bool,
}

#[derive(Default)]
struct Device {
    /// Host and lease generation.
    lease: Option<(&'static str, Generation)>,
    generation: u64,
    fence: Option<Fence>,
    /// Of the fence.
    secret: Option<Secret>,
}

#[derive(Default)]
struct Files {
    journal: Option<String>,
    configuration: Option<Configuration>,
    fences: Fences,
    marker: Option<MovedMarker>,
    running: bool,
    /// A QEMU whose guest does not run.
    still: Option<Still>,
}

/// The state that survives when all processes end.
#[derive(Default)]
pub struct World {
    devices: RefCell<BTreeMap<&'static str, Device>>,
    hosts: RefCell<BTreeMap<&'static str, Files>>,
    calls: Cell<usize>,
    crash: Cell<Option<Crash>>,
    dead: Cell<bool>,
    /// How often the guest was booted.
    boots: Cell<usize>,
    pub guest_deaf: Cell<bool>,
    pub broken_transfer: Cell<bool>,
    pub broken_start: Cell<Option<&'static str>>,
    pub unreachable: Cell<Option<&'static str>>,
    /// The host whose check reports a part of the VM that would not move.
    pub stays_behind: Cell<Option<&'static str>>,
    /// The host on which the VM's name is in use.
    pub name_taken: Cell<Option<&'static str>>,
}

impl World {
    /// The VM runs on host `a`, and `b` is empty.
    pub fn new() -> Rc<Self> {
        let world = Rc::new(Self::default());
        for device in DEVICES {
            world.devices.borrow_mut().insert(device, Device::default());
        }
        for host in ["a", "b"] {
            world.hosts.borrow_mut().insert(host, Files::default());
        }
        let configuration = Configuration {
            toml: CONFIGURATION.into(),
            ..Default::default()
        };
        world.files("a", |files| files.configuration = Some(configuration));
        world.host("a").start(&VM).unwrap();
        world.calls.set(0);
        world
    }

    pub fn host(self: &Rc<Self>, name: &'static str) -> FakeHost {
        FakeHost {
            name,
            world: Rc::clone(self),
        }
    }

    fn files<T>(&self, host: &str, change: impl FnOnce(&mut Files) -> T) -> T {
        change(self.hosts.borrow_mut().get_mut(host).unwrap())
    }

    /// Starts new processes, which end at `crash`.
    pub fn restart(&self, crash: Option<Crash>) {
        self.calls.set(0);
        self.crash.set(crash);
        self.dead.set(false);
    }

    /// The number of calls that the processes made.
    pub fn calls(&self) -> usize {
        self.calls.get()
    }

    /// Whether the processes ended early.
    pub fn crashed(&self) -> bool {
        self.dead.get()
    }

    /// One call with an effect on the world.
    fn call<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<T> {
        let died = || Err(Error::new(ErrorKind::Host, "the process has ended"));
        if self.dead.get() {
            return died();
        }
        let number = self.calls.get();
        self.calls.set(number + 1);
        let here = self.crash.get().filter(|crash| crash.call == number);
        if let Some(Crash { after: false, .. }) = here {
            self.dead.set(true);
            return died();
        }
        let result = what();
        self.check();
        if here.is_some() {
            self.dead.set(true);
            return died();
        }
        result
    }

    /// Invariants that hold at every moment.
    fn check(&self) {
        let hosts = self.hosts.borrow();
        let running: Vec<_> = hosts
            .iter()
            .filter(|(_, files)| files.running)
            .map(|(name, _)| *name)
            .collect();
        assert!(running.len() <= 1, "the VM runs on {running:?}");
        for (id, device) in &*self.devices.borrow() {
            if let Some((holder, generation)) = device.lease {
                assert_eq!(running, [holder], "{id} is borrowed by a dead VM");
                if let Some(fence) = &device.fence {
                    assert!(
                        generation > fence.generation,
                        "{id} is held by whom it was taken from"
                    );
                }
            }
        }
    }

    /// The host on which the VM runs.
    pub fn running(&self) -> Option<&'static str> {
        let hosts = self.hosts.borrow();
        let mut running = hosts.iter().filter(|(_, files)| files.running);
        running.next().map(|(name, _)| *name)
    }

    /// The holder of each device.
    pub fn holders(&self) -> Vec<Option<&'static str>> {
        let devices = self.devices.borrow();
        let leases = devices.values();
        leases
            .map(|device| device.lease.map(|(host, _)| host))
            .collect()
    }

    /// Whether the lender would lend a free device to the VM on `host` in its current
    /// state.
    pub fn may_borrow(&self, host: &str, id: &str) -> bool {
        let devices = self.devices.borrow();
        self.may_borrow_of(host, id, &devices[id])
    }

    /// Whether a free device is refused to other VMs.
    pub fn reserved(&self, id: &str) -> bool {
        let devices = self.devices.borrow();
        devices[id]
            .fence
            .as_ref()
            .is_some_and(|fence| fence.reserved)
    }

    /// Changes the text of each journal.
    pub fn rewrite_journals(&self, change: impl Fn(&str) -> String) {
        for files in self.hosts.borrow_mut().values_mut() {
            files.journal = files.journal.as_deref().map(&change);
        }
    }

    pub fn is_configured(&self, host: &str) -> bool {
        self.files(host, |files| files.configuration.is_some())
    }

    /// How often the guest was booted.
    pub fn boots(&self) -> usize {
        self.boots.get()
    }

    /// A host loses power: its processes end.
    pub fn power_off(self: &Rc<Self>, host: &'static str) {
        self.host(host).put_qemu(false, None);
        self.return_all(host);
    }

    fn stop(&self, host: &'static str) {
        self.files(host, |files| files.running = false);
        self.return_all(host);
    }

    fn return_all(&self, host: &'static str) {
        for device in self.devices.borrow_mut().values_mut() {
            if device.lease.is_some_and(|(holder, _)| holder == host) {
                device.lease = None;
            }
        }
    }
}

impl World {
    fn may_borrow_of(&self, host: &str, id: &str, device: &Device) -> bool {
        let shown = self.files(host, |files| files.fences.of(id));
        let Some(fence) = &device.fence else {
            return true;
        };
        shown.is_some_and(|shown| {
            shown.generation >= fence.generation && shown.secret == device.secret
        })
    }
}

/// The connection to the other host, with the encoding of the wire format.
pub struct Line(pub FakeHost);

impl Peer for Line {
    fn ask(&mut self, request: Request) -> Result<Reply> {
        let world = &self.0.world;
        if world.unreachable.get() == Some(self.0.name) {
            return Err(Error::lost("no route to host"));
        }
        let text = serde_json::to_string(&request).unwrap();
        // Either the request or the reply may be lost.
        world.call(|| Ok(()))?;
        let reply = Arrival::new(&self.0).answer(serde_json::from_str(&text).unwrap());
        world.call(|| Ok(()))?;
        let text = serde_json::to_string(&reply).unwrap();
        Ok(serde_json::from_str(&text).unwrap())
    }
}

/// `farside migrate web1 --to`.
pub fn migrate(world: &Rc<World>, from: &'static str, to: &'static str) -> Result<()> {
    migrate_as(world, from, to, Strategy::Cold)
}

/// The same, with `--live`.
pub fn migrate_live(world: &Rc<World>, from: &'static str, to: &'static str) -> Result<()> {
    let address = [127, 0, 0, 1].into();
    migrate_as(world, from, to, Strategy::Live { address })
}

fn migrate_as(
    world: &Rc<World>,
    from: &'static str,
    to: &'static str,
    strategy: Strategy,
) -> Result<()> {
    let (here, mut there) = (world.host(from), Line(world.host(to)));
    let plan = Plan {
        vm: VM.clone(),
        to: to.into(),
        shell: None,
        shutdown_timeout: Duration::from_secs(1),
        strategy,
    };
    let manifest = plan.manifest(&here)?;
    Mover::new(&here, &mut there, manifest).forward()
}

/// `farside migration resume web1` on `on`; true if there was nothing to do.
pub fn resume(
    world: &Rc<World>,
    on: &'static str,
    peer: &'static str,
    back: bool,
    lost: bool,
) -> Result<bool> {
    let (here, mut there) = (world.host(on), Line(world.host(peer)));
    let Some(journal) = here.journal(&VM)?.filter(Journal::is_open) else {
        return Ok(true);
    };
    if journal.role == farside_migration::Role::Destination {
        return resume_here(&here, journal, lost).map(|()| false);
    }
    let mut mover = Mover::new(&here, &mut there, journal).lost(lost);
    match back || mover.journal().step.is_back() {
        true => mover.back()?,
        false => mover.forward()?,
    }
    Ok(false)
}
