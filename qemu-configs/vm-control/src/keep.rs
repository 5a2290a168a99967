//! Keeps QEMU alive over an unplug.
//!
//! QEMU 11.1 aborts when it frees a `vfio-user-pci` with MSI-X: the region for
//! the pending bits has left its container before the device's own code takes it
//! out (`memory_region_del_subregion: Assertion subregion->container == mr`). It
//! frees a device when the last reference goes, a moment after the unplug. What
//! helps is one reference more. QEMU takes one, and never gives it back, when
//! `info mtree -f` prints a view of memory that the device's BARs are in. Each
//! unplug costs QEMU some kilobytes.
//!
//! A device whose memory the guest has turned off is in no view; to unplug it
//! would end the VM. But a guest that is letting go of one, as it was asked to before,
//! turns its memory off, too, a moment before it is unplugged.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{Error, Monitor, slots::plugged};

/// How long a guest may take from one to the other. It is a few instructions.
const LETTING_GO: Duration = Duration::from_secs(5);

/// How often to look.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Has QEMU keep a device that is served at `socket` for ever. To be called before
/// it is unplugged. Returns false when it has been unplugged meanwhile; that is waited
/// for until `deadline` at most.
pub(crate) fn keep(
    monitor: &mut Monitor,
    device: &str,
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
