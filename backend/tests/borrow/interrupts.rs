//! Interrupts from the device to the client's eventfds, direct and relayed.

use std::io::{Write, stdout};

use farside_backend::Interrupts;
use farside_devices::dma_test::{VECTORS, reg, status};
use farside_irq_relay::IrqIndex;
use rustix::{
    io::Errno,
    process::{Resource, getrlimit, setrlimit},
};

use crate::{
    guest::{
        CONFIG, Event, INTERRUPT, INTX_DISABLE, Job, MEMORY, Port, STATUS, capability, enable,
        raise, read_u16, read_u32, run, set_command, small,
    },
    host::{DMA, Host, Served},
    vmm::{DATA_EVENTFD, DATA_NONE, MASK, TRIGGER, UNMASK, Vmm},
};

const INTX: u32 = 0;
const MSI: u32 = 1;
const MSIX: u32 = 2;
const ERR: u32 = 3;
const REQ: u32 = 4;

/// Most descriptors per message.
const CHUNK: usize = 16;

/// File limit for the eventfds of [`VECTORS`] in client, backend and lender, and all other
/// files.
const FILES: u64 = 12_000;

fn serve(host: &Host, interrupts: Interrupts) -> Served {
    Served::start(farside_backend::Config {
        interrupts,
        ..host.config("a", &[DMA])
    })
}

fn leased(served: &Served) -> Vmm {
    let mut vmm = served.client(DMA);
    vmm.reset().unwrap();
    vmm
}

/// Returns after all relayed interrupts have been delivered: the register channel is
/// ordered, and answers this read after them.
fn settle(vmm: &mut Vmm) {
    read_u32(vmm, 0, reg::ID);
}

/// 2048 vectors in one process; most shells have a soft limit of 1024 files, and a higher
/// hard limit.
fn may_open_many_files() -> bool {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < FILES) {
        return false;
    }
    if limit.current.is_some_and(|files| files < FILES) {
        limit.current = Some(FILES);
        setrlimit(Resource::Nofile, limit).unwrap();
    }
    true
}

fn every_vector_fires_once(test: &str, interrupts: Interrupts) {
    if !may_open_many_files() {
        // For `cargo xtask test`: libtest shows `println!` only of failed tests.
        let why = format!("needs {FILES} open files, and `ulimit -Hn` is less");
        writeln!(stdout().lock(), "skipped: interrupts::{test}: {why}").unwrap();
        return;
    }
    let host = Host::new();
    let served = serve(&host, interrupts);
    let mut vmm = leased(&served);
    let events = Event::many(VECTORS.into());
    for (n, chunk) in events.chunks(CHUNK).enumerate() {
        let start = (n * CHUNK) as u32;
        let count = chunk.len() as u32;
        vmm.set_irqs(MSIX, DATA_EVENTFD | TRIGGER, start, count, chunk)
            .unwrap();
    }
    for vector in 0..u32::from(VECTORS) {
        raise(&mut vmm, vector);
    }
    for (vector, event) in events.iter().enumerate() {
        assert_eq!(event.wait(), 1, "vector {vector}");
    }
    // No further interrupt.
    settle(&mut vmm);
    assert!(events.iter().all(|event| event.count() == 0));
    let fired = host.lender_status(DMA).interrupts;
    assert_eq!(fired.len(), usize::from(VECTORS));
    assert!(
        fired
            .iter()
            .all(|count| (count.index, count.fired) == (IrqIndex::Msix, 1))
    );

    vmm.set_irqs::<Event>(MSIX, DATA_NONE | TRIGGER, 0, 0, &[])
        .unwrap();
    raise(&mut vmm, 5);
    settle(&mut vmm);
    assert_eq!(events[5].count(), 0);
}

#[test]
fn msix_with_2048_vectors_direct() {
    every_vector_fires_once("msix_with_2048_vectors_direct", Interrupts::Direct);
}

