use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use farside_vfio_user::{ListenError, Listener, Slot};

fn path(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("vm.sock")
}

#[test]
fn only_its_owner_may_connect_and_the_path_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(&dir);
    let listener = Listener::bind(&path).unwrap();
    let meta = fs::symlink_metadata(&path).unwrap();
    assert!(meta.file_type().is_socket());
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    drop(listener);
    assert!(!path.exists());
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

#[test]
fn a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(&dir);
    // std leaves the path behind, as a killed process does.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = Listener::bind(&path).unwrap();
    let _client = UnixStream::connect(&path).unwrap();
    assert!(listener.accept(Slot::Free).unwrap().is_some());
}

#[test]
fn a_socket_in_use_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(&dir);
    let first = Listener::bind(&path).unwrap();
    let error = Listener::bind(&path).unwrap_err();
    assert!(matches!(error, ListenError::InUse { .. }), "{error}");
    // The probe was a client that left at once.
    assert!(first.accept(Slot::Free).unwrap().is_some());
    let _client = UnixStream::connect(&path).unwrap();
    assert!(first.accept(Slot::Free).unwrap().is_some());
}

#[test]
fn a_socket_with_a_full_backlog_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(&dir);
    let _first = Listener::bind(&path).unwrap();
    let _waiting: Vec<_> = (0..5)
        .map(|_| UnixStream::connect(&path).unwrap())
        .collect();
    assert!(matches!(
        Listener::bind(&path),
        Err(ListenError::InUse { .. })
    ));
}

#[test]
fn what_is_not_a_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(&dir);
    fs::write(&path, "mine").unwrap();
    assert!(matches!(
        Listener::bind(&path),
        Err(ListenError::NotASocket { .. })
    ));
    assert_eq!(fs::read(&path).unwrap(), b"mine");
}

#[test]
fn a_path_that_is_too_long_says_how_long_it_may_be() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().as_os_str().len() + 1;
    let longest = dir.path().join("x".repeat(107 - base));
    Listener::bind(&longest).unwrap();
    let error = Listener::bind(&dir.path().join("x".repeat(108 - base))).unwrap_err();
    assert!(
        error.to_string().contains("108 bytes; at most 107"),
        "{error}"
    );
}

#[test]
fn a_path_that_cannot_be_is_an_error() {
    assert!(matches!(
        Listener::bind("".as_ref()),
        Err(ListenError::PathInvalid { .. })
    ));
    assert!(matches!(
        Listener::bind("a\0b".as_ref()),
        Err(ListenError::PathInvalid { .. } | ListenError::Probe { .. })
    ));
    let error = Listener::bind("/nonexistent/vm.sock".as_ref()).unwrap_err();
    assert!(matches!(error, ListenError::Listen { .. }), "{error}");
}

#[test]
fn another_ones_socket_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = path(&dir);
    let old = Listener::bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let _new = Listener::bind(&path).unwrap();
    drop(old);
    assert!(path.exists());
}
