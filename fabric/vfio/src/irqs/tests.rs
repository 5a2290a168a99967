use std::cell::RefCell;
use std::os::fd::AsRawFd;

use farside_irq_relay::{IrqCounts, IrqRange};
use proptest::prelude::*;

use super::*;

const MSIX: u16 = 6;
const MSI: u16 = 4;

/// vfio-pci's rules for INTx, MSI and MSI-X.
struct FakeKernel {
    no_resize: bool,
    /// Vectors that the host has to give.
    host: usize,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// The index in use, and its vectors' descriptors; -1 is none.
    enabled: Option<(u32, Vec<i32>)>,
    /// Vectors that were signalled.
    signalled: u32,
    calls: usize,
}

impl FakeKernel {
    fn new(no_resize: bool, host: usize) -> Self {
        Self {
            no_resize,
            host,
            state: RefCell::default(),
        }
    }

    fn irqs(&self) -> Irqs {
        self.irqs_of(false)
    }

    /// `inherited` from a process that is gone, or not.
    fn irqs_of(&self, inherited: bool) -> Irqs {
        let info = |count: u16, flags| IrqInfo {
            flags,
            count: count.into(),
        };
        let resize = if self.no_resize {
            wire::INFO_NORESIZE
        } else {
            0
        };
        let infos = [
            info(1, 0),
            info(MSI, wire::INFO_NORESIZE),
            info(MSIX, resize),
            info(0, 0),
            info(0, 0),
        ];
        Irqs::new("0000:00:04.0".parse().unwrap(), infos, inherited)
    }

    /// Number of the descriptor that a vector signals.
    fn signals(&self, vector: usize) -> Option<i32> {
        let state = self.state.borrow();
        let (_, fds) = state.enabled.as_ref()?;
        fds.get(vector).copied().filter(|&fd| fd >= 0)
    }
}

impl Kernel for FakeKernel {
    fn set_irqs(&self, set: IrqSet<'_>) -> io::Result<()> {
        let invalid = || Err(io::Error::from_raw_os_error(22));
        let mut state = self.state.borrow_mut();
        state.calls += 1;
        let is_enabled = state.enabled.as_ref().map(|(index, _)| *index);
        if is_enabled.is_some_and(|index| index != set.index) {
            return invalid();
        }
        if set.action != wire::SET_ACTION_TRIGGER && set.index != 0 {
            return Err(io::Error::from_raw_os_error(25));
        }
        match set.data {
            IrqSetData::All(0) if set.action == wire::SET_ACTION_TRIGGER => {
                if is_enabled.is_none() {
                    return invalid();
                }
                state.enabled = None;
            }
            IrqSetData::EventFds(fds) => {
                let start = set.start as usize;
                let end = start + fds.len();
                let no_resize = self.no_resize || set.index == 1;
                let old = match state.enabled.take() {
                    Some((index, old)) if no_resize && end > old.len() => {
                        state.enabled = Some((index, old));
                        return invalid();
                    }
                    Some((_, old)) => old,
                    None if end > self.host => return Err(io::Error::from_raw_os_error(28)),
                    None => vec![-1; end],
                };
                let mut new = old;
                new.resize(new.len().max(end), -1);
                for (place, fd) in new[start..end].iter_mut().zip(fds) {
                    *place = fd.map_or(-1, |fd| fd.as_raw_fd());
                }
                state.enabled = Some((set.index, new));
            }
            _ if is_enabled.is_none() => return invalid(),
            IrqSetData::All(count) if set.action == wire::SET_ACTION_TRIGGER => {
                state.signalled += count;
            }
            _ => {}
        }
        Ok(())
    }
}

fn counts() -> IrqCounts {
    let counts = IrqCounts::new().with_intx().with_msi(MSI).unwrap();
    counts.with_msix(MSIX).unwrap()
}

fn request(index: IrqIndex, start: u16, count: u16, action: Action, data: IrqData) -> SetIrqs {
    let range = IrqRange::new(&counts(), index as u32, start.into(), count.into()).unwrap();
    SetIrqs::new(range, action, data).unwrap()
}

fn triggers(index: IrqIndex, start: u16, fds: &[Option<IrqEventFd>]) -> SetIrqs {
    let targets = fds
        .iter()
        .map(|fd| fd.clone().map(IrqTarget::EventFd))
        .collect();
    let count = fds.len() as u16;
    request(
        index,
        start,
        count,
        Action::Trigger,
        IrqData::Targets(targets),
    )
}

fn disable(index: IrqIndex) -> SetIrqs {
    request(index, 0, 0, Action::Trigger, IrqData::None)
}

