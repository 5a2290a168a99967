//! One thread a device: it serves the lease, drives the model, and is the only
//! one to touch either.
//!
//! ```text
//!   no lease --Mail::Lease--> leased --Return / peer gone / stop--> no lease
//! ```
//!
//! The end of a lease has one order, whatever ended it: bus mastering off,
//! what is in flight drained, windows closed, memory unmapped, device reset,
//! lease released. While something in flight does not drain, the lease stays:
//! a device that could still write to a VM's memory is nobody else's.

mod bars;
mod lease;
mod ports;
mod refusals;
mod spin;

use std::{
    io,
    sync::{Arc, mpsc},
    time::Duration,
};

use farside_control::{DeviceStatus, Wakeup};
use farside_devices::Device;
use farside_fabric::{FaultSummary, soft::Adapter};
use rustix::event::{PollFd, PollFlags, poll};

use crate::registry::{MAX_MAIL, Mail, Mailbox, Registry};
use lease::LeaseLoop;

/// A device and what its thread needs.
pub(crate) struct DeviceLoop {
    id: String,
    device: Box<dyn Device>,
    adapter: Adapter,
    registry: Arc<Registry>,
    mail: mpsc::Receiver<Mail>,
    mail_wake: Wakeup,
    stop: Wakeup,
    poll_time: Duration,
    /// Of the last lease, for whoever looks afterwards.
    last_faults: FaultSummary,
}

impl DeviceLoop {
    /// The loop and the mailbox of its thread.
    pub(crate) fn new(
        id: String,
        device: Box<dyn Device>,
        adapter: Adapter,
        registry: Arc<Registry>,
        stop: Wakeup,
        poll_time: Duration,
    ) -> io::Result<(Self, Mailbox)> {
        let (sender, mail) = mpsc::sync_channel(MAX_MAIL);
        let mail_wake = Wakeup::new()?;
        let mailbox = Mailbox::new(sender, mail_wake.clone());
        let device_loop = Self {
            id,
            device,
            adapter,
            registry,
            mail,
            mail_wake,
            stop,
            poll_time,
            last_faults: FaultSummary::default(),
        };
        Ok((device_loop, mailbox))
    }

    /// Serves leases one after another until stopped.
    pub(crate) fn run(mut self) {
        loop {
            let mut fds = [
                PollFd::new(&self.mail_wake, PollFlags::IN),
                PollFd::new(&self.stop, PollFlags::IN),
            ];
            if let Err(errno) = poll(&mut fds, None)
                && errno != rustix::io::Errno::INTR
            {
                log::error!("device {}: cannot wait for borrowers: {errno}", self.id);
                return;
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            self.mail_wake.lower();
            while let Ok(mail) = self.mail.try_recv() {
                match mail {
                    Mail::Status(reply) => {
                        if let Some(status) = self.idle_status() {
                            // Whoever asked may have gone.
                            let _ = reply.try_send(status);
                        }
                    }
                    Mail::Lease(lease) => LeaseLoop::serve(&mut self, lease),
                }
            }
        }
    }

    fn idle_status(&self) -> Option<DeviceStatus> {
        Some(DeviceStatus {
            entry: self.registry.entry(&self.id)?,
            bus_master: false,
            usage: Default::default(),
            interrupts: Vec::new(),
            faults: self.last_faults.clone(),
            counters: counters(&*self.device),
        })
    }
}

fn counters(device: &dyn Device) -> Vec<(String, u64)> {
    device
        .stats()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}
