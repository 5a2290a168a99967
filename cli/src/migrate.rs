//! `farside migrate`.

use std::{net::IpAddr, time::Duration};

use clap::{ArgGroup, Args as ClapArgs};
use farside_daemon::paths;
use farside_lender_protocol::{Address, Client};
use farside_migration::{
    Host, Journal, LocalHost, Lock, Mover, Plan, Remote, Role, Shell,
    check::{Finding, Level, check},
    claim, forget,
    live::{Live, address_for},
    resume_here, serve_agent,
};

use crate::text::table;

/// Moves a VM to another host, with its devices: they stay where they are and are
/// borrowed from there. The VM is shut down here and starts there. The other host
/// is reached by ssh and needs nothing but farside. What was cut off anywhere goes
/// on, or back, with --resume.
#[derive(Debug, ClapArgs)]
#[command(group = ArgGroup::new("what").required(true))]
pub(crate) struct Migrate {
    /// Name of the VM.
    #[arg(value_name = "VM", group = "what", requires = "to")]
    vm: Option<String>,
    /// The host to go to, as the remote shell knows it.
    #[arg(long, value_name = "HOST", requires = "vm")]
    to: Option<String>,
    /// The remote shell, to which the host's name and a command are added
    /// [default: FARSIDE_RSH in the environment, else ssh].
    #[arg(long, value_name = "COMMAND")]
    rsh: Option<String>,
    /// How long the guest may take to power off, or with --live to let go of each
    /// device, seconds; when it does not, it runs on here and nothing has changed.
    #[arg(long, value_name = "SECONDS", default_value_t = 120, requires = "vm")]
    shutdown_timeout: u64,
    /// Let the guest run on meanwhile: it lets go of its devices, QEMU moves it, and
    /// it gets them back there. Its other disks must be seen by both hosts.
    #[arg(long, requires = "vm")]
    live: bool,
    /// With --live, the address of the other host at which its QEMU takes the guest
    /// [default: that of HOST, if it is of a private network: what QEMU sends is not
    /// encrypted].
    #[arg(long, value_name = "ADDRESS", requires = "live")]
    migrate_address: Option<IpAddr>,
    /// Only say what would stop it: look at this host and at the other one, and
    /// change nothing. Succeeds when nothing would.
    #[arg(long, requires = "vm")]
    check: bool,
    /// Go on with a migration that was cut off.
    #[arg(long, value_name = "VM", group = "what")]
    resume: Option<String>,
    /// Take the VM back instead.
    #[arg(long, requires = "resume")]
    back: bool,
    /// The other host is dead for good: go on without it. The lenders keep it
    /// from the devices, should it live all the same.
    #[arg(long, requires = "resume")]
    lost_host: bool,
    /// Show migrations of this host.
    #[arg(long, group = "what")]
    status: bool,
    /// Forget that a VM moved away, so that another may have its name here.
    #[arg(long, value_name = "VM", group = "what")]
    forget: Option<String>,
    /// Take a VM's devices for this host, from whichever host has them. For
    /// when that is lost for good.
    #[arg(long, value_name = "VM", group = "what")]
    claim: Option<String>,
    /// Let others borrow a device that is reserved for a VM on its way.
    #[arg(long, value_name = "DEVICE", group = "what")]
    end_reservation: Option<String>,
    /// The lender of that device [default: this host's].
    #[arg(long, value_name = "ADDRESS", requires = "end_reservation")]
    lender: Option<Address>,
    /// Answer another host on standard input and output.
    #[arg(long, group = "what", hide = true)]
    agent: bool,
}

impl Migrate {
    /// What --live asks for.
    fn live(&self, to: &str) -> anyhow::Result<Option<Live>> {
        if !self.live {
            return Ok(None);
        }
        let address = match self.migrate_address {
            Some(address) => address,
            None => address_for(to)?,
        };
        Ok(Some(Live { address }))
    }

    fn rsh(&self) -> Option<String> {
        let from_environment = || std::env::var("FARSIDE_RSH").ok();
        self.rsh
            .clone()
            .or_else(from_environment)
            .filter(|command| !command.is_empty())
    }
}

