//! This host's NTB endpoint, shared by all devices that are lent and borrowed through it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farside_error_chain::Chain;
use farside_fabric::{
    AdapterUsage, BusAddress, LimitError, LutRange, NtbLimits, NtbTables, NtbUse, Owner,
    PeerAddress, TakenWindow, VmShare, fits,
};
use farside_irq_relay::IrqEventFd;
use farside_pci::Bdf;
use farside_vfio::Function;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::borrower::GuestMemory;
use crate::driver::{Capabilities, Events, Flush, LinkState, NtbDriver, PeerCapabilities};
use crate::export::Exports;
use crate::platform::{BarOf, DomainOps, FunctionOps};
use crate::{NtbError, PeerSpace};

/// An NTB endpoint of this host that is in use. Clones share it; when the last clone and all paths
/// and windows are dropped, the link goes down and the endpoint is closed.
///
/// Calls may come from any thread.
pub struct Adapter<F: FunctionOps = Function> {
    shared: Arc<Shared<F>>,
}

/// The parts of an [`Adapter`].
pub struct Parts<F: FunctionOps> {
    /// The endpoint, alone in its domain.
    pub function: Arc<F>,
    /// Its driver.
    pub driver: Box<dyn NtbDriver>,
    /// Its whole window BAR, mapped.
    pub window: Arc<BarOf<F>>,
    /// The host physical address of its window BAR, if known: for status.
    pub window_address: BusAddress,
    /// Requester ids of CPUs: 0 (00:00.0), and others of the host bridge.
    pub cpu_requesters: Vec<u16>,
    /// The share of one VM of the tables.
    pub per_vm: VmShare,
}

struct Shared<F: FunctionOps> {
    function: Arc<F>,
    capabilities: Capabilities,
    limits: NtbLimits,
    window: Arc<BarOf<F>>,
    window_address: BusAddress,
    peer_space: PeerSpace,
    exports: Exports<F>,
    guest_memory: GuestMemory,
    flush: Arc<dyn Flush>,
    event: IrqEventFd,
    state: Mutex<State>,
}

struct State {
    driver: Box<dyn NtbDriver>,
    tables: NtbTables,
    /// Events that [`Adapter::wait_link`] has read, for `take_events`.
    events: Events,
}

impl<F: FunctionOps> Adapter<F> {
    /// Takes an endpoint into use: empties its tables, lets CPUs use its window,
    /// lets it master the bus (its domain being empty, to no effect yet) and
    /// enables the link. Does not wait for that: [`Adapter::wait_link`].
    ///
    /// # Errors
    /// [`NtbError::Unusable`], [`NtbError::Limit`]; hardware and system errors.
    pub fn new(parts: Parts<F>) -> Result<Self, NtbError> {
        let Parts {
            function,
            mut driver,
            window,
            window_address,
            cpu_requesters,
            per_vm,
        } = parts;
        let bdf = function.bdf();
        let capabilities = driver.capabilities().clone();
        let one_entry = capabilities.entries_per_window == Some(1);
        if capabilities.address_alignment > capabilities.segment() && !one_entry {
            let problem = format!(
                "its peer addresses must be multiples of {:#x}, more than a segment",
                capabilities.address_alignment
            );
            return Err(NtbError::Unusable { bdf, problem });
        }
        // Cannot exceed the table's size: `validate` checks that.
        let limits = capabilities.limits(cpu_requesters.len() as u32, per_vm);
        let tables = NtbTables::new(limits.clone())?;
        let alignment = address_alignment(capabilities.address_alignment, capabilities.segment());
        let peer_space = PeerSpace::new(function.domain().usable()?, alignment);
        let event = IrqEventFd::new().map_err(|source| NtbError::System {
            bdf,
            what: "make an eventfd",
            source,
        })?;

        driver.clear_tables()?;
        for &requester in &cpu_requesters {
            driver.add_requester(requester)?;
        }
        function.signal(driver.event_vector(), event.clone())?;
        driver.enable_events();
        function.set_bus_master(true)?;
        driver.enable_link()?;
        Ok(Self {
            shared: Arc::new(Shared {
                function,
                capabilities,
                limits,
                window,
                window_address,
                peer_space,
                exports: Exports::default(),
                guest_memory: GuestMemory::default(),
                flush: driver.flush(),
                event,
                state: Mutex::new(State {
                    driver,
                    tables,
                    events: Events::default(),
                }),
            }),
        })
    }

    /// The endpoint's address.
    pub fn bdf(&self) -> Bdf {
        self.shared.function.bdf()
    }

    /// The endpoint.
    pub fn function(&self) -> &Arc<F> {
        &self.shared.function
    }

    /// This port's sizes.
    pub fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    /// This port's limits, in the fabric's terms.
    pub fn limits(&self) -> &NtbLimits {
        &self.shared.limits
    }

