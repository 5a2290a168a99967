//! `farside start` and `farside stop`.

use clap::Args as ClapArgs;

#[derive(Debug, ClapArgs)]
pub(crate) struct Start {}

pub(crate) fn start(_: &Start) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Stop {}

pub(crate) fn stop(_: &Stop) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
