//! The steps at the destination host.

use std::{cell::RefCell, net::TcpListener, time::Duration};

use farside_daemon::VmName;
use farside_lender_protocol::{Fences, Generation};

use crate::{
    Error, ErrorKind, FoundDevice, Host, Journal, MovedDevice, Reply, Request, Result, Role,
    RunState, Step, Strategy, check, live::try_listen,
};

/// The destination host, which serves the requests of the source host.
pub struct Arrival<'a> {
    host: &'a dyn Host,
    /// Kept after a check: the other host connects to it.
    tried: RefCell<Option<TcpListener>>,
}

impl<'a> Arrival<'a> {
    /// At this host.
    pub fn new(host: &'a dyn Host) -> Self {
        let tried = RefCell::new(None);
        Self { host, tried }
    }

    /// Serves a request.
    pub fn answer(&self, request: Request) -> Reply {
        let done = match request {
            Request::Hello(hello) => {
                return match hello.check() {
                    Ok(()) => Reply::Hello {
                        hello: crate::Hello::ours(),
                        host: self.host.name(),
                    },
                    Err(error) => Reply::Failed(error),
                };
            }
            Request::Check(question) => {
                let (answer, listener) = check::answer(self.host, &question);
                self.tried.replace(listener);
                return Reply::Checked(answer);
            }
            Request::Prepare(journal) => self.prepare(*journal),
            Request::Install(journal) => self.install(&journal),
            Request::Start { id, vm } => self.until(&id, &vm, Step::Finish),
            Request::Incoming { id, vm } => {
                return match self.incoming(&id, &vm) {
                    Ok(port) => Reply::Listening(port),
                    Err(error) => Reply::Failed(error),
                };
            }
            Request::Finish { id, vm } => self.finish(&id, &vm),
            Request::StopThere { id, vm } => self.stop(&id, &vm),
        };
        match done {
            Ok(()) => Reply::Done,
            Err(error) => Reply::Failed(error),
        }
    }

    /// Checks that the VM can run here. Returns its devices as this host sees them.
    pub fn check(&self, theirs: &Journal) -> Result<Vec<MovedDevice>> {
        let (vm, configuration) = (&theirs.vm, &theirs.configuration);
        self.name_is_free(theirs)?;
        if let Some(address) = theirs.strategy.address() {
            try_listen(address)?;
        }
        if let Some(error) = self.host.missing(vm, configuration)?.into_iter().next() {
            return Err(error);
        }
        let found = self.host.find_all(vm, configuration)?;
        theirs
            .devices
            .iter()
            .map(|device| seen_from_here(device, &found, vm))
            .collect()
    }

    /// Refuses a VM whose name is in use here.
    pub(crate) fn name_is_free(&self, theirs: &Journal) -> Result<()> {
        let vm = &theirs.vm;
        if let Some(open) = self.open_other(theirs)? {
            return Err(open);
        }
        if self.host.configuration(vm)?.is_some() {
            return Err(Error::refused(format!(
                "there is a VM {vm} already: remove its configuration, or give one of the two another name"
            )));
        }
        match self.host.run_state(vm)? {
            RunState::Stopped => self.host.check_name_free(vm, &theirs.configuration),
            RunState::Running | RunState::Other(_) => {
                Err(Error::refused(format!("a VM {vm} runs there already")))
            }
        }
    }

    /// Another open migration of a VM of that name.
    fn open_other(&self, theirs: &Journal) -> Result<Option<Error>> {
        let open = self.host.journal(&theirs.vm)?.filter(Journal::is_open);
        Ok(open
            .filter(|ours| {
                // One that was abandoned before Install has changed nothing here.
                let harmless = ours.role == Role::Destination && ours.step == Step::Prepare;
                ours.id != theirs.id && !harmless
            })
            .map(|ours| {
                Error::refused(format!(
                    "another migration of VM {} is open there ({}, {}): see `farside migration status` there",
                    theirs.vm, ours.id, ours.step
                ))
            }))
    }

    fn prepare(&self, theirs: Journal) -> Result<()> {
        if let Some(ours) = self.host.journal(&theirs.vm)?
            && ours.id == theirs.id
        {
            return match ours.step.is_back() {
                true => Err(undone(&ours)),
                false => Ok(()),
            };
        }
        let devices = self.check(&theirs)?;
        let mut ours = Journal {
            role: Role::Destination,
            shell: None,
            begun: Vec::new(),
            devices,
            ..theirs
        };
        ours.begin(Step::Prepare);
        self.host.write_journal(&ours)
    }

