//! Reads or writes by a polling driver: a given queue depth, completions found in memory, no
//! interrupts, as SPDK does. It measures the device.

use std::collections::BTreeSet;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::command::{Command, MAX_TRANSFER, Opcode, data_pointer};
use super::controller::Controller;
use super::memory::{DRIVER_RAM, ENTRIES, QueueMemory};
use super::registers::Capabilities;
use crate::machine::Machine;
use crate::ram::PAGE;

/// The queue pair's number. Lower numbers use interrupts.
const ID: u16 = 2;
/// Completion polls between two reads of the clock.
const LOOKS: u32 = 64;

/// How the device is notified of new commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbells {
    /// By doorbell registers: each write is a message.
    Registers,
    /// By memory (Doorbell Buffer Config), and by the register when the event index
    /// requires it.
    Buffer,
}

/// Commands that are kept in flight.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// [`Opcode::Read`] or [`Opcode::Write`].
    pub opcode: Opcode,
    /// Bytes of each: whole pages.
    pub bytes: u64,
    /// How many.
    pub depth: u16,
    /// One after the other, or all over the namespace.
    pub sequential: bool,
    /// Other threads have the CPU between two looks for completions: for a host of one CPU.
    pub yields: bool,
}

impl Load {
    /// Random reads of a page.
    pub fn random_reads(depth: u16) -> Self {
        Self {
            opcode: Opcode::Read,
            bytes: PAGE,
            depth,
            sequential: false,
            yields: false,
        }
    }
}

/// Commands in flight, by identifier: a command may be overtaken by all others.
struct Slots {
    pointers: Vec<[u64; 2]>,
    free: Vec<u16>,
    since: Vec<Instant>,
}

/// A polled queue pair.
#[derive(Debug)]
pub struct Polled {
    memory: QueueMemory,
    capabilities: Capabilities,
    doorbells: Doorbells,
    namespace: u32,
    block_bytes: u64,
    pages: u64,
    tail: u16,
    head: u16,
    phase: u32,
    /// Commands submitted, and the completed ones among them.
    submitted: u64,
    completed: u64,
}

impl Controller {
    /// Adds a polled queue pair. A doorbell buffer applies to all queues, so with one the
    /// controller's interrupt-driven queues must not be used any more.
    ///
    /// # Errors
    /// If the controller refuses it.
    pub fn polled(&mut self, machine: &mut Machine, doorbells: Doorbells) -> Result<Polled> {
        let memory = QueueMemory::of(ID);
        for at in [memory.sq, memory.cq, memory.list, memory.page] {
            machine.ram.write(at, &[0; PAGE as usize])?;
        }
        if doorbells == Doorbells::Buffer {
            let mut config = Command::new(Opcode::DoorbellBufferConfig, 0);
            config.prp = [memory.list, memory.page];
            self.admin
                .run(machine, &config)?
                .success("Doorbell Buffer Config")?;
        }
        const CONTIGUOUS: u32 = 1 << 0;
        let size = u32::from(ENTRIES - 1) << 16 | u32::from(ID);
        for (opcode, at, word) in [
            (Opcode::CreateCq, memory.cq, CONTIGUOUS),
            (
                Opcode::CreateSq,
                memory.sq,
                u32::from(ID) << 16 | CONTIGUOUS,
            ),
        ] {
            let mut create = Command::new(opcode, 0);
            create.prp[0] = at;
            create.words = [size, word, 0];
            let done = self.admin.run(machine, &create)?;
            done.success(&format!("{opcode:?}"))?;
        }
        let identity = self.identity();
        Ok(Polled {
            memory,
            capabilities: Capabilities::read(machine)?,
            doorbells,
            namespace: self.namespace,
            block_bytes: identity.block_bytes,
            pages: identity.bytes() / PAGE,
            tail: 0,
            head: 0,
            phase: 1,
            submitted: 0,
            completed: 0,
        })
    }
}

