//! One test on a stage of its own; when it fails, what was said there is shown.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::Result;
use libtest_mimic::{Completion, Failed};

use super::{Stage, unable};

/// Runs a test on a new stage, where that can be made.
pub fn play(
    make: impl FnOnce() -> Result<Stage>,
    test: impl FnOnce(&Stage) -> Result<Completion>,
) -> Result<Completion, Failed> {
    if let Some(reason) = unable() {
        return Ok(Completion::ignored_with(reason));
    }
    let stage = make().map_err(|error| format!("{error:#}"))?;
    let result = catch_unwind(AssertUnwindSafe(|| test(&stage)));
    let what = match result {
        Ok(Ok(completion)) => return Ok(completion),
        Ok(Err(error)) => format!("{error:#}"),
        Err(panic) => panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "a panic without words".to_owned()),
    };
    Err(format!("{what}\n{}", stage.story()).into())
}
