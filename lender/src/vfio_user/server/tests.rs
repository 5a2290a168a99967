//! What a process sends that goes on with a connection, to a server that answers as the test says.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::mpsc,
};

use farside_fabric::memory::SharedMemory;
use farside_lender_protocol::STATE_PAGE;
use farside_pci::{
    BarKind, ConfigImage,
    regs::{COMMAND, MSIX_FLAGS_ENABLE},
};

use super::*;

const PAGE: u64 = 4096;

/// A request: its command, and its address or type of interrupt.
type Seen = (u16, u64);

const DMA_MAP: u16 = 2;
const DMA_UNMAP: u16 = 3;
const SET_IRQS: u16 = 8;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;
const RESET: u16 = 13;

/// Message Control of MSI-X, in [`config`].
const CONTROL: u64 = 0x42;

fn vectors() -> IrqCounts {
    IrqCounts::new().with_intx().with_msix(4).unwrap()
}

/// A server that refuses what `refuses` says, and what it is asked.
fn server(refuses: impl Fn(Seen) -> bool + Send + 'static) -> (Server, mpsc::Receiver<Seen>) {
    let (socket, peer) = UnixStream::pair().unwrap();
    let (sender, seen) = mpsc::channel();
    std::thread::spawn(move || answer(peer, &sender, refuses));
    let limits = Limits {
        max_msg_fds: 8,
        max_data_xfer_size: PAGE,
    };
    let device = Device {
        can_reset: true,
        config: config(),
        regions: Vec::new(),
        counts: vectors(),
        files: [const { None }; 6],
    };
    let client = Client::resume(socket.into(), limits);
    let path = Path::new("/run/device");
    let (server, _) = Server::with_device(client, path, &bars(), device).unwrap();
    (Arc::into_inner(server).unwrap(), seen)
}

/// A BAR of 64-bit memory.
fn bars() -> [Option<Bar>; 6] {
    let mut bars = [const { None }; 6];
    let prefetchable = false;
    bars[0] = Some(Bar::new(0x4000, BarKind::Memory64 { prefetchable }));
    bars
}

/// A configuration space with MSI-X.
fn config() -> Vec<u8> {
    let mut image = ConfigImage::endpoint(0x1234, 0x5678, 0, &bars());
    image.add_msix(0x40, 4, 0, 0, 0x800);
    image.to_vec()
}

/// Answers requests until the connection ends.
fn answer(mut peer: UnixStream, seen: &mpsc::Sender<Seen>, refuses: impl Fn(Seen) -> bool) {
    const REPLY: u32 = 1;
    const ERROR: u32 = 1 << 5;
    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }
    let mut config = config();
    let mut header = [0; 16];
    while peer.read_exact(&mut header).is_ok() {
        let mut payload = vec![0; u32_at(&header, 4) as usize - 16];
        peer.read_exact(&mut payload).unwrap();
        let command = u16::from_ne_bytes([header[2], header[3]]);
        let of = match command {
            DMA_MAP => u32_at(&payload, 16),
            REGION_READ | REGION_WRITE => u32_at(&payload, 0),
            RESET => 0,
            _ => u32_at(&payload, 8),
        };
        let request = (command, of.into());
        seen.send(request).unwrap();
        let (flags, errno) = match refuses(request) {
            true => (REPLY | ERROR, 17u32),
            false => (REPLY, 0),
        };
        let at = of as usize;
        let body = match command {
            REGION_READ => {
                let len = u32_at(&payload, 12) as usize;
                [&payload[..16], &config[at..at + len]].concat()
            }
            RESET => {
                config = self::config();
                Vec::new()
            }
            REGION_WRITE => {
                config[at..at + payload.len() - 16].copy_from_slice(&payload[16..]);
                payload[..16].to_vec()
            }
            _ => Vec::new(),
        };
        header[4..8].copy_from_slice(&(16 + body.len() as u32).to_ne_bytes());
        header[8..12].copy_from_slice(&flags.to_ne_bytes());
        header[12..].copy_from_slice(&errno.to_ne_bytes());
        peer.write_all(&[&header[..], &body].concat()).unwrap();
    }
}

fn page() -> HostSlice {
    let len = STATE_PAGE as usize;
    let memory = SharedMemory::anonymous(len).unwrap();
    memory.slice(0, len).unwrap()
}

/// A record in which a process has left these mappings.
fn left(mappings: &[((u64, u64), State)]) -> HostSlice {
    let page = page();
    let mut record = Record::start(page.clone());
    for (range, state) in mappings {
        record.set(*range, *state);
    }
    page
}

fn map(server: &Server, at: u64, pages: u64) -> Result<(), FabricError> {
    let len = (pages * PAGE) as usize;
    let memory = SharedMemory::anonymous(len).unwrap();
    let memory = memory.slice(0, len).unwrap();
    let file = File::open("/dev/zero").unwrap();
    server.map(Iova::new(at), &memory, &file, true)
}

