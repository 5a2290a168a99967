//! `farside doctor`.

use clap::Args as ClapArgs;

#[derive(Debug, ClapArgs)]
pub(crate) struct Doctor {}

pub(crate) fn run(_: &Doctor) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
