//! The ACPI power button: the guest powers off, as a guest with a service manager would.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use rustix::system::{RebootCommand, reboot};

/// Bytes of a `struct input_event` on a 64-bit Linux: two words of time, then type and code
/// of 16 bits, value of 32 bits.
const EVENT: usize = 24;
const EV_KEY: u16 = 1;
const KEY_POWER: u16 = 116;

/// Reads all present input devices, on threads.
pub fn watch() {
    let devices = fs::read_dir("/dev/input").into_iter().flatten().flatten();
    for path in devices.map(|entry| entry.path()) {
        let is_event = |name: &str| name.starts_with("event");
        if path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(is_event)
        {
            std::thread::spawn(move || listen(&path));
        }
    }
}

fn listen(path: &Path) {
    let Ok(mut device) = File::open(path) else {
        return;
    };
    let mut event = [0; EVENT];
    while device.read_exact(&mut event).is_ok() {
        if is_press(&event) {
            rustix::fs::sync();
            if let Err(error) = reboot(RebootCommand::PowerOff) {
                eprintln!("init: powering off: {error}");
            }
        }
    }
}

fn is_press(event: &[u8; EVENT]) -> bool {
    let short = |at: usize| u16::from_ne_bytes([event[at], event[at + 1]]);
    let value = [event[20], event[21], event[22], event[23]];
    short(16) == EV_KEY && short(18) == KEY_POWER && i32::from_ne_bytes(value) == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_press_of_the_power_key_counts() {
        let event = |kind: u16, code: u16, value: i32| {
            let mut event = [0; EVENT];
            event[16..18].copy_from_slice(&kind.to_ne_bytes());
            event[18..20].copy_from_slice(&code.to_ne_bytes());
            event[20..].copy_from_slice(&value.to_ne_bytes());
            event
        };
        assert!(is_press(&event(EV_KEY, KEY_POWER, 1)));
        assert!(!is_press(&event(EV_KEY, KEY_POWER, 0)));
        assert!(!is_press(&event(EV_KEY, 30, 1)));
        assert!(!is_press(&event(0, 0, 0)));
    }
}