#[test]
fn what_is_mapped_already_is_not_mapped_again() {
    let (server, seen) = server(|_| false);
    let page = left(&[((0, PAGE), State::Mapped)]);
    assert!(server.record_in(&page, true));
    map(&server, 0, 1).unwrap();
    map(&server, 4 * PAGE, 2).unwrap();
    server.settle().unwrap();
    let expected = [
        (DMA_MAP, 4 * PAGE),
        // Interrupts that are not set up again.
        (SET_IRQS, IrqIndex::Intx as u64),
        (SET_IRQS, IrqIndex::Msix as u64),
        (REGION_READ, CONTROL),
    ];
    assert_eq!(seen.try_iter().collect::<Vec<_>>(), expected);
    let (_, left) = Record::resume(page).unwrap();
    let expected = [(0, PAGE), (4 * PAGE, 2 * PAGE)].map(|range| (range, State::Mapped));
    assert_eq!(left, expected);
    // Once.
    server.settle().unwrap();
    assert_eq!(seen.try_recv().ok(), None);
}

#[test]
fn what_is_left_and_not_wanted_is_unmapped() {
    let (server, seen) = server(|seen| seen == (DMA_UNMAP, 8 * PAGE));
    let page = left(&[
        ((0, 2 * PAGE), State::Mapped),
        ((4 * PAGE, PAGE), State::Mapped),
        // Which the server has unmapped, and not said so.
        ((8 * PAGE, PAGE), State::Asked),
    ]);
    assert!(server.record_in(&page, true));
    // Another range than that of the former process.
    map(&server, PAGE, 1).unwrap();
    server.settle().unwrap();
    let seen: Vec<Seen> = seen
        .try_iter()
        .filter(|(of, _)| ![SET_IRQS, REGION_READ].contains(of))
        .collect();
    let expected = [
        (DMA_UNMAP, 0),
        (DMA_MAP, PAGE),
        (DMA_UNMAP, 4 * PAGE),
        (DMA_UNMAP, 8 * PAGE),
    ];
    assert_eq!(seen, expected);
    let (_, left) = Record::resume(page).unwrap();
    assert_eq!(left, [((PAGE, PAGE), State::Mapped)]);
}

#[test]
fn a_mapping_in_doubt_is_made_anew() {
    let (server, seen) = server(|seen| seen == (DMA_MAP, 4 * PAGE));
    let page = left(&[((0, PAGE), State::Asked), ((4 * PAGE, PAGE), State::Asked)]);
    assert!(server.record_in(&page, true));
    map(&server, 0, 1).unwrap();
    // What the server refuses is not mapped.
    map(&server, 4 * PAGE, 1).unwrap_err();
    let expected = [
        (DMA_UNMAP, 0),
        (DMA_MAP, 0),
        (DMA_UNMAP, 4 * PAGE),
        (DMA_MAP, 4 * PAGE),
    ];
    assert_eq!(seen.try_iter().collect::<Vec<_>>(), expected);
    let (_, left) = Record::resume(page).unwrap();
    assert_eq!(left, [((0, PAGE), State::Mapped)]);
}

#[test]
fn interrupts_that_are_set_up_again_stay_and_are_signalled_once() {
    let (server, seen) = server(|_| false);
    assert!(server.record_in(&left(&[]), true));
    server.set_irqs(&set_up()).unwrap();
    server.settle().unwrap();
    let expected = [
        // Before it would take away what was set up.
        (SET_IRQS, IrqIndex::Intx as u64),
        // Set up, and unmasked.
        (SET_IRQS, IrqIndex::Msix as u64),
        (SET_IRQS, IrqIndex::Msix as u64),
        (REGION_READ, CONTROL),
        (REGION_WRITE, CONTROL),
        (SET_IRQS, IrqIndex::Msix as u64),
    ];
    assert_eq!(seen.try_iter().collect::<Vec<_>>(), expected);
}

/// Sets four vectors of MSI-X up.
fn set_up() -> SetIrqs {
    let range = IrqRange::new(&vectors(), IrqIndex::Msix as u32, 0, 4).unwrap();
    let none = IrqData::Targets(vec![None; 4]);
    SetIrqs::new(range, Action::Trigger, none).unwrap()
}

#[test]
fn a_server_may_refuse_that_messages_are_enabled() {
    let (server, seen) = server(|seen| seen == (REGION_WRITE, CONTROL));
    server.set_irqs(&set_up()).unwrap();
    assert_eq!(seen.try_iter().last(), Some((REGION_WRITE, CONTROL)));
}

#[test]
fn a_reset_device_has_places_for_its_bars_before_it_decodes_them() {
    const BASE_ADDRESS: [u64; 2] = [0x10, 0x14];
    let (server, seen) = server(|(command, at)| command == REGION_WRITE && at == BASE_ADDRESS[0]);
    server.reset().unwrap();
    let writes = seen.try_iter().filter(|(of, _)| *of == REGION_WRITE);
    let places: Vec<_> = writes.map(|(_, at)| at).collect();
    assert_eq!(places, [BASE_ADDRESS[0], BASE_ADDRESS[1], COMMAND as u64]);
    let mut register = [0; 4];
    server.config_read(BASE_ADDRESS[1], &mut register).unwrap();
    assert_ne!(u32::from_le_bytes(register), 0, "though one was refused");
}

