//! This host: QEMU sends the guest.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use farside_daemon::VmName;
use farside_vm_config::Manager;
use farside_vm_control::{self as control, Monitor};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{address::uri, incoming::GREETING};
use crate::{Error, ErrorKind, Result};

/// Maximum time between two queries of the progress.
const QUERY_AGAIN: Duration = Duration::from_millis(250);

/// Time between two log lines.
const LOG_AGAIN: Duration = Duration::from_secs(5);

/// The location of the guest of a live migration, according to its source host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// Here.
    Here,
    /// There, completely. It stays paused here, unless the other host is known not to
    /// resume it.
    There(Report),
    /// Not here: QEMU has exited.
    Gone,
}

/// QEMU's figures of a completed transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How long the guest was paused, milliseconds.
    pub downtime_ms: u64,
    /// How long the transfer took, milliseconds.
    pub total_ms: u64,
    /// Bytes sent.
    pub bytes: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Status {
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

/// Progress of a transfer.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// No transfer was started.
    Idle,
    /// In progress; bytes.
    Underway { sent: u64, left: u64 },
    /// Completed: the guest is there, and paused here.
    Sent(Report),
    /// Failed or cancelled: the guest is here.
    Failed(String),
}

fn progress(answer: &Value) -> Result<Progress> {
    let status: Status = serde_json::from_value(answer.clone()).map_err(|error| {
        let message = format!("malformed answer to query-migrate ({error}): {answer}");
        Error::new(ErrorKind::Vm, message)
    })?;
    Ok(match status.status.as_str() {
        "" | "none" => Progress::Idle,
        "completed" => Progress::Sent(Report {
            downtime_ms: status.downtime,
            total_ms: status.total_time,
            bytes: status.ram.transferred,
        }),
        "failed" | "cancelled" => {
            Progress::Failed(status.error_desc.unwrap_or_else(|| status.status.clone()))
        }
        _ => Progress::Underway {
            sent: status.ram.transferred,
            left: status.ram.remaining,
        },
    })
}

/// Both ends need the same capabilities. With the return path, QEMU reports `completed`
/// only after the other end has confirmed that it received everything.
pub(super) fn set_capabilities(monitor: &mut Monitor) -> Result<()> {
    let on = |name: &str| json!({ "capability": name, "state": true });
    let capabilities = ["events", "return-path", "auto-converge"].map(on);
    let arguments = json!({ "capabilities": capabilities });
    monitor.run("migrate-set-capabilities", arguments)?;
    Ok(())
}

/// Where the guest is. Waits for a transfer in progress; with `cancel`, cancels it
/// first, which may come too late.
pub(crate) fn query_transfer(vm: &VmName, cancel: bool) -> Result<Guest> {
    let mut monitor = match Monitor::connect(vm, Manager::Qemu, GREETING) {
        Err(control::Error::NotRunning { .. }) => return Ok(Guest::Gone),
        monitor => monitor?,
    };
    if cancel {
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

/// Sends the guest to the QEMU that listens at `to`. After a failure the guest still
/// runs here.
pub(crate) fn send(vm: &VmName, to: SocketAddr) -> Result<Report> {
    // QEMU 11.1 sends such a guest all the same, to a QEMU without that device.
    let devices = control::describe(vm)?.devices;
    if let Some(device) = devices.iter().find(|device| device.plugged) {
        return Err(Error::refused(format!(
            "VM {vm} has device {} again: do not attach devices while it moves",
            device.id
        )));
    }
    let mut monitor = Monitor::connect(vm, Manager::Qemu, GREETING)?;
    set_capabilities(&mut monitor)?;
    monitor.run("migrate", json!({ "uri": uri(to) }))?;
    let why = match watch(&mut monitor)? {
        Progress::Sent(report) => return Ok(report),
        Progress::Failed(why) => why,
        other => format!("unexpected state {other:?}"),
    };
    Err(Error::new(
        ErrorKind::Vm,
        format!("QEMU cannot send the guest of VM {vm} to {to}: {why}"),
    ))
}

/// Waits until no transfer is in progress. Returns the result of the last one.
fn watch(monitor: &mut Monitor) -> Result<Progress> {
    let mut logged_at = Instant::now();
    loop {
        let answer = monitor.run("query-migrate", json!({}))?;
        let (sent, left) = match progress(&answer)? {
            Progress::Underway { sent, left } => (sent, left),
            over => return Ok(over),
        };
        if logged_at.elapsed() >= LOG_AGAIN {
            logged_at = Instant::now();
            let (vm, mib) = (monitor.vm(), |bytes| bytes >> 20);
            log::info!("VM {vm}: {} MiB sent, {} MiB left", mib(sent), mib(left));
        }
        // The event only ends the wait; the state is that of the next answer.
        monitor.wait_event(Instant::now() + QUERY_AGAIN, |event| {
            event.name == "MIGRATION"
        })?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_to_query_migrate_are_parsed() {
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
            let answer = json!({ "status": status, "ram": { "transferred": 5, "remaining": 7 } });
            let underway = Progress::Underway { sent: 5, left: 7 };
            assert_eq!(progress(&answer), Ok(underway), "{status}");
        }
        let failed = json!({ "status": "failed", "error-desc": "Connection refused" });
        let why = Progress::Failed("Connection refused".into());
        assert_eq!(progress(&failed), Ok(why));
        assert!(progress(&json!({ "status": 7 })).is_err());
    }
}
