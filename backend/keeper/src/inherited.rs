//! The descriptors that the process before has left.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
};

use crate::system::own;

/// Descriptors without an owner. Those that are not [claimed](Self::claim) are closed when this is dropped.
#[derive(Debug, Default)]
pub struct Inherited(BTreeSet<RawFd>);

impl Inherited {
    /// All that are open, but for `others`, which have owners.
    pub(crate) fn all_but(others: &BTreeSet<RawFd>) -> io::Result<Self> {
        let mut open = open()?;
        open.retain(|fd| !others.contains(fd));
        Ok(Self(open))
    }

    /// The descriptor of this number, once.
    pub fn claim(&mut self, fd: RawFd) -> Option<OwnedFd> {
        self.0.remove(&fd).then(|| own(fd))
    }
}

impl Drop for Inherited {
    fn drop(&mut self) {
        for fd in std::mem::take(&mut self.0) {
            drop(own(fd));
        }
    }
}

/// The numbers of all open descriptors.
pub(crate) fn open() -> io::Result<BTreeSet<RawFd>> {
    let directory = std::fs::File::open("/proc/self/fd")?;
    let listing = rustix::fs::Dir::new(directory)?;
    let own = listing.fd()?.as_raw_fd();
    let mut open = BTreeSet::new();
    for entry in listing {
        let entry = entry?;
        let number = entry.file_name().to_str().ok();
        open.extend(number.and_then(|number| number.parse::<RawFd>().ok()));
    }
    open.remove(&own);
    Ok(open)
}
