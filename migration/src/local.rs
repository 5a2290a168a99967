//! The host that this process runs on: files, programs, lenders.

mod domain;
pub(crate) mod requirements;

use std::{fs, io, net::IpAddr, path::PathBuf, time::Duration};

use farside_daemon::files;
use farside_lender_protocol::{Address, CallError, Client, Epoch, ErrorKind as Remote, Fences};
use farside_vm_config::{Manager, VmConfig, places, ram_ranges};
use farside_vm_control as control;

use crate::{
    Description, Error, ErrorKind, FoundDevice, Host, Identity, Journal, Result, Role, RunState,
    Tombstone,
    check::{self, Facts},
    live,
};

/// How long a VM may take to start: backend and QEMU, each.
const START: Duration = Duration::from_secs(120);

/// Longest description that is read, bytes.
const MAX_DESCRIPTION: u64 = 1 << 20;

/// This host.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalHost;

impl LocalHost {
    /// Where the journal of a VM's migration is.
    pub fn journal_path(vm: &str) -> PathBuf {
        places::state_dir()
            .join("migrations")
            .join(format!("{vm}.json"))
    }

    /// The journals of all VMs, and what is wrong with those that cannot be read.
    pub fn journals() -> Vec<Result<Journal>> {
        let Ok(entries) = fs::read_dir(places::state_dir().join("migrations")) else {
            return Vec::new();
        };
        let mut paths: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|ext| ext == "json"))
            .collect();
        paths.sort();
        paths
            .iter()
            .filter_map(|path| Journal::load(path).transpose())
            .collect()
    }
}

impl LocalHost {
    /// This host's part, while the VM is moved with its guest running.
    fn moves_live(&self, vm: &str) -> Result<Option<Role>> {
        let journal = self.journal(vm)?.filter(Journal::is_open);
        Ok(journal
            .filter(|journal| journal.live.is_some())
            .map(|journal| journal.role))
    }
}

fn tombstone_path(vm: &str) -> PathBuf {
    places::vm_state(vm).join("moved.json")
}

/// What a description's text says.
pub(crate) fn config_of(vm: &str, description: &Description) -> Result<VmConfig> {
    let config: VmConfig = toml::from_str(&description.toml)
        .map_err(|error| Error::refused(format!("the description of VM {vm}: {error}")))?;
    match &config.name {
        Some(name) if name != vm => Err(Error::refused(format!(
            "the description of VM {vm} is that of VM {name}"
        ))),
        _ => Ok(config),
    }
}

fn is_libvirt(config: &VmConfig) -> bool {
    config.manager == Some(Manager::Libvirt)
}

impl Host for LocalHost {
    fn name(&self) -> String {
        let name = rustix::system::uname();
        name.nodename().to_string_lossy().into_owned()
    }

    fn journal(&self, vm: &str) -> Result<Option<Journal>> {
        Journal::load(&Self::journal_path(vm))
    }

    fn write_journal(&self, journal: &Journal) -> Result<()> {
        journal.save(&Self::journal_path(&journal.vm))
    }

    fn description(&self, vm: &str) -> Result<Option<Description>> {
        let path = places::description(vm);
        let Some(bytes) = files::read_bounded(&path, MAX_DESCRIPTION)? else {
            return Ok(None);
        };
        let toml = String::from_utf8(bytes)
            .map_err(|_| Error::new(ErrorKind::Host, format!("{} is not UTF-8", path.display())))?;
        let mut description = Description {
            toml,
            ..Description::default()
        };
        if is_libvirt(&config_of(vm, &description)?) {
            description.domain = Some(domain::xml(vm)?);
            description.autostart = domain::starts_with_host(vm)?;
        }
        Ok(Some(description))
    }

    fn install(&self, vm: &str, description: &Description) -> Result<()> {
        if let Some(xml) = &description.domain {
            domain::define(vm, xml, description.autostart)?;
        }
        files::replace(&places::description(vm), description.toml.as_bytes())?;
        Ok(())
    }

    fn uninstall(&self, vm: &str) -> Result<()> {
        let state = places::vm_state(vm);
        // Where a description is, its domain is: so it is the first to go, as it is the
        // last to come.
        if let Some(description) = self.description(vm)? {
            if self.moves_live(vm)? == Some(Role::Source) {
                live::end(vm)?;
            }
            if let Some(xml) = &description.domain {
                files::replace(&state.join("moved.xml"), xml.as_bytes())?;
            }
            files::replace(&state.join("moved.toml"), description.toml.as_bytes())?;
            files::remove(&places::description(vm))?;
        }
        // One that was cut off in between has left a domain, which is not described.
        let by_libvirt = self
            .journal(vm)?
            .is_some_and(|journal| journal.description.domain.is_some());
        if by_libvirt && domain::exists(vm)? {
            domain::undefine(vm)?;
        }
        Ok(())
    }

    fn fences(&self, vm: &str) -> Result<Fences> {
        Ok(Fences::load(&places::fences(vm))?)
    }

    fn write_fences(&self, vm: &str, fences: &Fences) -> Result<()> {
        let path = places::fences(vm);
        match fences.0.is_empty() {
            true => files::remove(&path)?,
            false => fences.save(&path)?,
        }
        Ok(())
    }

    fn tombstone(&self, vm: &str) -> Result<Option<Tombstone>> {
        let path = tombstone_path(vm);
        let Some(bytes) = files::read_bounded(&path, MAX_DESCRIPTION)? else {
            return Ok(None);
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| Error::new(ErrorKind::Host, format!("{}: {error}", path.display())))
    }

    fn write_tombstone(&self, vm: &str, tombstone: Option<&Tombstone>) -> Result<()> {
        let path = tombstone_path(vm);
        match tombstone {
            None => files::remove(&path)?,
            Some(tombstone) => {
                let text = serde_json::to_vec_pretty(tombstone).map_err(io::Error::other)?;
                files::replace(&path, &text)?;
            }
        }
        Ok(())
    }

