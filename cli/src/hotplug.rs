//! `farside attach` and `farside detach`.

use clap::Args as ClapArgs;

#[derive(Debug, ClapArgs)]
pub(crate) struct Attach {}

pub(crate) fn attach(_: &Attach) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Detach {}

pub(crate) fn detach(_: &Detach) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
