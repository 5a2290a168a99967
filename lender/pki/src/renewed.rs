//! Certificates that are renewed while a process runs.

use std::{
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use farside_error_chain::Chain;

use crate::{CA_CERT, CA_CRL, Credentials, Date, PkiError, Side};

/// The credentials in a directory. [`Renewed::current`] loads its files again when one of them was
/// replaced or written to.
#[derive(Debug)]
pub struct Renewed {
    directory: PathBuf,
    side: Side,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    credentials: Arc<Credentials>,
    /// The files that were loaded last, or could not be loaded.
    seen: Files,
    /// That they have expired was logged.
    is_logged: bool,
}

/// The state of each file: device, inode, size, and modification time; none if it is missing.
type Files = [Option<[i64; 5]>; 4];

impl Renewed {
    /// Loads the files of `side` from `directory`.
    pub fn load(directory: &Path, side: Side) -> Result<Self, PkiError> {
        // Before loading: files that are replaced meanwhile are loaded again.
        let seen = look(directory, side);
        let credentials = Arc::new(Credentials::load(directory, side)?);
        Ok(Self {
            directory: directory.to_owned(),
            side,
            state: Mutex::new(State {
                credentials,
                seen,
                is_logged: false,
            }),
        })
    }

    /// The credentials in the files. If they cannot be used, logs why, once, and returns the former
    /// ones.
    pub fn current(&self) -> Arc<Credentials> {
        // Each update leaves it consistent.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let found = look(&self.directory, self.side);
        if found != state.seen {
            state.seen = found;
            match Credentials::load(&self.directory, self.side) {
                Ok(renewed) => {
                    log::info!(
                        "using the new certificates in {}: {} is valid until {}",
                        self.directory.display(),
                        renewed.certificate_file().display(),
                        renewed.own().not_after
                    );
                    state.credentials = Arc::new(renewed);
                    state.is_logged = false;
                }
                Err(error) => log::error!(
                    "keeping the former certificates (valid until {}): {error}",
                    state.credentials.own().not_after,
                    error = Chain(&error)
                ),
            }
        }
        // Peers refuse it by themselves, and are told why by their own TLS.
        if !state.is_logged && state.credentials.own().not_after < Date::now() {
            state.is_logged = true;
            if let Err(error) = state.credentials.check() {
                log::error!("no host can connect: {error}", error = Chain(&error));
            }
        }
        Arc::clone(&state.credentials)
    }
}

fn look(directory: &Path, side: Side) -> Files {
    let files = side.files();
    [CA_CERT, CA_CRL, files.certificate, files.key].map(|name| {
        let state = |meta: std::fs::Metadata| {
            [
                meta.dev().cast_signed(),
                meta.ino().cast_signed(),
                meta.size().cast_signed(),
                meta.mtime(),
                meta.mtime_nsec(),
            ]
        };
        let found: io::Result<_> = std::fs::metadata(directory.join(name)).map(state);
        found.ok()
    })
}
