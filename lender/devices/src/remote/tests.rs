use farside_fabric::{Access, Fault, Iova, memory::SharedMemory};
use farside_medium::Link;

use super::*;
use crate::{
    Dma, Interrupts,
    block::{
        BlockQueue, DEPTH, Ended, EngineChoice, LentMedium, MediumKeeper, Notice, Supply,
        remote_medium,
    },
    dma_test::{Command, reg, status},
    test_links::links,
};

/// Guest memory from address 0 on.
struct Memory(std::sync::Arc<SharedMemory>);

impl Dma for Memory {
    fn is_bus_master(&self) -> bool {
        true
    }

    fn reaches(&mut self, iova: Iova, len: usize, _access: Access) -> bool {
        self.0.slice(iova.get() as usize, len).is_some()
    }

    fn translate(&mut self, iova: Iova, len: usize, access: Access) -> Result<HostSlice, Fault> {
        let slice = self.0.slice(iova.get() as usize, len);
        slice.ok_or(Fault {
            iova,
            len: len as u64,
            access,
            reason: farside_fabric::FaultReason::Window,
        })
    }
}

struct NoInterrupts;

impl Interrupts for NoInterrupts {
    fn raise(&mut self, _vector: u16) {}
    fn set_intx(&mut self, _asserted: bool) {}
    fn is_pending(&self, _vector: u16) -> bool {
        false
    }
}

const SIZE: usize = 1 << 20;

/// A DMA test device, and its lender.
struct Pair {
    // Dropped first: the controller waits until its lender has closed the connection.
    lent: Option<LentMedium>,
    device: Box<dyn Device>,
    keeper: MediumKeeper,
    memory: Memory,
}

fn lend(link: Link) -> LentMedium {
    let image = tempfile::tempfile().unwrap();
    LentMedium::new(
        BlockQueue::open(image, EngineChoice::Threads, DEPTH).unwrap(),
        (0, true),
        ("dma0", link),
    )
    .unwrap()
}

impl Pair {
    fn new() -> Self {
        let (near, far) = links();
        let (medium, keeper) = remote_medium(0, near).unwrap();
        let model = Model::DmaTest(NoMedium::DmaTest);
        Self {
            lent: Some(lend(far)),
            device: model.controller("dma0", medium, (0, false)).unwrap(),
            keeper,
            memory: Memory(SharedMemory::anonymous(SIZE).unwrap()),
        }
    }

