//! A borrower's access to a function's configuration space.

use std::sync::Arc;

use farside_lender_protocol::RemoteError;
use farside_pci::{Description, Forwarding, Piece, regs::COMMAND};
use farside_vfio::Function;

use crate::refusals::internal;

/// The configuration space of a function, as VFIO or a vfio-user server has it.
pub(crate) trait ConfigAccess {
    /// Where the function is, for the log.
    fn place(&self) -> String;

    /// Reads configuration space.
    fn config_read(&self, offset: u64, data: &mut [u8]) -> Result<(), RemoteError>;

    /// Writes configuration space.
    fn config_write(&self, offset: u64, data: &[u8]) -> Result<(), RemoteError>;

    /// Sets and clears bits of the 16-bit register at `offset`, as a whole: libvfio-user refuses to write a byte of some.
    fn change_config(&self, offset: u64, set: u16, clear: u16) -> Result<(), RemoteError> {
        let mut register = [0; 2];
        self.config_read(offset, &mut register)?;
        let before = u16::from_le_bytes(register);
        let wanted = before & !clear | set;
        match wanted == before {
            true => Ok(()),
            false => self.config_write(offset, &wanted.to_le_bytes()),
        }
    }

    /// Sets and clears bits of the command register.
    fn set_command(&self, set: u16, clear: u16) -> Result<(), RemoteError> {
        self.change_config(COMMAND as u64, set, clear)
    }
}

impl ConfigAccess for Function {
    fn place(&self) -> String {
        self.bdf().to_string()
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) -> Result<(), RemoteError> {
        Function::config_read(self, offset, data).map_err(internal)
    }

    fn config_write(&self, offset: u64, data: &[u8]) -> Result<(), RemoteError> {
        Function::config_write(self, offset, data).map_err(internal)
    }
}

/// The registers of a lent function that are its borrower's.
pub(crate) struct ForwardedRegisters<F: ConfigAccess = Function> {
    function: Arc<F>,
    forwarding: Forwarding,
    /// Settings of before all leases. VFIO keeps a borrower's over a reset.
    before: Vec<(Piece, u32)>,
}

impl<F: ConfigAccess> ForwardedRegisters<F> {
    /// Of a function that was found as in `description`.
    pub(crate) fn new(description: &Description, function: Arc<F>) -> Self {
        let forwarding = Forwarding::of(&description.config);
        let before = forwarding.settings().iter().filter_map(|&piece| {
            let mut value = [0; 4];
            let (start, len) = (usize::from(piece.offset), usize::from(piece.len));
            value[..len].copy_from_slice(description.config.get(start..start + len)?);
            Some((piece, u32::from_le_bytes(value)))
        });
        Self {
            before: before.collect(),
            function,
            forwarding,
        }
    }

    /// The borrower's bits of a piece: `None` if there are none, all ones if the function does not answer.
    pub(crate) fn read(&self, piece: Piece) -> Option<u32> {
        let readable = self.forwarding.readable(piece)?;
        Some(match read(&*self.function, piece) {
            Ok(value) => value & readable,
            Err(error) => {
                self.failed(&error);
                u32::MAX
            }
        })
    }

    /// Writes the borrower's bits of a piece. Returns whether there are any.
    pub(crate) fn write(&self, piece: Piece, value: u32) -> bool {
        if self.forwarding.writable(piece).is_none() {
            return false;
        }
        if let Err(error) = self.try_write(piece, value) {
            self.failed(&error);
        }
        true
    }

    /// Sets the settings to those of before the lease.
    pub(crate) fn restore(&self) {
        for &(piece, value) in &self.before {
            if let Err(error) = self.try_write(piece, value) {
                self.failed(&error);
            }
        }
    }

    fn try_write(&self, piece: Piece, value: u32) -> Result<(), RemoteError> {
        let forwarding = &self.forwarding;
        // Smaller, if only a part of it has bits of the borrower.
        for part in forwarding.writes(piece.offset.into(), piece.len.into()) {
            let value = value >> (8 * (part.offset - piece.offset));
            let mut answers = true;
            let value = forwarding.value(part, value, || {
                let now = read(&*self.function, part)?;
                // Bits that are kept are not all 1: a reset bit reads as 0.
                answers = now != u32::MAX >> (32 - 8 * u32::from(part.len));
                Ok::<_, RemoteError>(now)
            })?;
            if answers {
                let bytes = value.to_le_bytes();
                let bytes = &bytes[..part.len.into()];
                self.function.config_write(part.offset.into(), bytes)?;
            }
        }
        Ok(())
    }

    fn failed(&self, error: &RemoteError) {
        log::debug!("{}: {error}", self.function.place());
    }
}

