//! Which accesses to a lent function's configuration space go to the device.
//!
//! Pure, and the same at both ends: the backend splits a guest's access into pieces for the device, and the lender, which
//! does not trust it, checks each piece by the image that it has read itself.

use std::ops::Range;

use crate::{
    ConfigImage,
    policy::{self, Class, DEVICE_SPECIFIC, Extent, Field, List, Shown, Treatment},
    regs::*,
};

/// Longest read of which a part goes to the device. A guest's have up to 8 bytes; a VMM also reads the whole space at its
/// start, for a copy.
pub const LONGEST_READ: usize = 8;

/// A naturally aligned access of 1, 2 or 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the space.
    pub offset: u16,
    /// Bytes.
    pub len: u8,
}

impl Piece {
    /// `None` unless it is naturally aligned, in a space of 4096 bytes.
    pub fn new(offset: u16, len: u8) -> Option<Self> {
        let aligned = matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len.into());
        let inside = usize::from(offset) + usize::from(len) <= CFG_SPACE_EXP_SIZE;
        (aligned && inside).then_some(Self { offset, len })
    }

    /// Its bytes in the space.
    pub fn range(self) -> std::ops::Range<usize> {
        let at = usize::from(self.offset);
        at..at + usize::from(self.len)
    }

    /// Its halves, or none if it is a byte.
    fn halves(self) -> Option<[Self; 2]> {
        let len = self.len / 2;
        (len != 0).then(|| {
            let high = self.offset + u16::from(len);
            [self.offset, high].map(|offset| Self { offset, len })
        })
    }
}

/// The bits of a function's configuration space that are the device's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forwarding {
    /// Bits that are read from the device.
    read: ConfigImage,
    /// Bits that are written to it, of those.
    written: ConfigImage,
    /// Registers with bits that are both, in capabilities that the specification defines.
    settings: Vec<Piece>,
}

impl Forwarding {
    /// None, of a space with so many bytes.
    pub fn none(size: usize) -> Self {
        Self {
            read: vec![0; size].into(),
            written: vec![0; size].into(),
            settings: Vec::new(),
        }
    }

    /// As the [policy] says of the capabilities in a function's image. An image that breaks the specification, as the
    /// backend refuses it, has fewer: a bit that two capabilities claim belongs to the later one, and what follows a
    /// broken link to none.
    pub fn of(image: &[u8]) -> Self {
        let mut new = Self::none(image.len());
        if image.len() != CFG_SPACE_SIZE && image.len() != CFG_SPACE_EXP_SIZE {
            return new;
        }
        let image = ConfigImage::from(image.to_vec());
        let (standard, is_whole) = standard(&image);
        // Whether bytes of 0x40 to 0xff that no capability has begin at `from`.
        let mut free = is_whole;
        let mut from = STD_HEADER_SIZEOF;
        let express = standard.iter().any(|&(id, _)| id == u16::from(CAP_ID_EXP));
        for (id, at, end) in with_ends(standard, CFG_SPACE_SIZE) {
            if free {
                new.device_specific(from, at);
            }
            (free, from) = match new.structure(&image, List::Standard, id, at, end) {
                // VFIO's granularity.
                Some(end) => (is_whole, end.next_multiple_of(4)),
                None => (false, end),
            };
        }
        if free {
            new.device_specific(from, CFG_SPACE_SIZE);
        }
        if express && image.len() == CFG_SPACE_EXP_SIZE {
            for (id, at, end) in with_ends(extended(&image), CFG_SPACE_EXP_SIZE) {
                new.structure(&image, List::Extended, id, at, end);
            }
        }
        new
    }

    /// Adds the capability at `at`, of which `end` is the limit. Returns its end, if it is visible.
    fn structure(
        &mut self,
        image: &ConfigImage,
        list: List,
        id: u16,
        at: usize,
        end: usize,
    ) -> Option<usize> {
        let Treatment::Show(shown) = policy::rule(list, id).1 else {
            return None;
        };
        let length = shown.length(image, at).ok()?;
        let end = end.min(at + length);
        for field in shown.fields() {
            self.field(field, at, end);
            let is_setting = (shown, field.class) == (Shown::PciExpress, Class::Forwarded);
            if let (true, Extent::Bits(bytes, _)) = (is_setting, field.extent) {
                // Below 4096 and 5, so they fit.
                let register = Piece::new((at + field.at) as u16, bytes as u8);
                let register = register.filter(|it| it.range().end <= end);
                self.settings.extend(register);
            }
        }
        self.settings.dedup();
        Some(end)
    }