impl Polled {
    /// Keeps `load` in flight for `time`. Returns the latency of each command, from before its
    /// submission; none is in flight on return.
    ///
    /// # Errors
    /// If RAM or the queue has no room for the load, or a command fails or times out.
    pub fn run(
        &mut self,
        machine: &mut Machine,
        load: Load,
        time: Duration,
    ) -> Result<Vec<Duration>> {
        let mut slots = self.slots(machine, load)?;
        let mut latencies = Vec::new();
        let end = Instant::now() + time;
        let deadline = end + machine.timeout;
        let mut looks = 0;
        let mut over = false;
        while !over || self.completed < self.submitted {
            if !over {
                self.submit(machine, load, &mut slots)?;
            }
            if self.reap(machine, &mut slots, &mut latencies)? {
                looks = 0;
            }
            looks += 1;
            if looks % LOOKS == 1 {
                let now = Instant::now();
                over = now >= end;
                ensure!(
                    now < deadline,
                    "{} of {} commands not within {:?}",
                    self.submitted - self.completed,
                    self.submitted,
                    machine.timeout
                );
            }
            match load.yields {
                true => std::thread::yield_now(),
                false => std::hint::spin_loop(),
            }
        }
        Ok(latencies)
    }

    /// A slot for each command in flight: pages for its data, behind all others those of PRP lists.
    fn slots(&self, machine: &Machine, load: Load) -> Result<Slots> {
        let Load { depth, bytes, .. } = load;
        ensure!(
            0 < depth && depth < ENTRIES,
            "{depth} commands in flight: a queue of {ENTRIES} entries has 1 to {}",
            ENTRIES - 1
        );
        ensure!(
            bytes > 0 && bytes.is_multiple_of(PAGE) && bytes <= MAX_TRANSFER,
            "transfers of {bytes} bytes: they can be whole pages up to {MAX_TRANSFER} bytes"
        );
        let lists = DRIVER_RAM.end + u64::from(depth) * bytes;
        let mut slots = Slots {
            pointers: Vec::new(),
            free: (0..depth).rev().collect(),
            since: vec![Instant::now(); depth.into()],
        };
        for id in 0..u64::from(depth) {
            let list = lists + id * PAGE;
            let (pointer, entries) = data_pointer(DRIVER_RAM.end + id * bytes, bytes, list)?;
            machine.ram.write(list, &entries)?;
            slots.pointers.push(pointer);
        }
        Ok(slots)
    }

    /// Submits these entries, whatever they are, and waits until each is completed. Returns the
    /// number of those that succeeded. Sets their command identifiers.
    ///
    /// # Errors
    /// If there are more than the queue holds, or one does not complete in time, or twice.
    pub fn run_raw(&mut self, machine: &mut Machine, entries: &[[u8; 64]]) -> Result<usize> {
        ensure!(
            entries.len() < usize::from(ENTRIES),
            "{} commands do not fit the queue",
            entries.len()
        );
        let (old, head) = (self.tail, self.head);
        let mut open = BTreeSet::new();
        for entry in entries {
            let mut entry = *entry;
            open.insert(self.tail);
            entry[2..4].copy_from_slice(&self.tail.to_le_bytes());
            let at = self.memory.sq + u64::from(self.tail) * 64;
            machine.ram.write(at, &entry)?;
            self.tail = (self.tail + 1) % ENTRIES;
        }
        let register = self.capabilities.tail_doorbell(ID);
        self.ring(machine, register, self.tail, old)?;
        let deadline = machine.deadline();
        let (mut done, mut succeeded) = (0, 0);
        while done < entries.len() {
            match self.take(machine)? {
                Some((id, status)) => {
                    ensure!(open.remove(&id), "a second completion of command {id}");
                    done += 1;
                    succeeded += usize::from(status == 0);
                }
                None => {
                    ensure!(
                        Instant::now() < deadline,
                        "{done} of {} commands complete within {:?}",
                        entries.len(),
                        machine.timeout
                    );
                    std::thread::yield_now();
                }
            }
        }
        let register = self.capabilities.head_doorbell(ID);
        self.ring(machine, register, self.head, head)?;
        Ok(succeeded)
    }

