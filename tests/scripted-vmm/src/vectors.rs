//! The eventfds that a VMM assigns to a device's MSI-X vectors.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// One eventfd per vector, and the number of interrupts on each.
pub struct Vectors {
    events: Vec<OwnedFd>,
    counts: Vec<u64>,
}

impl Vectors {
    /// Allocates `count` vectors.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn new(count: u32) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let events: Result<Vec<_>, _> = (0..count).map(|_| eventfd(0, flags)).collect();
        let events = events.with_context(|| format!("making {count} eventfds"))?;
        Ok(Self {
            counts: vec![0; events.len()],
            events,
        })
    }

    /// The number of vectors.
    pub fn len(&self) -> u32 {
        self.events.len() as u32
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The eventfds in vector order, for a message.
    pub fn fds(&self) -> Vec<RawFd> {
        self.events.iter().map(AsRawFd::as_raw_fd).collect()
    }

    /// Waits for an interrupt of `vector` until `deadline`. Returns the number of
    /// interrupts: 0 on timeout.
    ///
    /// # Errors
    /// If a system call fails, or there is no such vector.
    pub fn wait(&mut self, vector: u16, deadline: Instant) -> Result<u64> {
        let vector = usize::from(vector);
        let event = self.events.get(vector);
        let event = event.with_context(|| format!("no eventfd for vector {vector}"))?;
        poll_until(&mut [PollFd::new(event, PollFlags::IN)], deadline)?;
        self.take(vector)
    }

    /// Waits for any interrupt until `deadline`. Returns the number of interrupts.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn wait_any(&mut self, deadline: Instant) -> Result<u64> {
        let mut events: Vec<_> = self
            .events
            .iter()
            .map(|event| PollFd::new(event, PollFlags::IN))
            .collect();
        poll_until(&mut events, deadline)?;
        self.drain()
    }

    /// Consumes pending interrupts. Returns their number.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn drain(&mut self) -> Result<u64> {
        (0..self.events.len()).map(|vector| self.take(vector)).sum()
    }

    /// Interrupts consumed so far, per vector with any.
    pub fn counts(&self) -> BTreeMap<u32, u64> {
        let counted = (0..).zip(self.counts.iter().copied());
        counted.filter(|(_, count)| *count > 0).collect()
    }

    fn take(&mut self, vector: usize) -> Result<u64> {
        let mut count = [0; 8];
        match rustix::io::read(&self.events[vector], &mut count) {
            Ok(_) => {
                let count = u64::from_ne_bytes(count);
                self.counts[vector] += count;
                Ok(count)
            }
            Err(Errno::AGAIN) => Ok(0),
            Err(error) => Err(error).context("reading an eventfd"),
        }
    }
}

fn poll_until(events: &mut [PollFd<'_>], deadline: Instant) -> Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).context("a deadline that far away")?;
        match poll(events, Some(&timeout)) {
            Err(Errno::INTR) => {}
            other => return other.map(|_| ()).context("waiting for an interrupt"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_signal_is_counted_once() {
        let mut vectors = Vectors::new(3).unwrap();
        let signal = |vectors: &Vectors, vector: usize| {
            rustix::io::write(&vectors.events[vector], &1u64.to_ne_bytes()).unwrap();
        };
        for vector in [2, 0, 2] {
            signal(&vectors, vector);
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        assert_eq!(vectors.wait(2, deadline).unwrap(), 2);
        assert_eq!(vectors.wait(1, Instant::now()).unwrap(), 0);
        signal(&vectors, 2);
        assert_eq!(vectors.wait_any(deadline).unwrap(), 2);
        assert_eq!(vectors.drain().unwrap(), 0);
        assert_eq!(vectors.counts(), BTreeMap::from([(0, 1), (2, 3)]));
        assert!(vectors.wait(3, deadline).is_err());
    }
}
