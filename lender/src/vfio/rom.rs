//! The expansion ROM that a function is lent with.

use std::{fs::File, io, io::Read, path::PathBuf, sync::Arc};

use farside_error_chain::Chain;
use farside_pci::rom::{self, RomError};
use farside_vfio::{Function, VfioError};

use crate::config::RomConfig;

/// Which ROM guests see.
#[derive(Clone, Debug)]
pub(crate) enum Rom {
    /// The function's own.
    Own,
    /// These bytes, of a file; none if there are none.
    Fixed(Arc<[u8]>),
}

/// A file that is no ROM.
#[derive(Debug, thiserror::Error)]
#[error("cannot use {} as expansion ROM: name another file, or `rom = false` for none", path.display())]
pub(super) struct BadRom {
    path: PathBuf,
    source: Cause,
}

#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Rom(#[from] RomError),
}

impl Rom {
    /// Reads and checks the file, if one is configured.
    pub(super) fn new(config: &RomConfig) -> Result<Self, BadRom> {
        let read = |path: &PathBuf| {
            let mut bytes = Vec::new();
            // One more, to find one that is too large.
            let limit = rom::MAX as u64 + 1;
            File::open(path)?.take(limit).read_to_end(&mut bytes)?;
            rom::check(&bytes)?;
            Ok(Self::Fixed(bytes.into()))
        };
        match config {
            RomConfig::Own => Ok(Self::Own),
            RomConfig::Hidden => Ok(Self::Fixed(Arc::default())),
            RomConfig::File(path) => read(path).map_err(|source| BadRom {
                path: path.clone(),
                source,
            }),
        }
    }
}

/// The function's own ROM; empty if it has none.
pub(super) fn of(function: &Function) -> Result<Arc<[u8]>, VfioError> {
    let bytes = function.rom()?;
    match rom::check(&bytes) {
        Ok(()) => return Ok(bytes.into()),
        Err(_) if bytes.is_empty() => {}
        Err(error) => log::warn!(
            "{}: its expansion ROM is not shown to guests: {error}",
            function.bdf(),
            error = Chain(&error)
        ),
    }
    Ok(Arc::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_rom_is_named_with_the_reason() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "#!/bin/sh").unwrap();
        let error = Rom::new(&RomConfig::File(file.path().to_owned())).unwrap_err();
        let text = Chain(&error).to_string();
        for word in [
            &*file.path().display().to_string(),
            "0x55 0xaa",
            "rom = false",
        ] {
            assert!(text.contains(word), "{text}");
        }
        let error = Rom::new(&RomConfig::File("/nowhere".into())).unwrap_err();
        assert!(Chain(&error).to_string().contains("No such file"));
    }
}
