//! A host's certificate and key, and the CAs that it accepts.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    CertificateError, ClientConfig, ClientConnection, Error, InconsistentKeys, RootCertStore,
    ServerConfig, ServerConnection,
    client::{
        Resumption, WebPkiServerVerifier, danger::ServerCertVerifier,
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, ring::default_provider},
    pki_types::{
        CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
        pem::PemObject,
    },
    server::{
        NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier, danger::ClientCertVerifier,
    },
    sign::{CertifiedKey, SingleCertAndKey},
    version::TLS13,
};

use crate::{
    Certificate, Date, Fault, PkiError,
    verifier::{Keeping, Presented},
};

/// The file with the CAs' certificates.
pub const CA_CERT: &str = "ca-cert.pem";

/// The CA's key; only on the host that issues certificates.
pub const CA_KEY: &str = "ca-key.pem";

/// The file with the CAs' revocation lists, if there are some.
pub const CA_CRL: &str = "ca-crl.pem";

/// Longest file, bytes.
const MAX_FILE: u64 = 4 << 20;

/// The application protocol (ALPN, RFC 7301): a session with another server that has certificates of
/// the same CA, such as QEMU's or libvirt's, is refused.
const ALPN: &[u8] = b"farside";

/// The files of a certificate and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyPair {
    /// The certificate, followed by its intermediate CAs, if any.
    pub certificate: &'static str,
    /// The private key.
    pub key: &'static str,
}

/// The side of a connection that presents a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// A lender.
    Server,
    /// A backend or tool.
    Client,
}

impl Side {
    /// Its files.
    pub fn files(self) -> KeyPair {
        match self {
            Self::Server => KeyPair {
                certificate: "server-cert.pem",
                key: "server-key.pem",
            },
            Self::Client => KeyPair {
                certificate: "client-cert.pem",
                key: "client-key.pem",
            },
        }
    }

