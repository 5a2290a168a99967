//! Attributes the DMA faults in the kernel log to leases.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use farside_daemon::Wakeup;
use farside_error_chain::Chain;
use farside_fabric::{Access, Fault, FaultLog, FaultReason, Iova};
use farside_host_pci::kmsg::{self, FaultReader, KernelDmaFault, KernelEvent};
use farside_pci::Bdf;
use rustix::event::{PollFd, PollFlags, poll};

/// Reads the kernel log on its own thread, for all lent functions.
pub(crate) struct FaultWatch {
    logs: Mutex<BTreeMap<Bdf, Arc<FaultLog>>>,
}

impl FaultWatch {
    /// Starts reading, until `stop` is raised. If the log is unreadable, logs that and reports no
    /// faults.
    pub(crate) fn start(stop: Wakeup) -> (Arc<Self>, Option<JoinHandle<()>>) {
        let watch = Arc::new(Self {
            logs: Mutex::default(),
        });
        let reader = match FaultReader::open() {
            Ok(reader) => reader,
            Err(error) => {
                log::warn!(
                    "DMA faults of physical devices will not be seen: {error}",
                    error = Chain(&error)
                );
                return (watch, None);
            }
        };
        let mine = Arc::clone(&watch);
        let thread = std::thread::Builder::new()
            .name("dma-faults".into())
            .spawn(move || mine.read(reader, &stop));
        match thread {
            Ok(thread) => (watch, Some(thread)),
            Err(error) => {
                log::warn!(
                    "DMA faults of physical devices will not be seen: {error}",
                    error = Chain(&error)
                );
                (watch, None)
            }
        }
    }

    /// Records faults of `bdf` in `log` from now on.
    pub(crate) fn watch(&self, bdf: Bdf, log: &Arc<FaultLog>) {
        self.logs().insert(bdf, Arc::clone(log));
    }

    /// Ignores faults of `bdf` from now on.
    pub(crate) fn forget(&self, bdf: Bdf) {
        self.logs().remove(&bdf);
    }

    fn read(&self, mut reader: FaultReader, stop: &Wakeup) {
        loop {
            match reader.next_event() {
                Ok(Some(KernelEvent::Fault(fault))) => self.record(&fault),
                Ok(Some(other)) => log::debug!("the kernel says: {other:?}"),
                Ok(None) => {
                    let mut fds = [
                        PollFd::new(&reader, PollFlags::IN),
                        PollFd::new(stop, PollFlags::IN),
                    ];
                    // After an interrupted wait, the loop polls again.
                    let _ = poll(&mut fds, None);
                    if !fds[1].revents().is_empty() {
                        return;
                    }
                }
                Err(error) => {
                    log::error!(
                        "the kernel's log cannot be read any more: {error}",
                        error = Chain(&error)
                    );
                    return;
                }
            }
        }
    }

    fn record(&self, fault: &KernelDmaFault) {
        let log = self.logs().get(&fault.bdf).cloned();
        match log {
            Some(log) => log.record(Fault {
                iova: Iova::new(fault.iova),
                // Not part of the kernel's message.
                len: 0,
                access: match fault.access {
                    kmsg::Access::Read => Access::Read,
                    // If unknown, assume the more harmful one.
                    kmsg::Access::Write | kmsg::Access::Unknown => Access::Write,
                },
                reason: FaultReason::LenderDomain,
            }),
            None => log::debug!(
                "DMA fault of {}, which is not lent: {}",
                fault.bdf,
                fault.line
            ),
        }
    }

    fn logs(&self) -> MutexGuard<'_, BTreeMap<Bdf, Arc<FaultLog>>> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
