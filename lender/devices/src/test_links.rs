//! Connections for tests.

use std::os::unix::net::UnixStream;

use farside_medium::Link;

/// Both ends of a connection.
pub(crate) fn links() -> (Link, Link) {
    let (near, far) = UnixStream::pair().unwrap();
    let link = |socket: UnixStream| {
        socket.set_nonblocking(true).unwrap();
        Link::new(socket.into(), None).unwrap()
    };
    (link(near), link(far))
}
