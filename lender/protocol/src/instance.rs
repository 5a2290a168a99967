//! One run of a lender.

use std::{fmt, io};

use serde::{Deserialize, Serialize};

/// 128 random bits that tell one run of a lender from all others: the same lender may be known at
/// several addresses. No secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Instance(u128);

impl Instance {
    /// A new one.
    ///
    /// # Errors
    /// Those of the system's random numbers.
    pub fn random() -> io::Result<Self> {
        let mut random = [0; 16];
        getrandom::fill(&mut random)?;
        Ok(Self(u128::from_ne_bytes(random)))
    }
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl From<Instance> for String {
    fn from(instance: Instance) -> Self {
        instance.to_string()
    }
}

impl TryFrom<String> for Instance {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        // `from_str_radix` also accepts a plus sign.
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(&text, 16).ok().filter(|_| is_hex);
        number
            .map(Self)
            .ok_or("an instance has 32 hexadecimal digits")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_differ_and_text_parses_again() {
        let instance = Instance::random().unwrap();
        assert_ne!(instance, Instance::random().unwrap());
        assert_eq!(Instance::try_from(instance.to_string()), Ok(instance));
        for bad in ["", "0", &"g".repeat(32), &format!("+{}", "0".repeat(31))] {
            Instance::try_from(bad.to_owned()).unwrap_err();
        }
    }
}