    /// From here on the VM belongs to this host.
    fn install(&self, theirs: &Journal) -> Result<()> {
        let mut ours = self.ours(&theirs.id, &theirs.vm)?;
        if ours.step == Step::Prepare {
            for device in &mut ours.devices {
                let given = theirs.devices.iter().find(|given| given.id == device.id);
                device.fence = given.and_then(|given| given.fence);
                device.secret = given.and_then(|given| given.secret);
                if device.fence.is_none() {
                    return Err(Error::journal(format!(
                        "device {} of VM {} came without a fence",
                        device.id, ours.vm
                    )));
                }
            }
            ours.begin(Step::Install);
            self.host.write_journal(&ours)?;
        }
        self.advance(ours, Step::Start)
    }

    fn until(&self, id: &str, vm: &VmName, end: Step) -> Result<()> {
        let ours = self.ours(id, vm)?;
        if ours.step == Step::Prepare {
            return Err(Error::journal(format!(
                "VM {vm} is not configured there yet (migration {id})"
            )));
        }
        self.advance(ours, end)
    }

    /// The other host has removed the VM. If this host's journal is of another migration, this one had
    /// ended here.
    fn finish(&self, id: &str, vm: &VmName) -> Result<()> {
        match self.host.journal(vm)? {
            Some(ours) if ours.id != id => Ok(()),
            _ => self.until(id, vm, Step::Done),
        }
    }

    fn incoming(&self, id: &str, vm: &VmName) -> Result<u16> {
        let ours = self.ours(id, vm)?;
        if ours.step != Step::Start {
            return Err(Error::journal(format!(
                "VM {vm} is not about to start there (migration {id}, {})",
                ours.step
            )));
        }
        match ours.strategy {
            Strategy::Live { address } => self.host.incoming(vm, address),
            Strategy::Cold => Err(Error::journal(format!(
                "migration {id} of VM {vm} is not live"
            ))),
        }
    }

    /// The journal of a migration that is not being undone.
    fn ours(&self, id: &str, vm: &VmName) -> Result<Journal> {
        match self.host.journal(vm)? {
            Some(ours) if ours.id == id && ours.role == Role::Destination => {
                match ours.step.is_back() {
                    true => Err(undone(&ours)),
                    false => Ok(ours),
                }
            }
            _ => Err(Error::journal(format!(
                "migration {id} of VM {vm} is unknown there"
            ))),
        }
    }

    /// Performs the steps before `end`.
    fn advance(&self, mut ours: Journal, end: Step) -> Result<()> {
        while ours.step < end {
            let next = match ours.step {
                Step::Install => {
                    self.host.write_fences(&ours.vm, &fences(&ours))?;
                    self.host.install(&ours.vm, &ours.configuration)?;
                    Step::Start
                }
                Step::Start => {
                    if ours.was_running {
                        ours.strategy.start(self.host, &ours.vm)?;
                    }
                    Step::Finish
                }
                Step::Finish => {
                    self.host.write_moved_marker(&ours.vm, None)?;
                    Step::Done
                }
                other => {
                    return Err(Error::journal(format!(
                        "migration {} cannot go on here while {other}",
                        ours.id
                    )));
                }
            };
            ours.begin(next);
            self.host.write_journal(&ours)?;
        }
        Ok(())
    }

    /// Ends the VM, and removes its configuration.
    fn stop(&self, id: &str, vm: &VmName) -> Result<()> {
        let Some(mut ours) = self.host.journal(vm)?.filter(|ours| ours.id == id) else {
            return Ok(());
        };
        if ours.step == Step::Undone {
            return Ok(());
        }
        if ours.step == Step::Done {
            return Err(Error::new(
                ErrorKind::Arrived,
                format!(
                    "VM {vm} has arrived there: move it back with `farside migrate {vm} --to` from there"
                ),
            ));
        }
        // Ending a guest that was sent here would lose its memory.
        if ours.strategy.is_live() && self.host.run_state(vm)? == RunState::Running {
            return Err(Error::new(
                ErrorKind::Arrived,
                format!(
                    "VM {vm} has arrived there and runs: complete the migration, and move it back from there"
                ),
            ));
        }
        let installed = ours.has_begun(Step::Install);
        if ours.step != Step::StopThere {
            ours.begin(Step::StopThere);
            self.host.write_journal(&ours)?;
        }
        if installed {
            if self.host.configuration(vm)?.is_some() {
                let limit = Duration::from_secs(ours.shutdown_timeout);
                ours.strategy.end_destination(self.host, vm, limit)?;
            }
            self.host.uninstall(vm)?;
            self.host.write_fences(vm, &Fences::default())?;
        }
        ours.begin(Step::Undone);
        self.host.write_journal(&ours)
    }
}

