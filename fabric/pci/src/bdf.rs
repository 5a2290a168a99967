//! The address of a PCI function on this host, as Linux writes it.
//!
//! The form is `domain:bus:device.function`, all hexadecimal; a domain of 0
//! may be left out on input, as `lspci` does on output.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The largest device number on a bus (5 bits).
const MAX_DEVICE: u8 = 0x1f;
/// The largest function number of a device (3 bits).
const MAX_FUNCTION: u8 = 0x7;

/// A PCI function's place: domain (segment), bus, device and function.
///
/// Ordered as `lspci` lists. Serialised as its text form.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bdf {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// A text or numbers that are no PCI function's address.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{text:?} is not a PCI address: write domain:bus:device.function in hexadecimal, \
     such as 0000:01:00.0 (device up to 1f, function up to 7; a domain of 0 may be left out)"
)]
pub struct BdfError {
    text: String,
}

impl Bdf {
    /// The function at these numbers; `None` where device is above 31 or
    /// function above 7.
    pub const fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Self> {
        if device > MAX_DEVICE || function > MAX_FUNCTION {
            return None;
        }
        Some(Self {
            domain,
            bus,
            device,
            function,
        })
    }

    /// The PCI domain (segment); 0 on most machines.
    pub const fn domain(self) -> u32 {
        self.domain
    }

    /// The bus number.
    pub const fn bus(self) -> u8 {
        self.bus
    }

    /// The device number, up to 31.
    pub const fn device(self) -> u8 {
        self.device
    }

    /// The function number, up to 7.
    pub const fn function(self) -> u8 {
        self.function
    }

    /// The 16-bit requester ID that the function puts on the bus: bus in bits
    /// 15:8, device in 7:3, function in 2:0.
    pub const fn requester_id(self) -> u16 {
        (self.bus as u16) << 8 | (self.device as u16) << 3 | self.function as u16
    }

    fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.rsplit_once('.')?;
        let (rest, device) = rest.rsplit_once(':')?;
        let (domain, bus) = match rest.rsplit_once(':') {
            Some((domain, bus)) => (hex(domain, 4..=8)?, bus),
            None => (0, rest),
        };
        let small = |text, digits| u8::try_from(hex(text, digits)?).ok();
        Self::new(
            domain,
            small(bus, 2..=2)?,
            small(device, 2..=2)?,
            small(function, 1..=1)?,
        )
    }
}

/// `text` as a hexadecimal number of that many digits, with no sign or prefix.
fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    if !digits.contains(&text.len()) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(text, 16).ok()
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl fmt::Debug for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Bdf {
    type Err = BdfError;

    fn from_str(text: &str) -> Result<Self, BdfError> {
        Self::parse(text).ok_or_else(|| BdfError {
            text: text.chars().take(64).collect(),
        })
    }
}

impl TryFrom<String> for Bdf {
    type Error = BdfError;

    fn try_from(text: String) -> Result<Self, BdfError> {
        text.parse()
    }
}

impl From<Bdf> for String {
    fn from(bdf: Bdf) -> Self {
        bdf.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bdf(domain: u32, bus: u8, device: u8, function: u8) -> Bdf {
        Bdf::new(domain, bus, device, function).unwrap()
    }

    #[test]
    fn reads_the_long_and_the_short_form() {
        assert_eq!("0000:00:04.0".parse(), Ok(bdf(0, 0, 4, 0)));
        assert_eq!("00:04.0".parse(), Ok(bdf(0, 0, 4, 0)));
        assert_eq!("af:1f.7".parse(), Ok(bdf(0, 0xaf, 0x1f, 7)));
        assert_eq!("10000:01:00.0".parse(), Ok(bdf(0x10000, 1, 0, 0)));
        assert_eq!(bdf(0x10000, 1, 0, 0).to_string(), "10000:01:00.0");
    }

    #[test]
    fn refuses_what_is_no_address() {
        for text in [
            "",
            ".",
            ":.",
            "00:20.0",
            "00:04.8",
            "4.0",
            "0:4.0",
            "000:00:04.0",
            "00:04",
            "+0:04.0",
            "0000:00:04.0 ",
            "0000:00:04.0:1",
            "123456789:00:04.0",
            "0000:0é:04.0",
            "00:04.é",
        ] {
            let error = text.parse::<Bdf>().expect_err(text);
            assert!(error.to_string().contains("0000:01:00.0"), "{error}");
        }
        assert_eq!(Bdf::new(0, 0, 32, 0), None);
        assert_eq!(Bdf::new(0, 0, 0, 8), None);
    }

    #[test]
    fn an_error_does_not_repeat_a_long_text() {
        let error = "x".repeat(100_000).parse::<Bdf>().unwrap_err();
        assert!(error.to_string().len() < 400);
    }

    #[test]
    fn the_requester_id_is_bus_device_function() {
        assert_eq!(bdf(1, 0x12, 0x1f, 7).requester_id(), 0x12ff);
        assert_eq!(bdf(0, 0x01, 0x02, 3).requester_id(), 0x0113);
    }

    #[test]
    fn is_serialised_as_text() {
        let text = serde_json::to_string(&bdf(0, 1, 2, 3)).unwrap();
        assert_eq!(text, "\"0000:01:02.3\"");
        assert_eq!(serde_json::from_str::<Bdf>(&text).unwrap(), bdf(0, 1, 2, 3));
        assert!(serde_json::from_str::<Bdf>("\"nonsense\"").is_err());
    }

    proptest! {
        #[test]
        fn text_and_address_are_inverse(domain: u32, bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = bdf(domain, bus, device, function);
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = text.parse::<Bdf>();
        }
    }
}
