//! `farside migrate`.

use clap::Args as ClapArgs;

#[derive(Debug, ClapArgs)]
pub(crate) struct Migrate {}

pub(crate) fn run(_: &Migrate) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