/// Resumes a migration at the destination host when the other host is down. Refuses where the VM
/// may still run there, unless the user confirms with `lost` that the host is permanently down.
pub fn resume_here(host: &dyn Host, mut ours: Journal, lost: bool) -> Result<()> {
    let vm = ours.vm.clone();
    if ours.step.is_back() {
        return Arrival::new(host).stop(&ours.id, &vm);
    }
    if ours.strategy.source_may_run(ours.step) && !lost {
        return Err(Error::refused(format!(
            "VM {vm} may still run on {}: resume there with `farside migration resume {vm}`; if that host is permanently down, resume here with --lost-host",
            ours.source
        )));
    }
    if ours.step == Step::Prepare {
        for at in 0..ours.devices.len() {
            let secret = ours.chosen_secret(host, at, |device| &mut device.secret)?;
            let MovedDevice {
                lender, id, held, ..
            } = &ours.devices[at];
            let fence = host.hand_over(lender, id, &vm, &ours.id, *held, secret)?;
            ours.devices[at].fence = Some(fence);
        }
        ours.begin(Step::Install);
        host.write_journal(&ours)?;
    }
    let live = ours.strategy.is_live();
    let Err(error) = Arrival::new(host).advance(ours, Step::Done) else {
        return Ok(());
    };
    match host.journal(&vm)? {
        Some(ours) if lost && live && ours.step == Step::Start => {
            log::error!("{error}: the guest was lost with the other host; booting VM {vm} here");
            boot_instead(host, ours)
        }
        _ => Err(error),
    }
}

/// Completes a live migration as a cold one, and records that. Fails if the guest runs.
fn boot_instead(host: &dyn Host, mut ours: Journal) -> Result<()> {
    ours.strategy
        .end_destination(host, &ours.vm, Duration::ZERO)?;
    ours.strategy = Strategy::Cold;
    host.write_journal(&ours)?;
    Arrival::new(host).advance(ours, Step::Done)
}

fn undone(ours: &Journal) -> Error {
    Error::journal(format!(
        "migration {} of VM {} was undone there",
        ours.id, ours.vm
    ))
}

/// The fences that the VM shows to the lenders from now on.
fn fences(ours: &Journal) -> Fences {
    let devices = ours.devices.iter();
    Fences(
        devices
            .filter_map(|device| Some((device.id.clone(), device.given()?)))
            .collect(),
    )
}

/// A device as this host's lenders describe it. Refuses another device of that id.
pub(crate) fn seen_from_here(
    device: &MovedDevice,
    found: &[FoundDevice],
    vm: &VmName,
) -> Result<MovedDevice> {
    let Some(here) = found.iter().find(|here| here.id == device.id) else {
        return Err(Error::refused(format!(
            "device {} of VM {vm} is not found there: name its lender in the configuration as both hosts reach it",
            device.id
        )));
    };
    let other = |what: &str, theirs: &str, ours: &str| {
        Err(Error::refused(format!(
            "device {} is another one there ({}): its {what} is {ours}, not {theirs}",
            device.id, here.lender
        )))
    };
    if here.lender_name != device.lender_name {
        return other("lender", &device.lender_name, &here.lender_name);
    }
    if !here.identity.is_same(&device.identity) {
        let text = |identity: &crate::Identity| format!("{} ({})", identity.pci, identity.summary);
        return other("identity", &text(&device.identity), &text(&here.identity));
    }
    // The same lender shows the same lease to both.
    let lease = |holder: &Option<(VmName, Generation)>| {
        let ours = holder.as_ref().filter(|(holder, _)| holder == vm);
        ours.map(|(_, generation)| *generation)
    };
    if device.lease.is_some() && lease(&here.holder) != device.lease {
        return other(
            "lease",
            &text_of(device.lease),
            &text_of(lease(&here.holder)),
        );
    }
    if let Some((holder, _)) = here.holder.as_ref().filter(|(holder, _)| holder != vm) {
        return Err(Error::new(
            ErrorKind::Refused,
            format!("device {} is borrowed by VM {holder}", device.id),
        ));
    }
    Ok(MovedDevice {
        lender: here.lender.clone(),
        ..device.clone()
    })
}

fn text_of(generation: Option<Generation>) -> String {
    generation.map_or("none".to_owned(), |generation| generation.to_string())
}
