//! This host: QEMU sends the guest.

use std::time::{Duration, Instant};

use farside_vm_config::Manager;
use farside_vm_control::{self as control, Monitor};
use serde::Deserialize;
use serde_json::{Value, json};

use super::listen::GREETING;
use crate::{Error, ErrorKind, Result};

/// How often to look how far it is, at least.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// How often to tell.
const TELL_AGAIN: Duration = Duration::from_secs(5);

/// Where the guest of a live migration is, as the host that it leaves knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// Here.
    Here,
    /// There, whole. It stands still here for good, unless the other host is known
    /// not to go on with it.
    There(Report),
    /// Not here: QEMU has ended here.
    Gone,
}

/// What QEMU says of a migration that is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How long the guest stood still, milliseconds.
    pub downtime_ms: u64,
    /// How long it all took, milliseconds.
    pub total_ms: u64,
    /// How much was sent, bytes.
    pub bytes: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Told {
    status: String,
    error_desc: Option<String>,
    downtime: u64,
    total_time: u64,
    ram: Ram,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Ram {
    transferred: u64,
    remaining: u64,
}

/// What a status means.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// None was begun.
    Idle,
    /// It goes on.
    Underway { sent: u64, left: u64 },
    /// The guest is there, and stands still here.
    Sent(Report),
    /// It is over, and the guest is here.
    Failed(String),
}

fn progress(told: &Value) -> Result<Progress> {
    let told: Told = serde_json::from_value(told.clone()).map_err(|error| {
        let message = format!("QEMU's answer to query-migrate is odd ({error}): {told}");
        Error::new(ErrorKind::Vm, message)
    })?;
    Ok(match told.status.as_str() {
        "" | "none" => Progress::Idle,
        "completed" => Progress::Sent(Report {
            downtime_ms: told.downtime,
            total_ms: told.total_time,
            bytes: told.ram.transferred,
        }),
        "failed" | "cancelled" => {
            Progress::Failed(told.error_desc.unwrap_or_else(|| told.status.clone()))
        }
        _ => Progress::Underway {
            sent: told.ram.transferred,
            left: told.ram.remaining,
        },
    })
}

/// Both ends agree on these. The return path has the other end confirm that it has
/// taken all, before the guest is given up here.
pub(super) fn set_capabilities(monitor: &mut Monitor) -> Result<()> {
    let on = |name: &str| json!({ "capability": name, "state": true });
    let capabilities = ["events", "return-path", "auto-converge"].map(on);
    let arguments = json!({ "capabilities": capabilities });
    monitor.run("migrate-set-capabilities", arguments)?;
    Ok(())
}

/// Where the guest is. A transfer that is under way is waited for; with `call_off`,
/// QEMU is told to stop it first, which it may do too late.
pub(crate) fn whereabouts(vm: &str, call_off: bool) -> Result<Guest> {
    let mut monitor = match Monitor::connect(vm, Manager::Qemu, GREETING) {
        Err(control::Error::NotRunning { .. }) => return Ok(Guest::Gone),
        monitor => monitor?,
    };
    if call_off {
        monitor.run("migrate_cancel", json!({}))?;
    }
    Ok(match watch(&mut monitor)? {
        Progress::Sent(report) if !runs(&mut monitor)? => Guest::There(report),
        _ => Guest::Here,
    })
}

pub(super) fn runs(monitor: &mut Monitor) -> Result<bool> {
    let status = monitor.run("query-status", json!({}))?;
    Ok(status["running"] == true)
}

/// Sends the guest to the QEMU that listens at `uri`. When this fails, the guest
/// runs on here.
pub(crate) fn send(vm: &str, uri: &str) -> Result<Report> {
    // QEMU 11.1 would send the guest all the same, to a QEMU that has no such device.
    let devices = control::describe(vm)?.devices;
    if let Some(device) = devices.iter().find(|device| device.plugged) {
        return Err(Error::refused(format!(
            "VM {vm} has device {} again: do not attach devices while it moves",
            device.id
        )));
    }
    let mut monitor = Monitor::connect(vm, Manager::Qemu, GREETING)?;
    set_capabilities(&mut monitor)?;
    monitor.run("migrate", json!({ "uri": uri }))?;
    let why = match watch(&mut monitor)? {
        Progress::Sent(report) => return Ok(report),
        Progress::Failed(why) => why,
        other => format!("it says {other:?}"),
    };
    Err(Error::new(
        ErrorKind::Vm,
        format!("QEMU cannot send the guest of VM {vm} to {uri}: {why}"),
    ))
}

/// Waits until no transfer is under way. Returns how the last one ended.
fn watch(monitor: &mut Monitor) -> Result<Progress> {
    let mut told_at = Instant::now();
    loop {
        let told = monitor.run("query-migrate", json!({}))?;
        let (sent, left) = match progress(&told)? {
            Progress::Underway { sent, left } => (sent, left),
            over => return Ok(over),
        };
        if told_at.elapsed() >= TELL_AGAIN {
            told_at = Instant::now();
            let (vm, mib) = (monitor.vm(), |bytes| bytes >> 20);
            log::info!("VM {vm}: {} MiB sent, {} MiB left", mib(sent), mib(left));
        }
        // An event is a reason to look at once; it is the answer that counts.
        monitor.wait_event(Instant::now() + LOOK_AGAIN, |event| {
            event.name == "MIGRATION"
        })?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_qemu_says_is_understood() {
        let done = json!({
            "status": "completed", "downtime": 37, "total-time": 1556, "setup-time": 1,
            "ram": { "transferred": 225375077u64, "remaining": 0, "total": 537403392u64 },
        });
        let report = Report {
            downtime_ms: 37,
            total_ms: 1556,
            bytes: 225375077,
        };
        assert_eq!(progress(&done), Ok(Progress::Sent(report)));
        assert_eq!(progress(&json!({})), Ok(Progress::Idle));
        for status in ["setup", "active", "device", "pre-switchover", "cancelling"] {
            let told = json!({ "status": status, "ram": { "transferred": 5, "remaining": 7 } });
            let underway = Progress::Underway { sent: 5, left: 7 };
            assert_eq!(progress(&told), Ok(underway), "{status}");
        }
        let failed = json!({ "status": "failed", "error-desc": "Connection refused" });
        let why = Progress::Failed("Connection refused".into());
        assert_eq!(progress(&failed), Ok(why));
        assert!(progress(&json!({ "status": 7 })).is_err());
    }
}
