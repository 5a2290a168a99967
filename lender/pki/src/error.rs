//! Errors, with the file or the subject that they are about.

use std::{io, path::PathBuf};

use rustls::CertificateError;

use crate::{Certificate, Date, credentials::CA_CERT};

/// What is wrong with a certificate.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// It has expired.
    #[error("expired on {0}")]
    Expired(Date),
    /// It is not valid yet.
    #[error("is not valid before {0}, and it is {now} (check the clocks)", now = Date::now())]
    NotYet(Date),
    /// Its issuer is not one of the CAs of this host.
    #[error("is not issued by a CA in {CA_CERT} (its issuer: {0})")]
    UnknownIssuer(String),
    /// It is for other names.
    #[error("is for {presented}, not for {expected}")]
    Name {
        /// The names in it.
        presented: String,
        /// The name that was connected to.
        expected: String,
    },
    /// It is the certificate of a client instead of a server, or the reverse.
    #[error("is for another purpose: extendedKeyUsage must include {0} authentication")]
    Purpose(&'static str),
    /// A revocation list has it.
    #[error("is revoked")]
    Revoked,
    /// Another fault.
    #[error("is invalid: {0}")]
    Other(CertificateError),
}

impl Fault {
    /// The fault that the verification of `certificate`, for `purpose`, has reported.
    pub fn new(error: CertificateError, certificate: &Certificate, purpose: &'static str) -> Self {
        match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                Self::Expired(certificate.not_after)
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Self::NotYet(certificate.not_before)
            }
            // A bad signature is that of another CA with the same name.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                Self::UnknownIssuer(certificate.issuer.clone())
            }
            CertificateError::NotValidForNameContext { expected, .. } => Self::Name {
                presented: certificate.all_names(),
                expected: expected.to_str().into_owned(),
            },
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                Self::Purpose(purpose)
            }
            CertificateError::Revoked => Self::Revoked,
            other => Self::Other(other),
        }
    }
}

/// Why certificates cannot be used, or issued.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file cannot be read.
    #[error(
        "cannot read {path}: make certificates with `farside pki`, or name their directory (`[tls] directory`, FARSIDE_PKI_DIR)",
        path = path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// A file is too long.
    #[error("{path} is longer than {limit} bytes", path = path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The most bytes.
        limit: u64,
    },
    /// A file has no certificate.
    #[error("{path} has no certificate (-----BEGIN CERTIFICATE-----)", path = path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A file is malformed.
    #[error("{path} is invalid: {why}", path = path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: String,
    },
    /// Every user can read a key.
    #[error(
        "every user can read the private key {path} (mode {mode:04o}): `chmod o= {path}`, and issue a new one",
        path = path.display()
    )]
    Readable {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The key is another certificate's.
    #[error(
        "the key {key} does not belong to the certificate {certificate}: replace both",
        key = key.display(), certificate = certificate.display()
    )]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// This host's own certificate is not valid.
    #[error(
        "this host's certificate {path} ({subject}) {fault}: renew it (`farside pki issue`)",
        path = path.display()
    )]
    Own {
        /// The file.
        path: PathBuf,
        /// Its subject.
        subject: String,
        /// What is wrong.
        fault: Fault,
    },
    /// The peer's name cannot be in a certificate.
    #[error("{0:?} is neither a host name nor an IP address")]
    Name(String),
    /// The TLS library refuses the settings.
    #[error("TLS cannot be set up")]
    Tls(#[from] rustls::Error),
    /// A file exists.
    #[error("{path} exists: it is only replaced with --force", path = path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A file cannot be written.
    #[error("cannot write {path}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// A certificate cannot be made.
    #[error("cannot make the certificate of {subject}")]
    Issue {
        /// Its subject.
        subject: String,
        /// The cause.
        source: rcgen::Error,
    },
}
