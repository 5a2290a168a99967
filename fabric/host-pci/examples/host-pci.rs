//! Inspects this host's PCI functions from a shell, and runs a command while a function is bound to
//! vfio-pci.
//!
//! ```text
//! cargo run -p farside-host-pci --example host-pci -- list
//! cargo run -p farside-host-pci --example host-pci -- show 00:04.0
//! sudo host-pci with 00:04.0 'ls /dev/vfio'
//! sudo host-pci vfs 01:00.0 2 'host-pci list vfs-of:01:00.0'
//! sudo host-pci faults 0000:00:04.0
//! ```

use std::error::Error;
use std::process::{Command, ExitCode};

use farside_host_pci::kmsg::FaultReader;
use farside_host_pci::{Filter, Force, HostPci};
use farside_pci::Bdf;
use rustix::event::{PollFd, PollFlags, poll};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const USAGE: &str = "usage: host-pci list [FILTER] | show BDF | with BDF COMMAND | force BDF COMMAND \
                     | leave BDF | restore BDF | vfs BDF COUNT COMMAND | faults UNTIL-THIS-TEXT";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!(
                "error: {error}",
                error = farside_error_chain::Chain(&*error)
            );
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<()> {
    let host = HostPci::new();
    match *arguments {
        ["list"] => {
            for info in host.functions()? {
                println!("{info}");
            }
            Ok(())
        }
        ["list", filter] => {
            for info in host.select(&filter.parse::<Filter>()?)? {
                println!("{info}");
            }
            Ok(())
        }
        ["show", bdf] => show(&host, &bdf.parse()?),
        ["with", bdf, command] => with(&host, bdf, Force::No, command),
        ["force", bdf, command] => with(&host, bdf, Force::Yes, command),
        ["leave", bdf] => {
            host.bind_to_vfio(&bdf.parse()?, Force::No)?.leave();
            Ok(())
        }
        ["restore", bdf] => {
            let binding = host.bind_to_vfio(&bdf.parse()?, Force::No)?;
            println!("former: {:?}", binding.former());
            Ok(binding.restore()?)
        }
        ["vfs", pf, count, command] => {
            let created = host.create_vfs(&pf.parse()?, count.parse()?, Force::No)?;
            for vf in created.vfs() {
                println!("vf: {}", host.function(vf)?);
            }
            shell(command)?;
            Ok(created.remove()?)
        }
        ["faults", until] => faults(until),
        _ => Err(USAGE.into()),
    }
}

fn show(host: &HostPci, bdf: &Bdf) -> Result<()> {
    let info = host.function(bdf)?;
    println!("{info:#?}");
    let uses = host.usage(bdf)?;
    for used in &uses {
        println!("used: {used}");
    }
    if uses.is_empty() {
        println!("unused");
    }
    let group = host.group(bdf)?;
    for member in &group.members {
        println!("group {}: {member}", group.id);
    }
    match group.viable(bdf, &[]) {
        Ok(()) => println!("viable"),
        Err(error) => println!(
            "not viable: {error}",
            error = farside_error_chain::Chain(&error)
        ),
    }
    for count in host.interrupt_counts(bdf)? {
        println!(
            "interrupts: {:?} {} {}",
            count.kind, count.vector, count.count
        );
    }
    Ok(())
}

fn with(host: &HostPci, bdf: &str, force: Force, command: &str) -> Result<()> {
    let binding = host.bind_to_vfio(&bdf.parse()?, force)?;
    println!("former: {:?}", binding.former());
    shell(command)?;
    Ok(binding.restore()?)
}

fn shell(command: &str) -> Result<()> {
    let status = Command::new("sh").args(["-c", command]).status()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("`{command}`: {status}").into())
    }
}

fn faults(until: &str) -> Result<()> {
    let mut reader = FaultReader::open()?;
    // Signals a script that faults are recorded from now on.
    println!("reading");
    loop {
        let Some(event) = reader.next_event()? else {
            poll(&mut [PollFd::new(&reader, PollFlags::IN)], None)?;
            continue;
        };
        let line = format!("{event:x?}");
        println!("{line}");
        if line.contains(until) {
            return Ok(());
        }
    }
}
