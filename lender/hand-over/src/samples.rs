//! Samples of formats, for tests: what a version has written is kept, and read by the versions after it.

use std::{fmt::Write, fs, path::Path};

/// The variable that has the sample of a new version be written.
const WRITE: &str = "FARSIDE_WRITE_SAMPLES";

/// One named structure of a sample, encoded.
pub type Example = (String, Vec<u8>);

/// Compares `examples` with the sample at `path`, whose name has the version. A sample that exists is never replaced.
///
/// # Panics
/// If they differ: the layout has changed, and the version has not.
pub fn is_unchanged(path: &Path, examples: &[Example]) {
    let text = text(examples);
    write_new(path, || examples.to_vec());
    let sample = text_at(path);
    for (sample, now) in sample.lines().zip(text.lines()) {
        assert_eq!(
            sample,
            now,
            "{}: the layout has changed: raise the version (docs/hand-over-state.md)",
            path.display()
        );
    }
    assert_eq!(
        sample.lines().count(),
        text.lines().count(),
        "{}: structures were added or removed: raise the version (docs/hand-over-state.md)",
        path.display()
    );
}

/// Writes a sample where there is none, if that is asked for.
///
/// # Panics
/// If it cannot be written.
pub fn write_new(path: &Path, examples: impl FnOnce() -> Vec<Example>) {
    if !path.exists() && std::env::var_os(WRITE).is_some() {
        fs::write(path, text(&examples())).expect("a sample that can be written");
    }
}

fn text_at(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| {
        panic!(
            "{}: {error}: a new version needs a sample: run this test once with {WRITE}=1, and commit it",
            path.display()
        )
    })
}

/// The structures of the sample at `path`.
///
/// # Panics
/// If there is none.
pub fn read(path: &Path) -> Vec<Example> {
    let text = text_at(path);
    let lines = text.lines().map(|line| {
        let (name, hex) = line.split_once(": ").expect("NAME: HEX");
        let digits = hex.as_bytes().chunks(2).map(|two| {
            let two = std::str::from_utf8(two).expect("ASCII");
            u8::from_str_radix(two, 16).expect("hexadecimal digits")
        });
        (name.to_owned(), digits.collect())
    });
    lines.collect()
}

/// A fixed layout in parts, by their offsets: without the parts that are zero.
pub fn parts(bytes: &[u8]) -> Vec<Example> {
    let parts = bytes.chunks(PART).enumerate();
    let parts = parts.filter(|(_, part)| part.iter().any(|byte| *byte != 0));
    let parts = parts.map(|(n, part)| (format!("{:08x}", n * PART), part.to_vec()));
    parts.collect()
}

/// Puts [`parts`] together. Other structures are left out.
pub fn whole(parts: &[Example], len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (name, part) in parts {
        if let Ok(at) = usize::from_str_radix(name, 16) {
            bytes[at..at + part.len()].copy_from_slice(part);
        }
    }
    bytes
}

/// Bytes of a part.
const PART: usize = 64;

fn text(examples: &[Example]) -> String {
    let mut text = String::new();
    for (name, bytes) in examples {
        let _ = write!(text, "{name}: ");
        for byte in bytes {
            let _ = write!(text, "{byte:02x}");
        }
        text.push('\n');
    }
    text
}
