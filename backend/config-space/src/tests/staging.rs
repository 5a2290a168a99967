use super::image::{Image, PCIE, PM};
use super::*;

fn nvme() -> ConfigSpace {
    ConfigSpace::new(&Image::nvme().0).unwrap()
}

#[test]
fn a_staged_write_does_nothing() {
    let space = nvme();
    let staged = space.stage(4, &[6, 0]);
    assert_eq!(staged.dma(), Edge::Rising);
    assert_eq!(staged.effects().bus_master(), Edge::Rising);
    assert_eq!(read_u16(&space, 4), 0);
    drop(staged);
    assert_eq!(space.bytes, nvme().bytes);
}

#[test]
fn a_refused_bus_master_bit_is_all_that_is_refused() {
    let mut space = nvme();
    let mut staged = space.stage(4, &[0x46, 0x04, 0, 0]);
    staged.refuse_bus_master();
    let effects = list(space.commit(staged));
    assert_eq!(read_u16(&space, 4), 0x0442);
    assert_eq!(
        effects[0],
        Effect::CommandChanged {
            bus_master: Edge::Steady,
            memory: Edge::Rising,
            io: Edge::Steady,
            intx_disable: Edge::Rising,
        }
    );
    assert!(!space.may_dma());
    // The guest may try again.
    assert_eq!(space.stage(4, &[0x46, 0x04]).dma(), Edge::Rising);
}

#[test]
fn a_reset_between_the_steps_is_not_undone() {
    let mut space = nvme();
    write_u16(&mut space, 4, 2);
    let staged = space.stage(5, &[0x04]);
    space.reset();
    let effects = list(space.commit(staged));
    assert_eq!(
        read_u16(&space, 4),
        0x0400,
        "of the write only what it wrote"
    );
    assert!(matches!(
        effects[..],
        [Effect::CommandChanged {
            memory: Edge::Steady,
            intx_disable: Edge::Rising,
            ..
        }]
    ));
}

#[test]
fn a_write_that_begins_and_resets_never_begins() {
    // Both registers in one long write: the reset wins.
    let mut space = nvme();
    let mut data = vec![0; PCIE as usize + 10 - 4];
    data[0] = 6;
    *data.last_mut().unwrap() = 0x80;
    let staged = space.stage(4, &data);
    assert_eq!(staged.dma(), Edge::Steady);
    assert_eq!(
        list(space.commit(staged)),
        [Effect::Reset(ResetCause::FunctionLevel)]
    );
}

#[test]
fn bus_master_in_d3hot_is_not_dma() {
    let mut space = nvme();
    space.write(PM + 4, &[3]);
    let staged = space.stage(4, &[4]);
    assert_eq!(
        (staged.dma(), staged.effects().bus_master()),
        (Edge::Steady, Edge::Rising)
    );
}

#[test]
fn reset_tells_what_it_changed() {
    let mut space = nvme();
    write_u16(&mut space, 4, 6);
    let effects = list(space.reset());
    assert!(matches!(
        effects[..],
        [
            Effect::CommandChanged {
                bus_master: Edge::Falling,
                memory: Edge::Falling,
                ..
            },
            Effect::BarMoved(0),
            Effect::BarMoved(2)
        ]
    ));
    assert!(space.reset().is_empty());
}
