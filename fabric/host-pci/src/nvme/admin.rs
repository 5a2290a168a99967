//! Admin commands through the character device of a controller, which the kernel's nvme driver has.
//!
//! Source: Linux `include/uapi/linux/nvme_ioctl.h`.
#![allow(unsafe_code)]

use std::{fs::OpenOptions, io, mem::size_of, path::Path};

use super::{IDENTIFY_OPCODE, VIRTUALIZATION_MANAGEMENT, plan::IDENTIFY};
use vmm_sys_util::{ioctl::ioctl_with_mut_ref, ioctl_iowr_nr};

/// An admin command to a controller itself, not to a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdminCommand {
    /// Opcode: Identify or Virtualization Management.
    pub opcode: u8,
    /// Command dword 10.
    pub cdw10: u32,
    /// Command dword 11.
    pub cdw11: u32,
}

/// `struct nvme_passthru_cmd`.
#[repr(C)]
#[derive(Default)]
struct Passthrough {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12_to_15: [u32; 4],
    timeout_ms: u32,
    result: u32,
}

const _: () = assert!(size_of::<Passthrough>() == 72);

ioctl_iowr_nr!(NVME_IOCTL_ADMIN_CMD, 'N' as u32, 0x41, Passthrough);

/// Bytes that the controller writes for the commands that are sent here, whatever the length of the buffer.
fn data_len(opcode: u8) -> Option<u32> {
    match opcode {
        IDENTIFY_OPCODE => Some(IDENTIFY as u32),
        VIRTUALIZATION_MANAGEMENT => Some(0),
        _ => None,
    }
}

/// Sends `command` to the controller at `node`, which fills `data`. Returns the status field of the
/// completion: 0 for success.
///
/// # Errors
/// The node cannot be opened, the kernel does not send the command, or `data` is not as long as what the command writes.
pub(crate) fn send(node: &Path, command: AdminCommand, data: &mut [u8]) -> io::Result<u16> {
    let len = data_len(command.opcode).filter(|&len| len as usize == data.len());
    let len = len.ok_or(io::ErrorKind::InvalidInput)?;
    let device = OpenOptions::new().read(true).write(true).open(node)?;
    let mut passthrough = Passthrough {
        opcode: command.opcode,
        cdw10: command.cdw10,
        cdw11: command.cdw11,
        addr: data.as_mut_ptr() as u64,
        data_len: len,
        ..Passthrough::default()
    };
    // SAFETY: the structure is the one of this ioctl, and lives until that returns. The controller writes by DMA, which no
    // length of ours limits: as many bytes as the command transfers, by `data_len` those of `data`, exclusively borrowed for
    // the call; the kernel pins their pages until then. A node of another driver fails with ENOTTY: no other one has this
    // number.
    let status = unsafe { ioctl_with_mut_ref(&device, NVME_IOCTL_ADMIN_CMD(), &mut passthrough) };
    match u16::try_from(status) {
        Ok(status) => Ok(status),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
