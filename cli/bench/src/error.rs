//! What can be wrong with what others wrote.

use std::{io, path::PathBuf};

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// fio failed, or says something that is not understood.
    #[error("fio {what}; its output: {output}")]
    Fio {
        /// What is wrong.
        what: String,
        /// The beginning of what it printed.
        output: String,
    },
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
    Format {
        /// Of the file.
        found: u64,
        /// What we read.
        known: u32,
    },
    /// A section whose series do not fit each other.
    #[error("section {section}: {what}")]
    Section {
        /// Its name.
        section: String,
        /// What is wrong.
        what: String,
    },
    /// A plot could not be drawn.
    #[error("drawing the plot {name}: {what}")]
    Plot {
        /// Its name.
        name: String,
        /// What is wrong.
        what: String,
    },
    /// A file or directory could not be written.
    #[error("writing {}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        error: io::Error,
    },
    /// A file could not be read.
    #[error("reading {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        error: io::Error,
    },
    /// A file's contents are not as they should be.
    #[error("{}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        #[source]
        error: Box<Error>,
    },
}