#[test]
fn msix_with_2048_vectors_relayed() {
    every_vector_fires_once("msix_with_2048_vectors_relayed", Interrupts::Relayed);
}

fn both(test: impl Fn(&Host, &Served)) {
    for interrupts in [Interrupts::Direct, Interrupts::Relayed] {
        let host = Host::new();
        test(&host, &serve(&host, interrupts));
    }
}

#[test]
fn an_interrupt_at_the_end_of_dma_comes_after_the_data() {
    both(|_, served| {
        let mut vmm = leased(served);
        let ram = small(&mut vmm);
        let event = Event::new();
        vmm.set_irqs(MSIX, DATA_EVENTFD | TRIGGER, 7, 1, &[&event])
            .unwrap();
        assert!(enable(&mut vmm));
        for byte in 1..20u8 {
            let job = Job {
                length: 0x8_0000,
                pattern: u32::from_le_bytes([byte; 4]),
                vector: 7,
                control: INTERRUPT,
                ..Job::default()
            };
            crate::guest::start(&mut vmm, farside_devices::dma_test::Command::Fill, job);
            event.wait();
            ram.assert_filled(0, 0x8_0000, byte);
        }
    });
}

#[test]
fn intx_is_masked_by_firing_and_fires_again_while_asserted() {
    both(|_, served| {
        let mut vmm = leased(served);
        let event = Event::new();
        vmm.set_irqs(INTX, DATA_EVENTFD | TRIGGER, 0, 1, &[&event])
            .unwrap();
        raise(&mut vmm, 0);
        assert_eq!(event.wait(), 1);
        // Still asserted: unmasking signals it again.
        vmm.set_irqs::<Event>(INTX, DATA_NONE | UNMASK, 0, 1, &[])
            .unwrap();
        assert_eq!(event.wait(), 1);
        // Deasserted while masked: nothing is pending.
        vmm.try_write(0, reg::STATUS, &status::INTERRUPT.to_le_bytes())
            .unwrap();
        settle(&mut vmm);
        vmm.set_irqs::<Event>(INTX, DATA_NONE | UNMASK, 0, 1, &[])
            .unwrap();
        settle(&mut vmm);
        assert_eq!(event.count(), 0);
        // Masked by SET_IRQS.
        vmm.set_irqs::<Event>(INTX, DATA_NONE | MASK, 0, 1, &[])
            .unwrap();
        raise(&mut vmm, 0);
        settle(&mut vmm);
        assert_eq!(event.count(), 0);
        vmm.set_irqs_bool(INTX, UNMASK, 0, &[true]).unwrap();
        assert_eq!(event.wait(), 1);
    });
}

#[test]
fn intx_disable_holds_intx_back() {
    both(|_, served| {
        let mut vmm = leased(served);
        let event = Event::new();
        vmm.set_irqs(INTX, DATA_EVENTFD | TRIGGER, 0, 1, &[&event])
            .unwrap();
        set_command(&mut vmm, MEMORY | INTX_DISABLE);
        raise(&mut vmm, 0);
        settle(&mut vmm);
        assert_eq!(event.count(), 0);
        set_command(&mut vmm, MEMORY);
        assert_eq!(event.wait(), 1);
    });
}

