//! The steps at the host that a VM leaves, which is in charge.

use std::time::{Duration, Instant};

use farside_lender_protocol::{Epoch, Fences};

use crate::{
    Error, ErrorKind, Host, Journal, MovedDevice, Peer, Reply, Request, Result, Step, Tombstone,
    live::{Guest, Report},
};

/// A migration under way.
pub struct Mover<'a> {
    host: &'a dyn Host,
    peer: &'a mut dyn Peer,
    journal: Journal,
    lost: bool,
    report: Option<Report>,
    let_go: Option<Instant>,
    without_devices: Option<Duration>,
}

impl<'a> Mover<'a> {
    /// Begins one, or takes up what `journal` says of one that was cut off.
    pub fn new(host: &'a dyn Host, peer: &'a mut dyn Peer, journal: Journal) -> Self {
        Self {
            host,
            peer,
            journal,
            lost: false,
            report: None,
            let_go: None,
            without_devices: None,
        }
    }

    /// Somebody who knows says that the other host is dead.
    #[must_use]
    pub fn lost(mut self, lost: bool) -> Self {
        self.lost = lost;
        self
    }

    /// The journal as it stands.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// What QEMU says of a live migration, once the guest was sent.
    pub fn report(&self) -> Option<Report> {
        self.report
    }

    /// How long the guest of a live migration had not all of its devices: from when
    /// it was first asked to let go until the last was plugged in again, here or
    /// there. None when another process did a part of that.
    pub fn without_devices(&self) -> Option<Duration> {
        self.without_devices
    }

    /// Moves the VM. When something fails before a lender was asked for anything,
    /// the VM is put back as it was; later, somebody has to decide.
    pub fn forward(&mut self) -> Result<()> {
        if self.journal.begun.is_empty() {
            self.begin(Step::Prepare)?;
        }
        let Err(error) = self.run() else {
            return match self.journal.step {
                Step::Undone => Err(Error::refused(format!(
                    "VM {} went back to this host",
                    self.journal.vm
                ))),
                _ => Ok(()),
            };
        };
        let vm = self.journal.vm.clone();
        let step = self.journal.step;
        if step.is_before_handover() || step <= Step::Start && self.guest_is_here(false) {
            log::error!("{error}");
            return match self.back() {
                Ok(()) => Err(Error {
                    message: format!("{error}; VM {vm} is as it was"),
                    ..error
                }),
                Err(more) => Err(Error {
                    message: format!(
                        "{error}; going back failed too: {more}; `farside migrate --resume {vm}` tries that again"
                    ),
                    ..error
                }),
            };
        }
        Err(Error {
            message: format!(
                "{} while {}; `farside migrate --resume {vm}` goes on, and with --back it goes back",
                error.message, self.journal.step
            ),
            ..error
        })
    }

    /// Takes the VM back.
    pub fn back(&mut self) -> Result<()> {
        let step = self.journal.step;
        if step >= Step::Finish && !step.is_back() {
            return Err(Error::refused(format!(
                "VM {} has arrived at {} already: let it go on with --resume, and move it back from there",
                self.journal.vm, self.journal.destination
            )));
        }
        if !step.is_back() {
            self.begin(Step::StopThere)?;
        }
        self.run()?;
        match self.journal.step {
            Step::Done => Err(Error::refused(format!(
                "VM {} had arrived at {} without this host: move it back from there",
                self.journal.vm, self.journal.destination
            ))),
            _ => Ok(()),
        }
    }

    fn run(&mut self) -> Result<()> {
        while self.journal.is_open() {
            let next = self.step()?;
            self.begin(next)?;
        }
        Ok(())
    }

    fn begin(&mut self, step: Step) -> Result<()> {
        let mut journal = self.journal.clone();
        journal.begin(step);
        self.host.write_journal(&journal)?;
        log::info!("VM {} (to {}): {step}", journal.vm, journal.destination);
        self.journal = journal;
        Ok(())
    }

    /// Does the step that is under way. Returns the next.
    fn step(&mut self) -> Result<Step> {
        let vm = self.journal.vm.clone();
        let limit = Duration::from_secs(self.journal.shutdown_timeout);
        Ok(match self.journal.step {
            Step::Prepare => {
                self.ask(Request::Prepare(Box::new(self.journal.clone())))?;
                Step::ShutDown
            }
            Step::ShutDown => {
                self.let_go = Some(Instant::now());
                self.host.stop(&vm, limit)?;
                Step::Return
            }
            Step::Return => {
                self.all_returned()?;
                Step::HandOver
            }
            Step::HandOver => {
                self.hand_over()?;
                Step::Install
            }
            Step::Install => {
                self.ask(Request::Install(Box::new(self.journal.clone())))?;
                Step::Start
            }
            Step::Start => {
                self.send_live()?;
                let id = self.journal.id.clone();
                self.ask(Request::Start { id, vm })?;
                self.without_devices = self.let_go.map(|since| since.elapsed());
                Step::Finish
            }
            Step::Finish => {
                let tombstone = Tombstone {
                    to: self.journal.destination.clone(),
                    migration: self.journal.id.clone(),
                };
                self.host.write_tombstone(&vm, Some(&tombstone))?;
                self.host.write_fences(&vm, &Fences::default())?;
                self.host.uninstall(&vm)?;
                let id = self.journal.id.clone();
                self.ask(Request::Finish { id, vm })?;
                Step::Done
            }
            Step::StopThere => self.stop_there()?,
            Step::HandBack => {
                self.hand_back()?;
                Step::StartAgain
            }
            Step::StartAgain => {
                if self.journal.was_running {
                    self.host.start(&vm)?;
                    self.without_devices = self.let_go.map(|since| since.elapsed());
                }
                Step::Undone
            }
            end @ (Step::Done | Step::Undone) => end,
        })
    }

