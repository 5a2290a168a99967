//! Two hosts and a lender that are nothing but their state. A process can end
//! before or after each call that it makes: what was done stays, what it knew is
//! gone.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    net::IpAddr,
    rc::Rc,
    time::Duration,
};

use farside_control::{Address, Epoch, Fence, Fences};
use farside_migration::{
    Arrival, Description, Error, ErrorKind, FoundDevice, Host, Identity, Journal, Mover, Peer,
    Plan, Reply, Request, Result, Role, RunState, Tombstone,
    check::Facts,
    live::{Guest, Live, Report},
    resume_here,
};

use crate::live_world::Still;

pub const VM: &str = "web1";
pub const DEVICES: [&str; 2] = ["disk0", "disk1"];

/// Where the process ends: at so many calls from its start, before or after
/// what the call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    pub call: usize,
    pub after: bool,
}

#[derive(Default)]
struct Device {
    /// Host and epoch.
    lease: Option<(&'static str, Epoch)>,
    epoch: u64,
    fence: Option<Fence>,
}

#[derive(Default)]
struct Files {
    journal: Option<String>,
    description: Option<Description>,
    fences: Fences,
    tombstone: Option<Tombstone>,
    running: bool,
    /// A QEMU of which the guest does not run.
    still: Option<Still>,
}

/// Everything that is left when all processes end.
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
}

impl World {
    /// The VM runs on host `a`, and `b` has nothing.
    pub fn new() -> Rc<Self> {
        let world = Rc::new(Self::default());
        for device in DEVICES {
            world.devices.borrow_mut().insert(device, Device::default());
        }
        for host in ["a", "b"] {
            world.hosts.borrow_mut().insert(host, Files::default());
        }
        let description = Description {
            toml: "of the VM".into(),
            domain: None,
        };
        world.files("a", |files| files.description = Some(description));
        world.host("a").start(VM).unwrap();
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

    /// New processes, which end at `crash`.
    pub fn restart(&self, crash: Option<Crash>) {
        self.calls.set(0);
        self.crash.set(crash);
        self.dead.set(false);
    }

    /// How many calls the processes made.
    pub fn calls(&self) -> usize {
        self.calls.get()
    }

    /// Whether the processes ended early.
    pub fn crashed(&self) -> bool {
        self.dead.get()
    }

    /// One call that reaches the world.
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

    /// What holds at every moment.
    fn check(&self) {
        let hosts = self.hosts.borrow();
        let running: Vec<_> = hosts
            .iter()
            .filter(|(_, files)| files.running)
            .map(|(name, _)| *name)
            .collect();
        assert!(running.len() <= 1, "the VM runs on {running:?}");
        for (id, device) in &*self.devices.borrow() {
            if let Some((holder, epoch)) = device.lease {
                assert_eq!(running, [holder], "{id} is borrowed by a dead VM");
                if let Some(fence) = &device.fence {
                    assert!(
                        epoch > fence.epoch,
                        "{id} is held by whom it was taken from"
                    );
                }
            }
        }
    }

    /// Where the VM runs.
    pub fn running(&self) -> Option<&'static str> {
        let hosts = self.hosts.borrow();
        let mut running = hosts.iter().filter(|(_, files)| files.running);
        running.next().map(|(name, _)| *name)
    }

