//! `farside bench`.

use clap::Args as ClapArgs;

#[derive(Debug, ClapArgs)]
pub(crate) struct Bench {}

pub(crate) fn run(_: &Bench) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
