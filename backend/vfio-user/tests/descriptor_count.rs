//! No passed descriptor leaks. In a separate process, since the test counts the descriptors
//! of the whole process.

#[path = "support/device.rs"]
#[allow(dead_code, reason = "most of it is for the tests of single commands")]
mod device;
#[path = "wire/harness.rs"]
#[allow(dead_code, reason = "most of it is for the tests of single commands")]
mod harness;

use harness::*;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn no_message_leaves_descriptors_open() {
    let mut wire = Wire::negotiated();
    let canary = TriggerCanary::new();
    let map = [words(&[32, 3]), longs(&[0, 0x10000, 0x1000])].concat();
    let unmap = [words(&[24, 0]), longs(&[0x10000, 0x1000])].concat();
    // Sets and clears eventfds, so that the device holds none at the end.
    let set = words(&[20, 1 << 2 | 1 << 5, 2, 0, 2]);
    let disable = words(&[20, 1 | 1 << 5, 2, 0, 0]);
    let before = open_descriptors();
    for count in [0, 1, 2, 16, 17, 64] {
        let fds = vec![canary.fd(); count];
        for command in 0..=20 {
            for payload in [&[][..], &[0; 16], &map, &unmap, &set, &disable] {
                wire.send_fds(&message(1, command, 0, payload), &fds);
                wire.run().unwrap();
                while wire.received().is_some() {}
            }
        }
        for (command, payload) in [(SET_IRQS, &disable), (DMA_UNMAP, &unmap)] {
            wire.send_fds(&message(1, command, 0, payload), &[]);
            wire.run().unwrap();
            while wire.received().is_some() {}
        }
        assert_eq!(open_descriptors(), before, "{count} with each message");
    }
}
