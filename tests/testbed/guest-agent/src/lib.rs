//! What the host and the agent in a test guest say to each other.
//!
//! One JSON document a line, over a virtio-serial port. The agent speaks first
//! ([`FromGuest::Hello`], once per boot, so that the host notices a reboot);
//! then the host sends [`ToGuest`] and the agent answers each with one
//! [`FromGuest::Reply`] of the same id, in the order in which the work ends.

#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

/// The virtio-serial port's name, as QEMU and the guest's sysfs show it.
pub const PORT_NAME: &str = "farside.agent";

/// Kernel command line option: modules that init shall not load, by comma.
pub const SKIP_MODULES_OPTION: &str = "farside.skip";

/// The most of each output stream that one command may return.
pub const MAX_OUTPUT: usize = 16 << 20;

/// A message from the host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ToGuest {
    /// Chosen by the host; comes back in the reply.
    pub id: u64,
    /// What to do.
    pub request: Request,
}

/// A message from the guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromGuest {
    /// The agent has started.
    Hello {
        /// The kernel's id of this boot: another one means the guest rebooted.
        boot_id: String,
        /// As `uname -r` prints it.
        kernel: String,
    },
    /// The end of a request.
    Reply {
        /// The request's id.
        id: u64,
        /// What came of it, or why it failed.
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

/// How wide one access is.
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

    /// The width of that many bytes, when an access can have it.
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

/// What the host can ask for.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Runs a shell command to its end, or kills its process group when the time is up.
    Exec {
        /// For `sh -c`.
        command: String,
        /// How long it may take.
        timeout_ms: u64,
    },
    /// Reads from a BAR with one access.
    MmioRead {
        /// Where.
        at: BarAddress,
        /// How wide.
        width: Width,
    },
    /// Writes to a BAR with one access.
    MmioWrite {
        /// Where.
        at: BarAddress,
        /// How wide.
        width: Width,
        /// What; bits above the width must be zero.
        value: u64,
    },
    /// Writes one value to `count` consecutive places of a BAR.
    MmioFill {
        /// Where the first goes.
        at: BarAddress,
        /// How wide each access is.
        width: Width,
        /// What.
        value: u64,
        /// How often.
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
        /// What.
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
        /// How many bytes.
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
    /// Gives allocated memory back.
    FreePage {
        /// From [`Answer::Page`].
        handle: u64,
    },
    /// Reads guest-physical memory through `/dev/mem`: what the kernel does not
    /// use as RAM (holes, ROMs, ranges reserved with `memmap=`).
    PhysRead {
        /// Guest-physical address.
        gpa: u64,
        /// How many bytes.
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
        /// Where.
        path: String,
        /// From here on; 0 truncates the file first.
        offset: u64,
        /// Base64.
        data: String,
    },
    /// Reads part of a file in the guest.
    ReadFile {
        /// Which.
        path: String,
        /// From here on.
        offset: u64,
        /// At most so many bytes.
        len: u64,
    },
    /// Answers when a path exists (or, inverted, no longer does).
    WaitPath {
        /// Which.
        path: String,
        /// Wait until it is there, or until it is gone.
        present: bool,
        /// How long to wait.
        timeout_ms: u64,
    },
    /// Syncs and powers off; the answer comes before that.
    PowerOff,
    /// Syncs and reboots; the answer comes before that.
    Reboot,
}

/// What the agent answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is done, and there is nothing to say about it.
    Done,
    /// How a command ended.
    Exit {
        /// Exit code, when it exited.
        code: Option<i32>,
        /// Signal, when one killed it.
        signal: Option<i32>,
        /// Whether it was killed because its time was up.
        timed_out: bool,
        /// Base64.
        stdout: String,
        /// Base64.
        stderr: String,
    },
    /// What a register held.
    Value(u64),
    /// Base64 of the bytes that were read.
    Data(String),
    /// Allocated memory.
    Page {
        /// Its name in later requests.
        handle: u64,
        /// Where it is in guest-physical memory.
        gpa: u64,
        /// How much of it can be used.
        len: u64,
    },
}
