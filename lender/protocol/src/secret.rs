//! Proof of a right.

use std::{fmt, io};

use serde::{Deserialize, Serialize};

/// 128 random bits that prove a right to a device. The peer that gains the right chooses them, so
/// that it can repeat its request; no list or status has them.
///
/// Comparing takes as long whichever bits differ: it is one operation on a 128-bit number.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Secret(u128);

impl Secret {
    /// A new secret.
    pub fn random() -> io::Result<Self> {
        let mut random = [0; 16];
        getrandom::fill(&mut random)?;
        Ok(Self(u128::from_ne_bytes(random)))
    }

    /// The bits, for a record of them that only this process and its successor have.
    pub fn bits(self) -> u128 {
        self.0
    }

    /// The secret of these [bits](Self::bits).
    pub fn from_bits(bits: u128) -> Self {
        Self(bits)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Must not be logged.
        f.write_str("Secret")
    }
}

impl From<Secret> for String {
    fn from(secret: Secret) -> Self {
        format!("{:032x}", secret.0)
    }
}

impl TryFrom<String> for Secret {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        // `from_str_radix` also accepts a plus sign.
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(&text, 16).ok().filter(|_| is_hex);
        number.map(Self).ok_or("a secret has 32 hexadecimal digits")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_written_in_full_and_never_printed() {
        let secret = Secret::random().unwrap();
        assert_ne!(secret, Secret::random().unwrap());
        assert_eq!(Secret::try_from(String::from(secret)), Ok(secret));
        assert_eq!(String::from(Secret(10)), format!("{}a", "0".repeat(31)));
        assert_eq!(
            format!("{secret:?} {:?}", Some(secret)),
            "Secret Some(Secret)"
        );
        for bad in [
            "",
            "a",
            &"g".repeat(32),
            &format!("+{}", "0".repeat(31)),
            &"0".repeat(33),
        ] {
            Secret::try_from(bad.to_owned()).unwrap_err();
        }
    }
}