    /// Fills the queue up to the load's depth, and rings the doorbell once.
    fn submit(&mut self, machine: &mut Machine, load: Load, slots: &mut Slots) -> Result<()> {
        let old = self.tail;
        let blocks = load.bytes / self.block_bytes;
        let extents = self.pages * PAGE / load.bytes;
        while let Some(id) = slots.free.pop() {
            let extent = match load.sequential {
                true => self.submitted % extents,
                // Fibonacci hashing: visits every extent in a scattered order.
                false => self.submitted.wrapping_mul(0x9e37_79b9_7f4a_7c15) % extents,
            };
            let slot = usize::from(id);
            let command = Command::transfer(
                load.opcode,
                self.namespace,
                extent * blocks,
                blocks,
                slots.pointers[slot],
            );
            let at = self.memory.sq + u64::from(self.tail) * 64;
            slots.since[slot] = Instant::now();
            machine.ram.write(at, &command.entry(id))?;
            self.tail = (self.tail + 1) % ENTRIES;
            self.submitted += 1;
        }
        if self.tail != old {
            let register = self.capabilities.tail_doorbell(ID);
            self.ring(machine, register, self.tail, old)?;
        }
        Ok(())
    }

    /// Reaps all completions, and rings the doorbell once.
    fn reap(
        &mut self,
        machine: &mut Machine,
        slots: &mut Slots,
        latencies: &mut Vec<Duration>,
    ) -> Result<bool> {
        let old = self.head;
        while let Some((id, status)) = self.take(machine)? {
            ensure!(status == 0, "a command failed with status {status:#x}");
            let since = slots.since.get(usize::from(id));
            let since = since.with_context(|| format!("a completion of no command: {id}"))?;
            latencies.push(since.elapsed());
            slots.free.push(id);
            self.completed += 1;
        }
        if self.head == old {
            return Ok(false);
        }
        let register = self.capabilities.head_doorbell(ID);
        self.ring(machine, register, self.head, old)?;
        Ok(true)
    }

    /// Takes the next completion, if any. Returns its command's identifier and its status.
    fn take(&mut self, machine: &Machine) -> Result<Option<(u16, u32)>> {
        let at = self.memory.cq + u64::from(self.head) * 16;
        let last = machine.ram.load_u32(at + 12)?;
        if last >> 16 & 1 != self.phase {
            return Ok(None);
        }
        self.head += 1;
        if self.head == ENTRIES {
            self.head = 0;
            self.phase ^= 1;
        }
        Ok(Some((last as u16, last >> 17 & 0x7ff)))
    }

    /// Writes a doorbell: to memory if there is a buffer, and to the register if the value
    /// passes the event index (NVM Express 1.4, 7.13).
    fn ring(&self, machine: &mut Machine, register: u64, value: u16, old: u16) -> Result<()> {
        if self.doorbells == Doorbells::Buffer {
            let offset = register - self.capabilities.tail_doorbell(0);
            let [values, events] = [self.memory.list, self.memory.page];
            machine.ram.store_u32(values + offset, value.into())?;
            // Either the device sees the value or this reads its event index.
            fence(Ordering::SeqCst);
            let event = machine.ram.load_u32(events + offset)? as u16;
            if !passes(event, value, old) {
                return Ok(());
            }
        }
        machine
            .device
            .store(0, register, value.into())
            .context("ringing a doorbell")
    }
}

/// Whether the step from `old` to `value` passes `event`, modulo 2^16.
fn passes(event: u16, value: u16, old: u16) -> bool {
    value.wrapping_sub(event).wrapping_sub(1) < value.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doorbell_is_rung_when_it_passes_the_event_index() {
        for (event, old, value, rung) in [
            (5, 5, 6, true),
            (6, 5, 6, false),
            (4, 5, 6, false),
            (7, 5, 8, true),
            (8, 5, 8, false),
            (u16::MAX, u16::MAX, 0, true),
            (0, u16::MAX, 0, false),
        ] {
            assert_eq!(passes(event, value, old), rung, "{event} {old} {value}");
        }
    }
}
