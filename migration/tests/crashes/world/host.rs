//! A simulated host, with the interface that the crate under test uses.

use std::{rc::Rc, time::Duration};

use farside_daemon::{DeviceId, VmName};
use farside_lender_protocol::{Address, Fence, Fences, Generation, HeldFence, Secret};
use farside_migration::{
    Configuration, Error, ErrorKind, FoundDevice, HostFacts, Identity, Journal, Lenders,
    MovedMarker, Result, RunState, Runner, Store, check::Facts,
};

use super::{CONFIGURATION, Files, VM, World};
use crate::live_world::Still;

/// The name of the lender.
const LENDER: &str = "lender";

/// A host of the world.
pub struct FakeHost {
    pub name: &'static str,
    pub(super) world: Rc<World>,
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

    /// Sets both, as a part of a call.
    pub fn put_qemu(&self, running: bool, still: Option<Still>) {
        self.world.files(self.name, |files| {
            (files.running, files.still) = (running, still);
        });
    }

    /// Sets both.
    pub fn set_qemu(&self, running: bool, still: Option<Still>) -> Result<()> {
        self.once(|| {
            self.put_qemu(running, still);
            Ok(())
        })
    }

    /// Checks that only methods of the strategy recorded in the journal are called.
    pub fn assert_strategy(&self, live: bool) {
        if let Some(open) = self.journal(&VM).unwrap().filter(Journal::is_open) {
            assert_eq!(open.strategy.is_live(), live, "{:?}", open.step);
        }
    }

    /// One call.
    pub fn once<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<T> {
        self.world.call(what)
    }

    /// The port at which its QEMU waits for a guest.
    pub fn port(&self) -> u16 {
        if self.name == "a" { 1 } else { 2 }
    }

    /// The host whose QEMU waits at `port`.
    pub fn at_port(&self, port: u16) -> FakeHost {
        self.world.host(if port == 1 { "a" } else { "b" })
    }

    pub fn holds_nothing(&self) -> bool {
        !self.world.holders().contains(&Some(self.name))
    }

    pub fn is_deaf(&self) -> bool {
        self.world.guest_deaf.get()
    }

    pub fn return_devices(&self) {
        self.world.return_all(self.name);
    }

    pub fn breaks_transfers(&self) -> bool {
        self.world.broken_transfer.get()
    }

    /// Boots the VM.
    pub fn boot(&self) -> Result<()> {
        self.once(|| {
            self.borrow_all()?;
            self.world.boots.set(self.world.boots.get() + 1);
            self.put_qemu(true, None);
            Ok(())
        })
    }

    /// Hot-plugs all missing devices into a running guest.
    pub fn borrow_missing(&self) -> Result<()> {
        match self.holds_nothing() {
            true => self.once(|| self.borrow_all()),
            false => Ok(()),
        }
    }

    /// Borrows all devices or none, as a VM does at its start.
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
            device.generation += 1;
            device.lease = Some((self.name, Generation(device.generation)));
            if let Some(fence) = &mut device.fence {
                fence.reserved = false;
            }
        }
        Ok(())
    }
}

impl Store for FakeHost {
    fn journal(&self, _vm: &VmName) -> Result<Option<Journal>> {
        let text = self.world.files(self.name, |files| files.journal.clone());
        text.map(|text| Journal::from_text(&text)).transpose()
    }

    fn write_journal(&self, journal: &Journal) -> Result<()> {
        let text = journal.to_text()?;
        self.files(|files| files.journal = Some(text))
    }

    fn configuration(&self, _vm: &VmName) -> Result<Option<Configuration>> {
        Ok(self
            .world
            .files(self.name, |files| files.configuration.clone()))
    }

    fn install(&self, _vm: &VmName, configuration: &Configuration) -> Result<()> {
        let configuration = configuration.clone();
        self.files(|files| files.configuration = Some(configuration))
    }

    fn uninstall(&self, _vm: &VmName) -> Result<()> {
        let (running, still) = self.qemu();
        assert!(!running && still.is_none(), "QEMU still runs");
        self.files(|files| files.configuration = None)
    }

    fn fences(&self, _vm: &VmName) -> Result<Fences> {
        Ok(self.world.files(self.name, |files| files.fences.clone()))
    }

    fn write_fences(&self, _vm: &VmName, fences: &Fences) -> Result<()> {
        let fences = fences.clone();
        self.files(|files| files.fences = fences)
    }

    fn moved_marker(&self, _vm: &VmName) -> Result<Option<MovedMarker>> {
        Ok(self.world.files(self.name, |files| files.marker.clone()))
    }

