//! fio: its command line and its output.
//!
//! A run is measured between two [samples](Sample) that fio itself takes by the
//! commands that it runs when a job begins and ends: without its own start, and
//! with the ramp time that its figures leave out.

mod command;
mod output;
mod sample;

pub use command::{Hooks, Timing, arguments, sample_command};
pub use output::{Outcome, read_output};
pub use sample::{Sample, Work};

/// The remedy if fio is not installed.
pub const INSTALL: &str = "fio is not installed; install it: apt install fio (Debian, Ubuntu), \
     dnf install fio (Fedora, RHEL), zypper install fio (SUSE), apk add fio (Alpine)";