fn raw(fd: &IrqEventFd) -> Option<i32> {
    Some(fd.as_fd().as_raw_fd())
}

#[test]
fn the_next_process_signals_the_vectors_that_it_has_set_up() {
    for (no_resize, before, now) in [(true, 1, 3), (true, 3, 1), (false, 1, 3), (false, 3, 1)] {
        let kernel = FakeKernel::new(no_resize, 64);
        let fds: Vec<_> = (0..3).map(|_| Some(IrqEventFd::new().unwrap())).collect();
        let request = |count| triggers(IrqIndex::Msi, 0, &fds[..count]);
        kernel.irqs().apply(&kernel, &request(before)).unwrap();
        let mut next = kernel.irqs_of(true);
        next.apply(&kernel, &request(now)).unwrap();
        next.settle(&kernel);
        assert_eq!(kernel.signals(now - 1), raw(fds[now - 1].as_ref().unwrap()));
        assert_eq!(kernel.state.borrow().signalled, 0);
        next.signal_all(&kernel).unwrap();
        assert_eq!(kernel.state.borrow().signalled, now as u32);
    }
}

#[test]
fn what_the_next_process_does_not_set_up_is_disabled() {
    let kernel = FakeKernel::new(true, 64);
    let fd = [Some(IrqEventFd::new().unwrap())];
    let enable = || {
        let request = triggers(IrqIndex::Msix, 0, &fd);
        kernel.irqs().apply(&kernel, &request).unwrap();
    };
    enable();
    kernel.irqs_of(true).settle(&kernel);
    assert_eq!(kernel.state.borrow().enabled, None);
    enable();
    // The kernel enables one kind.
    let mut next = kernel.irqs_of(true);
    next.apply(&kernel, &triggers(IrqIndex::Intx, 0, &fd))
        .unwrap();
    next.settle(&kernel);
    let enabled = kernel.state.borrow().enabled.as_ref().map(|it| it.0);
    assert_eq!(enabled, Some(IrqIndex::Intx as u32));
}

#[test]
fn vectors_are_added_where_the_kernel_cannot() {
    let kernel = FakeKernel::new(true, 64);
    let mut irqs = kernel.irqs();
    let fds: Vec<_> = (0..3).map(|_| IrqEventFd::new().unwrap()).collect();
    let some = |i: usize| Some(fds[i].clone());
    irqs.apply(&kernel, &triggers(IrqIndex::Msi, 0, &[some(0)]))
        .unwrap();
    irqs.apply(&kernel, &triggers(IrqIndex::Msi, 1, &[some(1), some(2)]))
        .unwrap();
    for (vector, fd) in fds.iter().enumerate() {
        assert_eq!(kernel.signals(vector), raw(fd), "vector {vector}");
    }
}

#[test]
fn msix_is_enabled_once_for_all_vectors_where_the_host_has_them() {
    let fd = IrqEventFd::new().unwrap();
    for (host, calls) in [(64, 2), (4, 6)] {
        let kernel = FakeKernel::new(true, host);
        let mut irqs = kernel.irqs();
        for vector in [0, 3] {
            let request = triggers(IrqIndex::Msix, vector, &[Some(fd.clone())]);
            irqs.apply(&kernel, &request).unwrap();
        }
        assert_eq!((kernel.signals(0), kernel.signals(3)), (raw(&fd), raw(&fd)));
        // Without them: all, one; disable, all, four. And one that was tried.
        let made = kernel.state.borrow().calls;
        assert!(made <= calls, "{made} calls with {host} vectors");
    }
}

#[test]
fn what_the_host_cannot_give_leaves_the_rest() {
    let kernel = FakeKernel::new(true, 2);
    let mut irqs = kernel.irqs();
    let fd = IrqEventFd::new().unwrap();
    irqs.apply(
        &kernel,
        &triggers(IrqIndex::Msix, 0, &[Some(fd.clone()), None]),
    )
    .unwrap();
    let error = irqs
        .apply(&kernel, &triggers(IrqIndex::Msix, 4, &[Some(fd.clone())]))
        .unwrap_err();
    assert!(error.to_string().contains("MSI-X vectors 4..5"), "{error}");
    assert_eq!(kernel.signals(0), raw(&fd));
    assert_eq!(kernel.signals(4), None);
}

