//! An NVMe controller from enable to disable.

use std::ops::Range;

use anyhow::{Context, Result, ensure};

use super::command::{Command, Completion, Opcode, data_pointer};
use super::identify::Identity;
use super::memory::{ENTRIES, MAX_QUEUES};
use super::queue::Queue;
use super::registers::{
    ACQ, AQA, ASQ, CC, CSTS, Capabilities, ENABLE, FATAL, READY, SHUT_DOWN, is_shut_down, store_u64,
};
use crate::machine::Machine;
use crate::ram::PAGE;

/// An enabled controller, with its queues.
pub struct Controller {
    pub(super) admin: Queue,
    io: Vec<Queue>,
    pub(super) namespace: u32,
    identity: Identity,
    turn: usize,
}

/// A transfer between the namespace and memory.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// [`Opcode::Read`] or [`Opcode::Write`].
    pub opcode: Opcode,
    /// Offset in the namespace, bytes.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// Address in memory.
    pub address: u64,
}

/// Sets up the admin queues and sets enable.
pub fn start(machine: &mut Machine) -> Result<Queue> {
    let capabilities = Capabilities::read(machine)?;
    ensure!(
        capabilities.max_entries() >= ENTRIES.into() && capabilities.min_page() == PAGE,
        "the device's capabilities are {:#x}: this driver needs queues of {ENTRIES} entries and \
         pages of {PAGE} bytes",
        capabilities.0
    );
    stop(machine)?;
    let admin = Queue::new(machine, capabilities, 0, 0)?;
    let size = u32::from(ENTRIES - 1);
    machine.device.store(0, AQA, size << 16 | size)?;
    store_u64(machine, ASQ, admin.memory.sq)?;
    store_u64(machine, ACQ, admin.memory.cq)?;
    machine.device.store(0, CC, ENABLE)?;
    Ok(admin)
}

/// The controller's status register.
pub fn status(machine: &mut Machine) -> Result<u32> {
    machine.device.load(0, CSTS)
}

/// Whether the controller is ready for commands.
pub fn is_ready(machine: &mut Machine) -> Result<bool> {
    Ok(status(machine)? & READY != 0)
}

/// Clears enable, and waits until the controller is no longer ready.
pub fn stop(machine: &mut Machine) -> Result<()> {
    machine.device.store(0, CC, 0)?;
    machine.poll("disabling the device", CSTS, |csts| csts & READY == 0)?;
    Ok(())
}

impl Controller {
    /// Enables the controller with that many I/O queues; queue n uses vector n.
    ///
    /// # Errors
    /// If the controller does not become ready, or this driver does not support it.
    pub fn bring_up(machine: &mut Machine, queues: u16, namespace: u32) -> Result<Self> {
        ensure!(
            (1..=MAX_QUEUES).contains(&queues) && u32::from(queues) < machine.vectors.len(),
            "{queues} I/O queues: it can be 1 to {MAX_QUEUES}, each with a vector besides the \
             admin queue's, and {} vectors are set up",
            machine.vectors.len()
        );
        let mut admin = start(machine)?;
        let csts = machine.poll("enabling the device", CSTS, |csts| {
            csts & (READY | FATAL) != 0
        })?;
        ensure!(
            csts & FATAL == 0,
            "the device's status is fatal ({csts:#x}) after its enable"
        );
        let identity = identify(machine, &mut admin, namespace)?;
        let mut controller = Self {
            admin,
            io: Vec::new(),
            namespace,
            identity,
            turn: 0,
        };
        controller.create_queues(machine, queues)?;
        Ok(controller)
    }

    /// The controller's and the namespace's identity.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// I/O queues.
    pub fn queues(&self) -> u16 {
        self.io.len() as u16
    }

    fn create_queues(&mut self, machine: &mut Machine, queues: u16) -> Result<()> {
        const NUMBER_OF_QUEUES: u32 = 7;
        let mut command = Command::new(Opcode::SetFeatures, 0);
        let wanted = u32::from(queues - 1);
        command.words = [NUMBER_OF_QUEUES, wanted << 16 | wanted, 0];
        let granted = self.admin.run(machine, &command)?;
        let granted = granted.success("Set Features, number of queues")?.result;
        let granted = (granted & 0xffff).min(granted >> 16) + 1;
        ensure!(
            granted >= u32::from(queues),
            "the device has {granted} queues, and {queues} are wanted"
        );
        let capabilities = Capabilities::read(machine)?;
        const CONTIGUOUS: u32 = 1 << 0;
        const INTERRUPTS: u32 = 1 << 1;
        for id in 1..=queues {
            let queue = Queue::new(machine, capabilities, id, id)?;
            let size = u32::from(ENTRIES - 1) << 16 | u32::from(id);
            let mut create = Command::new(Opcode::CreateCq, 0);
            create.prp[0] = queue.memory.cq;
            create.words = [size, u32::from(id) << 16 | INTERRUPTS | CONTIGUOUS, 0];
            self.admin
                .run(machine, &create)?
                .success("Create I/O Completion Queue")?;
            let mut create = Command::new(Opcode::CreateSq, 0);
            create.prp[0] = queue.memory.sq;
            create.words = [size, u32::from(id) << 16 | CONTIGUOUS, 0];
            self.admin
                .run(machine, &create)?
                .success("Create I/O Submission Queue")?;
            self.io.push(queue);
        }
        Ok(())
    }

