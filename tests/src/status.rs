//! `farside status --json`, as a program that depends on it reads it.

use anyhow::{Context, Result};
use serde_json::Value;

/// All of it.
#[derive(Clone, Debug)]
pub struct Status(pub Value);

/// A device as its backend tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as in the status")]
pub struct Borrow {
    pub state: String,
    pub epoch: u64,
    pub bytes_pinned: u64,
    pub bytes_locked: u64,
    pub dma_windows: u64,
    pub lut_entries: u64,
    pub guest_ram_bytes: u64,
    pub layout_probes: u64,
    pub bme_to_ready_us: u64,
    pub bytes_pinned_before_bme: u64,
    /// (kind, vector, count) of each vector that fired, as far as the backend
    /// sees them: in the relayed form.
    pub fired: Vec<(String, u64, u64)>,
    pub last_error: Option<String>,
}

/// A device as its lender tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as in the status")]
pub struct Lent {
    /// The VM that has it.
    pub borrowed_by: Option<String>,
    pub bus_master: bool,
    pub windows: u64,
    pub lut_entries: u64,
    pub bytes_mapped: u64,
    /// (index, vector, count) of each vector that fired.
    pub interrupts: Vec<(u64, u64, u64)>,
    pub fault_total: u64,
    pub faults: Vec<Fault>,
    counters: Vec<(String, u64)>,
}

/// A refused DMA.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as in the status")]
pub struct Fault {
    pub iova: u64,
    pub access: String,
    pub reason: String,
}

impl Status {
    /// What the backend of `vm` says of `device`.
    pub fn borrow(&self, vm: &str, device: &str) -> Result<Borrow> {
        let backend = find(&self.0["backends"], |backend| backend["vm"] == vm)
            .with_context(|| format!("no backend of VM {vm} in {:#}", self.0))?;
        let found = find(&backend["devices"], |entry| entry["device"] == device)
            .with_context(|| format!("no device {device} in {backend:#}"))?;
        let read = |key: &str| number(&found[key]).with_context(|| format!("{key} in {found:#}"));
        let fired = list(&found["interrupts"]["fired"])
            .iter()
            .map(|count| {
                Ok((
                    text(&count["index"])?,
                    number(&count["vector"])?,
                    number(&count["fired"])?,
                ))
            })
            .collect::<Result<_>>()
            .with_context(|| format!("interrupts in {found:#}"))?;
        Ok(Borrow {
            state: text(&found["state"])?,
            epoch: read("epoch")?,
            bytes_pinned: read("bytes_pinned")?,
            bytes_locked: read("bytes_locked")?,
            dma_windows: read("dma_windows")?,
            lut_entries: read("lut_entries")?,
            guest_ram_bytes: read("guest_ram_bytes")?,
            layout_probes: read("layout_probes")?,
            bme_to_ready_us: read("bme_to_ready_us")?,
            bytes_pinned_before_bme: read("bytes_pinned_before_bme")?,
            fired,
            last_error: found["last_error"].as_str().map(str::to_owned),
        })
    }

    /// What the lender says of `device`.
    pub fn lent(&self, device: &str) -> Result<Lent> {
        let found = list(&self.0["lenders"])
            .iter()
            .flat_map(|lender| list(&lender["devices"]))
            .find(|entry| entry["entry"]["id"] == device)
            .with_context(|| format!("no lender has {device} in {:#}", self.0))?;
        let usage = |key: &str| {
            number(&found["usage"][key]).with_context(|| format!("usage.{key} in {found:#}"))
        };
        let faults = list(&found["faults"]["recent"])
            .iter()
            .map(|record| {
                Ok(Fault {
                    iova: number(&record["fault"]["iova"])?,
                    access: text(&record["fault"]["access"])?,
                    reason: text(&record["fault"]["reason"])?,
                })
            })
            .collect::<Result<_>>()
            .with_context(|| format!("faults in {found:#}"))?;
        let interrupts = list(&found["interrupts"])
            .iter()
            .map(|count| Ok((number(&count[0])?, number(&count[1])?, number(&count[2])?)))
            .collect::<Result<_>>()
            .with_context(|| format!("interrupts in {found:#}"))?;
        let counters = list(&found["counters"])
            .iter()
            .map(|pair| Ok((text(&pair[0])?, number(&pair[1])?)))
            .collect::<Result<_>>()
            .with_context(|| format!("counters in {found:#}"))?;
        Ok(Lent {
            borrowed_by: found["entry"]["borrowed_by"]["vm"]
                .as_str()
                .map(str::to_owned),
            bus_master: found["bus_master"].as_bool().context("bus_master")?,
            windows: usage("windows")?,
            lut_entries: usage("lut_entries")?,
            bytes_mapped: usage("bytes_mapped")?,
            interrupts,
            fault_total: number(&found["faults"]["total"])?,
            faults,
            counters,
        })
    }
}

impl Borrow {
    /// Whether no page is pinned and no window is open.
    pub fn is_closed(&self) -> bool {
        self.state != "ready" && self.bytes_pinned == 0 && self.dma_windows == 0
    }
}

impl Lent {
    /// Whether the device can reach nothing.
    pub fn is_closed(&self) -> bool {
        !self.bus_master && self.windows == 0 && self.bytes_mapped == 0
    }

    /// One of the model's own counters.
    pub fn counter(&self, name: &str) -> Result<u64> {
        self.counters
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| *value)
            .with_context(|| format!("no counter {name} in {:?}", self.counters))
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn find(value: &Value, is: impl Fn(&Value) -> bool) -> Option<&Value> {
    list(value).iter().find(|entry| is(entry))
}

fn number(value: &Value) -> Result<u64> {
    value
        .as_u64()
        .with_context(|| format!("{value} is no number"))
}

fn text(value: &Value) -> Result<String> {
    let text = value
        .as_str()
        .with_context(|| format!("{value} is no text"))?;
    Ok(text.to_owned())
}
