//! The protocol between the host and the agent in a test guest.
//!
//! One JSON document per line, over a virtio-serial port. The agent sends first
//! ([`FromGuest::Hello`], once per boot, so that the host detects a reboot); then the host
//! sends [`ToGuest`] and the agent answers each with one [`FromGuest::Reply`] of the same
//! id, in order of completion.

#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

/// The virtio-serial port's name, as QEMU and the guest's sysfs show it.
pub const PORT_NAME: &str = "farside.agent";

/// Kernel command line option: comma-separated modules that init must not load.
pub const SKIP_MODULES_OPTION: &str = "farside.skip";

/// Maximum size of each output stream of a command.
pub const MAX_OUTPUT: usize = 16 << 20;

/// A message from the host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ToGuest {
    /// Chosen by the host; returned in the reply.
    pub id: u64,
    /// The request.
    pub request: Request,
}

/// A message from the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromGuest {
    /// The agent has started.
    Hello {
        /// The kernel's boot id: a different one means that the guest has rebooted.
        boot_id: String,
        /// As `uname -r` prints it.
        kernel: String,
    },
    /// The end of a request.
    Reply {
        /// The request's id.
        id: u64,
        /// The result, or the error.
        result: Result<Answer, String>,
    },
}

/// A PCI function's BAR, or part of one, in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarAddress {
    /// Domain, bus, device and function as in `/sys/bus/pci/devices`.
    pub bdf: String,
    /// 0 to 5.
    pub bar: u8,
    /// Byte offset into the BAR, aligned to the access.
    pub offset: u64,
}

/// Access width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Width {
    /// One byte.
    U8,
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
    /// Eight bytes.
    U64,
}

impl Width {
    /// The width in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Width::U8 => 1,
            Width::U16 => 2,
            Width::U32 => 4,
            Width::U64 => 8,
        }
    }

    /// The access width of that many bytes, if there is one.
    pub fn from_bytes(bytes: u64) -> Option<Self> {
        match bytes {
            1 => Some(Width::U8),
            2 => Some(Width::U16),
            4 => Some(Width::U32),
            8 => Some(Width::U64),
            _ => None,
        }
    }
}

/// Requests from the host.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Runs a shell command, and kills its process group on timeout.
    Exec {
        /// For `sh -c`.
        command: String,
        /// Timeout.
        timeout_ms: u64,
    },
    /// Reads from a BAR with one access.
    MmioRead {
        /// Address.
        at: BarAddress,
        /// Width.
        width: Width,
    },
    /// Writes to a BAR with one access.
    MmioWrite {
        /// Address.
        at: BarAddress,
        /// Width.
        width: Width,
        /// Value; bits above the width must be zero.
        value: u64,
    },
    /// Writes one value to `count` consecutive locations of a BAR.
    MmioFill {
        /// Address of the first write.
        at: BarAddress,
        /// Width of each access.
        width: Width,
        /// Value.
        value: u64,
        /// Number of writes.
        count: u64,
    },
    /// Reads from configuration space through sysfs.
    ConfigRead {
        /// As in [`BarAddress`].
        bdf: String,
        /// Byte offset.
        offset: u64,
        /// One, two or four bytes.
        width: Width,
    },
    /// Writes to configuration space through sysfs.
    ConfigWrite {
        /// As in [`BarAddress`].
        bdf: String,
        /// Byte offset.
        offset: u64,
        /// One, two or four bytes.
        width: Width,
        /// Value.
        value: u64,
    },
    /// Allocates zeroed, locked, physically contiguous memory.
    AllocPage {
        /// Up to 2 MiB.
        len: u64,
    },
    /// Reads allocated memory.
    ReadPage {
        /// From [`Answer::Page`].
        handle: u64,
        /// Byte offset.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Writes allocated memory.
    WritePage {
        /// From [`Answer::Page`].
        handle: u64,
        /// Byte offset.
        offset: u64,
        /// Base64.
        data: String,
    },
    /// Frees allocated memory.
    FreePage {
        /// From [`Answer::Page`].
        handle: u64,
    },
    /// Reads guest-physical memory that the kernel does not use as RAM (holes, ROMs, ranges
    /// reserved with `memmap=`), through `/dev/mem`.
    PhysRead {
        /// Guest-physical address.
        gpa: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Writes guest-physical memory through `/dev/mem`; see [`Request::PhysRead`].
    PhysWrite {
        /// Guest-physical address.
        gpa: u64,
        /// Base64.
        data: String,
    },
    /// Writes a file in the guest.
    WriteFile {
        /// Path.
        path: String,
        /// Offset; 0 truncates the file first.
        offset: u64,
        /// Base64.
        data: String,
    },
    /// Reads part of a file in the guest.
    ReadFile {
        /// Path.
        path: String,
        /// Offset.
        offset: u64,
        /// Maximum number of bytes.
        len: u64,
    },
    /// Replies when a path exists (or no longer does).
    WaitPath {
        /// Path.
        path: String,
        /// Whether to wait for its creation or its removal.
        present: bool,
        /// Timeout.
        timeout_ms: u64,
    },
    /// Syncs and powers off, after the reply.
    PowerOff,
    /// Syncs and reboots, after the reply.
    Reboot,
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Done, without a result.
    Done,
    /// A command has ended.
    Exit {
        /// Exit code, if it exited.
        code: Option<i32>,
        /// Signal, if it was killed by one.
        signal: Option<i32>,
        /// Whether it was killed on timeout.
        timed_out: bool,
        /// Base64.
        stdout: String,
        /// Base64.
        stderr: String,
    },
    /// A register's value.
    Value(u64),
    /// Base64 of the bytes that were read.
    Data(String),
    /// Allocated memory.
    Page {
        /// Its handle in later requests.
        handle: u64,
        /// Its guest-physical address.
        gpa: u64,
        /// Its usable size in bytes.
        len: u64,
    },
}