    fn run_state(&self, vm: &str) -> Result<RunState> {
        if !places::description(vm).exists() {
            return Ok(RunState::Stopped);
        }
        let state = live::settled(|| control::describe(vm))?.state;
        Ok(match state {
            control::RunState::Running => RunState::Running,
            control::RunState::Still(why) => RunState::Other(format!(
                "its guest stands still ({why}), and would lose what it has in memory: let it go on, or end it"
            )),
            control::RunState::Stopped => {
                let description = self.description(vm)?.unwrap_or_default();
                match is_libvirt(&config_of(vm, &description)?) && domain::has_saved_state(vm)? {
                    true => RunState::Other(format!(
                        "libvirt has saved its memory (managed save), which does not move along: start it, or drop that with `virsh managedsave-remove {vm}`"
                    )),
                    false => RunState::Stopped,
                }
            }
        })
    }

    fn whereabouts(&self, vm: &str, call_off: bool) -> Result<live::Guest> {
        live::whereabouts(vm, call_off)
    }

    fn listen(&self, vm: &str, address: IpAddr) -> Result<String> {
        live::listen(vm, address)
    }

    fn send(&self, vm: &str, uri: &str) -> Result<live::Report> {
        live::send(vm, uri)
    }

    fn start(&self, vm: &str) -> Result<()> {
        if let Some(role) = self.moves_live(vm)? {
            return live::land(vm, role);
        }
        if control::describe(vm)?.state == control::RunState::Stopped {
            let options = control::StartOptions {
                limit: START,
                ..control::StartOptions::default()
            };
            if let Err(error) = control::start(vm, &options) {
                // libvirt goes on with what it was asked for, also when who asked was
                // killed.
                let runs =
                    control::describe(vm).is_ok_and(|now| now.state != control::RunState::Stopped);
                if !runs {
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    fn stop(&self, vm: &str, limit: Duration) -> Result<()> {
        match self.moves_live(vm)? {
            Some(Role::Source) => return live::let_go(vm, limit),
            Some(Role::Destination) => return live::end(vm),
            None => {}
        }
        let options = control::StopOptions {
            limit,
            force: false,
        };
        Ok(control::stop(vm, &options)?)
    }

    fn devices(&self, vm: &str, description: &Description) -> Result<Vec<FoundDevice>> {
        self.each_device(vm, description)?.into_iter().collect()
    }

    fn each_device(&self, vm: &str, description: &Description) -> Result<Vec<Result<FoundDevice>>> {
        let config = config_of(vm, description)?;
        let lenders = config.lenders();
        let devices = config.devices.iter().enumerate();
        Ok(devices
            .map(|(position, device)| {
                let port = device.port.unwrap_or(position as u16);
                find(&device.id, port, &lenders)
            })
            .collect())
    }

    fn moves_whole(&self, vm: &str, description: &Description) -> Result<()> {
        match description.domain {
            Some(_) => domain::moves_whole(vm),
            None => Ok(()),
        }
    }

    fn is_free(&self, vm: &str, description: &Description) -> Result<()> {
        match &description.domain {
            Some(xml) => domain::is_free(vm, xml),
            None => Ok(()),
        }
    }

    fn missing(&self, vm: &str, description: &Description) -> Result<Vec<Error>> {
        requirements::missing(vm, description)
    }

    fn reaches(&self, vm: &str, description: &Description, device: &FoundDevice) -> Result<()> {
        let config = config_of(vm, description)?;
        // Of a domain, libvirt knows how much it has.
        if is_libvirt(&config) && config.memory.is_none() {
            return Ok(());
        }
        let ram = ram_ranges(config.machine.unwrap_or_default(), config.memory());
        let mut client = Client::connect(&device.lender, None)?;
        Ok(client.check(&device.id, device.lender.route(), ram)?)
    }

    fn facts(&self, vm: &str, description: &Description, runs: bool) -> Result<Facts> {
        check::look(vm, description, runs)
    }

    fn hand_over(
        &self,
        lender: &Address,
        device: &str,
        vm: &str,
        migration: &str,
        supersedes: Option<Epoch>,
    ) -> Result<Epoch> {
        let mut client = Client::connect(lender, None)?;
        Ok(client.hand_over(device, vm, migration, supersedes)?)
    }
}

/// The lender that has a device, and what it says of it.
fn find(id: &str, port: u16, lenders: &[Address]) -> Result<FoundDevice> {
    let mut unreachable = None;
    for lender in lenders {
        match look(id, port, lender) {
            Ok(found) => return Ok(found),
            Err(CallError::Refused(error)) if error.kind == Remote::UnknownDevice => {}
            Err(error) => {
                unreachable.get_or_insert(error);
            }
        }
    }
    let asked: Vec<String> = lenders.iter().map(Address::to_string).collect();
    Err(match unreachable {
        Some(error) => Error::from(error).at(&format!("device {id}")),
        None => Error::new(
            ErrorKind::Lender,
            format!("no lender has device {id} (asked: {})", asked.join(", ")),
        ),
    })
}

fn look(id: &str, port: u16, lender: &Address) -> std::result::Result<FoundDevice, CallError> {
    let mut client = Client::connect(lender, None)?;
    let described = client.describe(id)?;
    let entry = client.status(id)?.entry;
    Ok(FoundDevice {
        id: id.to_owned(),
        port,
        lender: lender.clone(),
        lender_name: client.lender().to_owned(),
        identity: Identity::of(&described),
        holder: entry.borrowed_by.map(|holder| (holder.vm, holder.epoch)),
        fences: entry.fences,
    })
}
