//! TLS between real sockets: who is accepted, and what refused peers are told.

#[path = "tls/clock.rs"]
mod clock;

use std::{
    fs::Permissions,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};

use farside_error_chain::Chain;
use farside_lender_protocol::{Address, Channel, ChannelError, Identity, Listener, TlsError};
use farside_pki::{
    Certificate, Credentials, Renewed, Side,
    issue::{self, Validity},
};
use rustix::event::{PollFd, PollFlags, poll};
use rustls::{
    ClientConfig, Connection, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

const SOON: Duration = Duration::from_secs(20);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A CA, and the directories of hosts.
struct Site(tempfile::TempDir);

impl Site {
    fn new() -> Self {
        Self::of_ca("test CA")
    }

    fn of_ca(name: &str) -> Self {
        let site = Self(tempfile::tempdir().unwrap());
        issue::init(site.0.path(), name, Validity::days(2), false).unwrap();
        site
    }

    /// The directory of `host`, with new certificates.
    fn host(&self, host: &str) -> PathBuf {
        self.host_valid(host, Validity::days(1))
    }

    fn host_valid(&self, host: &str, validity: Validity) -> PathBuf {
        let dir = self.0.path().join(host);
        issue::issue(self.0.path(), host, &[], validity, &dir, true).unwrap();
        dir
    }

    /// Issues to `localhost` and its IPv4 address.
    fn lender(&self) -> PathBuf {
        let dir = self.0.path().join("localhost");
        let local = ["127.0.0.1".parse().unwrap()];
        let (ca, days) = (self.0.path(), Validity::days(1));
        issue::issue(ca, "localhost", &local, days, &dir, true).unwrap();
        dir
    }
}

fn past() -> Validity {
    let now = SystemTime::now();
    Validity {
        from: now - 2 * DAY,
        until: now - DAY,
    }
}

fn future() -> Validity {
    let now = SystemTime::now();
    Validity {
        from: now + DAY,
        until: now + 2 * DAY,
    }
}

type Heard = Result<(Identity, u32), ChannelError>;

/// A lender that echoes numbers, and reports each peer's first one, or its error.
struct Echo {
    port: u16,
    heard: mpsc::Receiver<Heard>,
    stop: farside_daemon::Wakeup,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    fn start(pki: &Path) -> Self {
        let certificates = Arc::new(Renewed::load(pki, Side::Server).unwrap());
        let listener = Listener::bind_tcp("127.0.0.1", 0, Some(certificates)).unwrap();
        let Address::Tls { port, .. } = listener.address() else {
            panic!("{}", listener.address());
        };
        let (report, heard) = mpsc::channel();
        let stop = farside_daemon::Wakeup::new().unwrap();
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            loop {
                let mut fds = [
                    PollFd::new(&listener, PollFlags::IN),
                    PollFd::new(&stopped, PollFlags::IN),
                ];
                poll(&mut fds, None).unwrap();
                if !fds[1].revents().is_empty() {
                    return;
                }
                while let Some(mut channel) = listener.accept().unwrap() {
                    let report = report.clone();
                    std::thread::spawn(move || {
                        let mut receive = || channel.receive::<u32>(SOON).map(|(n, _)| n);
                        let first = receive();
                        let first = first.map(|n| (channel.identity().unwrap(), n));
                        let number = first.as_ref().ok().map(|(_, n)| *n);
                        let _ = report.send(first);
                        let mut number = number;
                        while let Some(n) = number {
                            number = channel
                                .send(&n, &[], SOON)
                                .and_then(|()| channel.receive::<u32>(SOON))
                                .ok()
                                .map(|(n, _)| n);
                        }
                    });
                }
            }
        });
        Self {
            port,
            heard,
            stop,
            thread: Some(thread),
        }
    }

    fn connect(&self, host: &str, pki: &Path) -> std::io::Result<Channel> {
        let address = format!("tls:{host}:{}", self.port).parse().unwrap();
        Channel::connect(&address, pki, SOON)
    }

    /// Sends a number and receives it again; the error is the whole chain.
    fn exchange(&self, host: &str, pki: &Path) -> Result<(), String> {
        let connected = self.connect(host, pki);
        let mut channel = connected.map_err(|error| Chain(&error).to_string())?;
        let answer = channel
            .send(&7u32, &[], SOON)
            .and_then(|()| channel.receive::<u32>(SOON));
        let (number, _) = answer.map_err(|error| Chain(&error).to_string())?;
        assert_eq!(number, 7);
        Ok(())
    }

    fn socket(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).unwrap()
    }

    fn heard(&self) -> Heard {
        self.heard.recv_timeout(SOON).unwrap()
    }

    #[track_caller]
    fn heard_error(&self, words: &[&str]) {
        let error = self.heard().unwrap_err();
        assert_words(&Chain(&error).to_string(), words);
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.raise();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

#[track_caller]
fn assert_words(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "no {word:?} in {error}");
    }
}