#[test]
fn an_interrupt_while_masked_comes_on_unmask() {
    let kernel = FakeKernel::new(false, 64);
    let mut irqs = kernel.irqs();
    let fd = IrqEventFd::new().unwrap();
    let mask = |action| request(IrqIndex::Msix, 0, 1, action, IrqData::None);
    irqs.apply(&kernel, &triggers(IrqIndex::Msix, 0, &[Some(fd.clone())]))
        .unwrap();
    irqs.apply(&kernel, &mask(Action::Mask)).unwrap();
    let parked = irqs.tables[IrqIndex::Msix as usize].vectors[0]
        .parked
        .clone();
    let parked = parked.unwrap();
    assert_eq!(kernel.signals(0), raw(&parked));
    parked.signal().unwrap();
    assert_eq!(fd.take().unwrap(), None);
    irqs.apply(&kernel, &mask(Action::Unmask)).unwrap();
    assert_eq!(fd.take().unwrap(), Some(1));
    assert_eq!(kernel.signals(0), raw(&fd));
    // Nothing came: nothing is signalled.
    irqs.apply(&kernel, &mask(Action::Mask)).unwrap();
    irqs.apply(&kernel, &mask(Action::Unmask)).unwrap();
    assert_eq!(fd.take().unwrap(), None);
}

#[test]
fn a_relay_is_nothing_that_the_kernel_can_signal() {
    let kernel = FakeKernel::new(false, 64);
    let relay = std::sync::Arc::new(farside_irq_relay::Relay::new());
    let data = IrqData::Targets(vec![Some(IrqTarget::Relay(relay))]);
    let request = request(IrqIndex::Msix, 2, 1, Action::Trigger, data);
    let error = kernel.irqs().apply(&kernel, &request).unwrap_err();
    assert!(error.to_string().contains("MSI-X vector 2"), "{error}");
}

#[test]
fn disabling_twice_is_no_error() {
    let kernel = FakeKernel::new(false, 64);
    let mut irqs = kernel.irqs();
    irqs.apply(&kernel, &disable(IrqIndex::Msix)).unwrap();
    assert_eq!(kernel.state.borrow().calls, 0);
    let fd = IrqEventFd::new().unwrap();
    irqs.apply(&kernel, &triggers(IrqIndex::Msix, 0, &[Some(fd)]))
        .unwrap();
    irqs.disable_all(&kernel);
    irqs.disable_all(&kernel);
    assert_eq!(kernel.state.borrow().calls, 2);
    assert!(kernel.state.borrow().enabled.is_none());
}

#[derive(Clone, Debug)]
enum Step {
    Set { start: u16, there: Vec<bool> },
    Mask { vector: u16, masked: bool },
    Disable,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let set = (0..MSIX)
        .prop_flat_map(|start| {
            let count = 1..=usize::from(MSIX - start);
            (Just(start), proptest::collection::vec(any::<bool>(), count))
        })
        .prop_map(|(start, there)| Step::Set { start, there });
    let mask = (0..MSIX, any::<bool>()).prop_map(|(vector, masked)| Step::Mask { vector, masked });
    let step = prop_oneof![5 => set, 4 => mask, 1 => Just(Step::Disable)];
    proptest::collection::vec(step, 1..30)
}

proptest! {
    /// Against a plain model: where each vector goes, and whether it is masked.
    #[test]
    fn the_kernel_signals_what_was_asked_for(
        steps in steps(),
        no_resize: bool,
        host in usize::from(MSIX)..8,
    ) {
        let kernel = FakeKernel::new(no_resize, host);
        let mut irqs = kernel.irqs();
        let mut goes: Vec<Option<IrqEventFd>> = vec![None; MSIX.into()];
        let mut masked = [false; MSIX as usize];
        for step in steps {
            let asked = match step {
                Step::Set { start, there } => {
                    let fds: Vec<_> = (there.iter())
                        .map(|there| there.then(|| IrqEventFd::new().unwrap()))
                        .collect();
                    let from = usize::from(start);
                    goes[from..from + fds.len()].clone_from_slice(&fds);
                    triggers(IrqIndex::Msix, start, &fds)
                }
                Step::Mask { vector, masked: on } => {
                    masked[usize::from(vector)] = on;
                    let action = if on { Action::Mask } else { Action::Unmask };
                    request(IrqIndex::Msix, vector, 1, action, IrqData::None)
                }
                Step::Disable => {
                    goes.fill(None);
                    masked.fill(false);
                    disable(IrqIndex::Msix)
                }
            };
            irqs.apply(&kernel, &asked).unwrap();
            for vector in 0..usize::from(MSIX) {
                let signals = kernel.signals(vector);
                let wanted = goes[vector].as_ref().and_then(raw);
                if masked[vector] {
                    prop_assert_eq!(signals.is_some(), wanted.is_some());
                    prop_assert!(signals.is_none() || signals != wanted);
                } else {
                    prop_assert_eq!(signals, wanted, "vector {}", vector);
                }
            }
        }
    }
}