fn read(function: &impl ConfigAccess, piece: Piece) -> Result<u32, RemoteError> {
    let mut bytes = [0; 4];
    function.config_read(piece.offset.into(), &mut bytes[..piece.len.into()])?;
    Ok(u32::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use farside_pci::{ConfigImage, regs::*};
    use proptest::prelude::*;

    use super::*;

    /// A device all of whose bits are writable, which records the accesses.
    struct Fake(Mutex<(ConfigImage, Vec<(u64, usize)>)>);

    impl ConfigAccess for Fake {
        fn place(&self) -> String {
            "a fake".into()
        }

        fn config_read(&self, offset: u64, data: &mut [u8]) -> Result<(), RemoteError> {
            let (image, _) = &*self.0.lock().unwrap();
            data.copy_from_slice(&image[offset as usize..][..data.len()]);
            Ok(())
        }

        fn config_write(&self, offset: u64, data: &[u8]) -> Result<(), RemoteError> {
            let (image, writes) = &mut *self.0.lock().unwrap();
            image[offset as usize..][..data.len()].copy_from_slice(data);
            writes.push((offset, data.len()));
            Ok(())
        }
    }

    /// Power management, MSI and MSI-X at 0x40, 0x48 and 0x60; VPD at 0x70; PCI Express at 0x80; vendor-specific at 0xc0.
    fn leased() -> ForwardedRegisters<Fake> {
        let mut image = ConfigImage::endpoint(0x1af4, 0x10f0, 0x01_08_02, &Default::default());
        image.add_power_management(0x40);
        image.add_capability(0x48, CAP_ID_MSI).set_u16(0x4a, 0x180);
        image.add_msix(0x60, 4, 0, 0, 0x800);
        image.add_capability(0x70, 0x03).add_express(0x80, 4);
        image.set_u16(0x88, 0x2830);
        image.add_capability(0xc0, CAP_ID_VNDR).set_u8(0xc2, 64);
        let description = Description {
            config: image.to_vec(),
            bars: Default::default(),
            intx: false,
            msi_vectors: 1,
            msix_vectors: 4,
            summary: String::new(),
        };
        let fake = Fake(Mutex::new((image, Vec::new())));
        ForwardedRegisters::new(&description, Arc::new(fake))
    }

    fn piece(offset: u16, len: u8) -> Piece {
        Piece::new(offset, len).unwrap()
    }

    fn writes(leased: &ForwardedRegisters<Fake>) -> Vec<(u64, usize)> {
        std::mem::take(&mut leased.function.0.lock().unwrap().1)
    }

    #[test]
    fn what_is_not_the_borrowers_is_refused() {
        let leased = leased();
        for (register, offset, len) in [
            ("command", 0x04, 2),
            ("command and status", 0x04, 4),
            ("BAR 0", 0x10, 4),
            ("ROM", 0x30, 4),
            ("power state", 0x44, 2),
            ("MSI address", 0x4c, 4),
            ("MSI data", 0x54, 2),
            ("MSI-X control", 0x62, 2),
            ("link control", 0x90, 2),
            ("device control 2", 0xa8, 2),
            ("SR-IOV, if it were there", 0x108, 2),
        ] {
            assert!(!leased.write(piece(offset, len), !0), "{register}");
            assert_eq!(leased.read(piece(offset, len)), None, "{register}");
        }
        assert!(
            !leased.write(piece(0x92, 2), !0),
            "link status is read only"
        );
        assert!(leased.read(piece(0x92, 2)).is_some());
        assert_eq!(writes(&leased), []);
    }

    #[test]
    fn a_wide_write_reaches_the_borrowers_part_alone() {
        let leased = leased();
        // Device control and status: errors would be cleared, the payload size changed, the function reset.
        assert!(leased.write(piece(0x88, 4), !0));
        assert_eq!(writes(&leased), [(0x88, 2)]);
        assert_eq!(leased.function.0.lock().unwrap().0.u32(0x88), 0x7830);
        assert_eq!(
            leased.read(piece(0x88, 4)),
            Some(0x7010),
            "not the rest of it"
        );
        leased.restore();
        assert_eq!(leased.function.0.lock().unwrap().0.u16(0x88), 0x2830);
        writes(&leased);
        // Flag of the VPD address: never 1, or the EEPROM is written.
        assert!(leased.write(piece(0x70, 4), 0x8004_ffff));
        assert_eq!(writes(&leased), [(0x72, 2)]);
        assert_eq!(leased.function.0.lock().unwrap().0.u16(0x72), 4);
    }

    #[test]
    fn a_device_that_is_gone_is_not_written() {
        let leased = leased();
        leased.function.0.lock().unwrap().0.fill(0xff);
        assert!(leased.write(piece(0x88, 2), 0x5000));
        leased.restore();
        assert_eq!(writes(&leased), []);
    }

    proptest! {
        /// A hostile borrower changes nothing but its own bits, whatever it sends.
        #[test]
        fn a_hostile_borrower_reaches_its_own_bits(
            sent in prop::collection::vec((any::<u16>(), any::<u8>(), any::<u32>()), 1..40),
            near in any::<bool>(),
        ) {
            let leased = leased();
            let before = leased.function.0.lock().unwrap().0.clone();
            for (offset, len, value) in sent {
                let offset = if near { offset % 0x110 } else { offset };
                let len = if near { 1 << (len % 3) } else { len };
                let offset = if near { offset & !u16::from(len - 1) } else { offset };
                let Some(piece) = Piece::new(offset, len) else { continue };
                leased.write(piece, value);
                leased.read(piece);
            }
            let after = leased.function.0.lock().unwrap().0.clone();
            for at in 0..after.len() {
                let theirs = leased.forwarding.write_mask()[at];
                let status = leased.forwarding.read_mask()[at] & !theirs;
                let changed = before[at] ^ after[at];
                prop_assert_eq!(changed & !theirs & !status, 0, "{:#x}", at);
                prop_assert_eq!(after[at] & status & !before[at], 0, "{:#x}", at);
            }
            leased.restore();
            prop_assert_eq!(leased.function.0.lock().unwrap().0.u16(0x88), 0x2830);
        }
    }
}