#[test]
fn hosts_know_each_other_by_the_names_in_their_certificates() {
    let site = Site::new();
    let echo = Echo::start(&site.lender());
    let rack = site.host("Rack1-A");
    echo.exchange("localhost", &rack).unwrap();
    let (identity, number) = echo.heard().unwrap();
    assert_eq!(number, 7);
    assert!(
        matches!(&identity, Identity::Host { name, .. } if name == "rack1-a"),
        "{identity}"
    );
    // By an address that is in the lender's certificate.
    echo.exchange("127.0.0.1", &rack).unwrap();
    echo.heard().unwrap();
}

#[test]
fn a_lender_of_another_name_or_ca_is_refused_by_its_client() {
    let site = Site::new();
    let client = site.host("rack1-a");
    // The right CA, but another host's certificate.
    let echo = Echo::start(&site.host("rack1-b"));
    let error = echo.exchange("localhost", &client).unwrap_err();
    assert_words(&error, &["CN=rack1-b", "is for rack1-b, not for localhost"]);
    echo.heard_error(&["refuses the connection"]);
    // Another CA, and another one of the same name.
    for ca in ["other CA", "test CA"] {
        let other = Site::of_ca(ca);
        let echo = Echo::start(&other.lender());
        let error = echo.exchange("localhost", &client).unwrap_err();
        let words = ["CN=localhost", "not issued by a CA in ca-cert.pem", ca];
        assert_words(&error, &words);
        echo.heard_error(&["this host's certificate is not issued by a CA of the peer"]);
    }
}

#[test]
fn a_client_of_another_ca_is_refused_and_told_so() {
    let (site, other) = (Site::new(), Site::of_ca("other CA"));
    let echo = Echo::start(&site.lender());
    let error = rogue(&other.host("rack1-a"), &site, echo.socket());
    assert!(error.contains("UnknownCA"), "{error}");
    echo.heard_error(&["CN=rack1-a", "not issued by a CA in ca-cert.pem"]);
    // A host that accepts the lender's CA finds the fault by itself.
    let stranger = other.host("rack1-a");
    let ca = "ca-cert.pem";
    std::fs::copy(site.0.path().join(ca), stranger.join(ca)).unwrap();
    let path = stranger.join("client-cert.pem").display().to_string();
    let error = echo.exchange("localhost", &stranger).unwrap_err();
    assert_words(&error, &[&path, "not issued by a CA in ca-cert.pem"]);
}

#[test]
fn expired_and_early_certificates_are_named_with_their_date() {
    let site = Site::new();
    let echo = Echo::start(&site.lender());
    for (validity, words) in [(past(), "expired on "), (future(), "is not valid before ")] {
        let dir = site.host_valid("rack1-a", validity);
        let issued = Certificate::of_file(&dir.join("client-cert.pem")).unwrap();
        let date = match words {
            "expired on " => issued[0].not_after,
            _ => issued[0].not_before,
        };
        let dated = format!("{words}{date}");
        // This host's own.
        for side in [Side::Client, Side::Server] {
            let path = dir.join(side.files().certificate).display().to_string();
            let error = Credentials::load(&dir, side).unwrap_err().to_string();
            assert_words(&error, &[&path, "CN=rack1-a", &dated]);
        }
        let error = echo.exchange("localhost", &dir).unwrap_err();
        assert_words(&error, &["client-cert.pem", &dated]);
        // The peer's.
        let error = rogue(&dir, &site, echo.socket());
        assert!(error.contains("CertificateExpired"), "{error}");
        echo.heard_error(&["CN=rack1-a", &dated]);
    }
}

