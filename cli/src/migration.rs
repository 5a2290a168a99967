//! `farside migration`: the migrations of this host, and repairs by hand.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand};
use farside_bench::text_table;
use farside_daemon::{DeviceId, VmName, paths};
use farside_lender_protocol::{Address, Client, Secret};
use farside_migration::{
    Accept, Journal, LocalHost, Mover, Remote, Role, Shell, Step, Store, claim, forget, lock_vm,
    resume_here, serve_agent,
};

use crate::terminal::Plain;

/// Show, resume or repair migrations
///
/// Migrations are started by `farside migrate`. Also cleans up after a lost host.
#[derive(Debug, ClapArgs)]
pub(crate) struct Migration {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the migrations of this host and their steps
    Status,
    Resume(Resume),
    /// Remove the moved marker of a VM, so that its name can be used here again
    Forget {
        /// Name of the VM.
        #[arg(value_name = "VM")]
        vm: VmName,
    },
    /// Claim a VM's devices for this host when the host that holds them is lost
    Claim {
        /// Name of the VM.
        #[arg(value_name = "VM")]
        vm: VmName,
    },
    Release(Release),
    Agent(Agent),
}

/// Resume an interrupted migration, or roll it back
///
/// Run it on the source host or, if that is down, on the destination host.
#[derive(Debug, ClapArgs)]
struct Resume {
    /// Name of the VM.
    #[arg(value_name = "VM")]
    vm: VmName,
    /// Roll back to the source host.
    #[arg(long)]
    back: bool,
    /// Complete without the other host, which must be permanently down. Its leases
    /// are fenced off in case it is not.
    #[arg(long)]
    lost_host: bool,
    #[command(flatten)]
    shell: ShellFlag,
}

/// Release a device that is reserved for a VM that is being moved
///
/// Any VM may then borrow it.
#[derive(Debug, ClapArgs)]
struct Release {
    /// Id of the device.
    #[arg(value_name = "DEVICE")]
    device: DeviceId,
    /// The lender of that device [default: this host's].
    #[arg(long, value_name = "ADDRESS")]
    lender: Option<Address>,
}

/// Serve another host on standard input and output
///
/// `farside migrate` runs this by ssh. The flags restrict a key of ssh that has this as its command.
#[derive(Debug, ClapArgs)]
struct Agent {
    /// A VM that may come to this host; repeatable [default: any].
    #[arg(long, value_name = "VM")]
    vm: Vec<VmName>,
    /// A QEMU binary that VMs may run, which then confines itself; repeatable [default: any].
    #[arg(long, value_name = "PATH")]
    qemu: Vec<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ShellFlag {
    /// The remote shell, to which the host's name and a command are appended
    /// [default: FARSIDE_RSH in the environment, else ssh].
    #[arg(long, value_name = "COMMAND")]
    rsh: Option<String>,
}

impl ShellFlag {
    pub(crate) fn command(&self) -> Option<String> {
        let from_environment = || std::env::var("FARSIDE_RSH").ok();
        self.rsh
            .clone()
            .or_else(from_environment)
            .filter(|command| !command.is_empty())
    }
}

pub(crate) fn run(args: &Migration) -> anyhow::Result<()> {
    match &args.verb {
        Verb::Status => status(),
        Verb::Resume(args) => resume(args),
        Verb::Forget { vm } => {
            let _lock = lock_vm(vm)?;
            forget(&LocalHost, vm)?;
            println!("VM {vm}: forgotten that it moved away");
            Ok(())
        }
        Verb::Claim { vm } => {
            let _lock = lock_vm(vm)?;
            let fences = claim(&LocalHost, vm)?;
            let devices: Vec<_> = fences.0.into_keys().collect();
            println!("VM {vm} has its devices here: {}", devices.join(", "));
            Ok(())
        }
        Verb::Release(Release { device, lender }) => {
            let ours = || paths::lender_socket().into();
            let lender = lender.clone().unwrap_or_else(ours);
            Client::connect(&lender, None)?.end_reservation(device, secret_of(device))?;
            println!("device {device} can be borrowed by any VM");
            Ok(())
        }
        Verb::Agent(Agent { vm, qemu }) => {
            let (input, output) = (std::io::stdin().lock(), std::io::stdout().lock());
            let accept = Accept {
                vms: vm.clone(),
                qemus: qemu.clone(),
            };
            Ok(serve_agent(&LocalHost, &accept, input, output)?)
        }
    }
}

/// The secret of the fence that reserves a device, if a migration of this host requested that.
fn secret_of(device: &DeviceId) -> Option<Secret> {
    let journals = LocalHost::journals().into_iter().flatten();
    let mut devices = journals.flat_map(|journal| journal.devices);
    let device = devices.find(|moved| moved.id == *device && moved.secret.is_some())?;
    match device.back {
        Some(_) => device.back_secret,
        None => device.secret,
    }
}

fn status() -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for journal in LocalHost::journals() {
        match journal {
            Ok(journal) => rows.push(vec![
                journal.vm.to_string(),
                journal.source,
                journal.destination,
                journal.step.to_string(),
                journal.id,
            ]),
            Err(error) => eprintln!("error: {}", Plain(error)),
        }
    }
    let head = ["VM", "FROM", "TO", "STEP", "MIGRATION"];
    print!("{}", Plain(text_table(&head, &rows)));
    Ok(())
}

