//! `farside migrate`.

use std::{net::IpAddr, time::Duration};

use clap::{Args as ClapArgs, value_parser};
use farside_daemon::VmName;
use farside_migration::{
    LocalHost, MAX_SHUTDOWN_TIMEOUT, Mover, Plan, Remote, Shell, Strategy,
    check::{Finding, Level, check},
    live::address_for,
    lock_vm,
};

use crate::{
    migration::{ShellFlag, show_outcome},
    terminal::Plain,
};

/// Move a VM and its devices to another host
///
/// The devices stay in their hosts and are borrowed by the other host. The VM is shut down
/// here and started there. The other host is reached by ssh and needs farside, QEMU and the
/// VM's images at the same paths. An interrupted migration is resumed or rolled back by
/// `farside migration resume`.
#[derive(Debug, ClapArgs)]
pub(crate) struct Migrate {
    /// Name of the VM.
    #[arg(value_name = "VM")]
    vm: VmName,
    /// The destination host, as the remote shell resolves it.
    #[arg(long, value_name = "HOST")]
    to: String,
    #[command(flatten)]
    shell: ShellFlag,
    /// Time limit for the guest to power off, or with --live to release each device,
    /// in seconds; when it expires, the VM runs on here, unchanged.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    #[arg(value_parser = value_parser!(u64).range(..=MAX_SHUTDOWN_TIMEOUT))]
    shutdown_timeout: u64,
    /// Move the running guest: its devices are unplugged, QEMU migrates it, and
    /// they are plugged in again there. Its other disks must be visible to both
    /// hosts.
    #[arg(long)]
    live: bool,
    /// With --live, the address of the other host at which its QEMU listens for the
    /// guest [default: that of HOST, if it is private: QEMU sends the guest
    /// unencrypted].
    #[arg(long, value_name = "ADDRESS", requires = "live")]
    migrate_address: Option<IpAddr>,
    /// Only check both hosts for anything that would prevent the migration, and
    /// change nothing. Exits with status 0 if nothing does.
    #[arg(long)]
    check: bool,
}

impl Migrate {
    fn strategy(&self) -> anyhow::Result<Strategy> {
        if !self.live {
            return Ok(Strategy::Cold);
        }
        let address = match self.migrate_address {
            Some(address) => address,
            None => address_for(&self.to)?,
        };
        Ok(Strategy::Live { address })
    }
}

pub(crate) fn run(args: &Migrate) -> anyhow::Result<()> {
    let plan = Plan {
        vm: args.vm.clone(),
        to: args.to.clone(),
        shell: args.shell.command(),
        shutdown_timeout: Duration::from_secs(args.shutdown_timeout),
        strategy: args.strategy()?,
    };
    let shell = Shell::new(plan.shell.as_deref())?;
    let mut peer = Remote::new(&plan.to, shell);
    if args.check {
        return show_check(&plan, &mut peer);
    }
    let _lock = lock_vm(&plan.vm)?;
    let manifest = plan.manifest(&LocalHost)?;
    let mut mover = Mover::new(&LocalHost, &mut peer, manifest);
    mover.forward()?;
    show_outcome(&mover);
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
            why,
            ..
        } = found;
        let line = format!("{level:7}  {host:hosts$}  {check:checks$}  {what}");
        println!("{}", Plain(line));
        if !why.is_empty() {
            let line = format!("{:7}  {:hosts$}  {:checks$}  -> {why}", "", "", "");
            println!("{}", Plain(line));
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
