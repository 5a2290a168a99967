//! Works around a QEMU crash on unplug.
//!
//! QEMU 11.1 aborts when it frees a `vfio-user-pci` with MSI-X: the region of the pending bits has
//! left its container before the device's code removes it (`memory_region_del_subregion: Assertion
//! subregion->container == mr`). It frees a device when the last reference is dropped, a moment
//! after the unplug. An extra reference prevents that. QEMU takes one, and leaks it, when `info
//! mtree -f` prints a flat view that contains the device's BARs. Each unplug leaks some kilobytes
//! in QEMU.
//!
//! A device whose memory decoding is off is in no flat view; unplugging it would crash the VM. But
//! a guest that is releasing a device after an earlier request also disables decoding, a moment
//! before the unplug.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use farside_daemon::DeviceId;
use serde_json::json;

use crate::{Error, Monitor, slots::plugged};

/// Maximum time between the two. It is a few instructions.
const LETTING_GO: Duration = Duration::from_secs(5);

/// Polling interval.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Makes QEMU keep the device that is served at `socket` for ever. Call it before the unplug.
/// Returns false if the device has been unplugged meanwhile; waits for that until `deadline` at
/// most.
pub(crate) fn keep(
    monitor: &mut Monitor,
    device: &DeviceId,
    socket: &Path,
    deadline: Instant,
) -> Result<bool, Error> {
    let deadline = deadline.min(Instant::now() + LETTING_GO);
    loop {
        let command = json!({ "command-line": "info mtree -f" });
        let views = monitor.run("human-monitor-command", command)?;
        if is_seen(views.as_str().unwrap_or_default(), socket) {
            return Ok(true);
        }
        if !plugged(monitor)?.iter().any(|id| id == device) {
            return Ok(false);
        }
        if Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Err(Error::Unsupported {
        vm: monitor.vm().to_owned(),
        what: format!(
            "device {device} cannot be unplugged while its memory is turned off in the guest (no driver runs it): QEMU would abort, and the VM with it; load its driver there first, or write 1 to its `enable` in sysfs; where its backend has ended and neither helps, restart the VM"
        ),
    })
}

/// Whether a region of the device is in a flat view: QEMU names a region by its
/// device, and a device by its socket.
fn is_seen(views: &str, socket: &Path) -> bool {
    views.contains(&format!("vfio-user:{} BAR ", socket.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_device_itself_counts() {
        let views = "FlatView #0\n AS \"memory\", root: system\n  \
            00000000fe000000-00000000fe001fff (prio 0, i/o): vfio-user:/run/a/disk0.sock BAR 0\n";
        assert!(is_seen(views, Path::new("/run/a/disk0.sock")));
        assert!(!is_seen(views, Path::new("/run/a/disk.sock")));
        assert!(!is_seen(views, Path::new("/a/disk0.sock")));
        assert!(!is_seen("", Path::new("/run/a/disk0.sock")));
    }
}