    /// The used resources of this port.
    pub fn usage(&self) -> AdapterUsage {
        self.state().tables.usage()
    }

    /// Peer addresses for the memory that the peer host can access.
    pub fn peer_space(&self) -> &PeerSpace {
        &self.shared.peer_space
    }

    /// The BARs that the peer host can access.
    pub(crate) fn exports(&self) -> &Exports<F> {
        &self.shared.exports
    }

    /// The link status.
    pub fn link(&self) -> LinkState {
        self.state().driver.link()
    }

    /// The peer port's sizes, once they are known.
    pub fn peer(&self) -> Option<PeerCapabilities> {
        self.state().driver.peer()
    }

    /// Waits until the link is up, and checks that the ports are compatible.
    ///
    /// # Errors
    /// [`NtbError::LinkDown`] after `timeout`, with what is missing;
    /// [`NtbError::WindowSizesDiffer`]; [`NtbError::System`].
    pub fn wait_link(&self, timeout: Duration) -> Result<(), NtbError> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let link = self.link();
            if link.usable() {
                return self.check_link();
            }
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(NtbError::LinkDown {
                    bdf: self.bdf(),
                    waited: Some(timeout),
                    link,
                });
            }
            self.wait_event(left)?;
            self.note_events();
        }
    }

    /// Checks that the link is up now and that the ports are compatible.
    ///
    /// # Errors
    /// [`NtbError::LinkDown`], [`NtbError::WindowSizesDiffer`].
    pub fn check_link(&self) -> Result<(), NtbError> {
        let state = self.state();
        let (link, bdf) = (state.driver.link(), self.bdf());
        let Some(peer) = state.driver.peer().filter(|_| link.usable()) else {
            let waited = None;
            return Err(NtbError::LinkDown { bdf, waited, link });
        };
        let own = self.shared.capabilities.window_size;
        if peer.window_size != own {
            return Err(NtbError::WindowSizesDiffer {
                bdf,
                own,
                peer: peer.window_size,
            });
        }
        let alignment = address_alignment(peer.address_alignment, peer.segment());
        self.shared.peer_space.raise_alignment(alignment);
        Ok(())
    }

    /// Checks that a device of `owner` could open windows of `spans` bytes to the peer host through
    /// this port now, and returns their resources. For a lender.
    ///
    /// # Errors
    /// [`LimitError`] names what would fit.
    pub fn check_windows(
        &self,
        owner: Option<&Owner>,
        spans: &[u64],
    ) -> Result<NtbUse, LimitError> {
        self.state().tables.check_windows(owner, spans)
    }

    /// Checks that windows of `spans` bytes of guest RAM fit in the *peer's* port, if it is
    /// otherwise unused, and in the endpoint's domain. For a borrower, before its VM boots. The
    /// link must be up.
    ///
    /// # Errors
    /// [`NtbError::Limit`] names what would fit; [`NtbError::PeerSpace`],
    /// [`NtbError::LinkDown`], [`NtbError::WindowSizesDiffer`].
    pub fn check_ram(&self, spans: &[u64]) -> Result<NtbUse, NtbError> {
        self.check_link()?;
        let peer = self.peer().ok_or(NtbError::LinkDown {
            bdf: self.bdf(),
            waited: None,
            link: self.link(),
        })?;
        let needed = fits(
            spans,
            &NtbLimits {
                bar_size: peer.window_size,
                lut_entries: peer.lut_entries,
                alignment: Some(peer.address_alignment),
                ..self.limits().clone()
            },
        )?;
        self.shared.peer_space.check(spans)?;
        Ok(needed)
    }

    /// Readable when events are pending; take them with [`Adapter::take_events`].
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Takes the events since the last call.
    pub fn take_events(&self) -> Events {
        self.note_events();
        std::mem::take(&mut self.state().events)
    }

    /// A descriptor of the window BAR and the BAR's offset in it, for a VMM to map the part of a
    /// [`crate::BarWindow`].
    ///
    /// It is the endpoint's own descriptor; see [`farside_vfio::Function::bar_file`] for the
    /// implications.
    ///
    /// # Errors
    /// What the system reports.
    pub fn bar_file(&self) -> Result<(OwnedFd, u64), NtbError> {
        let bar = self.shared.capabilities.window_bar;
        Ok(self.shared.function.bar_file(bar)?)
    }

    pub(crate) fn guest_memory(&self) -> &GuestMemory {
        &self.shared.guest_memory
    }

    pub(crate) fn window(&self) -> &Arc<BarOf<F>> {
        &self.shared.window
    }

    pub(crate) fn window_address(&self) -> BusAddress {
        self.shared.window_address
    }

    pub(crate) fn flush(&self) -> &Arc<dyn Flush> {
        &self.shared.flush
    }

    /// Takes a requester entry and lets the requester use the window.
    pub(crate) fn add_requester(
        &self,
        device: &str,
        owner: &Owner,
        requester: u16,
    ) -> Result<RequesterEntry<F>, NtbError> {
        let mut state = self.state();
        let entry = state.tables.take_requester(device, owner)?;
        if let Err(error) = state.driver.add_requester(requester) {
            state.tables.give_back_requester(entry);
            return Err(error);
        }
        Ok(RequesterEntry {
            adapter: self.clone(),
            requester,
            entry,
        })
    }

    /// LUT entries that translate a window of `bytes` to `peer_address`, for a device's requester
    /// entry or this host's CPUs: those of another device of its owner, or free ones, programmed here.
    pub(crate) fn open_run(
        &self,
        requester: Option<usize>,
        peer_address: PeerAddress,
        bytes: u64,
    ) -> Result<LutRun<F>, NtbError> {
        let mut state = self.state();
        let taken = state.tables.take_window(requester, peer_address, bytes)?;
        if let TakenWindow::New(range) = taken
            && let Err(error) = state.driver.set_window(range, peer_address)
        {
            state.tables.give_back_window(requester, range);
            return Err(error);
        }
        Ok(LutRun {
            adapter: self.clone(),
            requester,
            range: taken.range(),
        })
    }

    fn note_events(&self) {
        // Read the eventfd first: later events signal it again. It is empty if another process was
        // faster.
        let _ = self.shared.event.take();
        let mut state = self.state();
        let events = state.driver.take_events();
        state.events.merge(events);
    }

    fn wait_event(&self, timeout: Option<Duration>) -> Result<(), NtbError> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let fd = self.event_fd();
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(NtbError::System {
                bdf: self.bdf(),
                what: "wait for the link",
                source: errno.into(),
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Tables and hardware are changed in sequence; no code panics in between.
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The best alignment of peer addresses: that of the LUT, and its segments, up to the largest IOMMU
/// page.
fn address_alignment(needed: u64, segment: u64) -> u64 {
    needed.max(segment.min(1 << 30))
}

impl<F: FunctionOps> Clone for Adapter<F> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<F: FunctionOps> std::fmt::Debug for Adapter<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Adapter")
            .field("bdf", &self.bdf())
            .field("usage", &self.usage())
            .finish()
    }
}

