//! The formats of state that outlives the process that writes it: their versions, and how absent fields are read.
//!
//! Each format has a version. A reader accepts its own version and the one before ([`Format::check`]), and refuses
//! others in words. Structures are encoded with [postcard](https://postcard.jamesmunns.com/wire-format), by position: new
//! fields are appended, [`decode`] reads absent ones as zero, and ignores those that follow the known ones.
//!
//! docs/hand-over-state.md has the rules.

#![forbid(unsafe_code)]

pub mod samples;

use serde::de::DeserializeOwned;

/// The version of farside that this is.
pub const FARSIDE: &str = env!("CARGO_PKG_VERSION");

/// A format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// What has it, as the subject of "… has version 3".
    what: &'static str,
    version: u32,
}

impl Format {
    /// The format of `what`, whose current version is `version`.
    pub const fn new(what: &'static str, version: u32) -> Self {
        Self { what, version }
    }

    /// The version that is written.
    pub const fn version(self) -> u32 {
        self.version
    }

    /// The oldest version that is read.
    pub const fn oldest(self) -> u32 {
        if self.version > 1 {
            self.version - 1
        } else {
            1
        }
    }

    /// Whether state of `version` is read.
    pub const fn reads(self, version: u32) -> bool {
        self.oldest() <= version && version <= self.version
    }

    /// Refuses versions that are not read. `farside` is the version of the program that has written the state, if known.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn check(self, version: u32, farside: Option<&str>) -> Result<(), Unreadable> {
        match self.reads(version) {
            true => Ok(()),
            false => Err(Unreadable {
                format: self,
                version,
                farside: farside.map(printable).filter(|text| !text.is_empty()),
            }),
        }
    }

    /// The versions that are read: "version 1", "versions 1 and 2".
    pub fn read(self) -> String {
        match self.oldest() == self.version {
            true => format!("version {}", self.version),
            false => format!("versions {} and {}", self.oldest(), self.version),
        }
    }
}

/// State of a version that this farside does not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} has version {version}{}, and this farside ({FARSIDE}) reads {}", format.what, by(farside.as_deref()), format.read())]
pub struct Unreadable {
    /// The format.
    pub format: Format,
    /// The state's version.
    pub version: u32,
    /// The version of the farside that has written it, if known.
    pub farside: Option<String>,
}

impl Unreadable {
    /// The farside that reads it, as in "install …".
    pub fn remedy(&self) -> String {
        match &self.farside {
            Some(farside) => format!("farside {farside}"),
            None if self.version > self.format.version => "the later farside".to_owned(),
            None => "the earlier farside".to_owned(),
        }
    }
}

fn by(farside: Option<&str>) -> String {
    farside.map_or_else(String::new, |it| format!(" (of farside {it})"))
}

/// A version of farside, from a process that may not be trusted.
fn printable(text: &str) -> String {
    let chars = text.chars().filter(char::is_ascii_graphic);
    chars.take(WRITER).collect()
}

/// Bytes of the version of farside in a fixed layout.
pub const WRITER: usize = 32;

/// [`FARSIDE`] for a fixed layout: zeros follow.
pub const fn writer() -> [u8; WRITER] {
    let (text, mut bytes, mut n) = (FARSIDE.as_bytes(), [0; WRITER], 0);
    while n < text.len() && n < WRITER {
        bytes[n] = text[n];
        n += 1;
    }
    bytes
}

/// The version of farside in a fixed layout, if there is one.
pub fn read_writer(bytes: &[u8]) -> Option<String> {
    let text = bytes.iter().take_while(|byte| **byte != 0);
    let text = printable(&text.map(|byte| char::from(*byte)).collect::<String>());
    (!text.is_empty()).then_some(text)
}

/// Zeros that stand for absent fields. More than any version may append.
const ABSENT: usize = 256;

/// Decodes a structure of this version or the one before. Fields that `bytes` end before are zero, false, empty or
/// `None`; bytes after the known fields are ignored.
///
/// # Errors
/// Those of [`postcard::from_bytes`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> postcard::Result<T> {
    match postcard::from_bytes(bytes) {
        Err(postcard::Error::DeserializeUnexpectedEnd) => {
            let mut longer = Vec::with_capacity(bytes.len() + ABSENT);
            longer.extend_from_slice(bytes);
            longer.resize(bytes.len() + ABSENT, 0);
            postcard::from_bytes(&longer)
        }
        decoded => decoded,
    }
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
    struct Before {
        name: String,
        list: Vec<u16>,
    }

    #[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    struct After {
        name: String,
        list: Vec<u16>,
        number: u64,
        text: String,
        more: Vec<(u8, u8)>,
        option: Option<String>,
        fixed: [u64; 4],
        flag: bool,
    }

    #[test]
    fn absent_fields_are_zero() {
        let before = Before {
            name: "a".into(),
            list: vec![1, 2],
        };
        let bytes = postcard::to_stdvec(&before).unwrap();
        let after = After {
            name: "a".into(),
            list: vec![1, 2],
            ..After::default()
        };
        assert_eq!(decode::<After>(&bytes), Ok(after));
    }

    #[test]
    fn later_fields_are_ignored() {
        let after = After {
            name: "a".into(),
            number: 3,
            flag: true,
            ..After::default()
        };
        let bytes = postcard::to_stdvec(&after).unwrap();
        let before = Before {
            name: "a".into(),
            list: Vec::new(),
        };
        assert_eq!(decode::<Before>(&bytes), Ok(before));
    }

    #[test]
    fn a_length_beyond_the_end_is_no_absent_field() {
        // Of 300 bytes there is one.
        assert!(decode::<String>(&[0xac, 2, b'a']).is_err());
    }

    #[test]
    fn this_version_and_the_one_before_are_read() {
        let reads = |version| {
            let format = Format::new("it", version);
            let read: Vec<_> = (0..6).filter(|it| format.reads(*it)).collect();
            (read, format.read())
        };
        assert_eq!(reads(1), (vec![1], "version 1".into()));
        assert_eq!(reads(2), (vec![1, 2], "versions 1 and 2".into()));
        assert_eq!(reads(4), (vec![3, 4], "versions 3 and 4".into()));
    }

    #[test]
    fn a_refusal_names_both_versions_and_the_farside_that_reads_it() {
        let format = Format::new("the state", 2);
        let refused = format.check(3, Some("9.1.0\x1b[2J")).unwrap_err();
        let text = format!(
            "the state has version 3 (of farside 9.1.0[2J), and this farside ({FARSIDE}) reads versions 1 and 2"
        );
        assert_eq!(refused.to_string(), text);
        assert_eq!(refused.remedy(), "farside 9.1.0[2J");
        let refused = Format::new("the state", 5).check(3, None).unwrap_err();
        assert!(refused.to_string().contains("version 3, and"), "{refused}");
        assert_eq!(refused.remedy(), "the earlier farside");
    }

    #[test]
    fn the_writer_is_in_a_fixed_layout() {
        assert_eq!(read_writer(&writer()).as_deref(), Some(FARSIDE));
        assert_eq!(read_writer(&[0; WRITER]), None);
        assert_eq!(read_writer(&[0xff; 100]), None);
    }
}
