use std::os::unix::net::UnixListener;

use std::time::Duration;

use super::*;

const SOON: Duration = Duration::from_secs(5);

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lender.sock");
    // Left behind: bound, then closed without an unlink.
    let socket = new_socket().unwrap();
    bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    drop(socket);
    let listener = Listener::bind(&path).unwrap();
    let mode = std::fs::metadata(&path).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);

    let error = Listener::bind(&path).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    assert!(error.to_string().contains("another process listens"));
    Channel::connect(&path.clone().into(), SOON).unwrap();
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn what_is_no_socket_of_ours_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let error = Listener::bind(&file).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{error}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");

    let stream = dir.path().join("stream");
    let _other = UnixListener::bind(&stream).unwrap();
    let error = Listener::bind(&stream).unwrap_err();
    assert!(error.to_string().contains("no lender's socket"), "{error}");

    let missing = dir.path().join("no/such/folder/sock");
    let error = Listener::bind(&missing).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    assert!(error.to_string().contains("no/such/folder"), "{error}");
}

#[test]
fn a_socket_that_another_process_put_there_is_not_unlinked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lender.sock");
    let first = Listener::bind(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let _second = Listener::bind(&path).unwrap();
    drop(first);
    assert!(path.exists());
}

#[test]
fn connecting_does_not_wait_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lender.sock");
    let socket = new_socket().unwrap();
    bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&socket, 0).unwrap();
    let mut waiting = Vec::new();
    let error = loop {
        match Channel::connect(&path.clone().into(), Duration::from_millis(20)) {
            Ok(channel) => waiting.push(channel),
            Err(error) => break error,
        }
        assert!(waiting.len() < 100, "the backlog has no end");
    };
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[test]
fn a_socket_that_somebody_else_made_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lender.sock");
    let address = SocketAddrUnix::new(&path).unwrap();
    let socket = new_socket().unwrap();
    bind(&socket, &address).unwrap();
    listen(&socket, 1).unwrap();
    let listener = Listener::adopt(socket, &path);
    assert_eq!(listener.address(), Address::Unix(path.clone()));
    assert!(listener.accept().unwrap().is_none());
    drop(listener);
    assert!(path.exists());
}

#[test]
fn an_address_that_the_internet_reaches_is_not_private_in_any_spelling() {
    for (address, private) in [
        ("10.0.0.1", true),
        ("::ffff:10.0.0.1", true),
        ("169.254.1.1", true),
        ("fe80::1", true),
        ("fd00::1", true),
        ("203.0.113.5", false),
        ("::ffff:203.0.113.5", false),
        ("2001:db8::1", false),
        // A NAT64 translates it (RFC 6052), wherever that is.
        ("64:ff9b::10.0.0.1", false),
        ("0.0.0.0", false),
        ("::", false),
    ] {
        assert_eq!(is_private(address.parse().unwrap()), private, "{address}");
    }
}
