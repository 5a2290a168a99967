use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use farside_vfio_user::{Listener, Slot};

fn path(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("vm.sock")
}

#[test]
fn one_client_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(&dir);
    let listener = Listener::bind(&path).unwrap();
    assert!(listener.accept(Slot::Free).unwrap().is_none());

    let _first = UnixStream::connect(&path).unwrap();
    let served = listener.accept(Slot::Free).unwrap();
    assert!(served.is_some());

    let mut second = UnixStream::connect(&path).unwrap();
    assert!(listener.accept(Slot::Taken).unwrap().is_none());
    assert_eq!(second.read(&mut [0]).unwrap(), 0, "refused");

    drop(served);
    let _third = UnixStream::connect(&path).unwrap();
    assert!(listener.accept(Slot::Free).unwrap().is_some());
}

/// QEMU aborts on ECONNRESET, which Linux reports to the peer of a socket that is
/// closed with unread data.
#[test]
fn whoever_is_left_hears_an_end_and_no_reset() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(&dir);
    let listener = Listener::bind(&path).unwrap();
    let connect = || {
        let mut client = UnixStream::connect(&path).unwrap();
        // More than one read returns, and never read.
        client.write_all(&[7; 20_000]).unwrap();
        client
    };
    let mut first = connect();
    let served = listener.accept(Slot::Free).unwrap();
    let mut second = connect();
    assert!(listener.accept(Slot::Taken).unwrap().is_none());
    assert_eq!(second.read(&mut [0]).unwrap(), 0, "refused");
    drop(served);
    assert_eq!(first.read(&mut [0]).unwrap(), 0, "dropped");
    let error = first.write_all(&[7; 100]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
    let mut third = connect();
    drop(listener);
    assert_eq!(third.read(&mut [0]).unwrap(), 0, "never accepted");
}
