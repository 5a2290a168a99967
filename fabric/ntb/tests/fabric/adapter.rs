//! Link, sizes and events of an endpoint in use.

use std::time::Duration;

use farside_fabric::{LimitError, PeerAddress};
use farside_ntb::NtbError;
use farside_ntb::regs::{reg, requester, requester_entry};
use farside_ntb_server::model::{Port, PortConfig};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::function::ModelFunction;
use crate::world::{MIB, World, owner};

fn is_readable(fd: std::os::fd::BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() != 0
}

#[test]
fn a_link_that_stays_down_says_what_is_missing() {
    let world = World::small();
    let a = world.start(Port::A);
    let wait = || a.wait_link(Duration::ZERO).unwrap_err().to_string();
    let error = wait();
    assert!(
        error.contains("link down") && error.contains("has no host"),
        "{error}"
    );
    world.set_present(Port::B, true);
    let error = wait();
    assert!(
        error.contains("is the other host's farside running"),
        "{error}"
    );
    let device = ModelFunction::device(1, &[]);
    let error = a.attach("drive", &owner(), device).unwrap_err();
    assert!(matches!(error, NtbError::LinkDown { waited: None, .. }));
    let error = a.open_bar_window(PeerAddress::new(MIB), MIB).unwrap_err();
    assert!(matches!(error, NtbError::LinkDown { .. }));
    let error = a.check_ram(&[MIB]).unwrap_err();
    assert!(matches!(error, NtbError::LinkDown { .. }));
    assert_eq!(a.usage().devices.len(), 0, "nothing is taken");
}

#[test]
fn the_first_host_waits_for_the_second() {
    let world = World::small();
    let a = world.start(Port::A);
    let waiting = std::thread::spawn({
        let a = a.clone();
        move || a.wait_link(Duration::from_secs(60))
    });
    let _b = world.start(Port::B);
    waiting.join().unwrap().unwrap();
    // An event seen while waiting is not lost.
    assert!(a.take_events().link);
    assert!(!a.take_events().link && !is_readable(a.event_fd()));
}

#[test]
fn a_host_that_goes_is_an_event() {
    let world = World::small();
    let [a, b] = world.start_both();
    a.take_events();
    assert!(!is_readable(a.event_fd()));
    drop(b);
    assert!(is_readable(a.event_fd()));
    assert!(a.take_events().link);
    assert!(!a.link().usable());
    // The port reconnects, as that of a rebooted host does.
    let _b = world.start(Port::B);
    assert!(is_readable(a.event_fd()));
    a.wait_link(Duration::from_secs(60)).unwrap();
}

#[test]
fn ports_of_different_sizes_are_refused_by_both() {
    let config = |window_size| PortConfig {
        window_size,
        lut_entries: 64,
    };
    let world = World::new([config(64 * MIB), config(256 * MIB)]);
    let [a, b] = Port::BOTH.map(|port| world.start(port));
    for (adapter, own, peer) in [(&a, "64 MiB", "256 MiB"), (&b, "256 MiB", "64 MiB")] {
        let error = adapter.wait_link(Duration::ZERO).unwrap_err().to_string();
        assert!(
            error.contains(&format!(
                "this port's window BAR has {own}, the peer port's has {peer}"
            )),
            "{error}"
        );
    }
    let error = b
        .attach("drive", &owner(), ModelFunction::device(1, &[]))
        .unwrap_err();
    assert!(
        matches!(error, NtbError::WindowSizesDiffer { .. }),
        "{error}"
    );
}

#[test]
fn a_guest_that_is_too_large_is_told_before_it_boots() {
    let world = World::small();
    let [a, b] = world.start_both();
    assert_eq!(a.check_ram(&[40 * MIB, 24 * MIB]).unwrap().lut_entries, 64);
    for error in [
        a.check_ram(&[64 * MIB, MIB]).unwrap_err(),
        b.check_windows(None, &[64 * MIB, MIB]).unwrap_err().into(),
    ] {
        let NtbError::Limit(LimitError::GuestTooLarge { needed, limit, .. }) = error else {
            panic!("{error}");
        };
        assert_eq!((needed, limit), (65, 64));
    }
}

#[test]
fn what_others_have_taken_counts() {
    let world = World::small();
    let [_a, b] = world.start_both();
    let _window = b.open_bar_window(PeerAddress::new(MIB), MIB).unwrap();
    b.check_windows(None, &[63 * MIB]).unwrap();
    let error = b.check_windows(None, &[32 * MIB, 32 * MIB]).unwrap_err();
    assert!(
        matches!(error, LimitError::LutEntries { free: 31, .. }),
        "{error}"
    );
    assert_eq!(b.usage().lut_entries, 1, "a check takes nothing");
}

#[test]
fn an_endpoint_is_left_as_it_was_found() {
    let world = World::small();
    let a = world.start(Port::A);
    let entry = || world.read64(Port::A, requester_entry(0)) as u32;
    assert_eq!(entry(), requester::VALID, "the CPU's");
    let function = a.function().clone();
    assert!(function.bus_master());
    drop(a);
    assert_eq!(entry(), 0);
    assert!(!function.bus_master());
    assert_eq!(world.read64(Port::A, reg::LINK_CONTROL) as u32, 0);
}

#[test]
fn what_a_former_driver_left_is_cleared() {
    use farside_ntb::regs::{REGISTERS_BAR, lut_entry};
    let world = World::small();
    world.set_present(Port::A, true);
    let stale = 0xdead_b001u64.to_le_bytes();
    world.write(Port::A, REGISTERS_BAR, lut_entry(17), &stale);
    assert_ne!(world.read64(Port::A, lut_entry(17)), 0);
    let _a = world.start(Port::A);
    assert_eq!(world.read64(Port::A, lut_entry(17)), 0);
}