    /// The authentication that extendedKeyUsage names.
    pub fn purpose(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

/// The certificates of one side of this host, as loaded.
#[derive(Debug)]
pub struct Credentials {
    directory: PathBuf,
    side: Side,
    key: Arc<CertifiedKey>,
    own: Certificate,
    /// The last of the CAs' certificates expires then.
    cas_until: Date,
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
    clients: Arc<dyn ClientCertVerifier>,
    servers: Arc<dyn ServerCertVerifier>,
}

impl Credentials {
    /// Loads the files of `side` from `directory`, and checks them.
    pub fn load(directory: &Path, side: Side) -> Result<Self, PkiError> {
        Self::load_by(directory, side, &open)
    }

    /// As [`Credentials::load`]; `open` opens the files, for a process that may not.
    pub fn load_by(directory: &Path, side: Side, open: Open<'_>) -> Result<Self, PkiError> {
        let files = side.files();
        let provider = Arc::new(default_provider());
        let (roots, cas_until) = load_roots(&directory.join(CA_CERT), open)?;
        let crls = load_crls(&directory.join(CA_CRL), open)?;
        let certificate = directory.join(files.certificate);
        let chain = load_chain(&certificate, open)?;
        let key = load_key(&directory.join(files.key), open)?;
        let invalid = |why: String| PkiError::Invalid {
            path: certificate.clone(),
            why,
        };
        let own = chain.first().map(|der| Certificate::parse(der));
        let own = own.ok_or_else(|| PkiError::Empty {
            path: certificate.clone(),
        })?;
        let own = own.map_err(invalid)?;
        let key = CertifiedKey::from_der(chain, key, &provider).map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => PkiError::Mismatch {
                certificate: certificate.clone(),
                key: directory.join(files.key),
            },
            other => other.into(),
        })?;
        let roots = Arc::new(roots);
        let invalid_roots = |error: rustls::server::VerifierBuilderError| PkiError::Invalid {
            path: directory.join(CA_CRL),
            why: error.to_string(),
        };
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .with_crls(crls.clone())
            .only_check_end_entity_revocation()
            .build()
            .map_err(invalid_roots)?;
        let servers = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
            .with_crls(crls)
            .only_check_end_entity_revocation()
            .build()
            .map_err(invalid_roots)?;
        let loaded = Self {
            directory: directory.to_owned(),
            side,
            key: Arc::new(key),
            own,
            cas_until,
            roots,
            provider,
            clients,
            servers,
        };
        loaded.check()?;
        Ok(loaded)
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The file of the own certificate.
    pub fn certificate_file(&self) -> PathBuf {
        self.directory.join(self.side.files().certificate)
    }

    /// This host's certificate.
    pub fn own(&self) -> &Certificate {
        &self.own
    }

    /// Verifies the own certificate as a peer with the same CAs would, now.
    pub fn check(&self) -> Result<(), PkiError> {
        self.check_cas()?;
        let chain = &self.key.cert;
        let (end_entity, intermediates) = chain.split_at(chain.len().min(1));
        let Some(end_entity) = end_entity.first() else {
            return Ok(());
        };
        let now = UnixTime::now();
        let verified = match self.side {
            Side::Client => self
                .clients
                .verify_client_cert(end_entity, intermediates, now)
                .map(drop),
            Side::Server => ParsedCertificate::try_from(end_entity).and_then(|parsed| {
                verify_server_cert_signed_by_trust_anchor(
                    &parsed,
                    &self.roots,
                    intermediates,
                    now,
                    self.provider.signature_verification_algorithms.all,
                )
            }),
        };
        let fault = match verified {
            Ok(()) if self.side == Side::Client && self.own.host().is_none() => {
                Fault::Other(CertificateError::NotValidForName)
            }
            Ok(()) => return Ok(()),
            Err(Error::InvalidCertificate(error)) => {
                Fault::new(error, &self.own, self.side.purpose())
            }
            Err(other) => return Err(other.into()),
        };
        Err(PkiError::Own {
            path: self.certificate_file(),
            subject: self.own.subject.clone(),
            fault,
        })
    }

    /// Fails if all CAs have expired. rustls does not check their dates.
    fn check_cas(&self) -> Result<(), PkiError> {
        match self.cas_until < Date::now() {
            false => Ok(()),
            true => Err(PkiError::Own {
                path: self.directory.join(CA_CERT),
                subject: "the last of the CAs".to_owned(),
                fault: Fault::Expired(self.cas_until),
            }),
        }
    }

    /// A session of a lender with a peer that has connected to it.
    pub fn accept(&self) -> Result<(ServerConnection, Presented), PkiError> {
        self.check_cas()?;
        let presented = Presented::default();
        let verifier: Arc<dyn ClientCertVerifier> = Arc::new(Keeping {
            presented: presented.clone(),
            verifier: self.clients.clone(),
        });
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(self.resolver());
        config.alpn_protocols = vec![ALPN.to_vec()];
        // For the processes that move data over the connection, and have no certificates.
        config.enable_secret_extraction = true;
        // Each connection presents its certificate, so an expired one is not resumed.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok((ServerConnection::new(Arc::new(config))?, presented))
    }

    /// A session with the lender at `host`, a name or an IP address, which its certificate must have.
    pub fn connect(&self, host: &str) -> Result<(ClientConnection, Presented), PkiError> {
        self.check_cas()?;
        // The scope of an IPv6 address means something on this host alone.
        let name = host.split('%').next().unwrap_or(host).to_owned();
        let name = ServerName::try_from(name).map_err(|_| PkiError::Name(host.to_owned()))?;
        let presented = Presented::default();
        let verifier: Arc<dyn ServerCertVerifier> = Arc::new(Keeping {
            presented: presented.clone(),
            verifier: self.servers.clone(),
        });
        let mut config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_cert_resolver(self.resolver());
        config.alpn_protocols = vec![ALPN.to_vec()];
        // For the processes that move data over the connection, and have no certificates.
        config.enable_secret_extraction = true;
        config.resumption = Resumption::disabled();
        Ok((ClientConnection::new(Arc::new(config), name)?, presented))
    }

    fn resolver(&self) -> Arc<SingleCertAndKey> {
        Arc::new(SingleCertAndKey::from(self.key.clone()))
    }
}

/// Opens a file.
pub type Open<'a> = &'a dyn Fn(&Path) -> io::Result<File>;

pub(crate) fn open(path: &Path) -> io::Result<File> {
    File::open(path)
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, PkiError> {
    read_by(path, &open)
}

/// Reads a file of bounded length.
fn read_by(path: &Path, open: Open<'_>) -> Result<Vec<u8>, PkiError> {
    let failed = |source| PkiError::Read {
        path: path.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    let file = open(path).map_err(failed)?;
    file.take(MAX_FILE + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    match bytes.len() as u64 > MAX_FILE {
        false => Ok(bytes),
        true => Err(PkiError::TooLong {
            path: path.to_owned(),
            limit: MAX_FILE,
        }),
    }
}

/// The CAs that are valid now, and until when the last of them is.
fn load_roots(path: &Path, open: Open<'_>) -> Result<(RootCertStore, Date), PkiError> {
    let now = Date::now();
    let mut roots = RootCertStore::empty();
    let mut until = None;
    let mut fault = None;
    for der in load_chain(path, open)? {
        let invalid = |why: String| PkiError::Invalid {
            path: path.to_owned(),
            why,
        };
        let ca = Certificate::parse(&der).map_err(invalid)?;
        if ca.not_after < now || ca.not_before > now {
            let expired = Fault::Expired(ca.not_after);
            let fault_of_ca = match ca.not_after < now {
                true => expired,
                false => Fault::NotYet(ca.not_before),
            };
            fault = Some((ca.subject, fault_of_ca));
            continue;
        }
        let added = roots.add(der);
        added.map_err(|error| invalid(error.to_string()))?;
        until = until.max(Some(ca.not_after));
    }
    match (until, fault) {
        (Some(until), _) => Ok((roots, until)),
        (None, Some((subject, fault))) => Err(PkiError::Own {
            path: path.to_owned(),
            subject,
            fault,
        }),
        (None, None) => Err(PkiError::Empty {
            path: path.to_owned(),
        }),
    }
}

pub(crate) fn load_crls(
    path: &Path,
    open: Open<'_>,
) -> Result<Vec<CertificateRevocationListDer<'static>>, PkiError> {
    let text = match read_by(path, open) {
        Ok(text) => text,
        Err(PkiError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let crls: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&text).collect();
    let why = match crls {
        Ok(crls) if !crls.is_empty() => return Ok(crls),
        Ok(_) => "no revocation list (-----BEGIN X509 CRL-----)".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(PkiError::Invalid {
        path: path.to_owned(),
        why,
    })
}

fn load_chain(path: &Path, open: Open<'_>) -> Result<Vec<CertificateDer<'static>>, PkiError> {
    let text = read_by(path, open)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match chain {
        Ok(chain) if chain.is_empty() => Err(PkiError::Empty {
            path: path.to_owned(),
        }),
        Ok(chain) => Ok(chain),
        Err(error) => Err(PkiError::Invalid {
            path: path.to_owned(),
            why: error.to_string(),
        }),
    }
}

fn load_key(path: &Path, open: Open<'_>) -> Result<PrivateKeyDer<'static>, PkiError> {
    const OTHERS_READ: u32 = 0o004;
    let file = open(path);
    let meta = file.and_then(|file| file.metadata());
    let meta = meta.map_err(|source| PkiError::Read {
        path: path.to_owned(),
        source,
    })?;
    if meta.mode() & OTHERS_READ != 0 {
        return Err(PkiError::Readable {
            path: path.to_owned(),
            mode: meta.mode() & 0o7777,
        });
    }
    PrivateKeyDer::from_pem_slice(&read_by(path, open)?).map_err(|error| PkiError::Invalid {
        path: path.to_owned(),
        why: error.to_string(),
    })
}

/// Whether a session agreed on farside's application protocol.
pub fn is_farside(protocol: Option<&[u8]>) -> bool {
    protocol == Some(ALPN)
}
