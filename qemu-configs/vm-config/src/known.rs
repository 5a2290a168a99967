//! The lenders that this host knows: one list, `lenders.toml`, for all VMs and tools that name none.
//!
//! ```toml
//! lenders = ["/run/farside/lender.sock", "tls:rack1-b:7410"]
//! ```

use std::{io, path::Path};

use farside_daemon::paths;
use farside_lender_protocol::Address;
use serde::Deserialize;

use crate::{LoadError, places};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Known {
    lenders: Vec<Address>,
}

/// The lenders of [`places::known_lenders`], or that of this host if there is no such file.
///
/// # Errors
/// The file cannot be read, or is invalid.
pub fn known_lenders() -> Result<Vec<Address>, LoadError> {
    let listed = read(&places::known_lenders())?;
    Ok(listed.unwrap_or_else(|| vec![paths::lender_socket().into()]))
}

/// The lenders of a file. `None` if there is none.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<Address>>, LoadError> {
    let path = || path.to_owned();
    let text = match std::fs::read_to_string(path()) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(LoadError::Read {
                path: path(),
                source,
            });
        }
    };
    let Known { lenders } = toml::from_str(&text).map_err(|source| LoadError::Parse {
        path: path(),
        source: Box::new(source),
    })?;
    match lenders.is_empty() {
        true => Err(LoadError::NoLender { path: path() }),
        false => Ok(Some(lenders)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(text: &str) -> Result<Option<Vec<Address>>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read(file.path()).map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            format!("{error}: {}", source.unwrap_or_default())
        })
    }

    #[test]
    fn a_list_names_lenders_of_this_host_and_others() {
        let lenders = listed("lenders = ['/run/farside/lender.sock', 'tls:rack1-b:7410']");
        let lenders = lenders.unwrap().unwrap();
        let lenders: Vec<_> = lenders.iter().map(Address::to_string).collect();
        assert_eq!(lenders, ["/run/farside/lender.sock", "tls:rack1-b:7410"]);
        assert!(
            read(Path::new("/nonexistent/lenders.toml"))
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn a_bad_list_is_named_with_key_value_and_remedy() {
        for (text, words) in [
            ("lenders = []", ["names no lender", "lenders = ["]),
            (
                "lender = ['/x']",
                ["unknown field `lender`", "expected `lenders`"],
            ),
            (
                "lenders = ['rack1-b:7410']",
                ["rack1-b:7410", "tls:HOST:PORT"],
            ),
        ] {
            let error = listed(text).unwrap_err();
            for word in words {
                assert!(error.contains(word), "{text}: {error}");
            }
        }
    }
}