    fn write_moved_marker(&self, _vm: &VmName, marker: Option<&MovedMarker>) -> Result<()> {
        let marker = marker.cloned();
        self.files(|files| files.marker = marker)
    }
}

impl Runner for FakeHost {
    fn run_state(&self, _vm: &VmName) -> Result<RunState> {
        Ok(match self.qemu() {
            (true, _) => RunState::Running,
            (false, None) => RunState::Stopped,
            (false, Some(still)) => RunState::Other(format!("it is {still:?}")),
        })
    }

    fn start(&self, vm: &VmName) -> Result<()> {
        // As `farside serve` does.
        farside_migration::may_run(self, vm)?;
        let described = self.configuration(vm)?.is_some();
        assert!(described, "nothing to start from on {}", self.name);
        self.assert_strategy(false);
        match self.qemu().0 {
            true => self.once(|| Ok(())),
            false => self.boot(),
        }
    }

    fn stop(&self, _vm: &VmName, _limit: Duration) -> Result<()> {
        self.assert_strategy(false);
        self.world.call(|| {
            if self.world.guest_deaf.get() {
                return Err(Error::new(ErrorKind::Vm, "the guest does not power off"));
            }
            self.world.stop(self.name);
            Ok(())
        })
    }
}

impl HostFacts for FakeHost {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn check_movable(&self, vm: &VmName, _: &Configuration, _: bool) -> Result<()> {
        match self.world.stays_behind.get() == Some(self.name) {
            true => Err(Error::refused(format!("VM {vm} has snapshots"))),
            false => Ok(()),
        }
    }

    fn check_name_free(&self, vm: &VmName, _: &Configuration) -> Result<()> {
        match self.world.name_taken.get() == Some(self.name) {
            true => Err(Error::refused(format!("there is a domain {vm}"))),
            false => Ok(()),
        }
    }

    fn missing(&self, _vm: &VmName, configuration: &Configuration) -> Result<Vec<Error>> {
        let missing = (configuration.toml != CONFIGURATION).then(|| Error::refused("no such VM"));
        Ok(missing.into_iter().collect())
    }

    fn facts(&self, vm: &VmName, _: &Configuration, _: bool) -> Result<Facts> {
        Err(Error::refused(format!("VM {vm} runs by nothing")))
    }
}

impl Lenders for FakeHost {
    fn find_each(&self, vm: &VmName, _: &Configuration) -> Result<Vec<Result<FoundDevice>>> {
        let devices = self.world.devices.borrow();
        let found = devices
            .iter()
            .zip(0..)
            .map(|((id, device), port)| FoundDevice {
                id: id.parse().unwrap(),
                port,
                lender: "tcp:lender:1".parse().unwrap(),
                lender_name: LENDER.into(),
                identity: Identity {
                    pci: "1:1".into(),
                    summary: (*id).to_owned(),
                    digest: String::new(),
                },
                holder: device
                    .lease
                    .map(|(_, generation)| (vm.to_owned(), generation)),
                fences: device.fence.iter().cloned().collect(),
            })
            .map(Ok);
        Ok(found.collect())
    }

    fn check_windows(&self, _: &VmName, _: &Configuration, device: &FoundDevice) -> Result<()> {
        // Its windows cover all RAM.
        assert_eq!(device.lender_name, LENDER);
        Ok(())
    }

    /// The lender's rules, as in `lender/src/fences.rs` and `registry.rs`.
    fn hand_over(
        &self,
        _lender: &Address,
        id: &DeviceId,
        vm: &VmName,
        migration: &str,
        supersedes: Option<HeldFence>,
        secret: Secret,
    ) -> Result<Generation> {
        self.world.call(|| {
            let mut devices = self.world.devices.borrow_mut();
            let device = devices.get_mut(id.as_str()).unwrap();
            if let Some(fence) = &device.fence {
                if fence.migration == migration {
                    assert_eq!(device.secret, Some(secret), "{migration} was repeated");
                    return Ok(fence.generation);
                }
                if supersedes.is_none_or(|held| held.generation < fence.generation) {
                    return Err(Error::new(ErrorKind::Lender, "handed over since"));
                }
                // A network peer needs it; only after the loss of a host nobody has it.
                let proof = supersedes.and_then(|held| held.secret);
                assert!(proof.is_none() || proof == device.secret, "{migration}");
            }
            device.secret = Some(secret);
            device.generation += 1;
            let generation = Generation(device.generation);
            device.fence = Some(Fence {
                vm: vm.to_owned(),
                generation,
                migration: migration.to_owned(),
                reserved: true,
            });
            // The VM may continue, but without the device.
            let holder = device.lease.take();
            drop(devices);
            if let Some((holder, _)) = holder {
                self.world.stop(holder);
            }
            Ok(generation)
        })
    }
}