pub(crate) fn run(args: &Migrate) -> anyhow::Result<()> {
    if args.agent {
        let (input, output) = (std::io::stdin().lock(), std::io::stdout().lock());
        return Ok(serve_agent(&LocalHost, input, output)?);
    }
    if args.status {
        return status();
    }
    if let Some(device) = &args.end_reservation {
        let ours = || paths::lender_socket().into();
        let lender = args.lender.clone().unwrap_or_else(ours);
        Client::connect(&lender, None)?.end_reservation(device)?;
        println!("device {device} can be borrowed by any VM");
        return Ok(());
    }
    if let Some(vm) = &args.forget {
        let _lock = Lock::take(vm)?;
        forget(&LocalHost, vm)?;
        println!("VM {vm}: forgotten that it moved away");
        return Ok(());
    }
    if let Some(vm) = &args.claim {
        let _lock = Lock::take(vm)?;
        let fences = claim(&LocalHost, vm)?;
        let devices: Vec<_> = fences.0.into_keys().collect();
        println!("VM {vm} has its devices here: {}", devices.join(", "));
        return Ok(());
    }
    if let Some(vm) = &args.resume {
        return resume(args, vm);
    }
    match (&args.vm, &args.to) {
        (Some(vm), Some(to)) => forward(args, vm, to),
        _ => anyhow::bail!("which VM, and where to? farside migrate VM --to HOST"),
    }
}

fn forward(args: &Migrate, vm: &str, to: &str) -> anyhow::Result<()> {
    let plan = Plan {
        vm: vm.to_owned(),
        to: to.to_owned(),
        shell: args.rsh(),
        shutdown_timeout: Duration::from_secs(args.shutdown_timeout),
        live: args.live(to)?,
    };
    let shell = Shell::new(plan.shell.as_deref())?;
    let mut peer = Remote::new(to, shell);
    if args.check {
        return show_check(&plan, &mut peer);
    }
    let _lock = Lock::take(vm)?;
    let manifest = plan.manifest(&LocalHost)?;
    let mut mover = Mover::new(&LocalHost, &mut peer, manifest);
    mover.forward()?;
    println!("{}", outcome(mover.journal()));
    tell_live(&mover);
    Ok(())
}

fn show_check(plan: &Plan, peer: &mut Remote) -> anyhow::Result<()> {
    let findings = check(plan, &LocalHost, peer);
    let width = |text: fn(&(String, Finding)) -> &str| {
        let lens = findings.iter().map(|found| text(found).chars().count());
        lens.max().unwrap_or(0)
    };
    let (hosts, checks) = (width(|(host, _)| host), width(|(_, found)| &found.check));
    for (host, found) in &findings {
        let Finding {
            level,
            check,
            what,
            advice,
        } = found;
        println!("{level:7}  {host:hosts$}  {check:checks$}  {what}");
        if !advice.is_empty() {
            println!("{:7}  {:hosts$}  {:checks$}  -> {advice}", "", "", "");
        }
    }
    let (vm, to) = (&plan.vm, &plan.to);
    let problems = findings
        .iter()
        .filter(|(_, found)| found.level == Level::Problem);
    match problems.count() {
        0 => println!("nothing stops VM {vm} from moving to {to}"),
        1 => anyhow::bail!("1 problem stops VM {vm} from moving to {to}"),
        count => anyhow::bail!("{count} problems stop VM {vm} from moving to {to}"),
    }
    Ok(())
}

/// What a live migration cost the guest.
fn tell_live(mover: &Mover<'_>) {
    if let Some(report) = mover.report() {
        println!(
            "the guest stood still for {} ms; QEMU sent {} MiB in {:.1} s",
            report.downtime_ms,
            report.bytes >> 20,
            report.total_ms as f64 / 1000.0,
        );
    }
    if mover.journal().live.is_some()
        && let Some(without) = mover.without_devices()
    {
        println!(
            "the guest was without its devices for {:.1} s",
            without.as_secs_f64()
        );
    }
}

fn resume(args: &Migrate, vm: &str) -> anyhow::Result<()> {
    let _lock = Lock::take(vm)?;
    let journal = LocalHost.journal(vm)?.filter(Journal::is_open);
    let Some(journal) = journal else {
        anyhow::bail!("no migration of VM {vm} is under way on this host");
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
    let shell = args.rsh().or_else(|| journal.shell.clone());
    let mut peer = Remote::new(&journal.destination, Shell::new(shell.as_deref())?);
    let mut mover = Mover::new(&LocalHost, &mut peer, journal).lost(args.lost_host);
    match args.back || mover.journal().step.is_back() {
        true => mover.back()?,
        false => mover.forward()?,
    }
    println!("{}", outcome(mover.journal()));
    tell_live(&mover);
    Ok(())
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
        farside_migration::Step::Done => format!("VM {vm} {runs} on {destination} now"),
        farside_migration::Step::Undone => format!("VM {vm} {runs} on {source} again"),
        step => format!("VM {vm} is between {source} and {destination}: {step}"),
    }
}

fn status() -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for journal in LocalHost::journals() {
        match journal {
            Ok(journal) => rows.push(vec![
                journal.vm,
                journal.source,
                journal.destination,
                journal.step.to_string(),
                journal.id,
            ]),
            Err(error) => eprintln!("error: {error}"),
        }
    }
    let head = ["VM", "FROM", "TO", "STEP", "MIGRATION"];
    print!("{}", table(&head, &rows));
    Ok(())
}