    fn ask(&mut self, request: Request) -> Result<()> {
        let host = self.journal.destination.clone();
        match self.peer.ask(request) {
            Ok(Reply::Done) => Ok(()),
            Ok(Reply::Failed(error)) => Err(error.at(&host)),
            Ok(other) => Err(Error::lost(format!("{host}: unexpected answer {other:?}"))),
            Err(error) => Err(error.at(&host)),
        }
    }

    /// Sends the guest, unless it was sent before.
    fn send_live(&mut self) -> Result<()> {
        let Journal { id, vm, .. } = self.journal.clone();
        let Some(live) = self.journal.live.clone() else {
            return Ok(());
        };
        match self.host.whereabouts(&vm, false)? {
            Guest::Here => {}
            Guest::There(report) => {
                self.report = Some(report);
                return Ok(());
            }
            // The other host knows whether it has the guest whole.
            Guest::Gone => return Ok(()),
        }
        let host = self.journal.destination.clone();
        let request = Request::Listen {
            id,
            vm: vm.clone(),
            live,
        };
        let uri = match self.peer.ask(request).map_err(|error| error.at(&host))? {
            Reply::Listening(uri) => uri,
            Reply::Failed(error) => return Err(error.at(&host)),
            other => return Err(Error::lost(format!("{host}: unexpected answer {other:?}"))),
        };
        self.report = Some(self.host.send(&vm, &uri)?);
        Ok(())
    }

    /// A backend that was killed may have left the lender to notice.
    fn all_returned(&self) -> Result<()> {
        let Journal {
            vm, description, ..
        } = &self.journal;
        for device in self.host.devices(vm, description)? {
            if let Some((holder, epoch)) = device.holder {
                return Err(Error::new(
                    ErrorKind::Lender,
                    format!(
                        "device {} is still borrowed by VM {holder} (epoch {epoch}) although the VM has ended",
                        device.id
                    ),
                ));
            }
        }
        Ok(())
    }

    fn hand_over(&mut self) -> Result<()> {
        for at in 0..self.journal.devices.len() {
            let device = &self.journal.devices[at];
            if device.fence.is_some() {
                continue;
            }
            let id = self.journal.id.clone();
            let fence = self.ask_lender(device, &id, device.held)?;
            self.journal.devices[at].fence = Some(fence);
            self.host.write_journal(&self.journal)?;
        }
        Ok(())
    }

    fn ask_lender(
        &self,
        device: &MovedDevice,
        id: &str,
        supersedes: Option<Epoch>,
    ) -> Result<Epoch> {
        let vm = &self.journal.vm;
        self.host
            .hand_over(&device.lender, &device.id, vm, id, supersedes)
    }

    /// In a live migration: the guest has not been sent, so the other host cannot
    /// have it.
    fn guest_is_here(&self, call_off: bool) -> bool {
        let Journal { vm, live, .. } = &self.journal;
        live.is_some() && self.host.whereabouts(vm, call_off) == Ok(Guest::Here)
    }

    fn stop_there(&mut self) -> Result<Step> {
        let Journal { id, vm, .. } = self.journal.clone();
        let here = self.guest_is_here(true);
        let Err(error) = self.ask(Request::StopThere { id, vm }) else {
            return Ok(Step::HandBack);
        };
        // It went on without this host, and the VM has arrived.
        if error.kind == ErrorKind::Arrived {
            log::warn!("{error}");
            return Ok(Step::Finish);
        }
        // A host that was never told to may not run it.
        let may_run_there = self.journal.has_begun(Step::Install) && !here;
        if error.kind == ErrorKind::Lost && (self.lost || !may_run_there) {
            log::warn!("{error}: going back without that host");
            return Ok(Step::HandBack);
        }
        Err(match error.kind {
            ErrorKind::Lost => Error {
                message: format!(
                    "{error}; the VM may run there: if that host is dead for good, say so with --lost-host"
                ),
                ..error
            },
            _ => error,
        })
    }

    fn hand_back(&mut self) -> Result<()> {
        if !self.journal.has_begun(Step::HandOver) {
            return Ok(());
        }
        // What is to be taken back must have been handed over first, or the
        // lender would still let that happen later.
        self.hand_over()?;
        let id = format!("{}-back", self.journal.id);
        for at in 0..self.journal.devices.len() {
            let device = &self.journal.devices[at];
            if device.back.is_none() {
                let back = self.ask_lender(device, &id, device.fence)?;
                self.journal.devices[at].back = Some(back);
                self.host.write_journal(&self.journal)?;
            }
        }
        let devices = self.journal.devices.iter();
        let fences = devices.filter_map(|device| Some((device.id.clone(), device.back?)));
        self.host
            .write_fences(&self.journal.vm, &Fences(fences.collect()))
    }
}
