//! Starts and stops QEMU in the background.
//!
//! Does not use QEMU's `-daemonize`, which redirects later errors to /dev/null. QEMU runs in its
//! own process group with a log as standard error, and has started when its monitor greets, which
//! is after all devices are created.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use farside_daemon::{VmName, paths};
use farside_error_chain::Chain;
use farside_qemu_configs::{CommandLine, QemuBinary, SANDBOX_OPTION, Vm};
use farside_vm_config::Manager;
use rustix::{
    fs::Mode,
    io::Errno,
    process::{Signal, umask},
};
use serde_json::json;

use crate::{
    Error, Monitor,
    logs::Log,
    process::Process,
    watch::{Waited, Watch},
};

/// Time limit for one attempt to connect to a new QEMU's monitor.
const GREETING: Duration = Duration::from_secs(10);

/// Interval of ACPI shutdown requests.
pub(crate) const PRESS_AGAIN: Duration = Duration::from_secs(5);

/// Time limit for QEMU to exit after `quit` or its own announcement.
const QUIT: Duration = Duration::from_secs(20);

/// Starts QEMU and waits until its monitor answers.
pub(crate) fn start(
    vm: &Vm,
    qemu: &QemuBinary,
    extra: &[String],
    limit: Duration,
) -> Result<Monitor, Error> {
    let name = &vm.name;
    let described = |source| Error::Vm {
        vm: name.clone(),
        source,
    };
    let mut command_line = vm.command_line(qemu.path()).map_err(described)?;
    let directory = paths::vm_dir(name);
    paths::create_directory(&directory)
        .map_err(Error::system(format!("cannot use {}", directory.display())))?;
    let pid_file = pid_file(name);
    let pid_text = pid_file.display().to_string();
    command_line.args.extend(["-pidfile".to_owned(), pid_text]);
    command_line.args.extend(extra.iter().cloned());
    if !command_line.args.iter().any(|arg| arg == "-display") {
        // No display.
        let none = ["-display".to_owned(), "none".to_owned()];
        command_line.args.extend(none);
    }
    confine(&mut command_line, qemu);
    // Left over from a killed QEMU.
    let _ = fs::remove_file(paths::monitor_socket(name));
    let log = Log::open(name, "qemu.log")?;
    let mut watch = Watch::new(&directory)?;
    keep_monitor_private();
    let process = log.spawn(&mut command_line.to_command())?;
    let failed = |why| Error::Failed {
        what: "QEMU",
        vm: name.clone(),
        why,
    };
    let deadline = Instant::now() + limit;
    let waited = watch.wait(&process, deadline, || {
        Monitor::connect(name, Manager::Qemu, GREETING).ok()
    })?;
    match waited {
        Waited::Answered(monitor) => Ok(monitor),
        Waited::Ended => Err(failed(log.last_words())),
        Waited::Late => {
            let _ = process.signal(Signal::KILL);
            let _ = process.wait(Instant::now() + QUIT);
            Err(failed(format!(
                "its monitor did not answer within {limit:?}: {}",
                log.last_words()
            )))
        }
    }
}

/// Adds QEMU's `-sandbox`, unless the arguments have one, or this QEMU cannot confine itself.
pub fn confine(command_line: &mut CommandLine, qemu: &QemuBinary) {
    let args = &mut command_line.args;
    // QEMU takes `--sandbox`, too.
    let is_there = |arg: &String| {
        arg.strip_prefix('-')
            .is_some_and(|arg| arg == SANDBOX_OPTION)
    };
    if args
        .iter()
        .any(|arg| arg == SANDBOX_OPTION || is_there(arg))
    {
        return;
    }
    match qemu.sandbox() {
        Ok(option) => args.extend(option.map(str::to_owned)),
        Err(error) => log::warn!(
            "QEMU runs without a filter of its system calls: {error}",
            error = Chain(&error)
        ),
    }
}

/// Makes the next QEMU create its monitor socket for this user only. QEMU has no option for a
/// socket's mode except the umask, any user with write permission may connect, and members of a
/// `socket-group` can traverse the VM's directory.
pub fn keep_monitor_private() {
    let others_write = Mode::WGRP | Mode::WOTH;
    let before = umask(Mode::RWXG | Mode::RWXO);
    umask(before | others_write);
}

/// Repeats the ACPI shutdown request (`system_powerdown`), and waits until QEMU has exited; with
/// `force`, kills it at the time limit.
pub(crate) fn stop(mut monitor: Monitor, limit: Duration, force: bool) -> Result<(), Error> {
    let vm = monitor.vm().to_owned();
    let deadline = Instant::now() + limit;
    if !limit.is_zero() {
        match power_down(&mut monitor, deadline) {
            Ok(true) => {
                // It exits by itself, unless started with `-no-shutdown`.
                let _ = monitor.run("quit", json!({}));
                return wait_end(&monitor, force);
            }
            Ok(false) => {}
            // It has exited.
            Err(Error::MonitorLost { .. }) => return wait_end(&monitor, force),
            Err(error) if !force => return Err(error),
            Err(_) => {}
        }
    }
    if !force {
        return Err(Error::Late {
            what: format!("the guest of VM {vm} has not powered off"),
            limit,
            advice: "it runs on; try again, check the guest, or terminate it with --force"
                .to_owned(),
        });
    }
    let _ = monitor.run("quit", json!({}));
    wait_end(&monitor, true)
}

