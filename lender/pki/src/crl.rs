//! Certificate revocation lists (RFC 5280, section 5).

use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, pem::PemObject};
use x509_parser::{
    certificate::X509Certificate, prelude::FromDer, revocation_list::CertificateRevocationList,
};

use crate::{
    CA_CRL, Date, PkiError,
    credentials::{load_crls, open, read},
    issue::{Ca, Output, Validity},
};

/// A revocation list. Parsing it verifies nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevocationList {
    /// The distinguished name of its issuer.
    pub issuer: String,
    /// When its issuer will have published the next one, if it states that.
    pub next_update: Option<Date>,
    number: u64,
    /// Serial number and time of each revocation.
    revoked: Vec<(Vec<u8>, i64)>,
}

impl RevocationList {
    /// The revocation lists in a PEM file; none if the file is missing.
    pub fn of_file(path: &Path) -> Result<Vec<Self>, PkiError> {
        let parse = |der: &CertificateRevocationListDer<'_>| {
            let parsed = CertificateRevocationList::from_der(der);
            let (_, list) = parsed.map_err(|error| PkiError::Invalid {
                path: path.to_owned(),
                why: error.to_string(),
            })?;
            let number = list.crl_number().and_then(|number| number.try_into().ok());
            let revoked = list.iter_revoked_certificates().map(|entry| {
                let serial = entry.raw_serial().to_vec();
                (serial, entry.revocation_date.timestamp())
            });
            Ok(Self {
                issuer: list.issuer().to_string(),
                next_update: list.next_update().map(|time| Date(time.timestamp())),
                number: number.unwrap_or(0),
                revoked: revoked.collect(),
            })
        };
        load_crls(path, &open)?.iter().map(parse).collect()
    }
}

/// Adds the certificates in `files` to the revocation list of the CA in `directory`, which is valid
/// for `days` from now on; without files, renews it. Returns the list's file.
pub fn revoke(directory: &Path, files: &[PathBuf], days: u32) -> Result<Vec<PathBuf>, PkiError> {
    let ca = Ca::load(directory)?;
    let path = directory.join(CA_CRL);
    let former = RevocationList::of_file(&path)?;
    let validity = Validity::days(days);
    let now = Date::now().0;
    let number = former.iter().map(|list| list.number).max().unwrap_or(0);
    let mut revoked: Vec<_> = former.into_iter().flat_map(|list| list.revoked).collect();
    for file in files {
        let serial = serial_of(file, &ca)?;
        if !revoked.iter().any(|(known, _)| *known == serial) {
            revoked.push((serial, now));
        }
    }
    let entry = |(serial, since): (Vec<u8>, i64)| RevokedCertParams {
        serial_number: SerialNumber::from(serial),
        revocation_time: (SystemTime::UNIX_EPOCH + Duration::from_secs(since.unsigned_abs()))
            .into(),
        reason_code: None,
        invalidity_date: None,
    };
    let list = CertificateRevocationListParams {
        this_update: validity.from.into(),
        next_update: validity.until.into(),
        crl_number: SerialNumber::from(number.saturating_add(1)),
        issuing_distribution_point: None,
        revoked_certs: revoked.into_iter().map(entry).collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let failed = |source| PkiError::Issue {
        subject: "the revocation list".to_owned(),
        source,
    };
    let list = list.signed_by(&ca.issuer).map_err(failed)?;
    let pem = list.pem().map_err(failed)?;
    let force = true;
    Output { directory, force }.write(&[(CA_CRL, pem)])
}

/// The serial number of the certificate in `file`, which `ca` has issued.
fn serial_of(file: &Path, ca: &Ca) -> Result<Vec<u8>, PkiError> {
    let invalid = |why: String| PkiError::Invalid {
        path: file.to_owned(),
        why,
    };
    let der = CertificateDer::from_pem_slice(&read(file)?);
    let der = der.map_err(|error| invalid(error.to_string()))?;
    let parsed = X509Certificate::from_der(&der).map_err(|error| invalid(error.to_string()))?;
    let parsed_ca =
        X509Certificate::from_der(&ca.der).map_err(|error| invalid(error.to_string()))?;
    match parsed.1.verify_signature(Some(parsed_ca.1.public_key())) {
        Ok(()) => Ok(parsed.1.raw_serial().to_vec()),
        Err(_) => Err(invalid(format!(
            "another CA has issued it ({}), which alone can revoke it",
            parsed.1.issuer()
        ))),
    }
}
