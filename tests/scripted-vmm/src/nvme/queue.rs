//! A submission queue and its completion queue (NVM Express 1.4, 4.1).

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};

use super::command::{Command, Completion};
use super::memory::{ENTRIES, QueueMemory};
use super::registers::Capabilities;
use crate::machine::Machine;

const COMMAND_BYTES: u64 = 64;
const COMPLETION_BYTES: u64 = 16;

/// A queue pair with a queue depth of one.
#[derive(Debug)]
pub struct Queue {
    id: u16,
    vector: u16,
    pub(super) memory: QueueMemory,
    capabilities: Capabilities,
    tail: u16,
    head: u16,
    /// The phase tag of the next completion.
    phase: u32,
    next_id: u16,
}

impl Queue {
    /// Queue pair `id`, whose completions use interrupt vector `vector`. Clears its memory.
    pub fn new(
        machine: &Machine,
        capabilities: Capabilities,
        id: u16,
        vector: u16,
    ) -> Result<Self> {
        let memory = QueueMemory::of(id);
        machine.ram.write(memory.sq, &[0; 0x1000])?;
        machine.ram.write(memory.cq, &[0; 0x1000])?;
        Ok(Self {
            id,
            vector,
            memory,
            capabilities,
            tail: 0,
            head: 0,
            phase: 1,
            next_id: 1,
        })
    }

    /// The address of its data page.
    pub fn page(&self) -> u64 {
        self.memory.page
    }

    /// Where the controller writes the next completion.
    pub fn next_completion(&self) -> Range<u64> {
        let at = self.memory.cq + u64::from(self.head) * COMPLETION_BYTES;
        at..at + COMPLETION_BYTES
    }

    /// Writes a command into the queue, without ringing the doorbell.
    pub fn put(&mut self, machine: &Machine, command: &Command) -> Result<()> {
        let at = self.memory.sq + u64::from(self.tail) * COMMAND_BYTES;
        machine.ram.write(at, &command.entry(self.next_id))?;
        self.next_id = self.next_id.wrapping_add(1);
        self.tail = (self.tail + 1) % ENTRIES;
        Ok(())
    }

    /// Rings the doorbell.
    pub fn ring(&self, machine: &mut Machine) -> Result<()> {
        let at = self.capabilities.tail_doorbell(self.id);
        machine.device.store(0, at, self.tail.into())
    }

    /// Submits a command, rings the doorbell, and waits for the completion.
    pub fn run(&mut self, machine: &mut Machine, command: &Command) -> Result<Completion> {
        self.put(machine, command)?;
        self.ring(machine)?;
        let done = self.wait(machine)?;
        done.with_context(|| {
            format!(
                "{:?} on queue {}: no completion within {:?}",
                command.opcode, self.id, machine.timeout
            )
        })
    }

    /// Waits for the interrupt of the one command, and reads its completion. Returns `None`
    /// if neither arrives in time.
    ///
    /// # Errors
    /// On a completion without an interrupt, and on an invalid completion.
    pub fn wait(&mut self, machine: &mut Machine) -> Result<Option<Completion>> {
        let deadline = machine.deadline();
        loop {
            let interrupts = machine.vectors.wait(self.vector, deadline)?;
            let done = self.is_complete(machine)?;
            match (interrupts, done) {
                (0, false) => return Ok(None),
                (0, true) => {
                    self.take(machine)?;
                    bail!(
                        "queue {}: a completion, but no interrupt on vector {} within {:?} \
                         ({} interrupts came before their completion)",
                        self.id,
                        self.vector,
                        machine.timeout,
                        machine.early_interrupts
                    );
                }
                (early, false) => machine.early_interrupts += early,
                (_, true) => return self.take(machine).map(Some),
            }
        }
    }

    /// Whether the next completion is in memory.
    pub fn is_complete(&self, machine: &Machine) -> Result<bool> {
        let last = machine.ram.load_u32(self.next_completion().end - 4)?;
        Ok(last >> 16 & 1 == self.phase)
    }

    fn take(&mut self, machine: &mut Machine) -> Result<Completion> {
        let at = self.next_completion().start;
        let result = machine.ram.load_u32(at)?;
        let queue = machine.ram.load_u32(at + 8)?;
        let last = machine.ram.load_u32(at + 12)?;
        let expected = self.next_id.wrapping_sub(1);
        ensure!(
            last as u16 == expected && queue >> 16 == u32::from(self.id),
            "queue {}: a completion of command {} of queue {}, instead of command {expected}",
            self.id,
            last as u16,
            queue >> 16
        );
        self.head += 1;
        if self.head == ENTRIES {
            self.head = 0;
            self.phase ^= 1;
        }
        let doorbell = self.capabilities.head_doorbell(self.id);
        machine.device.store(0, doorbell, self.head.into())?;
        Ok(Completion {
            result,
            // Status type and code, without phase tag and flags.
            status: (last >> 17) as u16 & 0x7ff,
        })
    }
}
