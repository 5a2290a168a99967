//! Identify data structures (NVM Express 1.4, 5.15).

use anyhow::{Result, ensure};

use super::command::MAX_TRANSFER;
use crate::ram::PAGE;

/// A controller and its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Serial number.
    pub serial: String,
    /// Model.
    pub model: String,
    /// Blocks of the namespace.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Most bytes of a transfer, limited by controller and driver.
    pub transfer_bytes: u64,
}

impl Identity {
    /// Parses the two structures; `min_page` is the smallest page (CAP.MPSMIN).
    ///
    /// # Errors
    /// If the namespace is inactive, or its block size is unsupported.
    pub fn parse(controller: &[u8; 4096], namespace: &[u8; 4096], min_page: u64) -> Result<Self> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let transfer_bytes = match controller[77] {
            0 => MAX_TRANSFER,
            shift => min_page
                .checked_shl(shift.into())
                .map_or(MAX_TRANSFER, |bytes| bytes.min(MAX_TRANSFER)),
        };
        let blocks = u64::from_le_bytes(std::array::from_fn(|at| namespace[at]));
        ensure!(blocks > 0, "the namespace has no blocks: is there one?");
        let format = usize::from(namespace[26] & 0xf);
        let data_shift = namespace[128 + 4 * format + 2];
        ensure!(
            (9..=12).contains(&data_shift),
            "blocks of 2^{data_shift} bytes: this driver knows 512 to {PAGE}"
        );
        Ok(Self {
            serial: text(&controller[4..24]),
            model: text(&controller[24..64]),
            blocks,
            block_bytes: 1 << data_shift,
            transfer_bytes,
        })
    }

    /// Bytes of the namespace.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn structures() -> ([u8; 4096], [u8; 4096]) {
        let mut controller = [0; 4096];
        controller[4..24].copy_from_slice(b"SN-1                ");
        controller[24..64].fill(b' ');
        controller[24..29].copy_from_slice(b"Model");
        controller[77] = 7;
        let mut namespace = [0; 4096];
        namespace[..8].copy_from_slice(&0x8000u64.to_le_bytes());
        namespace[26] = 1;
        namespace[128 + 4 + 2] = 12;
        (controller, namespace)
    }

    #[test]
    fn a_drive_is_as_it_says() {
        let (mut controller, namespace) = structures();
        let identity = Identity::parse(&controller, &namespace, 4096).unwrap();
        assert_eq!(
            (identity.serial.as_str(), identity.model.as_str()),
            ("SN-1", "Model")
        );
        assert_eq!((identity.blocks, identity.block_bytes), (0x8000, 4096));
        assert_eq!(identity.transfer_bytes, 512 << 10);
        for unlimited in [0, 20, 255] {
            controller[77] = unlimited;
            let identity = Identity::parse(&controller, &namespace, 4096).unwrap();
            assert_eq!(identity.transfer_bytes, MAX_TRANSFER);
        }
    }

    #[test]
    fn a_namespace_that_is_none_is_named() {
        let (controller, mut namespace) = structures();
        namespace[128 + 4 + 2] = 0;
        assert!(Identity::parse(&controller, &namespace, 4096).is_err());
        let error = Identity::parse(&controller, &[0; 4096], 4096).unwrap_err();
        assert!(error.to_string().contains("no blocks"), "{error}");
    }
}
