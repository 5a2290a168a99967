//! Runs VMs by `farside_vm_control`.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use farside_daemon::VmName;
use farside_vm_config::places;
use farside_vm_control as control;

use super::{LocalHost, config_of, domain, is_libvirt};
use crate::{LiveRunner, Result, Role, RunState, Runner, Store, live};

/// Time limit for backend and QEMU to start, each.
const START: Duration = Duration::from_secs(120);

impl Runner for LocalHost {
    fn run_state(&self, vm: &VmName) -> Result<RunState> {
        if !places::description(vm).exists() {
            return Ok(RunState::Stopped);
        }
        let state = live::wait_until_terminal(|| control::describe(vm))?.state;
        Ok(match state {
            control::RunState::Running => RunState::Running,
            control::RunState::Still(why) => RunState::Other(format!(
                "its guest does not run ({why}), and its memory would be lost: resume it, or stop it"
            )),
            control::RunState::Stopped => {
                let configuration = self.configuration(vm)?.unwrap_or_default();
                match is_libvirt(&config_of(vm, &configuration)?) && domain::has_saved_state(vm)? {
                    true => RunState::Other(format!(
                        "libvirt has saved its memory (managed save), which does not move along: start it, or drop that with `virsh managedsave-remove {vm}`"
                    )),
                    false => RunState::Stopped,
                }
            }
        })
    }

    fn start(&self, vm: &VmName) -> Result<()> {
        if control::describe(vm)?.state == control::RunState::Stopped {
            let options = control::StartOptions {
                limit: START,
                ..control::StartOptions::default()
            };
            if let Err(error) = control::start(vm, &options) {
                // libvirt completes a start whose virsh was killed.
                let runs =
                    control::describe(vm).is_ok_and(|now| now.state != control::RunState::Stopped);
                if !runs {
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    fn stop(&self, vm: &VmName, limit: Duration) -> Result<()> {
        let options = control::StopOptions {
            limit,
            force: false,
        };
        Ok(control::stop(vm, &options)?)
    }
}

impl LiveRunner for LocalHost {
    fn release_devices(&self, vm: &VmName, limit: Duration) -> Result<()> {
        live::release_devices(vm, limit)
    }

    fn incoming(&self, vm: &VmName, address: IpAddr) -> Result<u16> {
        live::incoming(vm, address)
    }

    fn send(&self, vm: &VmName, to: SocketAddr) -> Result<live::Report> {
        live::send(vm, to)
    }

    fn query_transfer(&self, vm: &VmName, cancel: bool) -> Result<live::Guest> {
        live::query_transfer(vm, cancel)
    }

    fn resume_here(&self, vm: &VmName) -> Result<()> {
        live::resume_guest(vm, Role::Source)
    }

    fn resume_received(&self, vm: &VmName) -> Result<()> {
        live::resume_guest(vm, Role::Destination)
    }

    fn end_paused(&self, vm: &VmName) -> Result<()> {
        live::end_paused(vm)
    }
}
