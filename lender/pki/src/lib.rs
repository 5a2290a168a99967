//! Certificates of hosts, and the TLS sessions between them.
//!
//! A host's directory has the file names of QEMU's `tls-creds-x509` object:
//!
//! | file | content |
//! | --- | --- |
//! | `ca-cert.pem` | the CAs whose certificates are accepted |
//! | `ca-crl.pem` | their revocation lists; optional |
//! | `server-cert.pem`, `server-key.pem` | the certificate of this host's lender, and its key |
//! | `client-cert.pem`, `client-key.pem` | the certificate of this host's backends and tools, and its key |
//!
//! [`issue`] writes such directories, [`revoke`] the lists of a CA. [`Credentials`] are a loaded one, from which TLS 1.3
//! sessions are made: both sides present a certificate, and nothing is resumed, so that each
//! connection verifies the certificates anew.

#![forbid(unsafe_code)]

mod certificate;
mod credentials;
mod crl;
mod error;
pub mod issue;
mod renewed;
mod verifier;

pub use certificate::{Certificate, Date, is_host_name};
pub use credentials::{CA_CERT, CA_CRL, CA_KEY, Credentials, KeyPair, Open, Side, is_farside};
pub use crl::{RevocationList, revoke};
pub use error::{Fault, PkiError};
pub use renewed::Renewed;
pub use verifier::Presented;
