//! Clocks that differ by more than certificates are valid for.

use rustls::{pki_types::UnixTime, server::WebPkiClientVerifier, time_provider::TimeProvider};

use super::*;

/// A clock that is ahead of this host's by so many seconds.
#[derive(Debug)]
struct Ahead(i64);

impl TimeProvider for Ahead {
    fn current_time(&self) -> Option<UnixTime> {
        let now = UnixTime::now().as_secs().checked_add_signed(self.0)?;
        Some(UnixTime::since_unix_epoch(Duration::from_secs(now)))
    }
}

/// A lender whose clock has another day refuses a certificate that is valid here, by an alert alone.
#[test]
fn a_peers_other_clock_is_named() {
    let site = Site::new();
    let client = site.host("rack1-a");
    let dir = site.lender();
    let day = DAY.as_secs() as i64;
    for (skew, accepted) in [(0, true), (day * 3 / 2, false), (-day, false)] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut roots = rustls::RootCertStore::empty();
        let ca = CertificateDer::from_pem_file(site.0.path().join("ca-cert.pem"));
        roots.add(ca.unwrap()).unwrap();
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider());
        let (chain, key) = own(&dir, Side::Server);
        let config = ServerConfig::builder_with_details(provider(), Arc::new(Ahead(skew)))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(chain, key);
        let mut config = config.unwrap();
        config.alpn_protocols = vec![b"farside".to_vec()];
        let lender = std::thread::spawn(move || {
            let (socket, _) = listener.accept().unwrap();
            let connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
            complete(&mut connection.into(), &socket)
        });
        let address = format!("tls:localhost:{port}").parse().unwrap();
        let answered = Channel::connect(&address, &client, SOON)
            .map_err(|error| Chain(&error).to_string())
            .and_then(|mut channel| {
                let answer = channel.receive::<u32>(SOON);
                answer.map_err(|error| Chain(&error).to_string())
            });
        // The lender closes the connection in any case.
        let error = answered.unwrap_err();
        let named = error.contains("has expired, or is not valid yet, by the peer's clock");
        assert_eq!(named, !accepted, "{skew}: {error}");
        assert_eq!(lender.join().unwrap().is_ok(), accepted, "{skew}");
    }
}
