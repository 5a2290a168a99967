//! The channels from here to the guests of a VM that plays a host: ports of its
//! virtio-serial device, which the nested QEMU opens as files. So a nested guest's agent
//! and its QEMU's monitor are reached like those of a non-nested VM.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::Testbed;
use crate::vm::option_value;

/// The serial number of the disk with QEMU, by which the VM finds it.
pub(super) const TOOLS_SERIAL: &str = "farside-tools";

/// Links to the ports' devices, in the VM.
const PORTS: &str = "/dev/virtio-ports";

/// A shell script for the VM that makes the links to the ports of `count` nested guests. Ports and
/// their names appear one after the other.
pub(super) fn link_script(count: u32) -> String {
    let mut script = format!("mkdir {PORTS}\n");
    for (slot, channel) in (0..count).flat_map(|slot| Channel::ALL.map(|channel| (slot, channel))) {
        script += &format!(
            "until port=$(grep -lx {name} /sys/class/virtio-ports/*/name); do sleep 0.1; done
            port=${{port%/name}}
            ln -s /dev/${{port##*/}} {device}\n",
            name = channel.port(slot),
            device = channel.device(slot),
        );
    }
    script
}

/// The channels of one nested guest.
#[derive(Debug, Clone, Copy)]
pub(super) enum Channel {
    Agent,
    Qmp,
    Console,
}

impl Channel {
    const ALL: [Channel; 3] = [Channel::Agent, Channel::Qmp, Channel::Console];

    /// The port's name in the VM.
    pub(super) fn port(self, slot: u32) -> String {
        let what = match self {
            Channel::Agent => "agent",
            Channel::Qmp => "qmp",
            Channel::Console => "console",
        };
        format!("nested{slot}.{what}")
    }

    /// The port's device in the VM, where udev would link it.
    pub(super) fn device(self, slot: u32) -> String {
        format!("{PORTS}/{}", self.port(slot))
    }

    /// The socket, or for the console the file, at this end.
    pub(super) fn path(self, directory: &Path, slot: u32) -> PathBuf {
        directory.join(self.port(slot))
    }
}

/// QEMU's options for the disk with QEMU and the channels to `count` guests.
pub(crate) fn args(testbed: &Testbed, count: u32, directory: &Path) -> Vec<OsString> {
    let disk = option_value(testbed.tools_disk());
    let mut args: Vec<String> = vec![
        "-drive".into(),
        format!("if=none,id=farside-tools,format=raw,readonly=on,file.locking=off,file={disk}"),
        "-device".into(),
        format!("virtio-blk-pci,drive=farside-tools,serial={TOOLS_SERIAL},addr=1e.0"),
    ];
    for slot in 0..count {
        for channel in Channel::ALL {
            let port = channel.port(slot);
            let path = option_value(&channel.path(directory, slot));
            let chardev = match channel {
                Channel::Console => format!("file,id={port},path={path}"),
                _ => format!("socket,id={port},path={path},server=on,wait=off"),
            };
            args.extend([
                "-chardev".into(),
                chardev,
                "-device".into(),
                format!("virtserialport,bus=farside-serial.0,chardev={port},name={port}"),
            ]);
        }
    }
    args.into_iter().map(OsString::from).collect()
}
