//! The steps at the host that a VM leaves, which is in charge.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use farside_lender_protocol::{Fences, Generation, HeldFence, Secret};

use crate::{
    Error, ErrorKind, Host, Journal, MovedDevice, MovedMarker, Peer, Reply, Request, Result, Step,
    live::{Guest, Report},
};

/// A migration in progress.
pub struct Mover<'a> {
    host: &'a dyn Host,
    peer: &'a mut dyn Peer,
    journal: Journal,
    lost: bool,
    report: Option<Report>,
    interrupted: Option<Instant>,
    interruption: Option<Duration>,
}

impl<'a> Mover<'a> {
    /// Begins the migration of `journal`, or resumes it.
    pub fn new(host: &'a dyn Host, peer: &'a mut dyn Peer, journal: Journal) -> Self {
        Self {
            host,
            peer,
            journal,
            lost: false,
            report: None,
            interrupted: None,
            interruption: None,
        }
    }

    /// The user confirms that the other host is permanently down.
    #[must_use]
    pub fn lost(mut self, lost: bool) -> Self {
        self.lost = lost;
        self
    }

    /// The present journal.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// QEMU's figures of a live migration, once the guest was sent.
    pub fn report(&self) -> Option<Report> {
        self.report
    }

    /// Cold: how long no host ran the VM, from the end of its shutdown until it was started there, or
    /// here again. Live: how long the guest lacked a device, from the first unplug request until the
    /// last device was plugged in again. None when another process did a part of that.
    pub fn interruption(&self) -> Option<Duration> {
        self.interruption
    }

