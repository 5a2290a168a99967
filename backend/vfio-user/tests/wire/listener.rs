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
    assert_eq!(second.read(&mut [0]).unwrap(), 0, "turned away");

    drop(served);
    let _third = UnixStream::connect(&path).unwrap();
    assert!(listener.accept(Slot::Free).unwrap().is_some());
}

/// QEMU aborts when its socket is reset, and Linux resets one that is closed with
/// something unread in it.
#[test]
fn whoever_is_left_hears_an_end_and_no_reset() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(&dir);
    let listener = Listener::bind(&path).unwrap();
    let connect = || {
        let mut client = UnixStream::connect(&path).unwrap();
        // More than one read gets, and nobody reads it.
        client.write_all(&[7; 20_000]).unwrap();
        client
    };
    let mut first = connect();
    let served = listener.accept(Slot::Free).unwrap();
    let mut second = connect();
    assert!(listener.accept(Slot::Taken).unwrap().is_none());
    assert_eq!(second.read(&mut [0]).unwrap(), 0, "turned away");
    drop(served);
    assert_eq!(first.read(&mut [0]).unwrap(), 0, "let go");
    let error = first.write_all(&[7; 100]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
    let mut third = connect();
    drop(listener);
    assert_eq!(third.read(&mut [0]).unwrap(), 0, "never accepted");
}
