use std::os::unix::net::UnixListener;

use super::*;

const SOON: Duration = Duration::from_secs(5);

#[test]
fn messages_keep_their_boundaries_and_descriptors() {
    let (mut a, mut b) = Channel::pair().unwrap();
    let file = tempfile::tempfile().unwrap();
    a.send(&1u32, &[file.as_fd()], SOON).unwrap();
    a.send(&2u32, &[], SOON).unwrap();
    let (first, fds) = b.receive::<u32>(SOON).unwrap();
    assert_eq!((first, fds.len()), (1, 1));
    let (second, fds) = b.receive::<u32>(SOON).unwrap();
    assert_eq!((second, fds.len()), (2, 0));
    assert!(b.try_receive::<u32>().unwrap().is_none());
    drop(a);
    assert!(matches!(b.receive::<u32>(SOON), Err(ChannelError::Closed)));
}

#[test]
fn a_message_over_a_limit_is_not_sent() {
    let (mut a, mut b) = Channel::pair().unwrap();
    let long = vec![0u8; MAX_MESSAGE];
    let error = a.send(&long, &[], SOON).unwrap_err();
    assert!(matches!(error, ChannelError::TooLarge { .. }), "{error}");
    let file = tempfile::tempfile().unwrap();
    let error = a
        .send(&0u8, &[file.as_fd(); MAX_FDS + 1], SOON)
        .unwrap_err();
    assert!(matches!(error, ChannelError::TooLarge { .. }), "{error}");
    assert!(b.try_receive::<u8>().unwrap().is_none());
}

#[test]
fn a_full_queue_is_said_and_waited_for() {
    let (mut a, mut b) = Channel::pair().unwrap();
    let mut sent = 0u64;
    while a.try_send(&sent, &[]).unwrap() {
        sent += 1;
    }
    let short = Duration::from_millis(1);
    let error = a.send(&sent, &[], short).unwrap_err();
    assert!(matches!(error, ChannelError::TimedOut(_)), "{error}");
    for expected in 0..sent {
        assert_eq!(b.receive::<u64>(SOON).unwrap().0, expected);
    }
    a.send(&sent, &[], SOON).unwrap();
}

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
