//! What is to be moved, and the manifest that is made of it.

use std::time::Duration;

use farside_lender_protocol::Fences;

use crate::{
    Description, Error, FoundDevice, Host, Journal, MovedDevice, Result, Role, RunState, Step,
    live::Live, lock::check_vm_name,
};

/// What is to be moved, and how.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The VM.
    pub vm: String,
    /// The host to go to, as the remote shell knows it.
    pub to: String,
    /// The remote shell's words, if not the usual ones.
    pub shell: Option<String>,
    /// How long the guest may take to power off; in a live migration, to let go of
    /// a device.
    pub shutdown_timeout: Duration,
    /// Let the guest run meanwhile.
    pub live: Option<Live>,
}

impl Plan {
    /// The manifest: what the VM is, and what it has, now. Refuses a VM that
    /// cannot be moved as it stands.
    pub fn manifest(&self, host: &dyn Host) -> Result<Journal> {
        self.may_leave(host)?;
        let description = self.description(host)?;
        let was_running = self.was_running(host, &description)?;
        let held = host.fences(&self.vm)?;
        let devices: Result<_> = host
            .devices(&self.vm, &description)?
            .into_iter()
            .map(|found| self.moved(found, &held))
            .collect();
        self.journal(host, description, was_running, devices?)
    }

    /// The VM is not on its way already, nor elsewhere.
    pub(crate) fn may_leave(&self, host: &dyn Host) -> Result<()> {
        let vm = &self.vm;
        check_vm_name(vm)?;
        if let Some(open) = host.journal(vm)?.filter(Journal::is_open) {
            return Err(Error::refused(format!(
                "VM {vm} is moving already (migration {}, {}): `farside migrate --resume {vm}` goes on, and with --back it goes back",
                open.id, open.step
            )));
        }
        crate::may_run(host, vm)
    }

    pub(crate) fn description(&self, host: &dyn Host) -> Result<Description> {
        host.description(&self.vm)?.ok_or_else(|| {
            Error::refused(format!(
                "VM {} has no description on this host, so nobody could start it on another",
                self.vm
            ))
        })
    }

    /// Whether the VM runs, in a state in which it can be moved in this way.
    pub(crate) fn was_running(&self, host: &dyn Host, description: &Description) -> Result<bool> {
        let vm = &self.vm;
        let running = match host.run_state(vm)? {
            RunState::Running => true,
            RunState::Stopped => false,
            RunState::Other(why) => {
                return Err(Error::refused(format!("VM {vm} cannot be moved: {why}")));
            }
        };
        host.moves_whole(vm, description)?;
        if self.live.is_none() {
            return Ok(running);
        }
        if !running {
            return Err(Error::refused(format!(
                "VM {vm} does not run: without --live it moves as it is"
            )));
        }
        if description.domain.is_some() {
            return Err(Error::refused(format!(
                "VM {vm} is run by libvirt: --live is for VMs whose QEMU farside runs; without it, it moves"
            )));
        }
        Ok(running)
    }

    /// A device as the manifest has it. `held` are the VM's fences.
    pub(crate) fn moved(&self, found: FoundDevice, held: &Fences) -> Result<MovedDevice> {
        let lease = match found.holder {
            Some((holder, _)) if holder != self.vm => {
                return Err(Error::refused(format!(
                    "device {} of VM {} is borrowed by VM {holder}: stop that one first",
                    found.id, self.vm
                )));
            }
            holder => holder.map(|(_, epoch)| epoch),
        };
        Ok(MovedDevice {
            held: held.of(&found.id),
            id: found.id,
            port: found.port,
            lender: found.lender,
            lender_name: found.lender_name,
            identity: found.identity,
            lease,
            fence: None,
            back: None,
        })
    }

    pub(crate) fn journal(
        &self,
        host: &dyn Host,
        description: Description,
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
            description,
            devices,
            live: self.live.clone(),
        })
    }
}

pub(crate) fn random_id() -> Result<String> {
    let mut random = [0; 16];
    // From a kernel that has started, 16 bytes come at once and whole.
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(std::io::Error::from)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}
