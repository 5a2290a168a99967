//! Process 1: mounts the standard file systems, loads the modules for communication with
//! the host, starts the agent and reaps orphans.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use anyhow::{Context, Result};
use farside_guest_agent::SKIP_MODULES_OPTION;
use rustix::mount::{MountFlags, mount};
use rustix::process::{WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};

/// Written by the host: one module file per line, each after its dependencies.
const MODULE_LIST: &str = "/etc/farside/modules";

/// Sets the guest up; returns only by powering the machine off.
pub fn run() -> Result<()> {
    let outcome = start();
    if let Err(error) = &outcome {
        eprintln!("init: {error:#}");
    }
    // A guest without an agent is useless. Powering off notifies the host at once, whereas
    // a panic would leave it waiting.
    rustix::fs::sync();
    reboot(RebootCommand::PowerOff).context("powering off")?;
    outcome
}

fn start() -> Result<()> {
    mount_all()?;
    load_modules()?;
    crate::power_button::watch();
    let agent = Command::new("/proc/self/exe")
        .arg("serve")
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root")
        .spawn()
        .context("starting the agent")?;
    let agent = rustix::process::Pid::from_child(&agent);
    loop {
        if let Some((pid, status)) = wait(WaitOptions::empty()).context("waiting for children")?
            && pid == agent
        {
            eprintln!("init: the agent ended: {status:?}");
            return Ok(());
        }
    }
}

fn mount_all() -> Result<()> {
    for (kind, target, data) in [
        ("proc", "/proc", None),
        ("sysfs", "/sys", None),
        ("devtmpfs", "/dev", None),
        ("tmpfs", "/dev/shm", None),
        ("devpts", "/dev/pts", None),
        ("tmpfs", "/run", None),
        ("tmpfs", "/tmp", None),
    ] {
        fs::create_dir_all(target).with_context(|| format!("creating {target}"))?;
        mount(kind, target, kind, MountFlags::empty(), data)
            .with_context(|| format!("mounting {kind} on {target}"))?;
    }
    // udev would create these; bash's and fio's users of process substitution need them.
    for (link, to) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = symlink(to, link);
    }
    Ok(())
}

fn load_modules() -> Result<()> {
    let cmdline = fs::read_to_string("/proc/cmdline").context("reading /proc/cmdline")?;
    let skip: HashSet<&str> = cmdline
        .split_whitespace()
        .filter_map(|word| word.strip_prefix(SKIP_MODULES_OPTION)?.strip_prefix('='))
        .flat_map(|names| names.split(','))
        .collect();
    let list = fs::read_to_string(MODULE_LIST).with_context(|| format!("reading {MODULE_LIST}"))?;
    for path in list.lines() {
        let name = path
            .rsplit('/')
            .next()
            .and_then(|file| file.strip_suffix(".ko"))
            .unwrap_or(path);
        if skip.contains(name) {
            continue;
        }
        let file = fs::File::open(path).with_context(|| format!("opening module {path}"))?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            // A module that fails to load (no such device) does not stop the boot.
            Err(error) => eprintln!("init: module {name}: {error}"),
        }
    }
    Ok(())
}
