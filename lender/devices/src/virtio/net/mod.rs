//! A virtio-net device (virtio 1.2, 5.1): a network interface on a tap interface of the lender's host.
//!
//! # Frames
//!
//! - *Sent:* the kernel takes a frame out of the buffers in guest memory by one system call, or the connection to the
//!   lender's host does.
//! - *Received:* a frame is read into memory of the device, since its length is not known before, and copied into as
//!   many buffers of the guest as it takes. So nothing waits in guest memory for a network that may be silent, and a
//!   device that is to be quiet is.
//!
//! Frames are given back to the driver in the order of its buffers. So the used ring in guest memory alone says where
//! the queues are, and a process that follows one that was killed goes on from there: frames that were being sent are
//! sent again, those that were being received are lost, as networks may do.
//!
//! # Queue pairs
//!
//! Each frame is received by the queue pair by which the driver has sent the last one of its flow, so that a guest's CPUs share
//! what they receive. One thread serves all pairs.
//!
//! The tap interface has as many offloads as the driver: long TCP segments and missing checksums pass as they are.

mod config;
mod control;
mod device;
mod flows;
mod in_order;
mod receive;
mod recovery;
mod send;

pub use config::{Config, ConfigError, Mac, MacError};

use std::{fs::File, io, sync::Arc};

use farside_fabric::memory::SharedMemory;
use virtio_bindings::{
    virtio_ids::VIRTIO_ID_NET,
    virtio_net::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN,
        VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN,
        VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ,
        VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS,
    },
};

use super::{
    pci::{Kind, Transport, Written},
    queue::Segment,
};
use crate::{
    Bus,
    block::{
        BlockError, BlockQueue, Offloads, RemoteMedium, TAP_SIZE, Tag,
        medium::{Direction, Medium},
    },
};
use flows::Flows;
use in_order::InOrder;
use receive::{MOST_BUFFERS, MOST_RECEIVING, ROOM, Receiving};
use send::{MOST_SENDING, Sending};

/// Most queue pairs.
const MOST_PAIRS: u16 = 64;

/// The queues of a pair (5.1.2).
fn receive_queue(pair: u16) -> u16 {
    2 * pair
}

fn transmit_queue(pair: u16) -> u16 {
    2 * pair + 1
}

/// How many queues there are with so many pairs: with several, a control queue, too.
fn queue_count(pairs: u16) -> u16 {
    2 * pairs + u16::from(pairs > 1)
}

/// Bytes of the device's configuration (5.1.4), up to the MTU.
const CONFIG_LEN: usize = 12;

/// The tag of what is no frame.
const OFFLOADS: Tag = MOST_RECEIVING + MOST_SENDING;
/// Most transfers in flight.
const DEPTH: u16 = OFFLOADS + 1;

/// Most descriptors of a buffer: those of the largest frame that Linux sends, with room.
const MOST_SEGMENTS: usize = 64;

/// The device type. Its class is that of an Ethernet controller.
const KIND: Kind = Kind {
    id: VIRTIO_ID_NET as u16,
    class: 0x02_00_00,
    name: "virtio-net",
    config_len: CONFIG_LEN as u32,
};

/// Features beside the transport's.
const FEATURES: u64 = 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_MTU
    | 1 << VIRTIO_NET_F_MAC
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6
    | 1 << VIRTIO_NET_F_GUEST_ECN
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6
    | 1 << VIRTIO_NET_F_HOST_ECN
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_NET_F_STATUS;

/// With several queue pairs.
const MULTIQUEUE_FEATURES: u64 = 1 << VIRTIO_NET_F_CTRL_VQ | 1 << VIRTIO_NET_F_MQ;

/// Whether frames of the tap interface are for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Session {
    /// The driver is not running.
    Off,
    /// The tap interface is being told what the driver can do.
    Opening,
    /// They are.
    Open,
    /// The tap interface has failed, until a reset.
    Failed,
}

