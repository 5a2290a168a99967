//! Random sequences of requests and interrupts against a naive model of VFIO.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{disable, request, set_masked, taken, vectors};
use farside_irq_relay::{Action, IrqData, IrqEventFd, IrqIndex, IrqTarget};
use proptest::{collection::vec, prelude::*};

/// Few vectors, so that operations collide; across a word boundary.
const FIRST: u16 = 61;
const VECTORS: u16 = 6;

#[derive(Clone, Debug)]
enum Op {
    Assign(IrqIndex, u16, bool),
    Disable(IrqIndex),
    Mask(IrqIndex, u16, bool),
    Raise(u16),
    LoopBack(IrqIndex, u16),
    Line(bool),
    Gate(bool),
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    use IrqIndex::{Intx, Msix};
    let place = prop_oneof![
        Just((Intx, 0)),
        (FIRST..FIRST + VECTORS).prop_map(|v| (Msix, v))
    ];
    let place2 = place.clone();
    let place3 = place.clone();
    prop_oneof![
        4 => (place, any::<bool>()).prop_map(|((i, v), on)| Op::Assign(i, v, on)),
        1 => prop_oneof![Just(Intx), Just(Msix)].prop_map(Op::Disable),
        4 => (place2, any::<bool>()).prop_map(|((i, v), on)| Op::Mask(i, v, on)),
        8 => (FIRST..FIRST + VECTORS).prop_map(Op::Raise),
        1 => place3.prop_map(|(i, v)| Op::LoopBack(i, v)),
        4 => any::<bool>().prop_map(Op::Line),
        2 => any::<bool>().prop_map(Op::Gate),
        1 => Just(Op::Reset),
    ]
}

/// VFIO's rules, as plainly as possible. After each operation, every pending vector that is
/// not held back is signalled.
#[derive(Default)]
struct Model {
    enabled: Option<IrqIndex>,
    assigned: BTreeSet<(IrqIndex, u16)>,
    masked: BTreeSet<(IrqIndex, u16)>,
    /// Pending vectors.
    wanting: BTreeSet<(IrqIndex, u16)>,
    line: bool,
    gate: bool,
}

impl Model {
    /// Returns the signalled vectors; `None` if the request is refused.
    fn step(&mut self, op: &Op) -> Option<Vec<(IrqIndex, u16)>> {
        match *op {
            Op::Assign(index, vector, on) => {
                if self.enabled.is_some_and(|enabled| enabled != index) {
                    return None;
                }
                self.enabled = Some(index);
                if on {
                    self.assigned.insert((index, vector));
                } else {
                    self.assigned.remove(&(index, vector));
                }
            }
            Op::Disable(index) => {
                for set in [&mut self.assigned, &mut self.masked, &mut self.wanting] {
                    set.retain(|(i, _)| *i != index);
                }
                if self.enabled == Some(index) {
                    self.enabled = None;
                }
            }
            Op::Mask(index, vector, true) => {
                self.masked.insert((index, vector));
            }
            Op::Mask(index, vector, false) => {
                self.masked.remove(&(index, vector));
            }
            Op::Raise(vector) => {
                if self.enabled == Some(IrqIndex::Msix) {
                    self.wanting.insert((IrqIndex::Msix, vector));
                }
            }
            Op::LoopBack(index, vector) => {
                if self.enabled != Some(index) {
                    return None;
                }
                self.wanting.insert((index, vector));
            }
            Op::Line(line) => self.line = line,
            Op::Gate(gate) => self.gate = gate,
            Op::Reset => {
                self.wanting.clear();
                self.line = false;
                self.gate = false;
            }
        }
        let intx = (IrqIndex::Intx, 0);
        let line = self.line.then_some(intx);
        let wanting = self.wanting.iter().copied().chain(line);
        let events: BTreeSet<_> = wanting
            .filter(|place| self.enabled == Some(place.0))
            .filter(|place| self.assigned.contains(place) && !self.masked.contains(place))
            .filter(|place| *place != intx || !self.gate)
            .collect();
        for place in &events {
            self.wanting.remove(place);
        }
        if events.contains(&intx) {
            self.masked.insert(intx);
        }
        Some(events.into_iter().collect())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn eventfds_are_signalled_exactly_as_the_model_says(ops in vec(op(), 0..60)) {
        let mut model = Model::default();
        let mut real = vectors();
        let places = (FIRST..FIRST + VECTORS).map(|v| (IrqIndex::Msix, v));
        let fds: BTreeMap<_, _> = places
            .chain([(IrqIndex::Intx, 0)])
            .map(|place| (place, IrqEventFd::new().unwrap()))
            .collect();
        for op in &ops {
            let accepted = match *op {
                Op::Assign(index, vector, on) => {
                    let target = on.then(|| IrqTarget::from(fds[&(index, vector)].clone()));
                    let data = IrqData::Targets(vec![target]);
                    let set = request(index, vector.into(), 1, Action::Trigger, data).unwrap();
                    real.apply(set).is_ok()
                }
                Op::Disable(index) => { disable(&mut real, index); true }
                Op::Mask(index, vector, on) => {
                    set_masked(&mut real, index, vector.into(), on);
                    true
                }
                Op::Raise(vector) => { real.raise(vector); true }
                Op::LoopBack(index, vector) => {
                    let data = IrqData::None;
                    let set = request(index, vector.into(), 1, Action::Trigger, data).unwrap();
                    real.apply(set).is_ok()
                }
                Op::Line(on) => { real.set_intx(on); true }
                Op::Gate(on) => { real.set_intx_disabled(on); true }
                Op::Reset => { real.reset(); true }
            };
            let expected = model.step(op);
            prop_assert_eq!(accepted, expected.is_some(), "{:?}", op);
            for (place, fd) in &fds {
                let events = expected.iter().flatten().any(|event| event == place);
                prop_assert_eq!(taken(fd), u64::from(events), "{:?} after {:?}", place, op);
            }
            for vector in FIRST..FIRST + VECTORS {
                let wanting = model.wanting.contains(&(IrqIndex::Msix, vector));
                prop_assert_eq!(real.is_pending(vector), wanting, "{} after {:?}", vector, op);
            }
            prop_assert_eq!(real.intx_asserted(), model.line, "after {:?}", op);
        }
        prop_assert_eq!(real.status().failed, 0);
    }
}
