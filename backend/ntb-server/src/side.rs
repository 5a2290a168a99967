//! The state of one VM: its port's configuration space, its memory, its interrupts.

use std::time::Duration;

use farside_config_space::{ConfigSpace, ConfigSpaceError};
use farside_daemon::RateLimit;
use farside_irq_relay::{IrqCounts, IrqCountsError, Vectors};
use farside_pci::Description;
use farside_vfio_user::{ClientLog, DmaCommands, Region, ReplyTo};

use crate::memory::Memory;
use crate::model::{Port, Target};

/// Timeout of a DMA command. Below QEMU's message timeout of 5 s, so that a read that
/// waits for the command is answered in time.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(2);

/// Most outstanding DMA commands to a VMM. Bounds memory.
const MAX_COMMANDS: usize = 4096;

/// One VM.
pub(crate) struct Side {
    /// For log lines.
    pub(crate) name: String,
    pub(crate) client_log: ClientLog,
    pub(crate) config: ConfigSpace,
    pub(crate) counts: IrqCounts,
    pub(crate) vectors: Vectors,
    pub(crate) memory: Memory,
    /// DMA commands to this VMM, for accesses by the peer.
    pub(crate) commands: DmaCommands<Tag>,
    /// The last command that ended was answered.
    pub(crate) answers: bool,
    /// Its requests wait: for its own load, or until the other VMM has executed commands.
    pub(crate) waits: bool,
    /// A window read by this VMM that waits for the peer.
    pub(crate) held: Option<Held>,
    /// The VMM has unplugged the port and may keep the connection.
    pub(crate) unplugged: bool,
    /// Limits log lines on unplugs.
    pub(crate) unplugs: RateLimit,
    /// Limits log lines on DMA commands that time out.
    pub(crate) unanswered: RateLimit,
    /// Number of the last read that had to wait.
    pub(crate) reads: u64,
    /// Data of a read; reused, so that reads do not allocate.
    pub(crate) buffer: Vec<u8>,
    /// Bytes of the regions of BARs 0 to 5.
    bars: [u64; 6],
}

/// A read that is not answered yet.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) to: ReplyTo,
    pub(crate) region: Region,
    pub(crate) offset: u64,
    /// The data is in the buffer.
    pub(crate) done: bool,
}

/// The access that a DMA command belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    /// The window read of this port with this number.
    Read { port: Port, number: u64 },
    /// A window write.
    Write(Target),
}

impl Side {
    pub(crate) fn new(name: String, description: &Description) -> Result<Self, SideError> {
        let counts = farside_lender_protocol::irq_counts(description)?;
        Ok(Self {
            name,
            client_log: ClientLog::default(),
            config: ConfigSpace::new(description)?,
            counts,
            vectors: Vectors::new(counts),
            memory: Memory::default(),
            commands: DmaCommands::new(COMMAND_TIMEOUT, MAX_COMMANDS),
            answers: true,
            waits: false,
            held: None,
            unplugged: false,
            unplugs: RateLimit::new(),
            unanswered: RateLimit::new(),
            reads: 0,
            buffer: Vec::new(),
            bars: std::array::from_fn(|bar| {
                description.bars[bar].as_ref().map_or(0, |bar| bar.size)
            }),
        })
    }

    /// Bytes of a region.
    pub(crate) fn region_size(&self, region: Region) -> u64 {
        match region {
            Region::Bar(bar) => self.bars.get(usize::from(bar)).copied().unwrap_or(0),
            Region::Config => self.config.size(),
            Region::Rom | Region::Vga => 0,
        }
    }

    /// Whether an access is entirely inside the region.
    pub(crate) fn contains(&self, region: Region, offset: u64, len: usize) -> bool {
        let end = offset.checked_add(len as u64);
        end.is_some_and(|end| end <= self.region_size(region))
    }
}

/// Invalid description of a port.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SideError {
    #[error(transparent)]
    Config(#[from] ConfigSpaceError),
    #[error(transparent)]
    Irqs(#[from] IrqCountsError),
}