/// The bit that a driver of a shared line reads to decide whether the interrupt is its
/// device's.
#[test]
fn interrupt_status_is_read_from_the_device_while_intx_is_in_use() {
    both(|_, served| {
        let mut vmm = served.client(DMA);
        let pending = |vmm: &mut Vmm| {
            // Read as the Linux kernel does, as lspci does, and on its own.
            let with_command = read_u32(vmm, CONFIG, 4) >> 16;
            let alone = u32::from(read_u16(vmm, CONFIG, STATUS));
            let mut header = [0; 64];
            Port::read(vmm, CONFIG, 0, &mut header);
            let status = u32::from(u16::from_le_bytes([header[6], header[7]]));
            assert_eq!([with_command, alone], [status; 2]);
            status & 1 << 3 != 0
        };
        assert!(!pending(&mut vmm), "nothing is borrowed");
        vmm.reset().unwrap();
        let event = Event::new();
        vmm.set_irqs(INTX, DATA_EVENTFD | TRIGGER, 0, 1, &[&event])
            .unwrap();
        assert!(!pending(&mut vmm));
        raise(&mut vmm, 0);
        assert_eq!(event.wait(), 1);
        assert!(pending(&mut vmm));
        // Independent of INTx disable.
        set_command(&mut vmm, MEMORY | INTX_DISABLE);
        assert!(pending(&mut vmm));
        // Not with MSI-X, whose messages do not affect the line.
        let control = capability(&mut vmm, 0x11) + 2;
        Port::write(&mut vmm, CONFIG, control, &[0, 0x80]);
        assert!(!pending(&mut vmm));
        Port::write(&mut vmm, CONFIG, control, &[0, 0]);
        assert!(pending(&mut vmm));
        // The acknowledgement is posted; the read is ordered after it.
        vmm.try_write(0, reg::STATUS, &status::INTERRUPT.to_le_bytes())
            .unwrap();
        assert!(!pending(&mut vmm));
        raise(&mut vmm, 0);
        assert!(pending(&mut vmm));
        vmm.reset().unwrap();
        assert!(!pending(&mut vmm));
    });
}

/// A driver that used MSI-X leaves INTx disabled; the firmware of the next boot
/// must find it enabled.
#[test]
fn a_lease_taken_by_a_reset_begins_with_intx_enabled() {
    both(|_, served| {
        let mut vmm = served.client(DMA);
        let event = Event::new();
        vmm.set_irqs(INTX, DATA_EVENTFD | TRIGGER, 0, 1, &[&event])
            .unwrap();
        vmm.try_write(CONFIG, 4, &INTX_DISABLE.to_le_bytes())
            .unwrap();
        assert_eq!(served.state(), "described");
        vmm.reset().unwrap();
        raise(&mut vmm, 0);
        assert_eq!(event.wait(), 1);
    });
}

#[test]
fn msi_fires_by_vector_and_keeps_what_is_masked() {
    both(|_, served| {
        let mut vmm = leased(served);
        let events = Event::many(16);
        vmm.set_irqs(MSI, DATA_EVENTFD | TRIGGER, 0, 16, &events)
            .unwrap();
        raise(&mut vmm, 3);
        assert_eq!(events[3].wait(), 1);
        vmm.set_irqs::<Event>(MSI, DATA_NONE | MASK, 3, 2, &[])
            .unwrap();
        raise(&mut vmm, 3);
        raise(&mut vmm, 3);
        raise(&mut vmm, 5);
        assert_eq!(events[5].wait(), 1);
        settle(&mut vmm);
        assert_eq!(events[3].count(), 0);
        let chosen = [false, true, false, true];
        vmm.set_irqs_bool(MSI, UNMASK, 2, &chosen).unwrap();
        assert_eq!(events[3].wait(), 1, "pending interrupts are one");
        assert!(events.iter().all(|event| event.count() == 0));
    });
}

#[test]
fn a_reset_forgets_what_is_pending() {
    both(|_, served| {
        let mut vmm = leased(served);
        let event = Event::new();
        vmm.set_irqs(MSIX, DATA_EVENTFD | TRIGGER, 0, 1, &[&event])
            .unwrap();
        vmm.set_irqs::<Event>(MSIX, DATA_NONE | MASK, 0, 1, &[])
            .unwrap();
        raise(&mut vmm, 0);
        settle(&mut vmm);
        vmm.reset().unwrap();
        vmm.set_irqs::<Event>(MSIX, DATA_NONE | UNMASK, 0, 1, &[])
            .unwrap();
        settle(&mut vmm);
        assert_eq!(event.count(), 0);
        raise(&mut vmm, 0);
        assert_eq!(event.wait(), 1);
    });
}

