//! DMA faults that the kernel logs, brought to the leases that they are of.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use farside_daemon::Wakeup;
use farside_error_chain::Chain;
use farside_fabric::{Access, Fault, FaultLog, FaultReason};
use farside_host_pci::kmsg::{self, FaultReader, KernelDmaFault, KernelEvent};
use farside_pci::Bdf;
use rustix::event::{PollFd, PollFlags, poll};

/// Reads the kernel's log on a thread of its own, for all functions that are
/// lent.
pub(crate) struct FaultWatch {
    logs: Mutex<BTreeMap<Bdf, Arc<FaultLog>>>,
}

impl FaultWatch {
    /// Starts reading, until `stop` is raised. Where the log cannot be read,
    /// that is said, and faults are not seen.
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

    /// Faults of `bdf` go to `log` from now on.
    pub(crate) fn watch(&self, bdf: Bdf, log: &Arc<FaultLog>) {
        self.logs().insert(bdf, Arc::clone(log));
    }

    /// Faults of `bdf` are nobody's from now on.
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
                    // An interrupted wait only looks again.
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
                iova: fault.iova,
                // The kernel does not say.
                len: 0,
                access: match fault.access {
                    kmsg::Access::Read => Access::Read,
                    // Of the two, what could have done harm.
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
