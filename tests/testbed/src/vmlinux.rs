//! The ELF image inside a bzImage. With a PVH boot of it the CPU skips decompression, which
//! on an emulated CPU takes longer than the rest of the boot until init.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command::output;

/// Magic number of a Zstandard frame.
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Extracts the ELF image of `bzimage` to `to`; `zstd` is the path of the binary.
pub(crate) fn extract(bzimage: &Path, to: &Path, zstd: &Path) -> Result<()> {
    let context = || format!("the kernel {}", bzimage.display());
    let image = fs::read(bzimage).with_context(context)?;
    let payload = payload(&image).with_context(context)?;
    ensure!(
        payload.starts_with(&ZSTD),
        "{} is not compressed with Zstandard",
        context()
    );
    let compressed = to.with_extension("zst");
    fs::write(&compressed, payload).with_context(|| format!("writing {}", compressed.display()))?;
    output(
        Command::new(zstd)
            .args(["-d", "-q", "-f", "--rm", "-o"])
            .args([to, &compressed]),
        "zstd is part of the test bed",
    )
    .with_context(context)?;
    Ok(())
}

/// The compressed payload (Linux x86 boot protocol 2.08: `setup_sects`, `payload_offset`,
/// `payload_length`), without the length that the kernel's build appends.
fn payload(image: &[u8]) -> Result<&[u8]> {
    let word = |at: usize| {
        let bytes = image.get(at..at + 4).context("it is too short")?;
        Ok::<_, anyhow::Error>(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    ensure!(
        image.get(0x202..0x206) == Some(b"HdrS"),
        "it has no boot header"
    );
    let version = word(0x206)? & 0xffff;
    ensure!(version >= 0x208, "its boot protocol is {version:#x}");
    let setup_sectors = match image[0x1f1] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = (setup_sectors + 1) * 512 + word(0x248)?;
    let len = word(0x24c)?.checked_sub(4).context("it has no payload")?;
    image
        .get(start..start + len)
        .context("its payload reaches behind its end")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Vec<u8> {
        let mut image = vec![0; 0x800];
        image[0x1f1] = 2;
        image[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
        image[0x248..0x24c].copy_from_slice(&0x10u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&8u32.to_le_bytes());
        image[0x610..0x618].copy_from_slice(b"abcdSIZE");
        image
    }

    #[test]
    fn the_payload_is_where_the_header_says() {
        assert_eq!(payload(&image()).unwrap(), b"abcd");
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        assert!(payload(b"MZ").is_err());
        let mut old = image();
        old[0x206] = 7;
        assert!(payload(&old).unwrap_err().to_string().contains("0x207"));
        let mut cut = image();
        cut.truncate(0x612);
        assert!(payload(&cut).unwrap_err().to_string().contains("behind"));
    }
}
