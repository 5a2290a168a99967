//! The output of `check`, the runner of test suites of Linux's storage.

pub mod blktests;
pub mod xfstests;

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// As its author expects.
    Passed,
    /// It cannot run there.
    NotRun,
    /// Otherwise.
    Failed,
    /// Not at all: `check` printed nothing more of it.
    Missing,
}

/// A test that `check` ran, or did not run.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Group and number; all of a group are `nvme/***`.
    pub test: String,
    /// The name of the block device, if the suite runs each test on each device.
    pub device: Option<String>,
    /// How it ended.
    pub ending: Ending,
    /// What was printed with it: reasons, differences.
    pub details: Vec<String>,
}
