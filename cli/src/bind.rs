//! `farside bind`.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use farside_daemon::SocketGroup;
use farside_lender::config::Config;
use farside_vm_config::places;

/// The functions that are bound, in root's own directory: lender.toml may have changed by the time that
/// they are returned.
const RECORD: &str = "/run/farside-vfio/bound";

/// Bind the physical functions of lender.toml to vfio-pci, for a lender without privileges
///
/// Takes the functions from their drivers, creates the virtual functions (`vfs`), and lets
/// a group open the functions. The lender then needs no root. The packaged
/// farside-vfio.service runs this.
#[derive(Debug, ClapArgs)]
pub(crate) struct Bind {
    /// The lender's configuration [default: lender.toml in /etc/farside].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Group of the lender, and of no VMM.
    #[arg(long, value_name = "GROUP", default_value = "farside-vfio")]
    group: String,
    /// Return the functions to their drivers, also those that the configuration no longer has,
    /// except virtual functions and those that a process has open.
    #[arg(long, conflicts_with = "group")]
    release: bool,
}

pub(crate) fn run(args: &Bind) -> anyhow::Result<()> {
    let default = || places::config_dir().join("lender.toml");
    let config = Config::load(&args.config.clone().unwrap_or_else(default))?;
    match args.release {
        true => farside_lender::release(&config, Path::new(RECORD))?,
        false => farside_lender::bind(
            &config,
            &SocketGroup::named(&args.group)?,
            Path::new(RECORD),
        )?,
    }
    Ok(())
}
