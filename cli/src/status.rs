//! `farside status`.

use std::{
    fmt::{self, Write},
    io::{self, ErrorKind, Read},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail};
use farside_backend_api::{BackendReport, DeviceReport, LenderReport, Status};
use farside_daemon::{VmName, paths};
use farside_error_chain::Chain;
use farside_lender_protocol::{Address, Availability, CallError, Client, DeviceStatus, LimitUse};
use farside_vm_control::connect_by;

use crate::{args::Status as Args, lenders::ask_all, terminal::Plain};

/// How long a backend may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let vms = match &args.vm {
        Some(vm) => vec![vm.clone()],
        None => running_vms()?,
    };
    let mut backends = Vec::new();
    let (mut unread, mut denied) = (false, false);
    for vm in &vms {
        match backend(&paths::status_socket(vm)) {
            Ok(Some(report)) => backends.push(report),
            Ok(None) if args.vm.is_some() => bail!("no backend runs for VM {vm}"),
            // A directory that a killed backend left.
            Ok(None) => {}
            Err(error) if args.vm.is_some() => return Err(error),
            Err(error) => {
                log::warn!("VM {vm}: {error:#}");
                match is_denied(&error) {
                    true => denied = true,
                    false => unread = true,
                }
            }
        }
    }
    let mut lenders = Vec::new();
    for (_, answer) in ask_all(&args.lenders, lender)? {
        match answer {
            Ok(lender) => lenders.push(lender),
            Err(error) if args.lenders.lenders.is_empty() => log::warn!("{}", Chain(&error)),
            Err(error) => return Err(error.into()),
        }
    }
    let status = Status::new(backends, lenders);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print!("{}", Plain(text(&status, unread || denied)));
    }
    if unread {
        bail!("the status of a backend cannot be read");
    }
    if status.backends.is_empty() && status.lenders.is_empty() {
        if denied {
            bail!("this user may not connect to the backends here");
        }
        bail!("neither a backend nor a lender runs here");
    }
    Ok(())
}

/// One backend's report; none if no backend listens at `socket`.
pub(crate) fn backend(socket: &Path) -> anyhow::Result<Option<BackendReport>> {
    match read_report(socket) {
        // Its keeper may have started another one, or nothing listens any more.
        Err(error) if has_ended(&error) => read_report(socket),
        read => read,
    }
}

fn read_report(socket: &Path) -> anyhow::Result<Option<BackendReport>> {
    let failed = |what: &str, error: io::Error| match error.kind() {
        ErrorKind::WouldBlock => anyhow!(
            "the backend does not answer at {} within {TIMEOUT:?}: it hangs, or is stopped",
            socket.display()
        ),
        _ => anyhow::Error::new(error).context(format!("cannot {what} {}", socket.display())),
    };
    let connected = connect_by(socket, Instant::now() + TIMEOUT).map_err(io::Error::from);
    let mut stream = match connected {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(failed("connect to", error)),
    };
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut report = Vec::new();
    let read = stream.read_to_end(&mut report);
    read.map_err(|error| failed("read the status from", error))?;
    let report = BackendReport::from_json(&report);
    let report =
        report.with_context(|| format!("cannot use the status from {}", socket.display()))?;
    Ok(Some(report))
}

/// Whether the backend closed the connection before its report was complete: it ended in between.
fn has_ended(error: &anyhow::Error) -> bool {
    let cause = error.root_cause();
    let reset = |cause: &io::Error| cause.kind() == ErrorKind::ConnectionReset;
    cause.downcast_ref().is_some_and(reset)
        || cause.downcast_ref().is_some_and(serde_json::Error::is_eof)
}

/// Whether a backend belongs to another user, and may well answer that one.
fn is_denied(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<io::Error>();
    cause.is_some_and(|cause| cause.kind() == ErrorKind::PermissionDenied)
}

fn lender(address: &Address, client: &mut Client) -> Result<LenderReport, CallError> {
    let devices = client
        .devices()?
        .into_iter()
        .map(|device| client.status(&device.id))
        .collect::<Result<_, _>>()?;
    Ok(LenderReport {
        lender: client.lender().to_owned(),
        address: address.clone(),
        devices,
        limits: client.limits_in_use()?,
    })
}

pub(crate) fn running_vms() -> anyhow::Result<Vec<VmName>> {
    let directory = paths::runtime_dir().join("vm");
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", directory.display()));
        }
    };
    let mut vms = Vec::new();
    for entry in entries {
        if let Ok(name) = entry?.file_name().into_string() {
            vms.extend(VmName::try_from(name).ok());
        }
    }
    vms.sort();
    Ok(vms)
}

fn text(status: &Status, hidden: bool) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, status, hidden);
    text
}

fn write(text: &mut String, status: &Status, hidden: bool) -> fmt::Result {
    if status.backends.is_empty() && !hidden {
        writeln!(text, "no backend runs")?;
    }
    for backend in &status.backends {
        writeln!(text, "VM {}", backend.vm)?;
        if let Some(restarts @ 1..) = backend.restarts {
            writeln!(text, "  started again {restarts} times")?;
        }
        if let Some(restarts @ 1..) = backend.keeper_restarts {
            writeln!(text, "  its keeper was replaced {restarts} times")?;
        }
        if let Some(problem) = &backend.problem {
            writeln!(text, "  problem: {problem}")?;
        }
        for device in &backend.devices {
            borrowed(text, device)?;
        }
    }
    for lender in &status.lenders {
        writeln!(text, "lender {} ({})", lender.lender, lender.address)?;
        limits(text, "  ", &lender.limits)?;
        for device in &lender.devices {
            lent(text, device)?;
        }
    }
    Ok(())
}

