//! QEMU's monitor: commands, and events with a deadline.
//!
//! Commands and their forms on the wire are crate `qapi`'s. Its own reader is not
//! used: it has no deadline, panics when QEMU ends before its greeting, and fails
//! at the first event that its copy of QEMU's schema does not know.

pub(crate) mod socket;

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use farside_daemon::paths;
use farside_vm_config::Manager;
use qapi::Command;
use serde_json::{Value, json};

use crate::{Error, process::Process, virsh};
use socket::{Line, Socket};

/// How long QEMU may take to answer. It answers between two instructions of
/// the guest; emulated, on a busy machine, late.
const ANSWER: Duration = Duration::from_secs(60);

/// Events that are kept while nobody asks for them. Bounds memory.
const MAX_EVENTS: usize = 1024;

/// Something that QEMU reported of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// As QEMU's documentation names it, such as `DEVICE_DELETED`.
    pub name: String,
    /// What it says.
    pub data: Value,
}

/// A connection to the monitor of a VM's QEMU.
#[derive(Debug)]
pub struct Monitor {
    vm: String,
    transport: Transport,
    events: VecDeque<Event>,
    next_id: u64,
}

#[derive(Debug)]
enum Transport {
    Socket(Socket),
    Virsh,
}

impl Monitor {
    /// Connects to the monitor of a VM, by the way of whoever runs it. It must
    /// greet within `limit`; QEMU serves one client at a time.
    ///
    /// [`Error::NotRunning`] when there is no QEMU.
    pub fn connect(vm: &str, manager: Manager, limit: Duration) -> Result<Self, Error> {
        let transport = match manager {
            Manager::Qemu => {
                let deadline = Instant::now() + limit;
                Transport::Socket(Socket::connect(
                    vm,
                    &paths::monitor_socket(vm),
                    deadline,
                    limit,
                )?)
            }
            Manager::Libvirt => {
                if !virsh::is_running(vm)? {
                    return Err(Error::NotRunning {
                        vm: vm.to_owned(),
                        hint: " (libvirt's domain of that name is not active)".to_owned(),
                    });
                }
                Transport::Virsh
            }
        };
        let mut monitor = Self {
            vm: vm.to_owned(),
            transport,
            events: VecDeque::new(),
            next_id: 0,
        };
        if let Transport::Socket(_) = monitor.transport {
            monitor.run("qmp_capabilities", json!({}))?;
        }
        Ok(monitor)
    }

    /// Runs one of `qapi`'s commands.
    pub fn execute<C: Command>(&mut self, command: &C) -> Result<C::Ok, Error> {
        let arguments = serde_json::to_value(command).map_err(|error| self.lost(error))?;
        let returned = self.run(C::NAME, arguments)?;
        serde_json::from_value(returned)
            .map_err(|error| self.lost(format!("the answer to {} is odd: {error}", C::NAME)))
    }

    /// Runs any command, and returns what it returns.
    pub fn run(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let answer = match &mut self.transport {
            Transport::Virsh => {
                let line = json!({ "execute": command, "arguments": arguments });
                virsh::monitor_command(&self.vm, &line)?
            }
            Transport::Socket(socket) => {
                let id = self.next_id;
                self.next_id += 1;
                let line = json!({ "execute": command, "arguments": arguments, "id": id });
                let deadline = Instant::now() + ANSWER;
                socket.send(&line, deadline)?;
                loop {
                    match socket.receive(deadline)? {
                        Some(Line::Event(event)) => keep(&mut self.events, event),
                        // An answer to a command that was given up.
                        Some(Line::Answer(answer)) if answer["id"] != id => {}
                        Some(Line::Answer(answer)) => break answer,
                        None => return Err(socket.silent(ANSWER)),
                    }
                }
            }
        };
        match (answer.get("return"), answer.get("error")) {
            (Some(value), _) => Ok(value.clone()),
            (None, Some(error)) => Err(Error::Refused {
                vm: self.vm.clone(),
                command: command.to_owned(),
                class: text(&error["class"]),
                reason: text(&error["desc"]),
            }),
            (None, None) => Err(self.lost(format!("the answer to {command} is odd: {answer}"))),
        }
    }

    /// Waits for the next event that `wanted` takes; others before it are
    /// dropped. None when `deadline` comes first, and at once through libvirt,
    /// which shows no events here: look at what they would tell.
    ///
    /// [`Error::MonitorLost`] when QEMU ends.
    pub fn wait_event(
        &mut self,
        deadline: Instant,
        wanted: impl Fn(&Event) -> bool,
    ) -> Result<Option<Event>, Error> {
        loop {
            while let Some(event) = self.events.pop_front() {
                if wanted(&event) {
                    return Ok(Some(event));
                }
            }
            let Transport::Socket(socket) = &mut self.transport else {
                return Ok(None);
            };
            match socket.receive(deadline)? {
                Some(Line::Event(event)) => keep(&mut self.events, event),
                Some(Line::Answer(_)) => {}
                None => return Ok(None),
            }
        }
    }

    /// Whether events come by themselves ([`Monitor::wait_event`]).
    pub fn has_events(&self) -> bool {
        matches!(self.transport, Transport::Socket(_))
    }

    /// QEMU's process, where we are connected to it.
    pub(crate) fn process(&self) -> Option<&Process> {
        match &self.transport {
            Transport::Socket(socket) => Some(socket.process()),
            Transport::Virsh => None,
        }
    }

    /// QEMU's process id, where that is known.
    pub fn pid(&self) -> Option<u32> {
        self.process().map(Process::pid)
    }

    /// The VM's name.
    pub fn vm(&self) -> &str {
        &self.vm
    }

    fn lost(&self, why: impl ToString) -> Error {
        Error::MonitorLost {
            vm: self.vm.clone(),
            why: why.to_string(),
        }
    }
}

fn keep(events: &mut VecDeque<Event>, event: Event) {
    log::debug!("QEMU reports {} {}", event.name, event.data);
    if events.len() == MAX_EVENTS {
        events.pop_front();
    }
    events.push_back(event);
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("without a reason").to_owned()
}