/// A virtio-net device on a tap interface.
pub struct VirtioNet {
    transport: Transport,
    block: BlockQueue,
    medium: Medium,
    /// The device's configuration, which the driver reads.
    config: [u8; CONFIG_LEN],
    /// Queue pairs.
    pairs: u16,
    /// So many of them are in use.
    active: u16,
    /// The pair of which frames are sent next.
    turn: u16,
    flows: Flows,
    session: Session,
    /// The tap interface is being told of a session, or of a former one.
    is_telling: bool,
    /// The tap interface could be reached. Behind another connection it may be one that was told nothing.
    was_connected: bool,
    /// Frames that are being received, and those that wait for buffers.
    receiving: InOrder<Receiving>,
    /// Their memory: [`ROOM`] bytes for each tag.
    room: Arc<SharedMemory>,
    sending: InOrder<Sending>,
    stats: Stats,
    quiesced: bool,
    /// A process before this one was running, whose queues can be taken up once they are reachable.
    recovery: bool,
    /// The descriptors of the buffer that is being decoded.
    buffer: Vec<Segment>,
    /// Those of the buffers of a frame that is being received.
    segments: Vec<Segment>,
    /// The buffers of that frame, with the bytes in each.
    given: Vec<(u16, u32)>,
    /// So many buffers are there, and too short for the frame that waits.
    too_few: u16,
    /// A frame waits for buffers.
    no_buffers: bool,
}

/// Counters since power-on, across resets.
#[derive(Clone, Copy, Debug, Default)]
struct Stats {
    sent: u64,
    received: u64,
    bytes_sent: u64,
    bytes_received: u64,
    /// Frames that were lost: not for this driver, too long for its buffers, malformed, or refused by the host.
    dropped: u64,
    /// Notifications that trapped.
    notifications: u64,
}

impl VirtioNet {
    /// Attaches to the tap interface and creates a device in its power-on state. `id` is the device id.
    ///
    /// # Errors
    /// A [`ConfigError`].
    pub fn open(id: &str, config: &Config) -> Result<Self, ConfigError> {
        let (config, tap) = config.open_tap(id)?;
        Self::with_tap(id, &config, tap.file)
    }

    /// As [`VirtioNet::open`], on the tap interface and with the configuration of [`Config::open_tap`].
    ///
    /// # Errors
    /// A [`ConfigError`].
    pub fn with_tap(id: &str, config: &Config, tap: File) -> Result<Self, ConfigError> {
        Self::with_block(id, config, BlockQueue::tap(tap, DEPTH))
    }

    /// As [`VirtioNet::with_tap`], on a tap interface that another host has.
    ///
    /// # Errors
    /// A [`ConfigError`].
    pub fn with_remote(
        id: &str,
        config: &Config,
        medium: RemoteMedium,
    ) -> Result<Self, ConfigError> {
        let block = BlockQueue::remote(medium, DEPTH);
        Self::with_block(id, config, block.map(BlockQueue::of_frames))
    }

    fn with_block(
        id: &str,
        config: &Config,
        block: io::Result<BlockQueue>,
    ) -> Result<Self, ConfigError> {
        config.validate()?;
        let engine = |source| ConfigError::Engine {
            tap: config.tap.clone(),
            source,
        };
        let room = usize::from(MOST_RECEIVING) * ROOM;
        let pairs = config.queues;
        let features = match pairs {
            1 => FEATURES,
            _ => FEATURES | MULTIQUEUE_FEATURES,
        };
        let (queues, description) = (queue_count(pairs), config.description());
        Ok(Self {
            transport: Transport::new(KIND, id.to_owned(), queues, features, description),
            block: block.map_err(engine)?,
            medium: Medium::new(format!("tap {}", config.tap), TAP_SIZE),
            config: config.registers(),
            pairs,
            active: 1,
            turn: 0,
            flows: Flows::NONE,
            session: Session::Off,
            is_telling: false,
            was_connected: true,
            receiving: InOrder::new(0, MOST_RECEIVING),
            room: SharedMemory::anonymous(room).map_err(engine)?,
            sending: InOrder::new(MOST_RECEIVING, MOST_SENDING),
            stats: Stats::default(),
            quiesced: false,
            recovery: false,
            buffer: Vec::with_capacity(MOST_SEGMENTS),
            segments: Vec::with_capacity(MOST_BUFFERS),
            given: Vec::with_capacity(MOST_BUFFERS),
            too_few: 0,
            no_buffers: false,
        })
    }

