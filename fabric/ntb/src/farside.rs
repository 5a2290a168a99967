//! The driver of farside's own NTB endpoint.
//!
//! Register set: [`crate::regs`].

use std::sync::Arc;
use std::time::Duration;

use farside_fabric::{LutRange, PeerAddress};
use farside_pci::Bdf;

use crate::driver::{Capabilities, Events, Flush, LinkState, NtbDriver, PeerCapabilities, Refused};
use crate::regs::{
    DOORBELLS, EVENT_VECTOR, ID, REQUESTERS, SCRATCHPADS, VERSION, WINDOW_BAR, caps, counts, error,
    event, link_control, link_status, lut, lut_entry, reg, requester, requester_entry,
};
use crate::{NtbError, Registers};

/// A port of farside's own NTB.
pub struct FarsideNtb {
    /// For messages.
    bdf: Bdf,
    registers: Arc<dyn Registers>,
    window: Arc<dyn Registers>,
    capabilities: Capabilities,
}

impl FarsideNtb {
    /// A driver of the function at `bdf`, whose BAR 0 is `registers` and whose
    /// window BAR is `window`, of `window_len` bytes. Changes nothing yet.
    ///
    /// # Errors
    /// [`NtbError::WrongRegisters`], [`NtbError::Version`],
    /// [`NtbError::Unusable`] when sizes contradict each other.
    pub fn new(
        bdf: Bdf,
        registers: Arc<dyn Registers>,
        window: Arc<dyn Registers>,
        window_len: u64,
    ) -> Result<Self, NtbError> {
        let found = registers.read32(reg::ID);
        if found != ID {
            return Err(NtbError::WrongRegisters {
                bdf,
                found,
                expected: ID,
            });
        }
        let found = registers.read32(reg::VERSION);
        if found != VERSION {
            return Err(NtbError::Version {
                bdf,
                found,
                supported: VERSION,
            });
        }
        let unusable = |problem| NtbError::Unusable { bdf, problem };
        let value = registers.read32(reg::CAPS);
        let sizes = sizes(value)
            .ok_or_else(|| unusable(format!("its register CAPS, {value:#x}, is invalid")))?;
        if sizes.window_size != window_len {
            return Err(unusable(format!(
                "its register CAPS says {:#x} bytes for the window BAR, which has {window_len:#x}",
                sizes.window_size
            )));
        }
        let counts = registers.read32(reg::COUNTS);
        Ok(Self {
            bdf,
            registers,
            window,
            capabilities: Capabilities {
                window_bar: WINDOW_BAR,
                window_size: sizes.window_size,
                lut_entries: sizes.lut_entries,
                address_alignment: sizes.address_alignment,
                entries_per_window: None,
                requester_entries: counts::requesters(counts).min(REQUESTERS),
                doorbells: counts::doorbells(counts).min(DOORBELLS),
                scratchpads: counts::scratchpads(counts).min(SCRATCHPADS),
                // Some register accesses, each a trap if the host is a VM.
                remap_time: Duration::from_millis(1),
            },
        })
    }

    /// Makes LUT entries `value(i)`, for `i` from 0 on, and reads them back, which also waits for
    /// the posted writes.
    fn set_entries(&self, entries: LutRange, value: impl Fn(u64) -> u64) -> Result<(), NtbError> {
        let each = || (entries.first..).zip(0..u64::from(entries.entries));
        for (index, i) in each() {
            self.registers.write64(lut_entry(index), value(i));
        }
        for (index, i) in each() {
            let found = self.registers.read64(lut_entry(index));
            if found != value(i) {
                return Err(NtbError::Register {
                    bdf: self.bdf,
                    register: format!("LUT entry {index}"),
                    written: value(i),
                    found,
                });
            }
        }
        Ok(())
    }

    /// Replaces the first requester entry that satisfies `wanted`; `None` if none does.
    fn replace_requester(
        &self,
        wanted: impl Fn(u32) -> bool,
        value: u32,
    ) -> Option<Result<(), NtbError>> {
        let at = (0..self.capabilities.requester_entries)
            .map(requester_entry)
            .find(|&at| wanted(self.registers.read32(at)))?;
        self.registers.write32(at, value);
        let found = self.registers.read32(at);
        Some(match found == value {
            true => Ok(()),
            false => Err(NtbError::Register {
                bdf: self.bdf,
                register: format!("requester entry at {at:#x}"),
                written: value.into(),
                found: found.into(),
            }),
        })
    }
}

/// The limits in `CAPS`, if valid.
fn sizes(value: u32) -> Option<PeerCapabilities> {
    let power = |shift| 1u64.checked_shl(shift);
    let sizes = PeerCapabilities {
        window_size: power(caps::window_shift(value))?,
        lut_entries: 1u32.checked_shl(caps::lut_shift(value))?,
        address_alignment: power(caps::address_align_shift(value))?,
    };
    // Consecutive entries translate to contiguous memory only if aligned.
    (sizes.segment() >= sizes.address_alignment).then_some(sizes)
}

