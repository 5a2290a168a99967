//! Runs a VM on this host: starts and stops its backend and QEMU, hot-plugs and unplugs devices.
//! Uses QMP if farside or a script started QEMU, virsh if libvirt did.
//!
//! - [`start`], [`stop`], [`is_running`], [`describe`]: the VM as a whole.
//! - [`attach`], [`detach`]: one device of a running VM.
//! - [`start_domain_backend`], [`end_domain_backend`]: the backend alone, for
//!   libvirt's hook.
//! - [`Monitor`]: QEMU's monitor, for other commands; [`keep_monitor_private`] for callers that
//!   start QEMU themselves. [`QmpClient`]: QMP on any socket.
//! - [`Backend`]: the control socket of the VM's backend.
//!
//! A VM is identified by its name, and configured by its VM configuration (`VmConfig::of_vm`);
//! `farside_daemon::paths` and `farside_vm_config::places` define its sockets and logs. Every wait
//! is for an event if there is one, and has a limit; a timeout error names the VM, the event and
//! the remedy.
//!
//! Processes are identified by the sockets at which they answer, or by a lock or PID file that they
//! hold open: the number in a file alone may name another process by now.

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
pub use qemu::{confine, keep_monitor_private};
pub use qmp::{ANSWER as QMP_ANSWER, Event, QmpClient, QmpError};
pub use virsh::run as virsh;