    fn with_bus<R>(&mut self, call: impl FnOnce(&mut dyn Device, &mut Bus<'_>) -> R) -> R {
        let mut bus = Bus {
            dma: &mut self.memory,
            irq: &mut NoInterrupts,
        };
        call(&mut *self.device, &mut bus)
    }

    fn set(&mut self, register: u64, value: u32) {
        let bytes = value.to_le_bytes();
        self.with_bus(|device, bus| device.bar_write(0, register, &bytes, bus));
    }

    fn status(&mut self) -> u32 {
        let mut bytes = [0; 4];
        self.with_bus(|device, bus| device.bar_read(0, reg::STATUS, &mut bytes, bus));
        u32::from_le_bytes(bytes)
    }

    /// Until the device would sleep.
    fn turn(&mut self) {
        loop {
            while self.with_bus(|device, bus| device.poll(bus)) {}
            if self.with_bus(|device, bus| device.enable_notifications(bus)) {
                return;
            }
        }
    }

    fn fill(&mut self) {
        self.set(reg::STATUS, u32::MAX);
        self.set(reg::LENGTH, SIZE as u32);
        self.set(reg::COMMAND, Command::Fill as u32);
        self.turn();
    }

    fn cut(&mut self) {
        self.lent = None;
        self.turn();
        let notice = self.keeper.notices.try_recv().unwrap();
        assert!(matches!(notice, Notice::Lost { .. }), "{notice:?}");
    }

    fn reconnect(&mut self) {
        let (near, far) = links();
        self.lent = Some(lend(far));
        self.keeper.supply(Supply::Link(Box::new(near), 0));
        self.turn();
    }
}

#[test]
fn a_device_does_no_dma_while_its_lender_is_out_of_reach() {
    let mut pair = Pair::new();
    pair.fill();
    assert_eq!(pair.status(), status::DONE);
    pair.cut();
    pair.fill();
    assert_eq!(pair.status(), status::BUSY);
    // A reset resumes a device, and does not bring its lender back.
    pair.device.reset();
    pair.fill();
    assert_eq!(pair.status(), status::BUSY);
    // Nor does the owner, who has quiesced it.
    assert!(pair.with_bus(|device, bus| device.quiesce(bus)));
    pair.with_bus(|device, bus| device.resume(bus));
    pair.turn();
    assert_eq!(pair.status(), status::BUSY);
    pair.reconnect();
    assert_eq!(pair.status(), status::DONE);
    // What the owner has quiesced stays so.
    pair.with_bus(|device, bus| device.quiesce(bus));
    pair.fill();
    pair.cut();
    pair.reconnect();
    assert_eq!(pair.status(), status::BUSY);
    pair.with_bus(|device, bus| device.resume(bus));
    pair.turn();
    assert_eq!(pair.status(), status::DONE);
    pair.cut();
    pair.keeper.supply(Supply::GivenUp);
    pair.fill();
    assert_eq!(pair.status(), status::BUSY);
}

#[test]
fn a_lease_without_a_medium_is_revoked_and_returned() {
    let mut pair = Pair::new();
    let lent = pair.lent.as_mut().unwrap();
    lent.release(Duration::from_secs(7));
    lent.turn(&mut || ()).unwrap();
    pair.turn();
    let notice = pair.keeper.notices.try_recv().unwrap();
    assert!(
        matches!(notice, Notice::Release(limit) if limit == Duration::from_secs(7)),
        "{notice:?}"
    );
    let Pair { lent, device, .. } = pair;
    let mut lent = lent.unwrap();
    assert_eq!(lent.stats(), []);
    let returning = std::thread::spawn(move || drop(device));
    let ended = loop {
        match lent.turn(&mut || ()) {
            Ok(_) => std::thread::yield_now(),
            Err(ended) => break ended,
        }
    };
    assert!(matches!(ended, Ended::Returned), "{ended:?}");
    // The controller waits for that.
    drop(lent);
    returning.join().unwrap();
}

#[test]
fn a_lease_without_a_medium_has_nothing_to_read_or_write() {
    let (near, far) = links();
    let (medium, _keeper) = remote_medium(0, near).unwrap();
    let mut queue = BlockQueue::remote(medium, 4).unwrap();
    let mut lent = lend(far);
    let memory = SharedMemory::anonymous(4096).unwrap();
    for tag in 0..3 {
        *queue.slices(tag) = vec![memory.slice(0, 4096).unwrap()];
    }
    queue.read(0, 0);
    queue.zero(1, 0, 4096, false);
    queue.punch(2, 0, 4096);
    queue.flush(3);
    let mut done = Vec::new();
    while done.len() < 4 {
        queue.turn();
        queue.is_busy();
        lent.turn(&mut || ()).unwrap();
        done.extend(std::iter::from_fn(|| queue.next_done()));
    }
    done.sort_by_key(|(tag, _)| *tag);
    let refused: Vec<_> = done.iter().map(|(_, result)| result.is_err()).collect();
    assert_eq!(refused, [true, true, true, false], "{done:?}");
    drop(lent);
}

#[test]
fn a_model_is_described_by_its_name_or_its_configuration() {
    let nvme: nvme::Config = toml::from_str("image = 'disk0'\nserial = 'S1'").unwrap();
    let virtio_blk = virtio::Config::new("disk1");
    for (model, text) in [
        (Model::DmaTest(NoMedium::DmaTest), "\"dma-test\""),
        (Model::Nvme(nvme), "{\"image\":\"disk0\""),
        (
            Model::VirtioBlk(Virtio { virtio_blk }),
            "{\"virtio-blk\":{\"image\":\"disk1\"",
        ),
    ] {
        let json = serde_json::to_string(&model).unwrap();
        assert!(json.starts_with(text), "{json}");
        assert_eq!(serde_json::from_str::<Model>(&json).unwrap(), model);
    }
    for unknown in ["\"dma\"", "{}", "{\"image\":\"a\",\"blk\":1}"] {
        assert!(serde_json::from_str::<Model>(unknown).is_err(), "{unknown}");
    }
}