/// Returns whether the guest has powered off. A booting guest does not handle the request yet, so
/// it is repeated.
fn power_down(monitor: &mut Monitor, deadline: Instant) -> Result<bool, Error> {
    loop {
        monitor.run("system_powerdown", json!({}))?;
        let press_again = deadline.min(Instant::now() + PRESS_AGAIN);
        let event = monitor.wait_event(press_again, |event| event.name == "SHUTDOWN")?;
        if event.is_some() {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
    }
}

fn wait_end(monitor: &Monitor, force: bool) -> Result<(), Error> {
    let Some(process) = monitor.process() else {
        return Ok(());
    };
    kill_late(monitor.vm(), process, force)
}

/// Waits until QEMU has exited as announced; kills it if allowed.
fn kill_late(vm: &VmName, process: &Process, force: bool) -> Result<(), Error> {
    let failed = || Error::system(format!("cannot end QEMU of VM {vm}"));
    if process.wait(Instant::now() + QUIT).map_err(failed())? {
        return Ok(());
    }
    if force {
        process.signal(Signal::KILL).map_err(failed())?;
        if process.wait(Instant::now() + QUIT).map_err(failed())? {
            return Ok(());
        }
    }
    Err(Error::Late {
        what: format!("QEMU of VM {vm} (process {}) has not ended", process.pid()),
        limit: QUIT,
        advice: "end it with --force".to_owned(),
    })
}

/// Stops a QEMU whose monitor does not answer.
pub(crate) fn kill_silent(vm: &VmName) -> Result<(), Error> {
    let process = kill_unanswering(&paths::monitor_socket(vm), &pid_file(vm), GREETING);
    let process = process.map_err(Error::system(format!("cannot end QEMU of VM {vm}")))?;
    kill_late(vm, &process, true)
}

/// Kills the process that listens at `monitor`; if its backlog is full, the one that wrote
/// `pid_file`.
fn kill_unanswering(monitor: &Path, pid_file: &Path, limit: Duration) -> io::Result<Process> {
    match crate::monitor::connect_by(monitor, Instant::now() + limit) {
        Ok(stream) => {
            let process = Process::of_peer(&stream)?;
            if process.is_service_manager() {
                return Err(io::Error::other(format!(
                    "the service manager listens at {}, and QEMU has not started: stop its unit",
                    monitor.display()
                )));
            }
            process.kill_listener(&stream)?;
            Ok(process)
        }
        Err(Errno::AGAIN) => {
            let process = Process::of_pid_file(pid_file)?.ok_or_else(|| {
                io::Error::other(format!(
                    "its monitor takes no more clients, and no process that `farside start` has \
                     started has {} open: `fuser {}` as root finds it",
                    pid_file.display(),
                    monitor.display()
                ))
            })?;
            process.signal(Signal::KILL)?;
            Ok(process)
        }
        Err(errno) => Err(errno.into()),
    }
}

/// The PID file of a QEMU started by `farside start`.
fn pid_file(vm: &VmName) -> PathBuf {
    paths::vm_dir(vm).join("qemu.pid")
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use farside_daemon::{OwnedListener, SocketKind};

    use super::*;

    /// An idle process that has the PID file open.
    fn silent(pid_file: &Path) -> Child {
        let script = format!(
            "exec 9>{0}; echo $$ >&9; exec sleep 1000",
            pid_file.display()
        );
        let child = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        let written = || fs::read_to_string(pid_file).is_ok_and(|text| text.ends_with('\n'));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !written() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        child
    }

    #[test]
    fn a_qemu_whose_monitor_takes_no_more_clients_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let (monitor, pid_file) = (directory.path().join("qmp"), directory.path().join("pid"));
        let _listener = OwnedListener::bind(&monitor, SocketKind::Stream, 1).unwrap();
        let short = Duration::from_millis(50);
        let connect = || crate::monitor::connect_by(&monitor, Instant::now() + short);
        let waiting: Vec<_> = std::iter::from_fn(|| connect().ok()).collect();
        assert!(!waiting.is_empty());

        let mut child = silent(&pid_file);
        let killed = kill_unanswering(&monitor, &pid_file, short).unwrap();
        assert_eq!(killed.pid(), child.id());
        assert!(!child.wait().unwrap().success());

        // The PID in the file belongs to another process; then there is no file.
        fs::write(&pid_file, format!("{}\n", std::process::id())).unwrap();
        let refused = || {
            let error = kill_unanswering(&monitor, &pid_file, short).unwrap_err();
            let said = error.to_string();
            assert!(said.contains("takes no more clients"), "{said}");
        };
        refused();
        fs::remove_file(&pid_file).unwrap();
        refused();

        // The owner of the directory links another process's PID file.
        let others = directory.path().join("others");
        let mut other = silent(&others);
        std::os::unix::fs::symlink(&others, &pid_file).unwrap();
        refused();
        fs::remove_file(&pid_file).unwrap();
        fs::hard_link(&others, &pid_file).unwrap();
        refused();
        assert!(other.try_wait().unwrap().is_none(), "it lives");
        other.kill().unwrap();
        other.wait().unwrap();

        // Does not block on a FIFO without a writer.
        fs::remove_file(&pid_file).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pid_file,
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        refused();
    }
}
