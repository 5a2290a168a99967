//! `farside serve`.

use std::{
    os::fd::AsFd,
    process::Command,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context;
use farside_backend::{Backend, Config, Helper, Interrupts, Past, ReleaseHook, serve_backend};
use farside_daemon::{Activated, VmName, Wakeup, paths, paths::SocketLayout, raise_open_files};
use farside_fabric::pin::PinPolicy;
use farside_keeper::{Former, Options};
use farside_vm_config::{DeviceConfig, HostConfig, VmConfig};

use crate::{
    args::{InterruptForm, Layout, Pin, Serve},
    hotplug,
    ram::ram_ranges,
    signals::{self, Termination},
    values::MachineArg,
};

/// Default of `--lost-after`, seconds.
const LOST_AFTER: u64 = 300;

/// Time in which a start ends at a signal: the process has 5 s.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);
const NO_VM: &str = "no VM given: use --vm NAME";

/// QEMU's default `x-msg-timeout`.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn run(args: Serve) -> anyhow::Result<()> {
    let mut activated = Activated::from_env()?;
    if !args.keeper {
        return serve(args, activated, Past::default());
    }
    let socket = paths::keeper_socket(&name(&args)?);
    raise_open_files();
    let former = Former::take(&socket)?;
    if let Some(highest) = former.highest() {
        activated
            .move_above(highest)
            .context("cannot keep the service manager's sockets")?;
    }
    let options = Options {
        former,
        announce: &farside_daemon::ready,
        patience: args.stop_within.map(Duration::from_secs),
    };
    let backend = |kept| {
        // The service manager listens to the process that it has started.
        farside_daemon::end_notices();
        match serve(args, activated, Past::new(kept)) {
            Ok(()) => 0,
            Err(error) => {
                crate::report(&error);
                1
            }
        }
    };
    match farside_keeper::keep(backend, options)? {
        0 => Ok(()),
        code => std::process::exit(code.into()),
    }
}

/// The name of the VM.
fn name(args: &Serve) -> anyhow::Result<VmName> {
    let named = match (&args.vm, &args.config) {
        (Some(vm), _) => Some(vm.clone()),
        (None, Some(path)) => VmConfig::load(path)?.name,
        (None, None) => None,
    };
    named.context(NO_VM)
}

