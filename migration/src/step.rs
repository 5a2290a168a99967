//! The steps of a cold migration.
//!
//! ```text
//!  forward:  Prepare -> ShutDown -> Return -> HandOver -> Install -> Start -> Finish -> Done
//!               |          |          |          |           |         |
//!  back:        +----------+----------+----------+-----------+---------+
//!                                                v
//!                    StopThere -> HandBack -> StartAgain -> Undone
//! ```
//!
//! | step | action | host that may run the VM meanwhile |
//! | --- | --- | --- |
//! | Prepare | the other host checks whether it could run the VM | the old host |
//! | ShutDown | the guest powers off, the backend ends | no other host |
//! | Return | the devices are back at the lenders | no host |
//! | HandOver | each lender fences the old host off and reserves the device | no host |
//! | Install | configuration and fences are sent to the other host | no host |
//! | Start | the VM starts there | the new host |
//! | Finish | the old host keeps only a moved marker | the new host |
//! | StopThere | the other host stops the VM, if it has started it, and removes it | no host |
//! | HandBack | each lender fences the other host off | no host |
//! | StartAgain | the VM starts on the old host | the old host |
//!
//! When the other host has gone on to the end by itself, StopThere finds that out,
//! and leads to Finish.
//!
//! A journal names the step that is *under way*: it is written before the step begins, and each
//! step can be done again after it was cut off anywhere. Until HandOver begins, a rollback does not
//! affect any lender. From then on it is a separate handover, with a newer fence.

use serde::{Deserialize, Serialize};

/// A step; see the picture in the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the table above says what they are")]
pub enum Step {
    Prepare,
    ShutDown,
    Return,
    HandOver,
    Install,
    Start,
    Finish,
    Done,
    StopThere,
    HandBack,
    StartAgain,
    Undone,
}

impl Step {
    /// Nothing is left to do.
    pub fn is_end(self) -> bool {
        matches!(self, Self::Done | Self::Undone)
    }

    /// It leads back to the old host.
    pub fn is_back(self) -> bool {
        self >= Self::StopThere
    }

    /// No lender has been called: the source host may simply continue.
    pub fn is_before_handover(self) -> bool {
        self < Self::HandOver
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Prepare => "asking the other host whether it can run the VM",
            Self::ShutDown => "shutting the VM down",
            Self::Return => "giving the devices back",
            Self::HandOver => "handing the devices over",
            Self::Install => "configuring the VM at the other host",
            Self::Start => "starting the VM at the other host",
            Self::Finish => "leaving the old host",
            Self::Done => "done",
            Self::StopThere => "stopping the VM at the other host",
            Self::HandBack => "handing the devices back",
            Self::StartAgain => "starting the VM at the old host again",
            Self::Undone => "undone",
        })
    }
}