#[test]
fn a_lenders_expired_certificate_is_named_by_its_client() {
    let site = Site::new();
    let client = site.host("rack1-a");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let dir = site.host_valid("localhost", past());
    let lender = std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let config = Arc::new(server_config(&dir));
        let mut connection: Connection = rustls::ServerConnection::new(config).unwrap().into();
        complete(&mut connection, &socket).unwrap_err()
    });
    let address = format!("tls:localhost:{port}").parse().unwrap();
    let error = Channel::connect(&address, &client, SOON).unwrap_err();
    assert_words(&Chain(&error).to_string(), &["(CN=localhost) expired on "]);
    assert!(lender.join().unwrap().contains("CertificateExpired"));
}

#[test]
fn a_client_without_a_certificate_is_refused() {
    let site = Site::new();
    let echo = Echo::start(&site.lender());
    let mut config = client_config(&site).with_no_client_auth();
    config.alpn_protocols = vec![b"farside".to_vec()];
    let error = handshake(config, echo.socket());
    assert!(error.contains("CertificateRequired"), "{error}");
    echo.heard_error(&["no certificate"]);
}

#[test]
fn a_server_certificate_is_none_of_a_client() {
    let site = Site::new();
    let echo = Echo::start(&site.lender());
    let dir = site.host("rack1-a");
    for kind in ["cert.pem", "key.pem"] {
        let [from, to] = ["server", "client"].map(|side| dir.join(format!("{side}-{kind}")));
        std::fs::copy(from, to).unwrap();
    }
    rogue(&dir, &site, echo.socket());
    echo.heard_error(&["CN=rack1-a", "client authentication"]);
}

#[test]
fn a_session_of_another_protocol_is_refused() {
    let site = Site::new();
    let echo = Echo::start(&site.lender());
    let (chain, key) = own(&site.host("rack1-a"), Side::Client);
    let config = client_config(&site).with_client_auth_cert(chain, key);
    // A client of another server that has certificates of the same CA.
    let mut config = config.unwrap();
    handshake(config.clone(), echo.socket());
    echo.heard_error(&["ALPN"]);
    config.alpn_protocols = vec![b"h2".to_vec()];
    let error = handshake(config, echo.socket());
    assert!(error.contains("NoApplicationProtocol"), "{error}");
    echo.heard_error(&["farside's protocol"]);
}

#[test]
fn neither_side_falls_back_to_plain_tcp() {
    let site = Site::new();
    let client = site.host("rack1-a");
    // A plain client at a port with TLS.
    let echo = Echo::start(&site.lender());
    let plain: Address = format!("tcp:127.0.0.1:{}", echo.port).parse().unwrap();
    let mut channel = Channel::connect(&plain, &client, SOON).unwrap();
    channel.send(&7u32, &[], SOON).unwrap();
    let error = channel.receive::<u32>(SOON).unwrap_err();
    assert!(matches!(error, ChannelError::Foreign(_)), "{error}");
    assert_words(&error.to_string(), &["tls:HOST:PORT"]);
    echo.heard_error(&["does not use TLS", "tls:HOST:PORT"]);
    // The reverse.
    let listener = Listener::bind_tcp("127.0.0.1", 0, None).unwrap();
    let Address::Tcp { port, .. } = listener.address() else {
        panic!("{}", listener.address());
    };
    let lender = std::thread::spawn(move || {
        poll(&mut [PollFd::new(&listener, PollFlags::IN)], None).unwrap();
        let mut channel = listener.accept().unwrap().unwrap();
        channel.receive::<u32>(SOON).unwrap_err().to_string()
    });
    let address = format!("tls:localhost:{port}").parse().unwrap();
    let error = Channel::connect(&address, &client, SOON).unwrap_err();
    assert_words(&Chain(&error).to_string(), &["tcp:HOST:PORT"]);
    assert_words(&lender.join().unwrap(), &["which is TLS", "tls:HOST:PORT"]);
}

