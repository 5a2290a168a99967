//! Blocks save and migration of a running domain.
//!
//! QEMU 11.1 does not mark `vfio-user-pci` as unmigratable: it would save or migrate a guest
//! without the device's state, and the resumed guest would use a different device. QEMU refuses
//! while an image is open whose format does not support migration. So a domain that borrows gets
//! one: an empty sector, read-only, and not attached to a guest device.

use std::path::Path;

use serde_json::{Value, json};

/// The name of the image, which is created next to the sockets of the domain's devices before its
/// start.
pub const ANCHOR_FILE: &str = "anchor.vhd";

/// Of the suitable formats, every build of QEMU includes this one.
const DRIVER: &str = "vpc";

/// Its node name in QEMU, which error messages quote, so it names the reason. QEMU's limit is 31
/// characters.
const NODE: &str = "farside-borrowed-devices";

const SECTOR: usize = 512;

/// The contents of the image: a sector, and the footer of a fixed disk (Virtual Hard Disk Image
/// Format Specification 1.0, "Hard Disk Footer Format").
pub fn anchor_image() -> Vec<u8> {
    let mut footer = [0; SECTOR];
    let size = (SECTOR as u64).to_be_bytes();
    let fields: [(usize, &[u8]); 9] = [
        (0, b"conectix"),
        // The reserved bit, always set; version 1.0; no other header.
        (8, &2u32.to_be_bytes()),
        (12, &[0, 1, 0, 0]),
        (16, &[0xff; 8]),
        (28, b"fars"),
        // Original and current size.
        (40, &size),
        (48, &size),
        // One cylinder, head, sector; a fixed disk.
        (56, &[0, 1, 1, 1]),
        (60, &2u32.to_be_bytes()),
    ];
    for (at, bytes) in fields {
        footer[at..at + bytes.len()].copy_from_slice(bytes);
    }
    let sum: u32 = footer.iter().copied().map(u32::from).sum();
    footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
    [[0; SECTOR], footer].concat()
}

/// The value of `-blockdev`, for a domain with a device served at `socket`.
pub(super) fn value(socket: &Path) -> Value {
    let path = socket.with_file_name(ANCHOR_FILE);
    json!({
        "driver": DRIVER,
        "node-name": NODE,
        "read-only": true,
        // No locking: the image is read-only, and AppArmor allows locks only on files that libvirt
        // declares.
        "file": { "driver": "file", "filename": path, "locking": "off" },
    })
}

/// Whether these are driver and node of an argument that farside added.
pub(super) fn is(driver: Option<&str>, node: Option<&str>) -> bool {
    (driver, node) == (Some(DRIVER), Some(NODE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_is_what_qemu_img_would_make() {
        let image = anchor_image();
        assert_eq!(image.len(), 2 * SECTOR);
        assert!(image[..SECTOR].iter().all(|byte| *byte == 0));
        assert_eq!(&image[SECTOR..SECTOR + 8], b"conectix");
        // Computed by independent software.
        assert_eq!(image[SECTOR + 64..SECTOR + 68], CHECKSUM);
    }

    const CHECKSUM: [u8; 4] = [0xff, 0xff, 0xf2, 0xf2];
}