    fn device_specific(&mut self, from: usize, to: usize) {
        if from < to {
            self.field(&DEVICE_SPECIFIC, from, to);
        }
    }

    fn field(&mut self, field: &Field, at: usize, end: usize) {
        let written = match field.class {
            Class::Emulated | Class::Constant => return,
            Class::Live => false,
            Class::Forwarded => true,
        };
        let start = at + field.at;
        let (bytes, mask) = match field.extent {
            Extent::Bits(bytes, mask) => (bytes, Some(mask)),
            Extent::Bytes(bytes) => (bytes, None),
            Extent::Rest => (end.saturating_sub(start), None),
        };
        if start + bytes > end {
            return;
        }
        for (n, at) in (start..start + bytes).enumerate() {
            let bits = mask.map_or(0xff, |mask| mask.to_le_bytes()[n]);
            self.read[at] |= bits;
            if written {
                self.written[at] |= bits;
            }
        }
    }

    /// Bits that are read from the device.
    pub fn read_mask(&self) -> &ConfigImage {
        &self.read
    }

    /// Bits that are written to it.
    pub fn write_mask(&self) -> &ConfigImage {
        &self.written
    }

    /// Registers of the specification whose forwarded bits software sets, and a reset by VFIO keeps.
    pub fn settings(&self) -> &[Piece] {
        &self.settings
    }

    /// The pieces of a read that go to the device. None of a long one ([`LONGEST_READ`]).
    pub fn reads(&self, offset: u64, len: usize) -> impl Iterator<Item = Piece> {
        let len = if len > LONGEST_READ { 0 } else { len };
        self.pieces(&self.read, offset, len)
    }

    /// The pieces of a write that go to the device.
    pub fn writes(&self, offset: u64, len: usize) -> impl Iterator<Item = Piece> {
        self.pieces(&self.written, offset, len)
    }

    fn pieces<'a>(
        &self,
        mask: &'a ConfigImage,
        offset: u64,
        len: usize,
    ) -> impl Iterator<Item = Piece> + use<'a> {
        let size = mask.len();
        let start = usize::try_from(offset).map_or(size, |it| it.min(size));
        let end = start.saturating_add(len).min(size);
        let mut at = start;
        std::iter::from_fn(move || {
            while at < end {
                let aligned = 1 << at.trailing_zeros().min(2);
                let fits = 1 << (end - at).ilog2().min(2);
                let len = usize::min(aligned, fits);
                // Below 4096 and 5, so they fit.
                let piece = Piece {
                    offset: at as u16,
                    len: len as u8,
                };
                at += len;
                if let Some(piece) = shrink(mask, piece) {
                    return Some(piece);
                }
            }
            None
        })
    }

    /// Puts what the device returned for a piece into what the guest reads.
    pub fn merge(&self, piece: Piece, device: u32, guest: &mut [u8]) {
        let masks = self.read.get(piece.range()).unwrap_or_default();
        for ((guest, device), mask) in guest.iter_mut().zip(device.to_le_bytes()).zip(masks) {
            *guest = *guest & !mask | device & mask;
        }
    }

    /// At the lender: the bits of a piece that a borrower may read, `None` if there are none.
    pub fn readable(&self, piece: Piece) -> Option<u32> {
        bits(&self.read, piece)
    }

    /// At the lender, and for what the backend sends: the bits of a piece that may be written, `None` if there are none.
    pub fn writable(&self, piece: Piece) -> Option<u32> {
        bits(&self.written, piece)
    }

    /// At the lender: the value to write for a piece. `now` is called for the device's, if any of its bits must be kept.
    ///
    /// # Errors
    /// That of `now`.
    pub fn value<E>(
        &self,
        piece: Piece,
        wanted: u32,
        now: impl FnOnce() -> Result<u32, E>,
    ) -> Result<u32, E> {
        let written = self.writable(piece).unwrap_or(0);
        let all = u32::MAX >> (32 - 8 * u32::from(piece.len));
        let kept = all & !self.readable(piece).unwrap_or(0);
        let kept = match kept {
            0 => 0,
            _ => now()? & kept,
        };
        Ok(wanted & written | kept)
    }
}