#[test]
fn what_was_set_up_before_the_borrow_counts_in_it() {
    both(|_, served| {
        let mut vmm = served.client(DMA);
        let events = Event::many(3);
        vmm.set_irqs(MSIX, DATA_EVENTFD | TRIGGER, 40, 3, &events)
            .unwrap();
        vmm.set_irqs::<Event>(MSIX, DATA_NONE | MASK, 41, 1, &[])
            .unwrap();
        assert_eq!(served.state(), "described");
        vmm.reset().unwrap();
        for vector in 40..43 {
            raise(&mut vmm, vector);
        }
        assert_eq!(events[0].wait(), 1);
        assert_eq!(events[2].wait(), 1);
        settle(&mut vmm);
        assert_eq!(events[1].count(), 0);
        vmm.set_irqs::<Event>(MSIX, DATA_NONE | UNMASK, 41, 1, &[])
            .unwrap();
        assert_eq!(events[1].wait(), 1);
    });
}

#[test]
fn loopback_triggers_fire_once() {
    both(|_, served| {
        let mut vmm = served.client(DMA);
        let events = Event::many(4);
        let raise = |vmm: &mut Vmm| vmm.set_irqs_bool(MSIX, TRIGGER, 0, &[true, false, true]);
        assert_eq!(raise(&mut vmm), Err(Errno::INVAL), "not enabled");
        vmm.set_irqs(MSIX, DATA_EVENTFD | TRIGGER, 0, 4, &events)
            .unwrap();
        for leased in [false, true] {
            if leased {
                vmm.reset().unwrap();
            }
            raise(&mut vmm).unwrap();
            let counts: Vec<_> = events.iter().map(Event::count).collect();
            assert_eq!(counts, [1, 0, 1, 0], "leased: {leased}");
        }
        vmm.set_irqs::<Event>(MSIX, DATA_NONE | TRIGGER, 0, 0, &[])
            .unwrap();
        assert_eq!(raise(&mut vmm), Err(Errno::INVAL), "not enabled any more");
    });
}

#[test]
fn error_and_request_interrupts_take_a_trigger() {
    both(|_, served| {
        let mut vmm = leased(served);
        for index in [ERR, REQ] {
            let event = Event::new();
            vmm.set_irqs(index, DATA_EVENTFD | TRIGGER, 0, 1, &[&event])
                .unwrap();
            vmm.set_irqs::<Event>(index, DATA_NONE | TRIGGER, 0, 1, &[])
                .unwrap();
            assert_eq!(event.wait(), 1);
            let masked = vmm.set_irqs::<Event>(index, DATA_NONE | MASK, 0, 1, &[]);
            assert_eq!(masked, Err(Errno::NOTTY));
            vmm.set_irqs::<Event>(index, DATA_NONE | TRIGGER, 0, 0, &[])
                .unwrap();
        }
    });
}

#[test]
fn nonsense_is_refused_and_changes_nothing() {
    both(|_, served| {
        let mut vmm = leased(served);
        let events = Event::many(2);
        vmm.set_irqs(MSIX, DATA_EVENTFD | TRIGGER, 0, 2, &events)
            .unwrap();
        let refused = |result: Result<(), Errno>| assert_eq!(result, Err(Errno::INVAL));
        refused(vmm.set_irqs(MSIX, DATA_EVENTFD | TRIGGER, 2047, 2, &events));
        refused(vmm.set_irqs(INTX, DATA_EVENTFD | TRIGGER, 0, 1, &events[..1]));
        refused(vmm.set_irqs(MSI, DATA_EVENTFD | TRIGGER, 0, 1, &events[..1]));
        let file = tempfile::tempfile().unwrap();
        refused(vmm.set_irqs(MSIX, DATA_EVENTFD | TRIGGER, 0, 1, &[&file]));
        raise(&mut vmm, 0);
        assert_eq!(events[0].wait(), 1);
        let ended = run(
            &mut vmm,
            farside_devices::dma_test::Command::Raise,
            Job::default(),
        );
        assert!(!ended.faulted());
    });
}