    fn written(&mut self, written: Written, bus: &mut Bus<'_>) {
        match written {
            Written::Nothing | Written::Config { .. } => {}
            Written::Notified => self.stats.notifications += 1,
            Written::Reset => {
                self.recovery = false;
                self.end_session();
                // Before the queues are used anew.
                self.save();
                self.advance(bus);
            }
        }
    }

    /// Frames that have come are for no other driver.
    fn end_session(&mut self) {
        self.session = Session::Off;
        (self.active, self.flows) = (1, Flows::NONE);
        self.receiving.iter_mut().for_each(Receiving::discard);
        self.no_buffers = false;
    }

    /// Advances a reset: it is over when nothing is sent out of guest memory.
    fn advance(&mut self, bus: &mut Bus<'_>) {
        if self.transport.is_resetting() {
            match self.sending.in_flight() {
                0 => {
                    self.transport.finish_reset(bus.irq);
                    self.sending.clear();
                }
                _ => self.block.hurry(),
            }
        }
    }

    fn may_run(&self, bus: &Bus<'_>) -> bool {
        !self.quiesced && self.transport.is_running(bus) && !self.recovery
    }

    fn run(&mut self, bus: &mut Bus<'_>) -> bool {
        let mut busy = self.recover(bus);
        if self.may_run(bus) {
            let connected = self.block.is_connected();
            let again = connected && !self.was_connected && self.session == Session::Open;
            self.was_connected = connected;
            if (self.session == Session::Off || again) && !self.is_telling {
                self.open_session(!again);
            }
            busy |= self.execute_commands(bus);
            if self.session != Session::Off {
                busy |= self.send_frames(bus);
            }
        }
        if self.session == Session::Open {
            self.start_receiving();
        }
        busy |= self.turn_block(bus);
        if self.may_run(bus) {
            busy |= self.deliver_frames(bus);
            self.transport.interrupt_driver(bus);
        }
        self.advance(bus);
        self.save_changes();
        busy
    }

    /// Tells the tap interface what the driver can do, and with `discard` that earlier frames are not for it: until that is
    /// done, those that come are not, either.
    fn open_session(&mut self, discard: bool) {
        let offloads = Offloads {
            checksum: self.transport.has_feature(VIRTIO_NET_F_GUEST_CSUM),
            tcp4: self.transport.has_feature(VIRTIO_NET_F_GUEST_TSO4),
            tcp6: self.transport.has_feature(VIRTIO_NET_F_GUEST_TSO6),
            ecn: self.transport.has_feature(VIRTIO_NET_F_GUEST_ECN),
        };
        self.session = match discard {
            true => Session::Opening,
            false => Session::Open,
        };
        self.is_telling = true;
        self.block.set_offloads(OFFLOADS, offloads, discard);
    }

    /// Advances transfers without blocking. Returns whether any finished.
    fn turn_block(&mut self, bus: &mut Bus<'_>) -> bool {
        self.block.turn();
        let mut busy = false;
        while let Some((tag, result)) = self.block.next_done() {
            busy = true;
            match tag {
                ..MOST_RECEIVING => self.received(tag, result),
                OFFLOADS => self.session_opened(result),
                _ => self.sent(tag, result),
            }
        }
        self.return_sent(bus);
        busy
    }

    fn session_opened(&mut self, result: Result<(), BlockError>) {
        self.is_telling = false;
        self.session = match (self.session, result) {
            // A reset came meanwhile.
            (Session::Off, _) => Session::Off,
            (_, Ok(())) => Session::Open,
            (_, Err(BlockError::Unreachable)) => Session::Off,
            (_, Err(error)) => {
                self.failed(error, Direction::Write);
                Session::Failed
            }
        };
    }

    /// A transfer has failed.
    fn failed(&mut self, error: BlockError, direction: Direction) {
        let condition = self.block.condition();
        let now = std::time::Instant::now();
        self.medium.failed(error, direction, condition, now);
    }

    /// A transfer has succeeded.
    fn succeeded(&mut self, direction: Direction) {
        if self.medium.problem().is_some() {
            let condition = self.block.condition();
            let now = std::time::Instant::now();
            self.medium.succeeded(direction, || condition, now);
        }
    }
}