    /// Moves the VM. An error before the handover takes the VM back; after it, the user
    /// decides.
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
                        "{error}; going back failed too: {more}; `farside migration resume {vm}` retries it"
                    ),
                    ..error
                }),
            };
        }
        Err(Error {
            message: format!(
                "{} while {}; `farside migration resume {vm}` goes on, and with --back it goes back",
                error.message, self.journal.step
            ),
            ..error
        })
    }

    /// Takes the VM back.
    pub fn back(&mut self) -> Result<()> {
        let (vm, step) = (&self.journal.vm, self.journal.step);
        if step >= Step::Finish && !step.is_back() {
            return Err(Error::refused(format!(
                "VM {vm} has arrived at {} already: complete the migration with `farside migration resume {vm}`, and move it back from there",
                self.journal.destination
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

    /// Executes the current step. Returns the next.
    fn step(&mut self) -> Result<Step> {
        let vm = self.journal.vm.clone();
        let limit = Duration::from_secs(self.journal.shutdown_timeout);
        Ok(match self.journal.step {
            Step::Prepare => {
                self.ask(Request::Prepare(Box::new(self.journal.clone())))?;
                Step::ShutDown
            }
            Step::ShutDown => {
                let strategy = &self.journal.strategy;
                self.interrupted = strategy.is_live().then(Instant::now);
                strategy.release(self.host, &vm, limit)?;
                self.interrupted.get_or_insert_with(Instant::now);
                Step::Return
            }
            Step::Return => {
                self.all_returned("although the VM has ended")?;
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
                self.send_guest()?;
                let id = self.journal.id.clone();
                self.ask(Request::Start { id, vm })?;
                self.interruption = self.interrupted.map(|since| since.elapsed());
                Step::Finish
            }
            Step::Finish => {
                let marker = MovedMarker {
                    to: self.journal.destination.clone(),
                    migration: self.journal.id.clone(),
                };
                self.host.write_moved_marker(&vm, Some(&marker))?;
                self.host.write_fences(&vm, &Fences::default())?;
                // The configuration is removed last, so without one nothing runs here.
                if self.host.configuration(&vm)?.is_some() {
                    self.journal.strategy.end_source(self.host, &vm)?;
                }
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
                    self.journal.strategy.start_again(self.host, &vm)?;
                    self.interruption = self.interrupted.map(|since| since.elapsed());
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

    /// Sends a running guest, unless it was sent before.
    fn send_guest(&mut self) -> Result<()> {
        let Some(address) = self.journal.strategy.address() else {
            return Ok(());
        };
        let Journal { id, vm, .. } = self.journal.clone();
        match self.host.query_transfer(&vm, false)? {
            Guest::Here => {}
            Guest::There(report) => {
                self.report = Some(report);
                return Ok(());
            }
            // Only the other host can determine whether it received the guest completely.
            Guest::Gone => return Ok(()),
        }
        let host = self.journal.destination.clone();
        let request = Request::Incoming { id, vm: vm.clone() };
        let port = match self.peer.ask(request).map_err(|error| error.at(&host))? {
            Reply::Listening(port) => port,
            Reply::Failed(error) => return Err(error.at(&host)),
            other => return Err(Error::lost(format!("{host}: unexpected answer {other:?}"))),
        };
        self.report = Some(self.host.send(&vm, SocketAddr::new(address, port))?);
        Ok(())
    }

    /// A lender notices late that a backend was killed.
    fn all_returned(&self, but: &str) -> Result<()> {
        let Journal {
            vm, configuration, ..
        } = &self.journal;
        for device in self.host.find_all(vm, configuration)? {
            if let Some((holder, generation)) = device.holder {
                return Err(Error::new(
                    ErrorKind::Lender,
                    format!(
                        "device {} is still borrowed by VM {holder} (generation {generation}) {but}",
                        device.id
                    ),
                ));
            }
        }
        Ok(())
    }

    fn hand_over(&mut self) -> Result<()> {
        for at in 0..self.journal.devices.len() {
            if self.journal.devices[at].fence.is_some() {
                continue;
            }
            let id = self.journal.id.clone();
            let journal = &mut self.journal;
            let secret = journal.chosen_secret(self.host, at, |device| &mut device.secret)?;
            let device = &self.journal.devices[at];
            let fence = self.ask_lender(device, &id, device.held, secret)?;
            self.journal.devices[at].fence = Some(fence);
            self.host.write_journal(&self.journal)?;
        }
        Ok(())
    }

    fn ask_lender(
        &self,
        device: &MovedDevice,
        id: &str,
        supersedes: Option<HeldFence>,
        secret: Secret,
    ) -> Result<Generation> {
        let vm = &self.journal.vm;
        self.host
            .hand_over(&device.lender, &device.id, vm, id, supersedes, secret)
    }

    fn guest_is_here(&self, cancel: bool) -> bool {
        let Journal { vm, strategy, .. } = &self.journal;
        strategy.guest_is_here(self.host, vm, cancel)
    }

    fn stop_there(&mut self) -> Result<Step> {
        let Journal { id, vm, .. } = self.journal.clone();
        let here = self.guest_is_here(true);
        let Err(error) = self.ask(Request::StopThere { id, vm }) else {
            return Ok(Step::HandBack);
        };
        // It completed the migration without this host.
        if error.kind == ErrorKind::Arrived {
            log::warn!("{error}");
            return Ok(Step::Finish);
        }
        // Without Install the other host does not run it.
        let may_run_there = self.journal.has_begun(Step::Install) && !here;
        if error.kind == ErrorKind::Lost && (self.lost || !may_run_there) {
            log::warn!("{error}: going back without that host");
            return Ok(Step::HandBack);
        }
        Err(match error.kind {
            ErrorKind::Lost => Error {
                message: format!(
                    "{error}; the VM may run there: if that host is permanently down, run `farside migration resume {} --back --lost-host`",
                    self.journal.vm
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
        // The other host ends the VM only if its journal is of this migration: it may have gone on alone,
        // and tried to move the VM since.
        if !self.lost {
            let destination = &self.journal.destination;
            self.all_returned(&format!("on {destination}: stop it there first"))?;
        }
        // Complete the handover first, or the other host could still request it later.
        self.hand_over()?;
        let id = format!("{}-back", self.journal.id);
        for at in 0..self.journal.devices.len() {
            if self.journal.devices[at].back.is_none() {
                let journal = &mut self.journal;
                let secret =
                    journal.chosen_secret(self.host, at, |device| &mut device.back_secret)?;
                let device = &self.journal.devices[at];
                let back = self.ask_lender(device, &id, device.given(), secret)?;
                self.journal.devices[at].back = Some(back);
                self.host.write_journal(&self.journal)?;
            }
        }
        let devices = self.journal.devices.iter();
        let fences = devices.filter_map(|device| Some((device.id.clone(), device.given_back()?)));
        self.host
            .write_fences(&self.journal.vm, &Fences(fences.collect()))
    }
}
