use farside_vfio_user::{Errno, MAX_MESSAGE_SIZE};

use crate::harness::*;

fn map(address: u64) -> Vec<u8> {
    [words(&[32, 3]), longs(&[0, address, 0x1000])].concat()
}

/// `SET_IRQS`: eventfds for `count` MSI-X vectors from `start`.
fn eventfds(start: u32, count: u32) -> Vec<u8> {
    words(&[20, 1 << 2 | 1 << 5, 2, start, count])
}

fn unmap(address: u64) -> Vec<u8> {
    [words(&[24, 0]), longs(&[address, 0x1000])].concat()
}

#[test]
fn a_command_that_takes_none_is_served_and_they_are_closed() {
    let cases = [
        (GET_INFO, words(&[16, 0, 0, 0]), Ok(())),
        (GET_REGION_INFO, words(&[32, 0, 7, 0, 0, 0, 0, 0]), Ok(())),
        (GET_IRQ_INFO, words(&[16, 0, 2, 0]), Ok(())),
        // As SPDK's client sends it.
        (DMA_UNMAP, unmap(0x1000), Ok(())),
        (REGION_READ, access(0, 0, 4), Ok(())),
        (REGION_WRITE, [access(0, 0, 4), vec![7; 4]].concat(), Ok(())),
        (WRITE_MULTI, longs(&[0]), Ok(())),
        (RESET, vec![], Ok(())),
        // Refused for what they are.
        (DMA_UNMAP, unmap(0x1000), Err(Errno::NOENT)),
        (6, vec![0; 16], Err(Errno::NOTSUP)),
        (999, vec![], Err(Errno::INVAL)),
    ];
    // The kernel's limit is 253 (SCM_MAX_FD), the server's 16.
    for count in [1, 2, 16, 17, 64] {
        let mut wire = Wire::negotiated();
        wire.call(DMA_MAP, &map(0x1000)).unwrap();
        for (command, payload, expected) in &cases {
            let canary = Canary::new();
            let fds = vec![canary.fd(); count];
            let answer = wire.call_fds(*command, payload, &fds).map(drop);
            assert_eq!(answer, *expected, "command {command}, {count} descriptors");
            assert!(canary.closed_elsewhere(), "{command}");
            wire.still_framed();
        }
        assert!(wire.device.dma.is_empty());
        assert_eq!(wire.device.resets, 1);
        assert_eq!(wire.device.bar0[..4], [7; 4]);
    }
}

#[test]
fn version_is_negotiated_whatever_comes_with_it() {
    let mut wire = Wire::new();
    let canary = Canary::new();
    let payload = version_payload(0, 1, b"{}");
    wire.call_fds(VERSION, &payload, &[canary.fd()]).unwrap();
    assert!(canary.closed_elsewhere());
    wire.still_framed();
}

#[test]
fn a_map_takes_the_first_and_closes_the_others() {
    let mut wire = Wire::negotiated();
    let (first, other) = (Canary::new(), Canary::new());
    wire.call_fds(DMA_MAP, &map(0), &[first.fd(), other.fd(), other.fd()])
        .unwrap();
    assert_eq!(wire.device.dma, [(0, 0x1000, true)]);
    assert!(other.closed_elsewhere());
    wire.still_framed();
}

#[test]
fn more_than_sixteen_are_refused_and_closed() {
    for (command, payload) in [(SET_IRQS, eventfds(0, 8)), (DMA_MAP, map(0))] {
        let mut wire = Wire::negotiated();
        let canary = Canary::new();
        let fds = [canary.fd(); 17];
        let errno = wire.call_fds(command, &payload, &fds).unwrap_err();
        assert_eq!(errno, Errno::INVAL);
        assert!(canary.closed_elsewhere());
        assert!(wire.device.dma.is_empty());
        wire.still_framed();
    }
}

#[test]
fn sixteen_in_parts_are_too_many_with_one_more() {
    let mut wire = Wire::negotiated();
    let canary = Canary::new();
    let bytes = message(1, SET_IRQS, 0, &eventfds(0, 8));
    for (part, count) in [(&bytes[..4], 16), (&bytes[4..8], 1), (&bytes[8..], 16)] {
        wire.send_fds(part, &vec![canary.fd(); count]);
        wire.run().unwrap();
    }
    assert_eq!(
        wire.received().unwrap().error,
        Errno::INVAL.raw_os_error() as u32
    );
    assert!(canary.closed_elsewhere());
    wire.still_framed();
}

