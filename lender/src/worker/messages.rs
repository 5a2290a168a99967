//! The messages between the broker and a worker, which are of one version ([`crate::keeper`]).
//!
//! Each has a number. Orders are answered in order; a broker that adopts a worker numbers its own above
//! those of former ones, whose answers it ignores. A worker sends the call whose reply it waits for again
//! to the next broker, which knows of the last one that was replied to.

use std::time::Duration;

use farside_daemon::VmName;
use farside_devices::block::{EngineChoice, Limits};
use farside_fabric::{LutRange, NtbLimits, PeerAddress};
use farside_lender_protocol::{DeviceEntry, Generation, RemoteError, Secret, Transport};
use farside_medium::Secrets;
use farside_vfio::HandleParts;
use serde::{Deserialize, Serialize};

use crate::{
    device_loop::Line, registry::Release, source::Report, vfio::FunctionConfig,
    vfio_user::ServerConfig,
};

/// A message and its number.
pub(crate) type Numbered<T> = (u64, T);

/// What a worker is asked to do. Each order after the first has one answer, in order.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Serve a lease. Comes with descriptors: for [calls](Call), the borrower's connection,
    /// the image and the file of the state if there are any, and the memory of BARs.
    Start(Box<Start>),
    /// Report the device's status.
    Status,
    /// End a lease that is older than `fence`, and flush the device's writes; then answer.
    HandOver {
        /// The fence.
        fence: Generation,
    },
    /// Ask the borrower to release the device, and end the lease after `limit`. Answered with
    /// [`Answer::Nothing`].
    Revoke {
        /// From now on.
        limit: Duration,
    },
    /// The device's disk has grown: notify the borrower.
    Resize {
        /// Bytes.
        to: u64,
    },
}

/// A lease for a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    /// The device's entry, with this lease.
    pub(crate) entry: DeviceEntry,
    pub(crate) device: Served,
    pub(crate) poll_us: u64,
    pub(crate) vm: VmName,
    pub(crate) generation: Generation,
    pub(crate) transport: Transport,
    /// Of a lease within the host that may go on: its chain's secret, and whether it goes on. The file of the state
    /// comes as a descriptor, before those of BARs.
    pub(crate) chain: Option<(Secret, bool)>,
}

/// What is lent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Served {
    /// A software model, with the limits of the adapter that the broker has.
    Model { model: Model, limits: NtbLimits },
    /// A function of this host, which the worker opens.
    Function(Box<FunctionConfig>),
    /// The medium of a model, over the network. The image comes as a descriptor, unless it has 0 bytes.
    Medium(Box<ServedMedium>),
    /// The device of a vfio-user server. The connection to it comes as a descriptor.
    Server {
        config: Box<ServerConfig>,
        /// A worker before this one was connected, and the device goes on.
        adopts: bool,
    },
}

/// The medium of a model whose controller is at the borrower.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ServedMedium {
    pub(crate) engine: EngineChoice,
    pub(crate) limits: Limits,
    /// Bytes of the image; 0 for a model without a medium.
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    /// It is a tap interface.
    pub(crate) frames: bool,
    /// Other controllers share it. The file of reservations comes as a descriptor after the image.
    pub(crate) shared: bool,
    /// The connection's TLS session.
    pub(crate) secrets: Option<Secrets>,
}

/// A software model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Model {
    /// An NVMe controller. The image comes as a descriptor.
    Nvme {
        /// Its configuration, as JSON.
        config: String,
        /// Bytes of the image.
        size: u64,
        /// Whether holes can be punched in it.
        punches_holes: bool,
    },
    /// The DMA test device.
    DmaTest,
    /// A virtio-blk device. The image comes as a descriptor.
    VirtioBlk {
        /// Its configuration, as JSON.
        config: String,
        /// Bytes of the image.
        size: u64,
        /// Whether holes can be punched in it.
        punches_holes: bool,
    },
    /// A virtio-net device. The tap interface comes as a descriptor.
    VirtioNet {
        /// Its configuration, in which all is said, as JSON.
        config: String,
    },
}

/// The answer to an [`Order`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Status(Box<Report>),
    HandedOver(Result<(), RemoteError>),
    /// The device thread has not answered in time, or its lease has ended.
    Nothing,
    /// The lease has ended: the last message.
    Ended(Box<Report>),
    /// The borrower is notified, or the disk cannot have that size.
    Resized(Result<(), RemoteError>),
}

/// What a worker asks of the broker. Each call has a reply, for which the worker waits if it needs that.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Call {
    /// Keep a second handle on the function that this process has opened. Comes with its two
    /// descriptors, once, before the lease begins.
    Opened(HandleParts),
    /// Take a requester entry of the adapter.
    TakeRequester,
    /// Take LUT entries for a window of `bytes`.
    TakeWindow {
        peer_address: PeerAddress,
        bytes: u64,
    },
    /// Give back a window's LUT entries.
    GiveBackWindow(LutRange),
    /// The lease has ended, and the device can be lent again as soon as this process has ended.
    Released(Release),
    /// The lease begins: the borrower is told of it, and goes on if this process ends.
    Begins,
    /// The lease may not go on over another connection: a flush has failed.
    EndChain,
    /// The device's problem has changed.
    Problem(Option<String>),
    /// Count the function's DMA faults.
    DmaFaults,
    /// Log a line.
    Line(Line, String),
}

/// The reply to a [`Call`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum CallReply {
    /// Of a broker that goes on for the former one: the call that waits is to be sent again.
    Again,
    Done,
    Window(LutRange),
    DmaFaults(u64),
    Refused(RemoteError),
}