impl NtbDriver for FarsideNtb {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn peer(&self) -> Option<PeerCapabilities> {
        sizes(self.registers.read32(reg::PEER_CAPS))
    }

    fn link(&self) -> LinkState {
        let status = self.registers.read32(reg::LINK_STATUS);
        if status == u32::MAX {
            // The device does not answer.
            return LinkState::default();
        }
        LinkState {
            up: status & link_status::UP != 0,
            peer_present: status & link_status::PEER_PRESENT != 0,
            peer_enabled: status & link_status::PEER_ENABLED != 0,
            peer_bus_master: status & link_status::PEER_BUS_MASTER != 0,
        }
    }

    fn enable_link(&mut self) -> Result<(), NtbError> {
        let value = link_control::ENABLE;
        self.registers.write32(reg::LINK_CONTROL, value);
        let found = self.registers.read32(reg::LINK_CONTROL);
        if found == value {
            return Ok(());
        }
        Err(NtbError::Register {
            bdf: self.bdf,
            register: "LINK_CONTROL".into(),
            written: value.into(),
            found: found.into(),
        })
    }

    fn disable_link(&mut self) {
        self.registers.write32(reg::LINK_CONTROL, 0);
        // Waits for the write.
        self.registers.read32(reg::LINK_CONTROL);
    }

    fn clear_tables(&mut self) -> Result<(), NtbError> {
        for index in 0..self.capabilities.requester_entries {
            self.registers.write32(requester_entry(index), 0);
        }
        let all = LutRange {
            first: 0,
            entries: self.capabilities.lut_entries,
        };
        self.set_entries(all, |_| 0)
    }

    fn set_window(&mut self, entries: LutRange, peer_address: PeerAddress) -> Result<(), NtbError> {
        let segment = self.capabilities.segment();
        // Wrapping: what lies beyond 2^64 is beyond the window's end, too.
        let at = |i: u64| peer_address.wrapping_add(i * segment);
        let value = |i| at(i).get() & lut::ADDRESS | lut::VALID;
        self.set_entries(entries, value).inspect_err(|_| {
            // Its error would only repeat the first.
            let _ = self.set_entries(entries, |_| 0);
        })
    }

    fn clear_window(&mut self, entries: LutRange) -> Result<(), NtbError> {
        self.set_entries(entries, |_| 0)
    }

    fn add_requester(&mut self, requester: u16) -> Result<(), NtbError> {
        let value = requester::VALID | u32::from(requester);
        self.replace_requester(|entry| entry & requester::VALID == 0, value)
            .unwrap_or(Err(NtbError::RequesterTable {
                bdf: self.bdf,
                limit: self.capabilities.requester_entries,
            }))
    }

    fn remove_requester(&mut self, requester: u16) -> Result<(), NtbError> {
        let value = requester::VALID | u32::from(requester);
        self.replace_requester(|entry| entry == value, 0)
            .unwrap_or(Ok(()))
    }

    fn event_vector(&self) -> u16 {
        EVENT_VECTOR
    }

    fn enable_events(&mut self) {
        self.registers.write32(reg::EVENT_MASK, 0);
    }

    fn take_events(&mut self) -> Events {
        let status = self.registers.read32(reg::EVENT_STATUS);
        if status == u32::MAX {
            return Events {
                link: true, // gone, which is a link event
                refused: None,
            };
        }
        // Clear before reading the state: a change in between is a new event.
        self.registers.write32(reg::EVENT_STATUS, status);
        Events {
            link: status & event::LINK != 0,
            refused: (status & event::ERROR != 0).then(|| self.refused()),
        }
    }

    fn flush(&self) -> Arc<dyn Flush> {
        Arc::new(ReadThrough(Arc::clone(&self.window)))
    }
}

impl FarsideNtb {
    fn refused(&self) -> Refused {
        let info = self.registers.read32(reg::ERROR_INFO);
        let refused = Refused {
            count: self.registers.read32(reg::ERROR_COUNT),
            write: info & error::WRITE != 0,
            offset: self.registers.read64(reg::ERROR_OFFSET),
            peer_address: PeerAddress::new(self.registers.read64(reg::ERROR_ADDRESS)),
            reason: match info & error::REASON {
                error::LINK_DOWN => "the link is down".into(),
                error::LUT_INVALID => "no window is open there".into(),
                error::NO_REQUESTER => "the requester table is empty".into(),
                error::NOT_BUS_MASTER => "the peer port may not master its bus".into(),
                error::ADDRESS => "the peer address is beyond 2^64".into(),
                error::PEER_REFUSED => "nothing is mapped there at the other host".into(),
                error::TIMEOUT => "the other host did not answer in time".into(),
                error::BUSY => "too many accesses are under way".into(),
                other => format!("reason {other}"),
            },
        };
        self.registers.write32(reg::ERROR_COUNT, 0);
        refused
    }
}

/// A read through the window: its completion cannot pass earlier posted writes (PCIe Base
/// Specification 6.0, 2.4.1).
struct ReadThrough(Arc<dyn Registers>);

impl Flush for ReadThrough {
    fn flush(&self, offset: u64) {
        self.0.read32(offset);
    }
}
