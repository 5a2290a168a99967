//! A failed test tells what was said on its stage.

use std::panic::{AssertUnwindSafe, catch_unwind};

use libtest_mimic::Failed;

/// Runs a test; when it fails or panics, `story` is shown with the reason.
pub fn told<T>(
    test: impl FnOnce() -> anyhow::Result<T>,
    story: impl FnOnce() -> String,
) -> Result<T, Failed> {
    let what = match catch_unwind(AssertUnwindSafe(test)) {
        Ok(Ok(passed)) => return Ok(passed),
        Ok(Err(error)) => format!("{error:#}"),
        Err(panic) => panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "a panic without words".to_owned()),
    };
    Err(format!("{what}\n{}", story()).into())
}
