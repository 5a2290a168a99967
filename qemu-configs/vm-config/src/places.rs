//! Default paths of configurations and state. Sockets: [`farside_daemon::paths`].

use std::path::PathBuf;

pub use farside_daemon::paths::{config_dir, state_dir};
use farside_daemon::{VmName, paths};

/// A VM configuration: `vm/NAME.toml` in [`config_dir`].
pub fn description(vm: &VmName) -> PathBuf {
    config_dir().join("vm").join(format!("{vm}.toml"))
}

/// The configuration of this host: `host.toml` in [`host_config_dir`](paths::host_config_dir),
/// whoever asks.
pub fn host() -> PathBuf {
    paths::host_config_dir().join("host.toml")
}

/// The file that remembers the lenders that etcd has named: `known/lenders.json` in [`state_dir`].
pub fn known_lenders() -> PathBuf {
    state_dir().join("known").join("lenders.json")
}

/// The state of one VM: `vm/NAME` in [`state_dir`].
pub fn vm_state(vm: &VmName) -> PathBuf {
    state_dir().join("vm").join(vm.as_str())
}

/// The [fences](farside_lender_protocol::Fences) of a VM that was moved to this host.
pub fn fences(vm: &VmName) -> PathBuf {
    vm_state(vm).join("fences.json")
}
