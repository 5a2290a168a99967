//! `farside hook`.

use clap::Args as ClapArgs;

#[derive(Debug, ClapArgs)]
pub(crate) struct Hook {}

pub(crate) fn run(_: &Hook) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