#[test]
fn garbage_and_long_records_end_the_connection() {
    let site = Site::new();
    let echo = Echo::start(&site.lender());
    for (bytes, words) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "does not use TLS"),
        (&[0xff; 100], "does not use TLS"),
        // A handshake record of 65535 bytes, and one of none.
        (&[22, 3, 1, 0xff, 0xff], "over the limit"),
        (&[22, 3, 1, 0, 0], "without content"),
        // No ClientHello.
        (&[22, 3, 1, 0, 4, 9, 0, 0, 0], "TLS failed"),
        (&[23, 3, 3, 0, 4, 9, 0, 0, 0], "TLS failed"),
    ] {
        let mut socket = echo.socket();
        socket.write_all(bytes).unwrap();
        echo.heard_error(&[words]);
        // Until the lender has closed it, or reset it.
        let _ = socket.read_to_end(&mut Vec::new());
    }
    // A peer that connects and goes leaves nothing to report.
    drop(echo.socket());
    assert!(matches!(echo.heard(), Err(ChannelError::Closed)));
}

#[test]
fn a_stalled_handshake_holds_up_nobody() {
    let site = Site::new();
    let echo = Echo::start(&site.lender());
    let mut stalled = Vec::new();
    for bytes in [&b""[..], &[22], &[22, 3, 1, 2, 0, 1]] {
        let mut socket = echo.socket();
        socket.write_all(bytes).unwrap();
        stalled.push(socket);
    }
    echo.exchange("localhost", &site.host("rack1-a")).unwrap();
    echo.heard().unwrap();
    drop(stalled);
    // The client's deadline covers the handshake.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = format!("tls:localhost:{port}").parse().unwrap();
    let patience = Duration::from_millis(50);
    let started = Instant::now();
    let error = Channel::connect(&address, &site.host("rack1-a"), patience).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
    assert!(started.elapsed() >= patience && started.elapsed() < SOON);
}