    /// Who has each device.
    pub fn holders(&self) -> Vec<Option<&'static str>> {
        let devices = self.devices.borrow();
        let leases = devices.values();
        leases
            .map(|device| device.lease.map(|(host, _)| host))
            .collect()
    }

    /// Whether the lender would lend a device to the VM on `host` as it is, were
    /// it free.
    pub fn may_borrow(&self, host: &str, id: &str) -> bool {
        let shown = self.files(host, |files| files.fences.of(id));
        let devices = self.devices.borrow();
        match &devices[id].fence {
            Some(fence) => shown.unwrap_or_default() >= fence.epoch,
            None => true,
        }
    }

    /// Whether another VM would be lent a device, were it free.
    pub fn reserved(&self, id: &str) -> bool {
        let devices = self.devices.borrow();
        devices[id]
            .fence
            .as_ref()
            .is_some_and(|fence| fence.reserved)
    }

    pub fn is_described(&self, host: &str) -> bool {
        self.files(host, |files| files.description.is_some())
    }

    /// How often the guest was booted.
    pub fn boots(&self) -> usize {
        self.boots.get()
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

/// A host of the world.
pub struct FakeHost {
    name: &'static str,
    world: Rc<World>,
}

impl FakeHost {
    fn files<T>(&self, change: impl FnOnce(&mut Files) -> T) -> Result<T> {
        self.world.call(|| Ok(self.world.files(self.name, change)))
    }

    /// Whether the guest runs in this host's QEMU, or why not.
    pub fn qemu(&self) -> (bool, Option<Still>) {
        self.world
            .files(self.name, |files| (files.running, files.still))
    }

    /// Changes that, as a part of a call.
    pub fn put_qemu(&self, running: bool, still: Option<Still>) {
        self.world.files(self.name, |files| {
            (files.running, files.still) = (running, still);
        });
    }

    /// Changes that.
    pub fn set_qemu(&self, running: bool, still: Option<Still>) -> Result<()> {
        self.once(|| {
            self.put_qemu(running, still);
            Ok(())
        })
    }

    /// One call.
    pub fn once<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<T> {
        self.world.call(what)
    }

    pub fn other(&self, name: &str) -> FakeHost {
        self.world.host(if name == "a" { "a" } else { "b" })
    }

    pub fn holds_nothing(&self) -> bool {
        !self.world.holders().contains(&Some(self.name))
    }

    pub fn breaks_transfers(&self) -> bool {
        self.world.broken_transfer.get()
    }

    /// Starts the VM from nothing.
    pub fn boot(&self) -> Result<()> {
        self.once(|| {
            self.borrow_all()?;
            self.world.boots.set(self.world.boots.get() + 1);
            self.put_qemu(true, None);
            Ok(())
        })
    }

    /// Plugs all devices into a guest that runs.
    pub fn borrow_missing(&self) -> Result<()> {
        match self.holds_nothing() {
            true => self.once(|| self.borrow_all()),
            false => Ok(()),
        }
    }

    /// All devices or none, as a VM that starts.
    fn borrow_all(&self) -> Result<()> {
        let refused = |why: String| Err(Error::new(ErrorKind::Vm, why));
        if self.world.broken_start.get() == Some(self.name) {
            return refused("QEMU does not start".into());
        }
        let mut devices = self.world.devices.borrow_mut();
        for (id, device) in &*devices {
            if device.lease.is_some() || !self.world.may_borrow_of(self.name, id, device) {
                return refused(format!("{id} cannot be borrowed"));
            }
        }
        for device in devices.values_mut() {
            device.epoch += 1;
            device.lease = Some((self.name, Epoch(device.epoch)));
            if let Some(fence) = &mut device.fence {
                fence.reserved = false;
            }
        }
        Ok(())
    }
}

impl World {
    fn may_borrow_of(&self, host: &str, id: &str, device: &Device) -> bool {
        let shown = self.files(host, |files| files.fences.of(id));
        let fence = device.fence.as_ref().map(|fence| fence.epoch);
        shown.unwrap_or_default() >= fence.unwrap_or_default()
    }
}

impl Host for FakeHost {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn journal(&self, _vm: &str) -> Result<Option<Journal>> {
        let text = self.world.files(self.name, |files| files.journal.clone());
        text.map(|text| Journal::from_text(&text)).transpose()
    }

    fn write_journal(&self, journal: &Journal) -> Result<()> {
        let text = journal.to_text()?;
        self.files(|files| files.journal = Some(text))
    }

    fn description(&self, _vm: &str) -> Result<Option<Description>> {
        Ok(self
            .world
            .files(self.name, |files| files.description.clone()))
    }

    fn install(&self, _vm: &str, description: &Description) -> Result<()> {
        let description = description.clone();
        self.files(|files| files.description = Some(description))
    }

    fn uninstall(&self, _vm: &str) -> Result<()> {
        if self.moves_live()? == Some(Role::Source) {
            self.end()?;
        }
        self.files(|files| files.description = None)
    }

    fn fences(&self, _vm: &str) -> Result<Fences> {
        Ok(self.world.files(self.name, |files| files.fences.clone()))
    }

    fn write_fences(&self, _vm: &str, fences: &Fences) -> Result<()> {
        let fences = fences.clone();
        self.files(|files| files.fences = fences)
    }

    fn tombstone(&self, _vm: &str) -> Result<Option<Tombstone>> {
        Ok(self.world.files(self.name, |files| files.tombstone.clone()))
    }

    fn write_tombstone(&self, _vm: &str, tombstone: Option<&Tombstone>) -> Result<()> {
        let tombstone = tombstone.cloned();
        self.files(|files| files.tombstone = tombstone)
    }

    fn run_state(&self, _vm: &str) -> Result<RunState> {
        Ok(match self.qemu() {
            (true, _) => RunState::Running,
            (false, None) => RunState::Stopped,
            (false, Some(still)) => RunState::Other(format!("it is {still:?}")),
        })
    }

    fn start(&self, vm: &str) -> Result<()> {
        // As `farside serve` does.
        farside_migration::may_run(self, vm)?;
        let described = self.description(vm)?.is_some();
        assert!(described, "nothing to start from on {}", self.name);
        if let Some(role) = self.moves_live()? {
            return self.land(role);
        }
        match self.qemu().0 {
            true => self.once(|| Ok(())),
            false => self.boot(),
        }
    }

    fn stop(&self, _vm: &str, _limit: Duration) -> Result<()> {
        let live = self.moves_live()?;
        if live == Some(Role::Destination) {
            return self.end();
        }
        self.world.call(|| {
            if self.world.guest_deaf.get() {
                return Err(Error::new(ErrorKind::Vm, "the guest does not power off"));
            }
            match live {
                Some(_) => self.world.return_all(self.name),
                None => self.world.stop(self.name),
            }
            Ok(())
        })
    }

    fn devices(&self, vm: &str, _description: &Description) -> Result<Vec<FoundDevice>> {
        let devices = self.world.devices.borrow();
        let found = devices
            .iter()
            .zip(0..)
            .map(|((id, device), port)| FoundDevice {
                id: (*id).to_owned(),
                port,
                lender: "tcp:lender:1".parse().unwrap(),
                lender_name: "lender".into(),
                identity: Identity {
                    pci: "1:1".into(),
                    summary: (*id).to_owned(),
                    digest: String::new(),
                },
                holder: device.lease.map(|(_, epoch)| (vm.to_owned(), epoch)),
                fences: device.fence.iter().cloned().collect(),
            });
        Ok(found.collect())
    }

    fn missing(&self, _vm: &str, _description: &Description) -> Result<Vec<Error>> {
        Ok(Vec::new())
    }

    fn reaches(&self, _: &str, _: &Description, _: &FoundDevice) -> Result<()> {
        Ok(())
    }

    fn facts(&self, vm: &str, _: &Description, _: bool) -> Result<Facts> {
        Err(Error::refused(format!("VM {vm} runs by nothing")))
    }

    fn whereabouts(&self, _vm: &str, _call_off: bool) -> Result<Guest> {
        self.once(|| Ok(self.where_is_it()))
    }

    fn listen(&self, _vm: &str, _address: IpAddr) -> Result<String> {
        self.listen_here()
    }

    fn send(&self, _vm: &str, uri: &str) -> Result<Report> {
        self.send_to(uri)
    }

    /// The lender's rules, as `lender/src/fences.rs` and `registry.rs` have them.
    fn hand_over(
        &self,
        _lender: &Address,
        id: &str,
        vm: &str,
        migration: &str,
        supersedes: Option<Epoch>,
    ) -> Result<Epoch> {
        self.world.call(|| {
            let mut devices = self.world.devices.borrow_mut();
            let device = devices.get_mut(id).unwrap();
            if let Some(fence) = &device.fence {
                if fence.migration == migration {
                    return Ok(fence.epoch);
                }
                if fence.epoch > supersedes.unwrap_or_default() {
                    return Err(Error::new(ErrorKind::Lender, "handed over since"));
                }
            }
            device.epoch += 1;
            let epoch = Epoch(device.epoch);
            device.fence = Some(Fence {
                vm: vm.to_owned(),
                epoch,
                migration: migration.to_owned(),
                reserved: true,
            });
            // The VM may run on, but not with the device.
            let holder = device.lease.take();
            drop(devices);
            if let Some((holder, _)) = holder {
                self.world.stop(holder);
            }
            Ok(epoch)
        })
    }
}

/// The other host, through the encoding that goes over the wire.
pub struct Line(pub FakeHost);

impl Peer for Line {
    fn ask(&mut self, request: Request) -> Result<Reply> {
        let world = &self.0.world;
        if world.unreachable.get() == Some(self.0.name) {
            return Err(Error::lost("no route to host"));
        }
        let text = serde_json::to_string(&request).unwrap();
        // The request may not arrive, and the answer neither.
        world.call(|| Ok(()))?;
        let reply = Arrival::new(&self.0).answer(serde_json::from_str(&text).unwrap());
        world.call(|| Ok(()))?;
        let text = serde_json::to_string(&reply).unwrap();
        Ok(serde_json::from_str(&text).unwrap())
    }
}

/// `farside migrate web1 --to`.
pub fn migrate(world: &Rc<World>, from: &'static str, to: &'static str) -> Result<()> {
    migrate_as(world, from, to, None)
}

/// The same, with `--live`.
pub fn migrate_live(world: &Rc<World>, from: &'static str, to: &'static str) -> Result<()> {
    let address = [127, 0, 0, 1].into();
    migrate_as(world, from, to, Some(Live { address }))
}

fn migrate_as(
    world: &Rc<World>,
    from: &'static str,
    to: &'static str,
    live: Option<Live>,
) -> Result<()> {
    let (here, mut there) = (world.host(from), Line(world.host(to)));
    let plan = Plan {
        vm: VM.into(),
        to: to.into(),
        shell: None,
        shutdown_timeout: Duration::from_secs(1),
        live,
    };
    let manifest = plan.manifest(&here)?;
    Mover::new(&here, &mut there, manifest).forward()
}

/// `farside migrate --resume web1` on `on`; true when there was nothing to do.
pub fn resume(
    world: &Rc<World>,
    on: &'static str,
    peer: &'static str,
    back: bool,
    lost: bool,
) -> Result<bool> {
    let (here, mut there) = (world.host(on), Line(world.host(peer)));
    let Some(journal) = here.journal(VM)?.filter(Journal::is_open) else {
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
