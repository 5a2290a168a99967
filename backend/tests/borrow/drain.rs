//! DMA in flight while the DMA path closes.

use farside_devices::dma_test::{Command, MAX_LENGTH};

use crate::{
    guest::{Ended, Job, MEMORY, Ram, enable, finish, set_command, start},
    host::{DMA, Host, assert_closed},
    vmm::Vmm,
};

const MIB: u64 = 1 << 20;
/// Address of the memory that is filled while it is unmapped.
const AT: u64 = 4 << 30;

/// Fills memory while `close` revokes access to it. Returns how the command ended, unless a
/// reset discarded it.
fn race(vmm: &mut Vmm, ram: &Ram, close: impl FnOnce(&mut Vmm), ends: bool) -> Option<Ended> {
    ram.fill(0, MAX_LENGTH as usize, 0);
    let job = Job {
        dst: AT,
        length: MAX_LENGTH,
        pattern: !0,
        ..Job::default()
    };
    start(vmm, Command::Fill, job);
    close(vmm);
    // From here on the device must not write this memory.
    ram.fill(0, MAX_LENGTH as usize, 0x5a);
    let ended = ends.then(|| finish(vmm));
    ram.assert_filled(0, MAX_LENGTH as usize, 0x5a);
    ended
}

fn guest(vmm: &mut Vmm) -> (Ram, Ram) {
    let low = Ram::new(MIB);
    let high = Ram::new(MAX_LENGTH.into());
    vmm.map(0, MIB, low.fd(0)).unwrap();
    vmm.map(AT, MAX_LENGTH.into(), high.fd(0)).unwrap();
    vmm.reset().unwrap();
    assert!(enable(vmm));
    (low, high)
}

/// Rounds to attempt until one interrupts a command halfway.
const ROUNDS: usize = 50;

#[test]
fn no_dma_reaches_memory_after_its_unmap_is_answered() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let (_low, high) = guest(&mut vmm);
    let caught = (0..ROUNDS).any(|_| {
        let close = |vmm: &mut Vmm| vmm.unmap(AT, MAX_LENGTH.into()).unwrap();
        let ended = race(&mut vmm, &high, close, true).unwrap();
        assert!(ended.faulted() || ended.moved == MAX_LENGTH);
        vmm.map(AT, MAX_LENGTH.into(), high.fd(0)).unwrap();
        ended.faulted() && ended.moved > 0
    });
    assert!(caught, "no command was ever caught in the middle");
}

#[test]
fn no_dma_happens_after_bus_master_disable() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let (_low, high) = guest(&mut vmm);
    let caught = (0..ROUNDS).any(|_| {
        let close = |vmm: &mut Vmm| set_command(vmm, MEMORY);
        let ended = race(&mut vmm, &high, close, true).unwrap();
        assert_closed(&host, &served, DMA, "leased");
        assert!(enable(&mut vmm));
        ended.faulted() && ended.moved > 0
    });
    assert!(caught, "no command was ever caught in the middle");
}

#[test]
fn no_dma_happens_after_a_reset() {
    let host = Host::new();
    let served = host.serve(DMA);
    let mut vmm = served.client(DMA);
    let (_low, high) = guest(&mut vmm);
    for _ in 0..5 {
        race(&mut vmm, &high, |vmm| vmm.reset().unwrap(), false);
        assert_closed(&host, &served, DMA, "leased");
        assert!(enable(&mut vmm));
    }
}
