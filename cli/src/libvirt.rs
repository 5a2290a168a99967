//! `farside libvirt`.

use clap::Args as ClapArgs;

#[derive(Debug, ClapArgs)]
pub(crate) struct Libvirt {}

pub(crate) fn run(_: &Libvirt) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
