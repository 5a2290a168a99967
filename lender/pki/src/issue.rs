//! A CA for a few hosts.

use std::{
    fs::File,
    io::{self, Write},
    net::IpAddr,
    os::unix::fs::{MetadataExt, OpenOptionsExt, fchown},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};

use crate::{CA_CERT, CA_KEY, PkiError, Side, certificate::is_host_name, credentials::read};

/// Clocks of hosts differ.
const SKEW: Duration = Duration::from_secs(3600);

const DAY: Duration = Duration::from_secs(24 * 3600);

/// When a certificate is valid.
#[derive(Clone, Copy, Debug)]
pub struct Validity {
    /// From then on.
    pub from: SystemTime,
    /// Until then.
    pub until: SystemTime,
}

impl Validity {
    /// From an hour ago, for hosts whose clocks are late, for `days`.
    pub fn days(days: u32) -> Self {
        let now = SystemTime::now();
        Self {
            from: now - SKEW,
            until: now + DAY * days,
        }
    }
}

/// Makes a CA in `directory`: its certificate and its key. Returns the files.
pub fn init(
    directory: &Path,
    name: &str,
    validity: Validity,
    force: bool,
) -> Result<Vec<PathBuf>, PkiError> {
    let failed = |source| PkiError::Issue {
        subject: name.to_owned(),
        source,
    };
    let key = KeyPair::generate().map_err(failed)?;
    let mut params = params(name, validity);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let certificate = params.self_signed(&key).map_err(failed)?;
    Output { directory, force }
        .write(&[(CA_KEY, key.serialize_pem()), (CA_CERT, certificate.pem())])
}

/// Issues the certificates of a host: makes its directory `output`, with the CA in `directory`.
/// Returns the files.
pub fn issue(
    directory: &Path,
    host: &str,
    addresses: &[IpAddr],
    validity: Validity,
    output: &Path,
    force: bool,
) -> Result<Vec<PathBuf>, PkiError> {
    if !is_host_name(host) {
        return Err(PkiError::Name(host.to_owned()));
    }
    let failed = |source| PkiError::Issue {
        subject: host.to_owned(),
        source,
    };
    let ca = Ca::load(directory)?;
    let mut files = Vec::new();
    for (side, purpose) in [
        (Side::Server, ExtendedKeyUsagePurpose::ServerAuth),
        (Side::Client, ExtendedKeyUsagePurpose::ClientAuth),
    ] {
        let mut params = params(host, validity);
        let name = host.to_owned().try_into().map_err(failed)?;
        params.subject_alt_names = vec![SanType::DnsName(name)];
        if side == Side::Server {
            let addresses = addresses.iter().copied();
            params
                .subject_alt_names
                .extend(addresses.map(SanType::IpAddress));
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.signed_by(&key, &ca.issuer).map_err(failed)?;
        files.push((side.files().key, key.serialize_pem()));
        files.push((side.files().certificate, certificate.pem()));
    }
    let same_ca = std::fs::read(output.join(CA_CERT)).is_ok_and(|there| there == ca.pem.as_bytes());
    if !same_ca {
        files.push((CA_CERT, ca.pem));
    }
    Output {
        directory: output,
        force,
    }
    .write(&files)
}

/// A CA, with its key.
pub(crate) struct Ca {
    pem: String,
    pub(crate) der: CertificateDer<'static>,
    pub(crate) issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    /// Loads the CA in `directory`.
    pub(crate) fn load(directory: &Path) -> Result<Self, PkiError> {
        let (ca_cert, ca_key) = (directory.join(CA_CERT), directory.join(CA_KEY));
        let invalid = |path: &Path, why: String| PkiError::Invalid {
            path: path.to_owned(),
            why,
        };
        let pem = text(&ca_cert)?;
        let der = CertificateDer::from_pem_slice(pem.as_bytes())
            .map_err(|error| invalid(&ca_cert, error.to_string()))?;
        let key = KeyPair::from_pem(&text(&ca_key)?)
            .map_err(|error| invalid(&ca_key, error.to_string()))?;
        let certificate = crate::Certificate::parse(&der).map_err(|why| invalid(&ca_cert, why))?;
        if certificate.key != fingerprint(&key) {
            return Err(PkiError::Mismatch {
                certificate: ca_cert,
                key: ca_key,
            });
        }
        let issuer = Issuer::from_ca_cert_der(&der, key)
            .map_err(|error| invalid(&ca_cert, error.to_string()))?;
        Ok(Self { pem, der, issuer })
    }
}

fn params(name: &str, validity: Validity) -> CertificateParams {
    let mut params = CertificateParams::default();
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    params.distinguished_name = subject;
    params.not_before = validity.from.into();
    params.not_after = validity.until.into();
    params
}

fn fingerprint(key: &KeyPair) -> String {
    use rcgen::PublicKeyData;
    let digest = ring::digest::digest(&ring::digest::SHA256, &key.subject_public_key_info());
    digest
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn text(path: &Path) -> Result<String, PkiError> {
    String::from_utf8(read(path)?).map_err(|error| PkiError::Invalid {
        path: path.to_owned(),
        why: error.to_string(),
    })
}

pub(crate) struct Output<'a> {
    pub(crate) directory: &'a Path,
    pub(crate) force: bool,
}

impl Output<'_> {
    /// Writes all files, or none if one of them exists.
    pub(crate) fn write(&self, files: &[(&str, String)]) -> Result<Vec<PathBuf>, PkiError> {
        let at = |name: &str| self.directory.join(name);
        if !self.force {
            let mut paths = files.iter().map(|(name, _)| at(name));
            if let Some(path) = paths.find(|path| path.symlink_metadata().is_ok()) {
                return Err(PkiError::Exists { path });
            }
        }
        let failed = |path: &Path, source| PkiError::Write {
            path: path.to_owned(),
            source,
        };
        std::fs::create_dir_all(self.directory).map_err(|source| failed(self.directory, source))?;
        let mut written = Vec::new();
        for (name, text) in files {
            let path = at(name);
            write(&path, text.as_bytes(), self.force).map_err(|source| failed(&path, source))?;
            written.push(path);
        }
        Ok(written)
    }
}

/// Creates a file. With `force`, atomically replaces another of that name, and keeps its owner and
/// mode: a daemon that reads it may run as another user.
fn write(path: &Path, bytes: &[u8], force: bool) -> io::Result<()> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = if force { Path::new(&fresh) } else { path };
    let mode = match path.to_string_lossy().ends_with("-key.pem") {
        true => 0o600,
        false => 0o644,
    };
    let former = force.then(|| path.symlink_metadata().ok()).flatten();
    if force
        && let Err(error) = std::fs::remove_file(fresh)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(fresh)?;
    if let Some(former) = former.filter(|former| former.is_file()) {
        fchown(&file, Some(former.uid()), Some(former.gid()))?;
        file.set_permissions(former.permissions())?;
    }
    file.write_all(bytes)?;
    file.sync_all()?;
    match force {
        true => std::fs::rename(fresh, path),
        false => Ok(()),
    }
}
