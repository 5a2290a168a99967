use std::os::unix::{
    fs::PermissionsExt,
    net::{UnixListener, UnixStream},
};

use super::*;

/// Room for a few connections.
const BACKLOG: i32 = 4;

fn bind_stream(path: &Path) -> Result<OwnedListener, ListenError> {
    OwnedListener::bind(path, SocketKind::Stream, BACKLOG)
}

#[test]
fn only_its_owner_may_connect_and_the_path_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = bind_stream(&path).unwrap();
    let meta = fs::symlink_metadata(&path).unwrap();
    assert!(meta.file_type().is_socket());
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    for kind in [SocketKind::Stream, SocketKind::SeqPacket] {
        let path = dir.path().join(kind.to_string());
        // Stale: bound, then closed without unlink(2).
        let socket = new_socket(kind).unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        drop(socket);
        let listener = OwnedListener::bind(&path, kind, BACKLOG).unwrap();

        let error = OwnedListener::bind(&path, kind, BACKLOG).unwrap_err();
        assert!(matches!(error, ListenError::InUse { .. }), "{error}");
        assert!(error.to_string().contains("another process listens at"));
        // The probe was a peer that disconnected at once.
        assert!(listener.accept().unwrap().is_some());
        assert!(listener.accept().unwrap().is_none());
        drop(listener);
        assert!(!path.exists());
    }
}

#[test]
fn a_socket_with_a_full_backlog_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let _first = bind_stream(&path).unwrap();
    let _pending: Vec<_> = (0..=BACKLOG)
        .map(|_| UnixStream::connect(&path).unwrap())
        .collect();
    let error = bind_stream(&path).unwrap_err();
    assert!(matches!(error, ListenError::InUse { .. }), "{error}");
}

#[test]
fn what_is_no_socket_of_ours_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "precious").unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    for path in [&file, &link] {
        let error = bind_stream(path).unwrap_err();
        assert!(matches!(error, ListenError::NotASocket { .. }), "{error}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");

    let stream = dir.path().join("stream");
    let _other = UnixListener::bind(&stream).unwrap();
    let error = OwnedListener::bind(&stream, SocketKind::SeqPacket, BACKLOG).unwrap_err();
    assert!(matches!(error, ListenError::Probe { .. }), "{error}");
}

#[test]
fn a_path_that_is_too_long_says_how_long_it_may_be() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().as_os_str().len() + 1;
    let longest = dir.path().join("x".repeat(MAX_PATH - base));
    bind_stream(&longest).unwrap();
    let error = bind_stream(&dir.path().join("x".repeat(MAX_PATH + 1 - base))).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("108 bytes, the limit is 107"), "{text}");
}

#[test]
fn an_invalid_path_is_an_error() {
    for path in ["", "a\0b"] {
        let error = bind_stream(path.as_ref()).unwrap_err();
        assert!(matches!(error, ListenError::PathInvalid { .. }), "{error}");
    }
    let error = bind_stream("/nonexistent/s".as_ref()).unwrap_err();
    assert!(matches!(error, ListenError::Listen { .. }), "{error}");
    assert!(error.to_string().contains("/nonexistent/s"), "{error}");
}

#[test]
fn a_socket_that_another_process_put_there_is_not_unlinked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let first = bind_stream(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let _second = bind_stream(&path).unwrap();
    drop(first);
    assert!(path.exists());
}

#[test]
fn a_socket_that_somebody_else_made_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let socket = UnixListener::bind(&path).unwrap();
    socket.set_nonblocking(true).unwrap();
    let listener = OwnedListener::adopt(socket.into(), &path);
    assert!(!listener.owns_path());
    assert!(listener.accept().unwrap().is_none());
    drop(listener);
    assert!(path.exists());
}
