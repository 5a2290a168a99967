//! Register accesses of a borrower, checked.

use farside_pci::Piece;

use super::{LeaseLoop, Line};

impl LeaseLoop<'_> {
    /// What a read of configuration space returns: all ones if no bit of it is the borrower's.
    pub(super) fn config_read(&mut self, offset: u16, len: u8) -> u32 {
        let piece = Piece::new(offset, len);
        let value = piece.and_then(|piece| self.device.config_read(piece));
        value.unwrap_or_else(|| {
            self.refuse_config("read", offset, len);
            u32::MAX
        })
    }

    /// Writes the bits of configuration space that are the borrower's.
    pub(super) fn config_write(&mut self, offset: u16, len: u8, value: u32) {
        let piece = Piece::new(offset, len);
        if !piece.is_some_and(|piece| self.device.config_write(piece, value)) {
            self.refuse_config("write", offset, len);
        }
    }

    /// Counts a configuration access to bits that are not the borrower's, and logs the first of the lease.
    fn refuse_config(&mut self, verb: &str, offset: u16, len: u8) {
        self.refusals += 1;
        if !std::mem::replace(&mut self.config_refused, true) {
            let line = format!(
                "device {}: VM {} may not {verb} {len} bytes at {offset:#x} of configuration space: refused, as further ones under this lease",
                self.owner.id, self.vm
            );
            self.owner.home.line(Line::Refused, &line);
        }
    }

    /// Whether a register access satisfies the contract of `bar_read` and `bar_write`.
    pub(super) fn is_valid(&mut self, bar: u8, offset: u64, len: u8) -> bool {
        let bars = &self.device.source().described().description.bars;
        let size = match bars.get(usize::from(bar)) {
            Some(Some(bar)) => bar.size,
            _ => return false,
        };
        matches!(len, 1 | 2 | 4 | 8)
            && offset.is_multiple_of(u64::from(len))
            && offset
                .checked_add(u64::from(len))
                .is_some_and(|end| end <= size)
    }
}