    /// Moves data between the namespace and memory.
    ///
    /// # Errors
    /// If the command fails or times out, or the transfer is invalid.
    pub fn transfer(&mut self, machine: &mut Machine, transfer: &Transfer) -> Result<()> {
        let (command, queue) = self.prepare(machine, transfer)?;
        let done = queue.run(machine, &command)?;
        done.success(&format!("{transfer:x?}"))?;
        Ok(())
    }

    /// As [`Controller::transfer`], for a transfer that the controller may fail or never
    /// complete. Before it starts, `before` receives the one range of RAM that the
    /// controller may write besides the transfer's.
    ///
    /// # Errors
    /// If the connection is lost; also the errors of `before`.
    pub fn try_transfer<T>(
        &mut self,
        machine: &mut Machine,
        transfer: &Transfer,
        before: impl FnOnce(&Machine, Range<u64>) -> Result<T>,
    ) -> Result<(Option<Completion>, T)> {
        let (command, queue) = self.prepare(machine, transfer)?;
        queue.put(machine, &command)?;
        let noted = before(machine, queue.next_completion())?;
        queue.ring(machine)?;
        Ok((queue.wait(machine)?, noted))
    }

    /// Builds the command, on the next queue in turn.
    fn prepare(&mut self, machine: &Machine, transfer: &Transfer) -> Result<(Command, &mut Queue)> {
        let block = self.identity.block_bytes;
        let end = transfer.offset.checked_add(transfer.bytes);
        ensure!(
            transfer.offset.is_multiple_of(block)
                && transfer.bytes.is_multiple_of(block)
                && transfer.bytes <= self.identity.transfer_bytes
                && end.is_some_and(|end| end <= self.identity.bytes()),
            "{transfer:x?} does not fit a device of {:#x} bytes in blocks of {block}, with \
             transfers of up to {:#x} bytes",
            self.identity.bytes(),
            self.identity.transfer_bytes
        );
        let queue = self.turn % self.io.len();
        self.turn = self.turn.wrapping_add(1);
        let queue = self.io.get_mut(queue).context("no I/O queue")?;
        let list = queue.memory.list;
        let (prp, entries) = data_pointer(transfer.address, transfer.bytes, list)?;
        machine.ram.write(list, &entries)?;
        let (from, count) = (transfer.offset / block, transfer.bytes / block);
        let command = Command::transfer(transfer.opcode, self.namespace, from, count, prp);
        Ok((command, queue))
    }

    /// Makes written data durable.
    ///
    /// # Errors
    /// As [`Controller::transfer`].
    pub fn flush(&mut self, machine: &mut Machine) -> Result<()> {
        let command = Command::new(Opcode::Flush, self.namespace);
        let queue = self.io.first_mut().context("no I/O queue")?;
        queue.run(machine, &command)?.success("Flush")?;
        Ok(())
    }

    /// A page for data that the driver does not use.
    pub fn spare_page(&self) -> u64 {
        self.admin.memory.page
    }

    /// A normal shutdown, as drivers do before they unbind, and a disable. Returns whether
    /// the controller reported the shutdown as complete.
    ///
    /// # Errors
    /// If the controller does not clear its ready bit.
    pub fn shut_down(self, machine: &mut Machine) -> Result<bool> {
        machine.device.store(0, CC, ENABLE | SHUT_DOWN)?;
        let csts = machine.poll("shutting the device down", CSTS, |csts| {
            is_shut_down(csts) || csts & FATAL != 0
        })?;
        stop(machine)?;
        Ok(is_shut_down(csts))
    }
}

fn identify(machine: &mut Machine, admin: &mut Queue, namespace: u32) -> Result<Identity> {
    let mut structure = |machine: &mut Machine, which: u32, namespace: u32| -> Result<[u8; 4096]> {
        let mut command = Command::new(Opcode::Identify, namespace);
        command.prp[0] = admin.memory.page;
        command.words[0] = which;
        let done = admin.run(machine, &command)?;
        done.success("Identify")?;
        let mut bytes = [0; 4096];
        machine.ram.read(admin.memory.page, &mut bytes)?;
        Ok(bytes)
    };
    const NAMESPACE: u32 = 0;
    const CONTROLLER: u32 = 1;
    let controller = structure(machine, CONTROLLER, 0)?;
    let of_namespace = structure(machine, NAMESPACE, namespace)?;
    let min_page = Capabilities::read(machine)?.min_page();
    Identity::parse(&controller, &of_namespace, min_page)
        .with_context(|| format!("namespace {namespace}"))
}