/// What is used of limits, on one line.
fn limits(text: &mut String, indent: &str, limits: &[LimitUse]) -> fmt::Result {
    let limits: Vec<_> = limits.iter().map(LimitUse::to_string).collect();
    match limits.is_empty() {
        true => Ok(()),
        false => writeln!(text, "{indent}limits: {}", limits.join(", ")),
    }
}

/// A device, as its backend has it.
fn borrowed(text: &mut String, device: &DeviceReport) -> fmt::Result {
    let attached = if device.attached { " (attached)" } else { "" };
    writeln!(
        text,
        "  {}{attached}: {} (generation {})",
        device.device, device.state, device.generation
    )?;
    writeln!(
        text,
        "    {} MiB pinned ({} MiB locked), {} DMA windows, {} LUT entries",
        device.bytes_pinned >> 20,
        device.bytes_locked >> 20,
        device.dma_windows,
        device.lut_entries
    )?;
    if device.bme_to_ready_us != 0 {
        writeln!(
            text,
            "    last bus-master enable: DMA-ready after {} µs, {} layout probes",
            device.bme_to_ready_us, device.layout_probes
        )?;
    }
    if let Some(connection) = &device.connection {
        let what = match device.lender {
            Address::Unix(_) => "process",
            _ => "network",
        };
        writeln!(text, "    {what}: {connection}")?;
    }
    if let Some(controller) = &device.controller {
        limits(text, "    ", &controller.limits)?;
        faults(text, controller)?;
    }
    if let Some(error) = &device.last_error {
        writeln!(text, "    last error: {error}")?;
    }
    Ok(())
}

/// A device, as its lender has it.
fn lent(text: &mut String, device: &DeviceStatus) -> fmt::Result {
    let entry = &device.entry;
    write!(text, "  {} ({}): ", entry.id, entry.summary)?;
    match &entry.borrowed_by {
        Some(by) => write!(
            text,
            "borrowed by VM {} (generation {}, {} s)",
            by.vm, by.generation, by.seconds
        )?,
        None => match &entry.kept {
            Some(kept) => write!(text, "{kept}")?,
            None => write!(text, "free")?,
        },
    }
    match entry.availability {
        Availability::Available => writeln!(text)?,
        other => writeln!(text, ", {other}")?,
    }
    if let Some(problem) = &entry.problem {
        writeln!(text, "    problem: {problem}")?;
    }
    let mut counters = device.counters.iter();
    let media_errors = counters.find(|counter| counter.name == "media_errors");
    let count = media_errors.map_or(0, |counter| counter.value);
    if count != 0 {
        writeln!(text, "    {count} commands failed at the medium")?;
    }
    let usage = &device.usage;
    writeln!(
        text,
        "    {} windows, {} LUT entries, {} MiB mapped, bus master {}",
        usage.windows,
        usage.lut_entries,
        usage.bytes_mapped >> 20,
        if device.bus_master { "on" } else { "off" }
    )?;
    limits(text, "    ", &device.limits)?;
    let interrupts: u64 = device.interrupts.iter().map(|count| count.fired).sum();
    let vectors = device.interrupts.len();
    writeln!(text, "    {interrupts} interrupts on {vectors} vectors")?;
    faults(text, device)
}

fn faults(text: &mut String, device: &DeviceStatus) -> fmt::Result {
    writeln!(text, "    {} DMA faults", device.faults.total)?;
    for record in &device.faults.recent {
        writeln!(text, "      #{}: {}", record.sequence, record.fault)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use rustix::{
        event::{PollFd, PollFlags, Timespec, poll},
        net::sockopt,
    };

    use super::*;

    /// Reads the report of a backend that ends as `end` does, once a client has connected to the listener.
    fn read_from(end: impl FnOnce(UnixListener) + Send) -> anyhow::Result<Option<BackendReport>> {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("status");
        let listener = UnixListener::bind(&socket).unwrap();
        sockopt::set_socket_timeout(&listener, sockopt::Timeout::Recv, Some(TIMEOUT)).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let limit = Timespec::try_from(TIMEOUT).unwrap();
                poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&limit)).unwrap();
                end(listener);
            });
            backend(&socket)
        })
    }

    #[test]
    fn a_backend_that_ends_before_its_report_does_not_run() {
        assert!(read_from(drop).unwrap().is_none());
        let accepted = |listener: UnixListener| {
            let client = listener.accept().unwrap();
            drop(listener);
            drop(client);
        };
        assert!(read_from(accepted).unwrap().is_none());
    }

    #[test]
    fn a_backend_without_a_report_is_an_error_the_second_time() {
        let mut connections = 0;
        let silent = |listener: UnixListener| {
            for _ in 0..2 {
                connections += usize::from(listener.accept().is_ok());
            }
        };
        let error = format!("{:#}", read_from(silent).unwrap_err());
        assert!(error.contains("cannot use the status from"), "{error}");
        assert_eq!(connections, 2);
    }

    #[test]
    fn a_backend_of_another_user_does_not_hang() {
        let error = |kind| anyhow::Error::from(io::Error::from(kind)).context("cannot connect");
        assert!(is_denied(&error(ErrorKind::PermissionDenied)));
        assert!(!is_denied(&error(ErrorKind::OutOfMemory)));
        assert!(!is_denied(&anyhow!("the backend does not answer")));
    }
}
