//! A planned migration, and its manifest.

use std::time::Duration;

use farside_daemon::VmName;
use farside_lender_protocol::{Fences, Secret};

use crate::{
    Configuration, Error, FoundDevice, Host, Journal, MovedDevice, Result, Role, RunState, Step,
    Store, Strategy,
};

/// A planned migration.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The VM.
    pub vm: VmName,
    /// The destination host, as named for the remote shell.
    pub to: String,
    /// The remote shell's words, if not the default ones.
    pub shell: Option<String>,
    /// Time limit for the guest to power off; in a live migration, to release a device.
    pub shutdown_timeout: Duration,
    /// Cold or live.
    pub strategy: Strategy,
}

impl Plan {
    /// The manifest: the VM's present configuration, state and devices. Refuses a VM
    /// that cannot be moved.
    pub fn manifest(&self, host: &dyn Host) -> Result<Journal> {
        self.may_leave(host)?;
        let configuration = self.configuration(host)?;
        let was_running = self.was_running(host, &configuration)?;
        let held = host.fences(&self.vm)?;
        let devices: Result<_> = host
            .find_all(&self.vm, &configuration)?
            .into_iter()
            .map(|found| self.moved(found, &held))
            .collect();
        self.journal(host, configuration, was_running, devices?)
    }

    /// Refuses a VM that is being moved, or has moved.
    pub(crate) fn may_leave(&self, store: &dyn Store) -> Result<()> {
        let vm = &self.vm;
        if let Some(open) = store.journal(vm)?.filter(Journal::is_open) {
            return Err(Error::refused(format!(
                "VM {vm} is moving already (migration {}, {}): `farside migration resume {vm}` goes on, and with --back it goes back",
                open.id, open.step
            )));
        }
        crate::may_run(store, vm)
    }

    pub(crate) fn configuration(&self, store: &dyn Store) -> Result<Configuration> {
        store.configuration(&self.vm)?.ok_or_else(|| {
            Error::refused(format!(
                "VM {} has no configuration on this host, so another could not start it",
                self.vm
            ))
        })
    }

    /// Whether the VM runs. Refuses a state in which the strategy cannot move it.
    pub(crate) fn was_running(
        &self,
        host: &dyn Host,
        configuration: &Configuration,
    ) -> Result<bool> {
        let vm = &self.vm;
        let running = match host.run_state(vm)? {
            RunState::Running => true,
            RunState::Stopped => false,
            RunState::Other(why) => {
                return Err(Error::refused(format!("VM {vm} cannot be moved: {why}")));
            }
        };
        host.check_movable(vm, configuration, self.strategy.is_live())?;
        if !self.strategy.is_live() {
            return Ok(running);
        }
        if !running {
            return Err(Error::refused(format!(
                "VM {vm} does not run: move it without --live"
            )));
        }
        if configuration.domain.is_some() {
            return Err(Error::refused(format!(
                "VM {vm} is run by libvirt, and --live is for VMs whose QEMU farside runs: move it without --live"
            )));
        }
        Ok(running)
    }

    /// A device, for the manifest. `held` are the VM's fences.
    pub(crate) fn moved(&self, found: FoundDevice, held: &Fences) -> Result<MovedDevice> {
        let lease = match found.holder {
            Some((holder, _)) if holder != self.vm => {
                return Err(Error::refused(format!(
                    "device {} of VM {} is borrowed by VM {holder}: stop that one first",
                    found.id, self.vm
                )));
            }
            holder => holder.map(|(_, generation)| generation),
        };
        Ok(MovedDevice {
            held: held.of(&found.id),
            id: found.id,
            port: found.port,
            lender: found.lender,
            lender_name: found.lender_name,
            identity: found.identity,
            lease,
            secret: Some(Secret::random()?),
            fence: None,
            back_secret: None,
            back: None,
        })
    }

    pub(crate) fn journal(
        &self,
        host: &dyn Host,
        configuration: Configuration,
        was_running: bool,
        devices: Vec<MovedDevice>,
    ) -> Result<Journal> {
        Ok(Journal {
            id: random_id()?,
            vm: self.vm.clone(),
            role: Role::Source,
            step: Step::Prepare,
            begun: Vec::new(),
            source: host.name(),
            destination: self.to.clone(),
            shell: self.shell.clone(),
            was_running,
            shutdown_timeout: self.shutdown_timeout.as_secs(),
            configuration,
            devices,
            strategy: self.strategy.clone(),
        })
    }
}

pub(crate) fn random_id() -> Result<String> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(std::io::Error::from)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}
