//! Logs the events of an endpoint.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::Adapter;

/// Minimum interval between log lines, since guests can cause events. The endpoint counts them
/// meanwhile.
const PAUSE: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// A thread that logs events until this is dropped.
pub(crate) struct Watch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(adapter: &Adapter) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let (adapter, stopped) = (adapter.clone(), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("ntb-events".into())
            .spawn(move || watch(&adapter, &stopped))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Adding 1 to an eventfd counter of 0 cannot fail.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that watches the NTB has panicked");
        }
    }
}

fn watch(adapter: &Adapter, stop: &OwnedFd) {
    loop {
        let event = adapter.event_fd();
        let mut fds = [
            PollFd::new(stop, PollFlags::IN),
            PollFd::from_borrowed_fd(event, PollFlags::IN),
        ];
        // After an interrupted wait, the loop polls again.
        let _ = poll(&mut fds, None);
        if !fds[0].revents().is_empty() {
            return;
        }
        if fds[1].revents().is_empty() {
            continue;
        }
        log(adapter);
        let mut stop = [PollFd::new(stop, PollFlags::IN)];
        // The loop condition handles an early end of the pause.
        let _ = poll(&mut stop, Some(&PAUSE));
    }
}

fn log(adapter: &Adapter) {
    let events = adapter.take_events();
    let bdf = adapter.bdf();
    if events.link {
        match adapter.link().usable() {
            true => log::info!("NTB endpoint {bdf}: link up"),
            false => log::error!(
                "NTB endpoint {bdf}: link down: devices across it cannot DMA, and their registers read as all ones"
            ),
        }
    }
    if let Some(refused) = events.refused {
        log::warn!(
            "NTB endpoint {bdf}: {} accesses through its window were refused, the last a {} at offset {:#x} (peer address {}): {}",
            refused.count,
            if refused.write { "write" } else { "read" },
            refused.offset,
            refused.peer_address,
            refused.reason
        );
    }
}
