//! Checks a VM before QEMU is started.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use farside_daemon::DeviceId;

use crate::{Firmware, MonitorSocket, SharedMemoryError, ViommuError, Vm, check_viommu};

/// Maximum length of a UNIX socket path, in bytes (`sun_path` of unix(7), without the final zero).
const MAX_SOCKET: usize = 107;
/// More CPUs need an IOMMU with interrupt remapping.
const MAX_VCPUS: u32 = 255;

/// A VM for which no command line can be written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum VmError {
    /// Guest RAM is not a multiple of the page size.
    #[error(
        "guest RAM of {ram} bytes is not a multiple of {granule} bytes: use {below} or {above}"
    )]
    Ram {
        ram: u64,
        granule: u64,
        below: u64,
        above: u64,
    },
    /// No guest RAM.
    #[error("guest RAM of 0 bytes: give the VM some")]
    NoRam,
    /// No CPUs, or more than this configuration supports.
    #[error("{vcpus} vCPUs: a VM has 1 to {MAX_VCPUS}")]
    Vcpus { vcpus: u32 },
    /// A duplicate of a unique value.
    #[error("{what} {name:?} is used twice in this VM")]
    Duplicate { what: &'static str, name: String },
    /// A socket path exceeds the kernel's limit.
    #[error(
        "the socket path {path:?} has {len} bytes, and {MAX_SOCKET} is the most a UNIX \
         socket can have: use a shorter directory"
    )]
    SocketPath { path: PathBuf, len: usize },
    /// A path that is invalid in an argument.
    #[error("the path {path:?} is empty, not UTF-8, or has a zero byte: rename it")]
    Path { path: PathBuf },
    /// The machine does not have the port.
    #[error("device {id} at port {port}: the ports of a {machine} VM are 0 to {last}")]
    Port {
        id: DeviceId,
        port: usize,
        machine: &'static str,
        last: usize,
    },
    /// Two devices at one port.
    #[error(
        "devices {first} and {second} are both at port {port}: give one of them another, or another `function` \
         (a device without `port` has its position in the list, counted from 0)"
    )]
    SamePort {
        port: usize,
        first: DeviceId,
        second: DeviceId,
    },
    /// No device has so many functions.
    #[error("device {id} is function {function}: the functions of a device are 0 to 7")]
    Function { id: DeviceId, function: u8 },
    /// A guest finds the other functions by function 0.
    #[error(
        "device {id} is function {function} of the device at port {port}, which has no function 0: \
         give another device that `port`, without `function`"
    )]
    NoFunction0 {
        id: DeviceId,
        function: u8,
        port: usize,
    },
    /// More devices or ports than the machine can have.
    #[error("{wanted} {what}: a {machine} VM has room for {limit}")]
    TooMany {
        wanted: usize,
        what: &'static str,
        machine: &'static str,
        limit: usize,
    },
    /// An argument that cannot be passed to a process.
    #[error("the extra argument {argument:?} has a zero byte")]
    Argument { argument: String },
    /// A value that `-readconfig` cannot express.
    #[error(
        "{key} = {value:?} cannot be in a file for -readconfig, whose values have at most \
         1023 bytes and no quote: use another form"
    )]
    ConfigValue { key: String, value: String },
    /// The extra arguments replace the shared memory.
    #[error("the extra arguments undo what borrowing needs")]
    Memory(#[source] SharedMemoryError),
    /// The extra arguments contain a vIOMMU that does not support borrowed devices.
    #[error("the extra arguments have a vIOMMU that ends QEMU")]
    Viommu(#[source] ViommuError),
}

impl Vm {
    /// Checks everything that does not depend on the system.
    pub fn check(&self) -> Result<(), VmError> {
        self.check_ram()?;
        if !(1..=MAX_VCPUS).contains(&self.vcpus) {
            return Err(VmError::Vcpus { vcpus: self.vcpus });
        }
        self.check_ports()?;
        if let Firmware::Ovmf { code, vars } = &self.firmware {
            path_text(code)?;
            path_text(vars)?;
        }
        let monitor = self.monitor.as_ref().and_then(MonitorSocket::path);
        if let Some(path) = monitor {
            check_socket(path)?;
        }
        for device in &self.devices {
            check_socket(&device.socket)?;
        }
        unique("device id", self.devices.iter().map(|d| d.id.to_string()))?;
        let sockets = self.devices.iter().map(|d| d.socket.as_path());
        let sockets = sockets.chain(monitor);
        unique("socket", sockets.map(|path| path.display().to_string()))?;
        let places = self.devices.iter().filter_map(|d| d.bootindex);
        unique("bootindex", places.map(|place| place.to_string()))?;
        match self.extra_args.iter().find(|arg| arg.contains('\0')) {
            Some(argument) => Err(VmError::Argument {
                argument: argument.clone(),
            }),
            None => check_viommu(&self.extra_args).map_err(VmError::Viommu),
        }
    }

    fn check_ram(&self) -> Result<(), VmError> {
        let (ram, granule) = (self.ram, self.huge_pages.granule());
        if ram == 0 {
            return Err(VmError::NoRam);
        }
        if !ram.is_multiple_of(granule) {
            // At least 1, so that the advice is valid.
            let below = (ram / granule * granule).max(granule);
            return Err(VmError::Ram {
                ram,
                granule,
                below,
                above: below.saturating_add(granule),
            });
        }
        Ok(())
    }
}

fn check_socket(socket: &Path) -> Result<(), VmError> {
    let len = path_text(socket)?.len();
    if len > MAX_SOCKET {
        let path = socket.to_owned();
        return Err(VmError::SocketPath { path, len });
    }
    Ok(())
}

/// A path as text for an argument.
pub(crate) fn path_text(path: &Path) -> Result<&str, VmError> {
    path.to_str()
        .filter(|text| !text.is_empty() && !text.contains('\0'))
        .ok_or_else(|| VmError::Path {
            path: path.to_owned(),
        })
}

fn unique(what: &'static str, names: impl Iterator<Item = String>) -> Result<(), VmError> {
    let mut seen = BTreeSet::new();
    for name in names {
        if let Some(name) = seen.replace(name) {
            return Err(VmError::Duplicate { what, name });
        }
    }
    Ok(())
}
