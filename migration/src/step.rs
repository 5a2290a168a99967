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
//! | step | what it does | who may run the VM meanwhile |
//! | --- | --- | --- |
//! | Prepare | the other host checks whether it could run the VM | the old host |
//! | ShutDown | the guest powers off, the backend ends | nobody new |
//! | Return | the lenders have the devices back | nobody |
//! | HandOver | each lender fences the old host off and reserves the device | nobody |
//! | Install | configuration and fences go to the other host | nobody |
//! | Start | the VM starts there | the new host |
//! | Finish | the old host keeps only a moved marker | the new host |
//! | StopThere | the other host ends the VM, if it had started it, and forgets it | nobody |
//! | HandBack | each lender fences the other host off | nobody |
//! | StartAgain | the VM starts on the old host | the old host |
//!
//! When the other host has gone on to the end by itself, StopThere finds that out,
//! and leads to Finish.
//!
//! A journal names the step that is *under way*: it is written before the step
//! begins, and each step can be done again after it was cut off anywhere. Until
//! HandOver begins, going back takes nothing from anybody. From then on the
//! lenders know: going back is a handover of its own, with a newer fence.

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

    /// No lender has been asked for anything: the old host may simply go on.
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
