//! VFIO devices among the files that are shared as memory: a function's BARs, for DMA of other devices of its VM.
//!
//! Other files that are no regular ones stay refused. Their page faults may be answered by anybody, and what is behind
//! them may change while an IOMMU maps it, which does not notice.
#![allow(unsafe_code)]

use std::{fs::File, mem::offset_of};

use rustix::{
    fs::{FileType, Stat, fstatfs},
    ioctl::{Opcode, Updater, ioctl, opcode},
};

/// `VFIO_DEVICE_GET_INFO` (`linux/vfio.h`), for filters of system calls: mapping shared memory needs it.
pub const GET_DEVICE_INFO: Opcode = opcode::none(b';', 107);

/// It is a PCI function.
const FLAGS_PCI: u32 = 1 << 1;

/// Of a file without a name, as a group's devices are.
const ANON_INODE_FS_MAGIC: u64 = 0x0904_1934;

/// The part of `struct vfio_device_info` that all kernels have.
#[repr(C)]
struct DeviceInfo {
    argsz: u32,
    flags: u32,
    num_regions: u32,
    num_irqs: u32,
    /// A driver of another device may take the request for one with a larger structure.
    rest: [u64; 510],
}

/// Whether `file`, whose status that is, is a PCI function, by VFIO's group or by its device node.
///
/// A request that means something else to another driver of a device node does to that device what the sender of the
/// descriptor could have done.
pub(crate) fn is_function(file: &File, status: &Stat) -> bool {
    let has_kind = match FileType::from_raw_mode(status.st_mode) {
        FileType::CharacterDevice => true,
        _ => fstatfs(file).is_ok_and(|system| system.f_type as u64 == ANON_INODE_FS_MAGIC),
    };
    let mut info = DeviceInfo {
        argsz: offset_of!(DeviceInfo, rest) as u32,
        flags: 0,
        num_regions: 0,
        num_irqs: 0,
        rest: [0; 510],
    };
    if !has_kind {
        return false;
    }
    // SAFETY: of a VFIO device this request reads and writes a structure that begins with these fields, no more bytes of it than
    // `argsz` says. The kernel's other kinds of anonymous files have no such request. A device node's driver that takes it for
    // one of its own has room for a page of results, more than any request of this number is known to write; one that
    // programs make (CUSE), which could ask for more, is made by root.
    let asked = unsafe {
        let request = Updater::<GET_DEVICE_INFO, _>::new(&mut info);
        ioctl(file, request)
    };
    asked.is_ok() && info.flags & FLAGS_PCI != 0
}

#[cfg(test)]
mod tests {
    use rustix::{
        event::{EventfdFlags, eventfd},
        fs::fstat,
    };

    use super::*;

    /// A function itself is in the tests of hosts.
    #[test]
    fn other_files_are_no_functions() {
        let event = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let null = File::open("/dev/null").unwrap();
        let directory = File::open("/").unwrap();
        for file in [event, null, directory] {
            assert!(!is_function(&file, &fstat(&file).unwrap()));
        }
    }
}