#[test]
fn they_belong_to_the_message_they_came_with_however_it_is_cut() {
    let bytes = message(1, SET_IRQS, 0, &eventfds(0, 1));
    for split in 1..bytes.len() {
        for with_second in [false, true] {
            let mut wire = Wire::negotiated();
            let canary = TriggerCanary::new();
            let fds = [canary.fd()];
            let (first, second) = if with_second {
                (&[][..], &fds[..])
            } else {
                (&fds[..], &[][..])
            };
            wire.send_fds(&bytes[..split], first);
            wire.run().unwrap();
            wire.send_fds(&bytes[split..], second);
            wire.run().unwrap();
            assert_eq!(wire.received().unwrap().error, 0);
            assert!(wire.device.eventfds[0].is_some());
            wire.still_framed();
            drop(wire);
            assert!(canary.closed_elsewhere());
        }
    }
}

#[test]
fn they_belong_to_the_right_one_of_pipelined_messages() {
    // QEMU sends DMA_MAPs in bursts, with and without a descriptor.
    let mut wire = Wire::negotiated();
    let canary = Canary::new();
    let with = [true, false, false, true, true, false, true];
    for (page, with) in with.iter().enumerate() {
        let bytes = message(page as u16, DMA_MAP, 0, &map(0x1000 * page as u64));
        wire.send_fds(&bytes, &[canary.fd()][..usize::from(*with)]);
    }
    wire.run().unwrap();
    let got: Vec<bool> = wire.device.dma.iter().map(|(_, _, fd)| *fd).collect();
    assert_eq!(got, with);
}

#[test]
fn they_belong_to_the_right_one_after_short_messages() {
    // Messages before it that are shorter than one read.
    for before in [
        message(1, RESET, 0, &[]),
        message(1, RESET, 0, &[]).repeat(2),
        message(1, REGION_READ, 0, &access(0, 7, 4)),
        message(1, GET_INFO, 0, &words(&[16, 0, 0, 0])),
        message(1, SET_IRQS, 0, &words(&[20, 1 | 1 << 5, 2, 0, 1])),
    ] {
        for together in [false, true] {
            let mut wire = Wire::negotiated();
            let canary = TriggerCanary::new();
            let set = message(2, SET_IRQS, 0, &eventfds(3, 1));
            if together {
                wire.send(&[before.as_slice(), &set[..1]].concat());
                wire.send_fds(&set[1..], &[canary.fd()]);
            } else {
                wire.send(&before);
                wire.send_fds(&set, &[canary.fd()]);
            }
            wire.run().unwrap();
            while let Some(reply) = wire.received() {
                assert_eq!(reply.error, 0);
            }
            assert!(wire.device.eventfds[3].is_some());
        }
    }
}

#[test]
fn two_messages_in_one_segment_get_them_on_the_first_that_takes_them() {
    let mut wire = Wire::negotiated();
    let canary = TriggerCanary::new();
    let both = [
        message(1, SET_IRQS, 0, &eventfds(0, 1)),
        message(2, RESET, 0, &[]),
    ]
    .concat();
    wire.send_fds(&both, &[canary.fd()]);
    wire.run().unwrap();
    assert_eq!(wire.received().unwrap().error, 0);
    assert_eq!(wire.received().unwrap().error, 0);
    assert!(wire.device.eventfds[0].is_some());
}

#[test]
fn those_with_a_body_that_is_thrown_away_are_closed() {
    let mut wire = Wire::negotiated();
    let (first, second) = (Canary::new(), Canary::new());
    let header = raw_message(1, REGION_WRITE, MAX_MESSAGE_SIZE + 100, 0, &[]);
    wire.send_fds(&header, &[first.fd()]);
    wire.run().unwrap();
    assert!(first.closed_elsewhere());
    let body = vec![0; MAX_MESSAGE_SIZE as usize + 84];
    for (at, part) in body.chunks(50_000).enumerate() {
        wire.send_fds(part, &[second.fd()][..usize::from(at == 3)]);
        wire.run().unwrap();
    }
    assert!(second.closed_elsewhere());
    wire.received().unwrap();
    wire.still_framed();
}

#[test]
fn those_of_a_message_that_never_ends_go_with_the_connection() {
    let mut wire = Wire::negotiated();
    let canary = Canary::new();
    let bytes = message(1, SET_IRQS, 0, &eventfds(0, 1));
    wire.send_fds(&bytes[..20], &[canary.fd()]);
    wire.run().unwrap();
    drop(wire);
    assert!(canary.closed_elsewhere());
}

#[test]
fn received_ones_close_on_exec() {
    let mut wire = Wire::negotiated();
    let canary = TriggerCanary::new();
    wire.call_fds(SET_IRQS, &eventfds(0, 1), &[canary.fd()])
        .unwrap();
    let sink = wire.device.eventfds[0].as_ref().unwrap();
    let fd = sink.trigger().unwrap();
    assert!(
        rustix::io::fcntl_getfd(fd)
            .unwrap()
            .contains(rustix::io::FdFlags::CLOEXEC)
    );
}
