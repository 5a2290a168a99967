//! `farside ntb`.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args as ClapArgs;
use farside_daemon::Wakeup;
use farside_fabric::parse_size;
use farside_ntb_server::{Config, NtbServer, PortAt, PortConfig};

use crate::signals;

/// Connect two VMs by a PCIe non-transparent bridge (NTB) emulated in software
///
/// Each port is a PCIe function, served to one VM over vfio-user. A store to the
/// window (BAR 2) in one VM goes to the memory of the other, or to a register of
/// one of its devices, as the port's LUT maps it; there are also doorbells,
/// scratchpads and link state.
///
/// It replaces the adapter between two VMs that act as hosts: to test farside with
/// an NTB, or to develop a driver for one. Every access to a window is a message,
/// so it is slow. docs/ntb-model.md describes the registers.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Start with:
  farside ntb --port A=a.sock --port B=b.sock
and give each VM one of the sockets (and memory that is shared):
  qemu-system-x86_64 -m 2G -object memory-backend-memfd,id=mem,size=2G,share=on \\
    -machine q35,memory-backend=mem \\
    -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"type\":\"unix\",\"path\":\"a.sock\"}}' ...")]
pub(crate) struct Ntb {
    /// Socket of port A, and of port B.
    #[arg(
        long = "port",
        value_name = "A|B=PATH",
        required = true,
        value_parser = parse_port
    )]
    ports: Vec<(char, PathBuf)>,
    /// Size of each port's window: a power of two from 1M to 1T.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    window_size: u64,
    /// Size of port B's window [default: as port A's].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    window_size_b: Option<u64>,
    /// Segments of each window, each with its own translation: a power of two
    /// up to 4096.
    #[arg(long, value_name = "N", default_value_t = PortConfig::default().lut_entries)]
    lut_entries: u32,
}

/// Serves until Ctrl-C or SIGTERM.
pub(crate) fn run(args: &Ntb) -> anyhow::Result<()> {
    let at = |name: char, window_size: u64| {
        let mut sockets = args.ports.iter().filter(|(port, _)| *port == name);
        let socket = sockets.next().map(|(_, path)| path.clone());
        anyhow::ensure!(
            sockets.next().is_none(),
            "port {name} is given twice: give --port A=PATH and --port B=PATH"
        );
        Ok(PortAt {
            socket: socket.with_context(|| {
                format!("where is port {name}? Give its socket with --port {name}=PATH")
            })?,
            sizes: PortConfig {
                window_size,
                lut_entries: args.lut_entries,
            },
        })
    };
    let window_size_b = args.window_size_b.unwrap_or(args.window_size);
    let server = NtbServer::start(&Config {
        ports: [at('A', args.window_size)?, at('B', window_size_b)?],
    })?;
    let stop = Wakeup::new()?;
    signals::raise_on_signal(&stop, signals::stopping).context("cannot wait for signals")?;
    server.run(&stop)?;
    Ok(())
}

fn parse_port(text: &str) -> Result<(char, PathBuf), String> {
    match text.split_once('=') {
        Some(("A" | "a", path)) if !path.is_empty() => Ok(('A', path.into())),
        Some(("B" | "b", path)) if !path.is_empty() => Ok(('B', path.into())),
        _ => Err("give a port and its socket, as in A=/run/ntb-a.sock".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_a_letter_and_a_path() {
        assert_eq!(parse_port("A=/x=y").unwrap(), ('A', "/x=y".into()));
        assert_eq!(parse_port("b=z").unwrap(), ('B', "z".into()));
        for bad in ["C=/x", "A=", "A", "/x"] {
            assert!(parse_port(bad).is_err(), "{bad}");
        }
    }
}