/// Nothing that is decrypted may wait where poll(2) does not see it.
#[test]
fn two_messages_in_one_record_end_the_connection() {
    let site = Site::new();
    let (client, lender) = (site.host("rack1-a"), site.lender());
    let credentials = Credentials::load(&client, Side::Client).unwrap();
    let frame = [1, 0, 0, 0, 7];
    let echo = Echo::start(&lender);
    for (sent, good) in [
        (frame.to_vec(), true),
        (frame.repeat(2), false),
        ([&frame[..], &[9]].concat(), false),
    ] {
        let (connection, _) = credentials.connect("localhost").unwrap();
        let mut connection: Connection = connection.into();
        let socket = echo.socket();
        complete(&mut connection, &socket).unwrap();
        connection.writer().write_all(&sent).unwrap();
        connection.write_tls(&mut &socket).unwrap();
        match echo.heard() {
            Ok((_, number)) => assert!(good && number == 7),
            Err(ChannelError::Tls(TlsError::Record(_))) => assert!(!good),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn renewed_certificates_are_used_and_broken_ones_are_not() {
    let site = Site::new();
    let pki = site.lender();
    let echo = Echo::start(&pki);
    let client = site.host("rack1-a");
    let shown = || {
        let credentials = Credentials::load(&client, Side::Client).unwrap();
        let (connection, presented) = credentials.connect("localhost").unwrap();
        complete(&mut connection.into(), &echo.socket()).unwrap();
        presented.certificate().unwrap().key
    };
    let first = shown();
    assert_eq!(shown(), first);
    let mut early = echo.connect("localhost", &client).unwrap();
    site.lender();
    let second = shown();
    assert_ne!(second, first);
    // A session that is established goes on.
    early.send(&1u32, &[], SOON).unwrap();
    assert_eq!(early.receive::<u32>(SOON).unwrap().0, 1);
    // Broken: the key of another certificate, no PEM, no file.
    let key = pki.join("server-key.pem");
    let good = std::fs::read(&key).unwrap();
    let other = std::fs::read(pki.join("client-key.pem")).unwrap();
    for broken in [Some(&other[..]), Some(b"-----BEGIN"), None] {
        match broken {
            Some(bytes) => std::fs::write(&key, bytes).unwrap(),
            None => std::fs::remove_file(&key).unwrap(),
        }
        assert_eq!(shown(), second);
    }
    std::fs::write(&key, good).unwrap();
    std::fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    assert_eq!(shown(), second);
    site.lender();
    assert_ne!(shown(), second);
}

#[test]
fn a_revoked_certificate_is_refused_by_a_lender_that_runs() {
    const LIST: &str = "ca-crl.pem";
    let site = Site::new();
    let lender = site.lender();
    let echo = Echo::start(&lender);
    let (revoked, other) = (site.host("rack1-a"), site.host("rack1-b"));
    let publish = |certificates: &[PathBuf], to: &Path| {
        farside_pki::revoke(site.0.path(), certificates, 1).unwrap();
        std::fs::copy(site.0.path().join(LIST), to.join(LIST)).unwrap();
    };
    // An empty list.
    publish(&[], &lender);
    let mut early = echo.connect("localhost", &revoked).unwrap();
    early.send(&1u32, &[], SOON).unwrap();
    echo.heard().unwrap();
    publish(&[revoked.join("client-cert.pem")], &lender);
    let error = echo.exchange("localhost", &revoked).unwrap_err();
    assert_words(&error, &["this host's certificate is revoked"]);
    echo.heard_error(&["CN=rack1-a", "is revoked"]);
    echo.exchange("localhost", &other).unwrap();
    echo.heard().unwrap();
    // A later list keeps the earlier entries, and the reverse direction is checked, too.
    publish(&[lender.join("server-cert.pem")], &other);
    let error = echo.exchange("localhost", &other).unwrap_err();
    assert_words(&error, &["CN=localhost", "is revoked"]);
    echo.heard_error(&["this host's certificate is revoked"]);
    publish(&[], &lender);
    echo.exchange("localhost", &revoked).unwrap_err();
    echo.heard_error(&["CN=rack1-a", "is revoked"]);
    // A session that is established goes on.
    assert_eq!(early.receive::<u32>(SOON).unwrap().0, 1);
}

// Clients and servers that do not check themselves.

type Own = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn own(dir: &Path, side: Side) -> Own {
    let files = side.files();
    let certificate = CertificateDer::from_pem_file(dir.join(files.certificate));
    let key = PrivateKeyDer::from_pem_file(dir.join(files.key));
    (vec![certificate.unwrap()], key.unwrap())
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A client that accepts `site`'s lenders.
fn client_config(
    site: &Site,
) -> rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert> {
    let ca = CertificateDer::from_pem_file(site.0.path().join("ca-cert.pem"));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(ca.unwrap()).unwrap();
    ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
}

fn server_config(dir: &Path) -> ServerConfig {
    let (chain, key) = own(dir, Side::Server);
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key);
    let mut config = config.unwrap();
    config.alpn_protocols = vec![b"farside".to_vec()];
    config
}

/// Presents the client certificate in `dir`; returns the error.
fn rogue(dir: &Path, site: &Site, socket: TcpStream) -> String {
    let (chain, key) = own(dir, Side::Client);
    let config = client_config(site).with_client_auth_cert(chain, key);
    let mut config = config.unwrap();
    config.alpn_protocols = vec![b"farside".to_vec()];
    handshake(config, socket)
}

/// Connects, and reads until the error.
fn handshake(config: ClientConfig, socket: TcpStream) -> String {
    let name = "localhost".try_into().unwrap();
    let connection = rustls::ClientConnection::new(Arc::new(config), name);
    let mut connection: Connection = connection.unwrap().into();
    if let Err(error) = complete(&mut connection, &socket) {
        return error;
    }
    loop {
        match connection.complete_io(&mut &socket) {
            Ok((0, 0)) => return "closed".to_owned(),
            Ok(_) => {}
            Err(error) => return format!("{error:?}"),
        }
    }
}

fn complete(connection: &mut Connection, mut socket: &TcpStream) -> Result<(), String> {
    while connection.is_handshaking() || connection.wants_write() {
        let done = connection.complete_io(&mut socket);
        done.map_err(|error| format!("{error:?}"))?;
    }
    Ok(())
}
