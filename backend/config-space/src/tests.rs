//! Tests of the whole; each file one part of the space.

mod capabilities;
mod extended;
mod forwarding;
mod header;
mod image;
mod laws;
mod malformed;
mod staging;

use super::*;

/// Reads a register.
fn read_u8(space: &ConfigSpace, at: u64) -> u8 {
    let mut data = [0; 1];
    space.read(at, &mut data);
    data[0]
}

fn read_u16(space: &ConfigSpace, at: u64) -> u16 {
    let mut data = [0; 2];
    space.read(at, &mut data);
    u16::from_le_bytes(data)
}

fn read_u32(space: &ConfigSpace, at: u64) -> u32 {
    let mut data = [0; 4];
    space.read(at, &mut data);
    u32::from_le_bytes(data)
}

fn write_u16(space: &mut ConfigSpace, at: u64, value: u16) -> Effects {
    space.write(at, &value.to_le_bytes())
}

fn write_u32(space: &mut ConfigSpace, at: u64, value: u32) -> Effects {
    space.write(at, &value.to_le_bytes())
}

/// Effects as a list.
fn list(effects: Effects) -> Vec<Effect> {
    effects.into_iter().collect()
}

/// Ids and places of the standard capabilities that a guest finds.
fn standard(space: &ConfigSpace) -> Vec<(u8, u64)> {
    let mut found = Vec::new();
    if read_u16(space, 6) & 0x10 == 0 {
        return found;
    }
    let mut at = u64::from(read_u8(space, 0x34));
    while at != 0 {
        found.push((read_u8(space, at), at));
        at = u64::from(read_u8(space, at + 1));
        assert!(found.len() < 64, "a loop");
    }
    found
}

/// Ids and places of the extended capabilities that a guest finds.
fn extended(space: &ConfigSpace) -> Vec<(u16, u64)> {
    let mut found = Vec::new();
    let mut at = 0x100;
    while at != 0 && read_u32(space, at) != 0 {
        let header = read_u32(space, at);
        found.push((header as u16, at));
        at = u64::from(header >> 20);
        assert!(found.len() < 1024, "a loop");
    }
    found
}
