//! Errors in files and in the output of other software.

use std::{io, path::PathBuf};

/// An error of a benchmark.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum Error {
    /// fio failed, or its output cannot be parsed.
    #[error("fio {what}; its output: {output}")]
    Fio { what: String, output: String },
    /// Counters of a disk and the CPUs.
    #[error("these are not the counters of a disk and the CPUs: {0:?}")]
    Sample(String),
    /// A file of results that is none.
    #[error("this is not a file of results of farside bench")]
    NotResults(#[source] serde_json::Error),
    /// Results that another farside wrote.
    #[error(
        "these results have format {found}, and this farside reads format {known}: use the \
         farside that wrote them, or measure again"
    )]
    Format { found: u64, known: u32 },
    /// A section whose series do not fit each other.
    #[error("section {section}: {what}")]
    Section { section: String, what: String },
    /// A plot could not be drawn.
    #[error("drawing the plot {name}: {what}")]
    Plot { name: String, what: String },
    /// A file or directory could not be written.
    #[error("writing {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    /// A file could not be read.
    #[error("reading {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    /// A file's contents are not as they should be.
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        error: Box<Error>,
    },
}