impl<F: FunctionOps> Drop for Shared<F> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // The peer's accesses end first, then those of this host.
        if let Err(error) = self.function.set_bus_master(false) {
            log::error!("{error}", error = Chain(&error));
        }
        state.driver.disable_link();
        if let Err(error) = state.driver.clear_tables() {
            log::error!("{error}", error = Chain(&error));
        }
    }
}

/// A device's entry in the requester table; released on drop.
pub(crate) struct RequesterEntry<F: FunctionOps> {
    adapter: Adapter<F>,
    requester: u16,
    entry: usize,
}

impl<F: FunctionOps> RequesterEntry<F> {
    pub(crate) fn adapter(&self) -> &Adapter<F> {
        &self.adapter
    }

    /// See [`Adapter::open_run`].
    pub(crate) fn open_run(
        &self,
        peer_address: PeerAddress,
        bytes: u64,
    ) -> Result<LutRun<F>, NtbError> {
        self.adapter.open_run(Some(self.entry), peer_address, bytes)
    }
}

impl<F: FunctionOps> Drop for RequesterEntry<F> {
    fn drop(&mut self) {
        let mut state = self.adapter.state();
        match state.driver.remove_requester(self.requester) {
            Ok(()) => state.tables.give_back_requester(self.entry),
            Err(error) => log::error!(
                "{error}; the entry is not used again",
                error = Chain(&error)
            ),
        }
    }
}

/// Consecutive valid LUT entries. The last device of their owner that drops them clears and releases
/// them.
pub(crate) struct LutRun<F: FunctionOps> {
    adapter: Adapter<F>,
    requester: Option<usize>,
    range: LutRange,
}

impl<F: FunctionOps> LutRun<F> {
    pub(crate) fn range(&self) -> LutRange {
        self.range
    }

    /// Offset of the first in the window BAR, in bytes.
    pub(crate) fn offset(&self) -> u64 {
        u64::from(self.range.first) * self.adapter.capabilities().segment()
    }

    /// Drops the entries, which may still be mapped: they are cleared, but not allocated again.
    pub(crate) fn retire(self) {
        self.adapter.state().tables.keep_window(self.range);
    }
}

impl<F: FunctionOps> Drop for LutRun<F> {
    fn drop(&mut self) {
        let mut state = self.adapter.state();
        if state.tables.has_one_holder(self.range)
            && let Err(error) = state.driver.clear_window(self.range)
        {
            // Entries with a stale translation must not be reused.
            state.tables.keep_window(self.range);
            log::error!(
                "{error}; the entries are not used again",
                error = Chain(&error)
            );
        }
        state.tables.give_back_window(self.requester, self.range);
    }
}
