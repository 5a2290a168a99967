//! Runs a VM on this host: starts and ends its backend and QEMU, plugs devices
//! in and out while it runs. Through QMP where farside or a script started QEMU,
//! through virsh where libvirt did.
//!
//! - [`start`], [`stop`], [`is_running`], [`describe`]: the VM as a whole.
//! - [`attach`], [`detach`]: one device of a running VM.
//! - [`start_domain_backend`], [`end_domain_backend`]: the backend alone, for
//!   libvirt's hook.
//! - [`Monitor`]: QEMU's monitor, for what is not here; [`keep_monitor_private`] for
//!   who starts QEMU himself. [`QmpClient`]: QMP on any socket.
//! - [`Backend`]: the control socket of the VM's backend.
//!
//! A VM is named, and known by its description (`VmConfig::of_vm`); where its
//! sockets and logs are say `farside_daemon::paths` and
//! `farside_vm_config::places`. Every wait is for an event where there is one, and
//! has a limit; an error names the VM, what was waited for and what to do.
//!
//! Processes are known by the sockets at which they answer, a backend without room
//! for a connection by the lock that it holds: a process id from a file may be
//! another's by now, and none is looked at.

#![forbid(unsafe_code)]

mod backend;
mod domain;
mod error;
mod keep;
mod life;
mod lock;
mod logs;
mod monitor;
mod places;
mod plug;
mod process;
mod qemu;
mod qmp;
mod slots;
mod systemd;
mod virsh;
mod watch;

pub use backend::Backend;
pub use domain::{end_domain_backend, start_domain_backend};
pub use error::Error;
pub use life::{
    DeviceState, RunState, StartOptions, StopOptions, VmState, describe, is_running, start, stop,
};
pub use monitor::{Monitor, connect_by};
pub use places::virsh as virsh_program;
pub use plug::{AttachOptions, Attached, Detached, attach, detach};
pub use qemu::keep_monitor_private;
pub use qmp::{ANSWER as QMP_ANSWER, Event, QmpClient, QmpError};
pub use virsh::run as virsh;
