//! One test on a separate stage; if it fails, the stage's logs are shown.

use anyhow::Result;
use libtest_mimic::{Completion, Failed};

use super::{Stage, unable};
use crate::told;

/// Runs a test on a new stage, where the machine can make one.
pub fn play(
    make: impl FnOnce() -> Result<Stage>,
    test: impl FnOnce(&Stage) -> Result<Completion>,
) -> Result<Completion, Failed> {
    if let Some(reason) = unable() {
        return Ok(Completion::ignored_with(reason));
    }
    let stage = make().map_err(|error| format!("{error:#}"))?;
    told(|| test(&stage), || stage.story())
}