fn resume(args: &Resume) -> anyhow::Result<()> {
    let vm = &args.vm;
    let _lock = lock_vm(vm)?;
    let journal = LocalHost.journal(vm)?.filter(Journal::is_open);
    let Some(journal) = journal else {
        anyhow::bail!("no migration of VM {vm} is open on this host");
    };
    if journal.role == Role::Destination {
        anyhow::ensure!(
            !args.back,
            "only {}, the host that VM {vm} leaves, can take it back",
            journal.source
        );
        resume_here(&LocalHost, journal, args.lost_host)?;
        let journal = LocalHost.journal(vm)?;
        println!("{}", journal.as_ref().map_or_else(String::new, outcome));
        return Ok(());
    }
    let shell = args.shell.command().or_else(|| journal.shell.clone());
    let mut peer = Remote::new(&journal.destination, Shell::new(shell.as_deref())?);
    let mut mover = Mover::new(&LocalHost, &mut peer, journal).lost(args.lost_host);
    match args.back || mover.journal().step.is_back() {
        true => mover.back()?,
        false => mover.forward()?,
    }
    show_outcome(&mover);
    Ok(())
}

/// Where the VM is now, and what the migration cost the guest.
pub(crate) fn show_outcome(mover: &Mover<'_>) {
    let journal = mover.journal();
    println!("{}", outcome(journal));
    if let Some(report) = mover.report() {
        println!(
            "the guest stood still for {} ms; QEMU sent {} MiB in {:.1} s",
            report.downtime_ms,
            report.bytes >> 20,
            report.total_ms as f64 / 1000.0,
        );
    }
    let interruption = mover.interruption().filter(|_| journal.was_running);
    if let Some(seconds) = interruption.map(|time| time.as_secs_f64()) {
        match journal.strategy.is_live() {
            true => println!("the guest was without its devices for {seconds:.1} s"),
            false => println!("it was off for {seconds:.2} s between its shutdown and its boot"),
        }
    }
}

fn outcome(journal: &Journal) -> String {
    let Journal {
        vm,
        source,
        destination,
        step,
        was_running,
        ..
    } = journal;
    let runs = if *was_running { "runs" } else { "is" };
    match step {
        Step::Done => format!("VM {vm} {runs} on {destination} now"),
        Step::Undone => format!("VM {vm} {runs} on {source} again"),
        step => format!("VM {vm} is between {source} and {destination}: {step}"),
    }
}
