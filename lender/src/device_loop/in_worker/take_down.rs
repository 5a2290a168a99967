//! The end of the DMA of a device that runs, when its worker is gone.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use farside_error_chain::Chain;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::WorkerLease;
use crate::{
    device_loop::end::{FIRST_PAUSE, LONGEST_PAUSE},
    worker::{Handle, Running},
};

impl WorkerLease<'_> {
    /// Leaves the device of a worker that is gone as it runs, if its lease goes on, or takes it down. Returns whether the lease goes
    /// on; `None` if its DMA could not be stopped before the lender stopped.
    pub(super) fn leave_or_take_down(&mut self) -> Option<bool> {
        let may_go_on = self.ended.is_none() && self.may_go_on();
        let Some(handle) = self.running.take() else {
            let report = self.report.take();
            self.device
                .ended(self.lease_owner.vm().clone(), report, None);
            if let Err(error) = self.device.process_gone(!may_go_on) {
                log::error!("{error}");
            }
            return Some(may_go_on);
        };
        if may_go_on && !self.is_ending() && self.owner.home.keeps_running(self.generation) {
            let kept = Running {
                vm: self.lease_owner.vm().clone(),
                handle,
                record: self.record.take(),
            };
            self.device.keep(kept, self.report.take());
            return Some(true);
        }
        if !self.take_down(&handle) {
            self.running = Some(handle);
            return None;
        }
        let report = self.report.take();
        self.device
            .ended(self.lease_owner.vm().clone(), report, Some(handle));
        Some(false)
    }

    /// Stops the DMA of the device of a worker that is gone: the borrower's VMM may keep a
    /// function, and with it the mappings, open. Retries until the lender stops.
    pub(super) fn take_down(&mut self, device: &Handle) -> bool {
        let mut pause = FIRST_PAUSE;
        while let Err(error) = device.take_down() {
            let error = Chain(&error);
            self.owner.publish_problem(Some(&format!(
                "cannot stop its DMA: {error}; VM {} keeps the lease (generation {}) until that succeeds, trying again",
                self.lease_owner, self.generation
            )));
            if !self.pause_for_request(pause) {
                log::error!(
                    "device {}: the lender stops, and its DMA is not stopped: {error}; it stays as it is until the process has exited",
                    self.owner.id
                );
                return false;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        self.owner.publish_problem(None);
        true
    }

    /// Takes requests for the length of `pause`, while leased. Returns false when the lender stops.
    fn pause_for_request(&mut self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let left = Timespec::try_from(left).unwrap_or_default();
            let stop = self.owner.stop.as_fd();
            // Requests after the lease has been released include the next lease: they stay.
            let requests = match self.is_leased() {
                true => self.owner.requests_wake.as_fd(),
                false => stop,
            };
            let mut fds = [stop, requests].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            // An interrupted wait is only shorter.
            let ready = poll(&mut fds, Some(&left));
            let [stop, requests] = fds.map(|fd| !fd.revents().is_empty());
            match ready {
                Ok(_) if stop => return false,
                Ok(_) if requests => self.take_request(),
                _ => return true,
            }
        }
    }
}