fn serve(args: Serve, activated: Activated, past: Past) -> anyhow::Result<()> {
    let mut file = match &args.config {
        Some(path) => VmConfig::load(path)?,
        None => {
            let host = HostConfig::read()?;
            VmConfig {
                discovery: host.discovery(),
                lenders: host.lenders,
                ..VmConfig::default()
            }
        }
    };
    let vm = args.vm.or(file.name.take()).context(NO_VM)?;
    farside_migration::may_run(&farside_migration::LocalHost, &vm)?;
    let more = args.devices.into_iter().map(DeviceConfig::from);
    file.devices.extend(more);
    if file.devices.is_empty() && args.config.is_none() {
        anyhow::bail!("no device to serve: give at least one with --device ID");
    }
    if !args.lenders.lenders.is_empty() {
        file.lenders = args.lenders.lenders;
        file.discovery = None;
    }
    let interrupts = match args.interrupts {
        Some(InterruptForm::Direct) => Interrupts::Direct,
        Some(InterruptForm::Relayed) => Interrupts::Relayed,
        None => file.interrupts.unwrap_or_default(),
    };
    let pin_policy = match args.pin {
        Some(Pin::Require) => PinPolicy::Require,
        Some(Pin::Prefer) => PinPolicy::Prefer,
        None => file.pin.unwrap_or(PinPolicy::Prefer),
    };
    let memory = args.memory.or(file.memory);
    let machine = args.machine.map(MachineArg::machine).or(file.machine);
    let machine = machine.unwrap_or_default();
    let message_timeout = message_timeout(memory);
    let open_timeout = args
        .open_timeout
        .or(file.open_timeout)
        // Leaves time for the lender and for a rollback.
        .map_or(message_timeout * 4 / 5, Duration::from_secs);

    let ntb = match args.ntb {
        None if file.ntb => HostConfig::read()?.ntb,
        named => named,
    };
    let stop = Wakeup::new()?;
    let signals = Termination::catch().context("cannot wait for signals")?;
    past.deliver_signals().context("cannot wait for signals")?;
    // This program, also after its file was replaced by a later version.
    let mut program = Command::new("/proc/self/exe");
    program.args(["serve-helper", vm.as_str()]);
    let helper = Helper::start(program).context("cannot start the backend's helper process")?;
    let starting = Starting::default();
    // A VM that has its devices already keeps them until the second signal.
    let stops = (!past.goes_on()).then(|| (starting.clone(), helper.clone()));
    let asked = helper.clone();
    let release = ReleaseHook::new(move |device, limit| asked.release(device, limit));
    let config = Config {
        directory: paths::vm_dir(&vm),
        fences: Some(farside_vm_config::places::fences(&vm)),
        vm,
        devices: file.device_ids(),
        lenders: file.lenders(),
        discovery: file.discovery.clone(),
        pki: file.pki(),
        ntb,
        interrupts,
        pin_policy,
        memory: args.max_memory.or(file.max_memory).max(memory),
        ram: memory.map_or_else(Vec::new, |memory| ram_ranges(machine, memory)),
        open_timeout,
        message_timeout,
        lost_after: Duration::from_secs(args.lost_after.or(file.lost_after).unwrap_or(LOST_AFTER)),
        socket_group: args.socket_group.or(file.socket_group),
        layout: match args.layout {
            Some(Layout::Plain) => SocketLayout::Plain,
            Some(Layout::Spdk) => SocketLayout::Spdk,
            None => file.layout.unwrap_or_default(),
        },
        release: Some(release),
        past,
        helper: Some(helper),
    };
    let catch = || {
        signals.raise(&stop, move |signal| {
            log::info!("{signal} received");
            if let Some((starting, helper)) = &stops {
                starting.stop(helper);
            }
        })
    };
    let backend = Backend::start_activated(&config, activated, catch);
    if starting.is_stopped() {
        log::info!("backend of VM {} stopped before it served", config.vm);
        return Ok(());
    }
    backend?.run(stop)?;
    Ok(())
}

/// The start of a backend, which waits for its helper process and for lenders until a signal comes.
#[derive(Clone, Default)]
struct Starting(Arc<(Mutex<Phase>, Condvar)>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Starts,
    Stops,
    Over,
}

impl Starting {
    /// Ends the start, if that goes on, or the process if the start does not end in time.
    fn stop(&self, helper: &Helper) {
        let (phase, over) = &*self.0;
        let mut now = phase.lock().unwrap_or_else(PoisonError::into_inner);
        if *now != Phase::Starts {
            return;
        }
        *now = Phase::Stops;
        helper.stop_waiting();
        let goes_on = |now: &mut Phase| *now != Phase::Over;
        let waited = over.wait_timeout_while(now, STOP_TIMEOUT, goes_on);
        let (now, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *now != Phase::Over {
            log::warn!(
                "the start waits for a lender or the NTB link, and has not ended within {STOP_TIMEOUT:?}: exiting"
            );
            std::process::exit(0);
        }
    }

    /// The start is over: whether a signal has ended it.
    fn is_stopped(&self) -> bool {
        let (phase, over) = &*self.0;
        let mut now = phase.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *now, Phase::Over);
        over.notify_all();
        before == Phase::Stops
    }
}

/// `farside serve-helper`: serves the backend at standard input.
pub(crate) fn helper() -> anyhow::Result<()> {
    signals::ignore()?;
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    Ok(serve_backend(socket, hotplug::release)?)
}

/// As `farside qemu` gives a VM of this size: QEMU ends itself when an answer is
/// late.
fn message_timeout(memory: Option<u64>) -> Duration {
    memory.map_or(MESSAGE_TIMEOUT, |memory| {
        Duration::from_millis(farside_qemu_configs::message_timeout_ms(memory).into())
    })
}