/// The smallest part of a piece with all its bits of the mask.
fn shrink(mask: &ConfigImage, piece: Piece) -> Option<Piece> {
    bits(mask, piece)?;
    let Some([low, high]) = piece.halves() else {
        return Some(piece);
    };
    match (bits(mask, low), bits(mask, high)) {
        (Some(_), None) => shrink(mask, low),
        (None, Some(_)) => shrink(mask, high),
        _ => Some(piece),
    }
}

fn bits(mask: &ConfigImage, piece: Piece) -> Option<u32> {
    let mut bytes = [0; 4];
    bytes[..piece.len.into()].copy_from_slice(mask.get(piece.range())?);
    match u32::from_le_bytes(bytes) {
        0 => None,
        bits => Some(bits),
    }
}

/// Ids and offsets of the standard capabilities, up to a broken link, and whether there is none.
fn standard(image: &ConfigImage) -> (Vec<(u16, usize)>, bool) {
    let mut found: Vec<(u16, usize)> = Vec::new();
    if image.u16(STATUS) & STATUS_CAP_LIST == 0 {
        return (found, true);
    }
    let pointer = |at| usize::from(image.u8(at) & !0b11);
    let mut at = pointer(CAPABILITY_LIST);
    while at >= STD_HEADER_SIZEOF && found.iter().all(|&(_, other)| other != at) {
        found.push((image.u8(at).into(), at));
        at = pointer(at + CAP_LIST_NEXT);
    }
    (found, at == 0)
}

/// Ids and offsets of the extended capabilities, up to a broken link.
fn extended(image: &ConfigImage) -> Vec<(u16, usize)> {
    let mut found: Vec<(u16, usize)> = Vec::new();
    let mut seen = [false; CFG_SPACE_EXP_SIZE / 4];
    let mut at = CFG_SPACE_SIZE;
    while at >= CFG_SPACE_SIZE && !std::mem::replace(&mut seen[at / 4], true) {
        let header = image.u32(at);
        if at == CFG_SPACE_SIZE && (header == 0 || header == !0) {
            break;
        }
        found.push((header as u16, at));
        at = (header >> 20) as usize & !0b11;
    }
    found
}

/// The bytes of a 4096-byte space from 0x100 on that are in no capability. A hidden capability, whose length is not known, reaches up
/// to the next one.
pub(crate) fn extended_gaps(image: &ConfigImage) -> Vec<Range<u64>> {
    let mut gaps = Vec::new();
    let mut from = CFG_SPACE_SIZE;
    if image.len() == CFG_SPACE_EXP_SIZE {
        for (id, at, end) in with_ends(extended(image), CFG_SPACE_EXP_SIZE) {
            gaps.push(from..at);
            from = match policy::rule(List::Extended, id).1 {
                Treatment::Show(shown) => shown
                    .length(image, at)
                    .map_or(end, |length| (at + length).next_multiple_of(4).min(end)),
                Treatment::Hide(_) => end,
            };
        }
    }
    gaps.push(from..CFG_SPACE_EXP_SIZE);
    gaps.retain(|gap| !gap.is_empty());
    gaps.into_iter()
        .map(|gap| gap.start as u64..gap.end as u64)
        .collect()
}

/// In the order of their offsets, each with the offset of the next, or the end of the space.
fn with_ends(
    mut found: Vec<(u16, usize)>,
    end: usize,
) -> impl Iterator<Item = (u16, usize, usize)> {
    found.sort_unstable_by_key(|&(_, at)| at);
    let ends: Vec<usize> = found
        .iter()
        .skip(1)
        .map(|&(_, at)| at)
        .chain([end])
        .collect();
    found
        .into_iter()
        .zip(ends)
        .map(|((id, at), end)| (id, at, end))
}

#[cfg(test)]
mod tests;
