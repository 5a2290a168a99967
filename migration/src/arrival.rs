//! The steps at the host that a VM goes to.

use std::{cell::RefCell, net::TcpListener, time::Duration};

use farside_lender_protocol::{Epoch, Fences};

use crate::{
    Error, ErrorKind, FoundDevice, Host, Journal, MovedDevice, Reply, Request, Result, Role,
    RunState, Step, check,
    live::{Live, try_listen},
};

/// A host that answers what the other one asks of it.
pub struct Arrival<'a> {
    host: &'a dyn Host,
    /// Of a check: the other host connects to it.
    tried: RefCell<Option<TcpListener>>,
}

impl<'a> Arrival<'a> {
    /// At this host.
    pub fn new(host: &'a dyn Host) -> Self {
        let tried = RefCell::new(None);
        Self { host, tried }
    }

    /// Does what is asked.
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
            Request::Listen { id, vm, live } => {
                return match self.listen(&id, &vm, &live) {
                    Ok(uri) => Reply::Listening(uri),
                    Err(error) => Reply::Failed(error),
                };
            }
            Request::Finish { id, vm } => self.until(&id, &vm, Step::Done),
            Request::StopThere { id, vm } => self.stop(&id, &vm),
        };
        match done {
            Ok(()) => Reply::Done,
            Err(error) => Reply::Failed(error),
        }
    }

    /// Whether the VM could run here. Returns its devices as they are seen from
    /// here.
    pub fn check(&self, theirs: &Journal) -> Result<Vec<MovedDevice>> {
        let (vm, description) = (&theirs.vm, &theirs.description);
        self.name_is_free(theirs)?;
        if let Some(live) = &theirs.live {
            try_listen(live.address)?;
        }
        if let Some(error) = self.host.missing(vm, description)?.into_iter().next() {
            return Err(error);
        }
        let found = self.host.devices(vm, description)?;
        theirs
            .devices
            .iter()
            .map(|device| seen_from_here(device, &found, vm))
            .collect()
    }

    /// Nothing of that name is in the way here.
    pub(crate) fn name_is_free(&self, theirs: &Journal) -> Result<()> {
        let vm = &theirs.vm;
        if let Some(open) = self.open_other(theirs)? {
            return Err(open);
        }
        if self.host.description(vm)?.is_some() {
            return Err(Error::refused(format!(
                "there is a VM {vm} already: remove its description, or give one of the two another name"
            )));
        }
        match self.host.run_state(vm)? {
            RunState::Stopped => self.host.is_free(vm, &theirs.description),
            RunState::Running | RunState::Other(_) => {
                Err(Error::refused(format!("a VM {vm} runs there already")))
            }
        }
    }

    /// Another migration of a VM of that name, which is not over.
    fn open_other(&self, theirs: &Journal) -> Result<Option<Error>> {
        let open = self.host.journal(&theirs.vm)?.filter(Journal::is_open);
        Ok(open
            .filter(|ours| {
                // One that was given up before anything happened is no harm.
                let harmless = ours.role == Role::Destination && ours.step == Step::Prepare;
                ours.id != theirs.id && !harmless
            })
            .map(|ours| {
                Error::refused(format!(
                    "another migration of VM {} is not over there ({}, {}): `farside migrate --status` there says more",
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

    /// From here on the VM belongs here.
    fn install(&self, theirs: &Journal) -> Result<()> {
        let mut ours = self.ours(&theirs.id, &theirs.vm)?;
        if ours.step == Step::Prepare {
            for device in &mut ours.devices {
                let given = theirs.devices.iter().find(|given| given.id == device.id);
                device.fence = given.and_then(|given| given.fence);
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

    fn until(&self, id: &str, vm: &str, end: Step) -> Result<()> {
        let ours = self.ours(id, vm)?;
        if ours.step == Step::Prepare {
            return Err(Error::journal(format!(
                "VM {vm} has not been described there yet (migration {id})"
            )));
        }
        self.advance(ours, end)
    }

    fn listen(&self, id: &str, vm: &str, live: &Live) -> Result<String> {
        let ours = self.ours(id, vm)?;
        if ours.step != Step::Start {
            return Err(Error::journal(format!(
                "VM {vm} is not about to start there (migration {id}, {})",
                ours.step
            )));
        }
        self.host.listen(vm, live.address)
    }

    /// The journal of a migration that is not being undone.
    fn ours(&self, id: &str, vm: &str) -> Result<Journal> {
        match self.host.journal(vm)? {
            Some(ours) if ours.id == id && ours.role == Role::Destination => {
                match ours.step.is_back() {
                    true => Err(undone(&ours)),
                    false => Ok(ours),
                }
            }
            _ => Err(Error::journal(format!(
                "nothing is known of migration {id} of VM {vm} there"
            ))),
        }
    }

    /// Goes on until `end` is what comes next.
    fn advance(&self, mut ours: Journal, end: Step) -> Result<()> {
        while ours.step < end {
            let next = match ours.step {
                Step::Install => {
                    self.host.write_fences(&ours.vm, &fences(&ours))?;
                    self.host.install(&ours.vm, &ours.description)?;
                    Step::Start
                }
                Step::Start => {
                    if ours.was_running {
                        self.host.start(&ours.vm)?;
                    }
                    Step::Finish
                }
                Step::Finish => {
                    self.host.write_tombstone(&ours.vm, None)?;
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

    /// Ends and forgets the VM.
    fn stop(&self, id: &str, vm: &str) -> Result<()> {
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
                    "VM {vm} has arrived there, and that is over: move it back with `farside migrate {vm} --to` from there"
                ),
            ));
        }
        // To end a guest that was moved alive would lose what it has in memory.
        if ours.live.is_some() && self.host.run_state(vm)? == RunState::Running {
            return Err(Error::new(
                ErrorKind::Arrived,
                format!(
                    "VM {vm} has arrived there and runs: let it go on, and move it back from there"
                ),
            ));
        }
        let installed = ours.has_begun(Step::Install);
        if ours.step != Step::StopThere {
            ours.begin(Step::StopThere);
            self.host.write_journal(&ours)?;
        }
        if installed {
            if self.host.description(vm)?.is_some() {
                let limit = Duration::from_secs(ours.shutdown_timeout);
                self.host.stop(vm, limit)?;
            }
            self.host.uninstall(vm)?;
            self.host.write_fences(vm, &Fences::default())?;
        }
        ours.begin(Step::Undone);
        self.host.write_journal(&ours)
    }
}

/// Goes on at the host that the VM goes to, when the other host is dead. Without
/// `lost`, the word of somebody who knows that it is, only where it has let
/// the VM go.
pub fn resume_here(host: &dyn Host, mut ours: Journal, lost: bool) -> Result<()> {
    let vm = ours.vm.clone();
    if ours.step.is_back() {
        return Arrival::new(host).stop(&ours.id, &vm);
    }
    // A guest that is moved while it runs goes on there when that fails late.
    let may_run_there = match ours.live {
        None => ours.step == Step::Prepare,
        Some(_) => ours.step <= Step::Start,
    };
    if may_run_there && !lost {
        return Err(Error::refused(format!(
            "VM {vm} may still run on {}: go on there with `farside migrate --resume {vm}`; if that host is dead for good, say so here with --lost-host",
            ours.source
        )));
    }
    if ours.step == Step::Prepare {
        for at in 0..ours.devices.len() {
            let device = &ours.devices[at];
            let fence = host.hand_over(&device.lender, &device.id, &vm, &ours.id, device.held)?;
            ours.devices[at].fence = Some(fence);
        }
        ours.begin(Step::Install);
        host.write_journal(&ours)?;
    }
    let live = ours.live.is_some();
    let Err(error) = Arrival::new(host).advance(ours, Step::Done) else {
        return Ok(());
    };
    match host.journal(&vm)? {
        Some(ours) if lost && live && ours.step == Step::Start => {
            log::error!(
                "{error}: the guest was lost with the other host, and VM {vm} is started anew"
            );
            start_anew(host, ours)
        }
        _ => Err(error),
    }
}

/// Goes on with a live migration as if it was a cold one. A guest that runs is not
/// ended: then this fails.
fn start_anew(host: &dyn Host, mut ours: Journal) -> Result<()> {
    host.stop(&ours.vm, Duration::ZERO)?;
    ours.live = None;
    host.write_journal(&ours)?;
    Arrival::new(host).advance(ours, Step::Done)
}

fn undone(ours: &Journal) -> Error {
    Error::journal(format!(
        "migration {} of VM {} was undone there",
        ours.id, ours.vm
    ))
}

/// What the VM shows to the lenders from now on.
fn fences(ours: &Journal) -> Fences {
    let devices = ours.devices.iter();
    Fences(
        devices
            .filter_map(|device| Some((device.id.clone(), device.fence?)))
            .collect(),
    )
}

/// A device as this host's lenders describe it: it must be the same one.
pub(crate) fn seen_from_here(
    device: &MovedDevice,
    found: &[FoundDevice],
    vm: &str,
) -> Result<MovedDevice> {
    let Some(here) = found.iter().find(|here| here.id == device.id) else {
        return Err(Error::refused(format!(
            "device {} of VM {vm} is not found there: name its lender in the description as both hosts reach it",
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
    if here.identity != device.identity {
        let text = |identity: &crate::Identity| format!("{} ({})", identity.pci, identity.summary);
        return other("identity", &text(&device.identity), &text(&here.identity));
    }
    // The same lender shows the same lease to both.
    let lease = |holder: &Option<(String, Epoch)>| {
        let ours = holder.as_ref().filter(|(holder, _)| holder == vm);
        ours.map(|(_, epoch)| *epoch)
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

fn text_of(epoch: Option<Epoch>) -> String {
    epoch.map_or("none".to_owned(), |epoch| epoch.to_string())
}
