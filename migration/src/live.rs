//! Live migration: QEMU moves the guest while it runs, and farside moves the
//! devices that it borrows.
//!
//! The steps are those of a cold migration ([`crate::Step`]), of which three mean
//! something else:
//!
//! | step | cold | live |
//! | --- | --- | --- |
//! | ShutDown | the guest powers off | the guest lets go of each device |
//! | Start | the VM boots there | QEMU moves the guest there, which goes on, and gets its devices back |
//! | StartAgain | the VM boots here again | the guest goes on here, and gets its devices back |
//!
//! Never two guests run: QEMU at the other host is started so that its guest
//! stands still ([`listen`]), and is told to go on ([`land`]) only when QEMU here
//! says that it has sent everything and will not go on by itself ([`send`]). Until
//! it was told, going back is safe; as long as the guest is here, also without the
//! other host, which cannot have it. So a live migration that fails goes back by
//! itself, which a cold one does only until the lenders are asked: a guest that runs
//! waits for its devices.
//!
//! QEMU sends guest memory as it is: anyone on the way can read and change it.

mod address;
mod land;
mod listen;
mod send;
mod settled;

pub use address::address_for;
pub(crate) use address::try_listen;
pub(crate) use land::{end, land, let_go};
pub(crate) use listen::{GREETING, listen};
pub use send::{Guest, Report};
pub(crate) use send::{send, whereabouts};
pub(crate) use settled::settled;

use serde::{Deserialize, Serialize};

/// What a journal says of a live migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Live {
    /// The address of the other host at which its QEMU listens.
    pub address: std::net::IpAddr,
}
