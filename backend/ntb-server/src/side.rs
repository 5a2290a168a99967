//! What there is of one VM: its view of the port, its memory, its interrupts.

use std::time::Duration;

use farside_config_space::{ConfigSpace, ConfigSpaceError};
use farside_daemon::RateLimit;
use farside_irq_relay::{IrqCounts, IrqCountsError, Vectors};
use farside_pci::Description;
use farside_vfio_user::{ClientLog, DmaCommands, Region, ReplyTo};

use crate::memory::Memory;
use crate::model::{Port, Target};

/// How long a VMM may take to serve a message. Below QEMU's own patience of
/// 5 s: a read that waits for it is answered in time.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// Most messages to a VMM that may be unanswered. Bounds memory.
const MAX_MESSAGES: usize = 4096;

/// One VM.
pub(crate) struct Side {
    /// For log lines.
    pub(crate) name: String,
    pub(crate) client_log: ClientLog,
    pub(crate) config: ConfigSpace,
    pub(crate) counts: IrqCounts,
    pub(crate) vectors: Vectors,
    pub(crate) memory: Memory,
    /// To this VMM, for accesses that come from the other.
    pub(crate) commands: DmaCommands<Tag>,
    /// A window read of this VMM's that waits for the other.
    pub(crate) held: Option<Held>,
    /// The VMM has unplugged the port and may keep the connection.
    pub(crate) unplugged: bool,
    /// Lines about that.
    pub(crate) unplugs: RateLimit,
    /// Lines on messages that the VMM does not answer.
    pub(crate) unanswered: RateLimit,
    /// Number of the last read that had to wait.
    pub(crate) reads: u64,
    /// What a read fills; kept, so that reads do not allocate.
    pub(crate) buffer: Vec<u8>,
    /// Bytes of the regions of BARs 0 to 5.
    bars: [u64; 6],
}

/// A read whose answer waits.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) to: ReplyTo,
    pub(crate) region: Region,
    pub(crate) offset: u64,
    /// The answer is in the buffer.
    pub(crate) done: bool,
}

/// What a message is for.
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
            commands: DmaCommands::new(MESSAGE_TIMEOUT, MAX_MESSAGES),
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

    /// Whether all of an access is in the region.
    pub(crate) fn contains(&self, region: Region, offset: u64, len: usize) -> bool {
        let end = offset.checked_add(len as u64);
        end.is_some_and(|end| end <= self.region_size(region))
    }
}

/// The port's description contradicts itself.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SideError {
    #[error(transparent)]
    Config(#[from] ConfigSpaceError),
    #[error(transparent)]
    Irqs(#[from] IrqCountsError),
}
