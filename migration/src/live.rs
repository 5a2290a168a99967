//! Live migration: QEMU moves the running guest, and farside moves the devices that
//! it borrows.
//!
//! The steps are those of a cold migration ([`crate::Step`]), of which three differ
//! ([`crate::Strategy`]):
//!
//! | step | cold | live |
//! | --- | --- | --- |
//! | ShutDown | the guest powers off | each device is hot-unplugged |
//! | Start | the VM boots there | QEMU sends the guest, which resumes there; its devices are plugged in again |
//! | StartAgain | the VM boots here again | the guest resumes here; its devices are plugged in again |
//!
//! At most one of the two guests runs. QEMU at the other host is started with its
//! guest paused ([`incoming`]). The guest resumes there ([`resume_guest`]) only after
//! QEMU here has reported the transfer as completed ([`send`]), which leaves the
//! guest here paused. Until then it is safe to go back; while the guest is here, even
//! without the other host, which cannot have it. So a live migration that fails goes
//! back by itself, where a cold one does so only before the handover: a running guest
//! waits for its devices.
//!
//! QEMU sends guest memory unencrypted and unauthenticated.

mod address;
mod guest;
mod incoming;
mod send;
mod terminal;

pub use address::address_for;
pub(crate) use address::try_listen;
pub(crate) use guest::{end_paused, release_devices, resume_guest};
pub(crate) use incoming::{GREETING, incoming};
pub use send::{Guest, Report};
pub(crate) use send::{query_transfer, send};
pub(crate) use terminal::wait_until_terminal;