#[test]
fn vectors_that_are_set_up_are_unmasked_but_for_those_that_the_borrower_has_masked() {
    let (server, seen) = server(|_| false);
    let requests = || seen.try_iter().filter(|(of, _)| *of == SET_IRQS).count();
    server.set_irqs(&set_up()).unwrap();
    assert_eq!(requests(), 2, "all at once");
    let one = IrqRange::new(&vectors(), IrqIndex::Msix as u32, 2, 1).unwrap();
    let change = |action| SetIrqs::new(one, action, IrqData::None).unwrap();
    server.set_irqs(&change(Action::Mask)).unwrap();
    assert_eq!(requests(), 1);
    server.set_irqs(&set_up()).unwrap();
    assert_eq!(requests(), 4, "three of four, each for itself");
    server.set_irqs(&change(Action::Unmask)).unwrap();
    assert_eq!(requests(), 1);
    server.set_irqs(&set_up()).unwrap();
    assert_eq!(requests(), 2);
    // Of a range, those that are chosen.
    let range = IrqRange::new(&vectors(), IrqIndex::Msix as u32, 0, 4).unwrap();
    let chosen = IrqData::Bool(vec![true, false, true, false]);
    let mask = SetIrqs::new(range, Action::Mask, chosen).unwrap();
    server.set_irqs(&mask).unwrap();
    assert_eq!(requests(), 1);
    server.set_irqs(&set_up()).unwrap();
    assert_eq!(requests(), 3, "two of four, each for itself");
}

#[test]
fn a_reset_device_has_the_messages_that_were_set_up() {
    let (server, seen) = server(|_| false);
    server.set_irqs(&set_up()).unwrap();
    seen.try_iter().for_each(drop);
    server.reset().unwrap();
    let last = [(REGION_WRITE, CONTROL), (SET_IRQS, IrqIndex::Msix as u64)];
    assert!(seen.try_iter().collect::<Vec<_>>().ends_with(&last));
    let range = IrqRange::new(&vectors(), IrqIndex::Msix as u32, 0, 0).unwrap();
    let disable = SetIrqs::new(range, Action::Trigger, IrqData::None).unwrap();
    server.set_irqs(&disable).unwrap();
    seen.try_iter().for_each(drop);
    server.reset().unwrap();
    assert_eq!(seen.try_iter().last(), Some((REGION_WRITE, COMMAND as u64)));
}

#[test]
fn messages_are_enabled_in_configuration_space_while_they_are_set_up() {
    let (server, seen) = server(|_| false);
    let control = || {
        let mut control = [0; 2];
        server.config_read(CONTROL, &mut control).unwrap();
        u16::from_le_bytes(control) & MSIX_FLAGS_ENABLE
    };
    server.set_irqs(&set_up()).unwrap();
    assert_eq!(control(), MSIX_FLAGS_ENABLE);
    // Again, with a bit that is set.
    server.set_irqs(&set_up()).unwrap();
    let range = IrqRange::new(&vectors(), IrqIndex::Msix as u32, 0, 0).unwrap();
    let disable = SetIrqs::new(range, Action::Trigger, IrqData::None).unwrap();
    server.set_irqs(&disable).unwrap();
    assert_eq!(control(), 0);
    let writes = seen
        .try_iter()
        .filter(|(command, _)| *command == REGION_WRITE);
    assert_eq!(writes.collect::<Vec<_>>(), [(REGION_WRITE, CONTROL); 2]);
}

#[test]
fn nobody_goes_on_with_a_server_that_does_dma_by_messages() {
    let (server, _seen) = server(|_| false);
    let page = page();
    assert!(server.record_in(&page, false));
    map(&server, 0, 1).unwrap();
    assert!(server.can_be_adopted());
    assert!(Record::resume(page.clone()).is_some());
    assert!(server.lock().mapped.read(0, &mut [0; 4]));
    assert!(!server.can_be_adopted());
    assert!(!server.record_in(&page, true));
}

#[test]
fn a_record_that_a_borrower_has_written_costs_nobody_else() {
    let (server, seen) = server(|(command, _)| command == DMA_UNMAP);
    let last = !0xfff;
    let page = left(&[((last, u64::MAX), State::Mapped), ((0, 0), State::Mapped)]);
    assert!(server.record_in(&page, true));
    map(&server, last, 1).unwrap();
    map(&server, 0, 1).unwrap();
    server.settle().unwrap();
    let maps = seen.try_iter().filter(|(of, _)| *of == DMA_MAP);
    assert_eq!(maps.count(), 2);
}
