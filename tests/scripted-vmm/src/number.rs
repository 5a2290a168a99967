//! Numbers as written on a command line.

use anyhow::{Context, Result};

/// A number: `512`, `8M` (K, M, G: powers of 1024) or `0x10000`.
///
/// # Errors
/// If the text is not a number; the message names it and the accepted forms.
pub fn parse(text: &str) -> Result<u64> {
    let bad = || format!("`{text}` is not a number: write 4096, 4K, 8M, 1G or 0x1000");
    if let Some(hex) = text.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).with_context(bad);
    }
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'K')) => (&text[..at], 1 << 10),
        Some((at, 'M')) => (&text[..at], 1 << 20),
        Some((at, 'G')) => (&text[..at], 1 << 30),
        _ => (text, 1),
    };
    let number: u64 = digits.parse().with_context(bad)?;
    number.checked_mul(factor).with_context(bad)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn numbers_in_every_form() {
        for (text, number) in [
            ("0", 0),
            ("512", 512),
            ("4K", 4096),
            ("8M", 8 << 20),
            ("3G", 3 << 30),
            ("0xfee00000", 0xfee0_0000),
        ] {
            assert_eq!(parse(text).unwrap(), number, "{text}");
        }
        for text in ["", "M", "-1", "0x", "8m", "99999999999G"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
