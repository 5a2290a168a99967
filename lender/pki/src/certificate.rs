//! The fields of a certificate that people and rules refer to.

use std::{fmt, net::IpAddr, path::Path};

use ring::digest::{SHA256, digest};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use x509_parser::{
    certificate::X509Certificate, extensions::GeneralName, prelude::FromDer, time::ASN1Time,
    x509::X509Name,
};

use crate::{PkiError, credentials::read};

/// Longest host name, bytes (RFC 1035).
const MAX_HOST: usize = 253;

/// Longest printed name of a subject, characters. A peer chooses it before it is verified.
const MAX_SUBJECT: usize = 200;

/// A moment, in seconds of UNIX time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Date(pub i64);

impl Date {
    /// The system's time.
    pub fn now() -> Self {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
        Self(since.map_or(0, |since| since.as_secs().cast_signed()))
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ok(time) = ASN1Time::from_timestamp(self.0) else {
            return write!(f, "second {} of UNIX time", self.0);
        };
        let time = time.to_datetime();
        let (year, month, day) = time.to_calendar_date();
        let month = u8::from(month);
        let (hour, minute, second) = time.to_hms();
        write!(
            f,
            "{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC"
        )
    }
}

/// A certificate. Parsing it verifies nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The distinguished name of its subject, without control characters.
    pub subject: String,
    /// The distinguished name of its issuer, without control characters.
    pub issuer: String,
    /// The names of the subject: DNS names of the subjectAltName extension.
    pub names: Vec<String>,
    /// The IP addresses of the subjectAltName extension.
    pub addresses: Vec<IpAddr>,
    /// From when it is valid.
    pub not_before: Date,
    /// Until when it is valid.
    pub not_after: Date,
    /// Whether it is the certificate of a CA.
    pub is_ca: bool,
    /// For what extendedKeyUsage allows it; empty if that is missing.
    pub uses: Vec<&'static str>,
    /// SHA-256 of its public key (SubjectPublicKeyInfo), in hexadecimal digits.
    pub key: String,
    common_name: Option<String>,
}

impl Certificate {
    /// Parses a certificate in DER.
    pub fn parse(der: &[u8]) -> Result<Self, String> {
        let (_, parsed) = X509Certificate::from_der(der).map_err(|error| error.to_string())?;
        let (mut names, mut addresses, mut uses) = (Vec::new(), Vec::new(), Vec::new());
        let alternatives = parsed
            .subject_alternative_name()
            .map_err(|error| error.to_string())?;
        for name in alternatives.map_or(&[][..], |names| &names.value.general_names) {
            match name {
                GeneralName::DNSName(name) => names.push(printable(name)),
                GeneralName::IPAddress(bytes) => addresses.extend(ip(bytes)),
                _ => {}
            }
        }
        let usage = parsed
            .extended_key_usage()
            .map_err(|error| error.to_string())?;
        if let Some(usage) = usage {
            let known = [
                (usage.value.server_auth, "server"),
                (usage.value.client_auth, "client"),
            ];
            uses.extend(
                known
                    .into_iter()
                    .filter(|(has, _)| *has)
                    .map(|(_, use_)| use_),
            );
        }
        let digest = digest(&SHA256, parsed.public_key().raw);
        Ok(Self {
            subject: shown(parsed.subject()),
            issuer: shown(parsed.issuer()),
            common_name: common_name(parsed.subject()),
            names,
            addresses,
            not_before: Date(parsed.validity().not_before.timestamp()),
            not_after: Date(parsed.validity().not_after.timestamp()),
            is_ca: parsed.is_ca(),
            uses,
            key: digest
                .as_ref()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        })
    }

    /// The certificates in a PEM file.
    pub fn of_file(path: &Path) -> Result<Vec<Self>, PkiError> {
        let text = read(path)?;
        let invalid = |why: String| PkiError::Invalid {
            path: path.to_owned(),
            why,
        };
        CertificateDer::pem_slice_iter(&text)
            .map(|der| {
                let der = der.map_err(|error| invalid(error.to_string()))?;
                Self::parse(&der).map_err(invalid)
            })
            .collect()
    }

    /// The host that a verified certificate identifies, in lower case: the first DNS name of its
    /// subjectAltName extension, or without such names the common name of its subject. A pattern
    /// (`*.rack1`) identifies no host.
    pub fn host(&self) -> Option<String> {
        let name = match self.names.first() {
            Some(name) => name,
            None => self.common_name.as_ref()?,
        };
        is_host_name(name).then(|| name.to_ascii_lowercase())
    }

    /// All its names and addresses.
    pub fn all_names(&self) -> String {
        let addresses = self.addresses.iter().map(IpAddr::to_string);
        let all: Vec<String> = self.names.iter().cloned().chain(addresses).collect();
        match all.is_empty() {
            true => "none".to_owned(),
            false => all.join(", "),
        }
    }
}

/// Whether `text` can be the name of a host.
pub fn is_host_name(text: &str) -> bool {
    (1..=MAX_HOST).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    }
}

fn common_name(name: &X509Name<'_>) -> Option<String> {
    // The last one is the most specific.
    let last = name.iter_common_name().last()?;
    last.as_str().ok().map(str::to_owned)
}

fn shown(name: &X509Name<'_>) -> String {
    match name.to_string() {
        name if name.is_empty() => "(no subject)".to_owned(),
        name => printable(&name),
    }
}

fn printable(text: &str) -> String {
    let plain = |c: char| if c.is_control() { '?' } else { c };
    text.chars().take(MAX_SUBJECT).map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_printed_in_utc() {
        assert_eq!(Date(0).to_string(), "1970-01-01 00:00:00 UTC");
        assert_eq!(Date(951_782_399).to_string(), "2000-02-28 23:59:59 UTC");
        assert_eq!(
            Date(i64::MAX).to_string(),
            format!("second {} of UNIX time", i64::MAX)
        );
    }

    #[test]
    fn a_host_is_the_first_name_or_the_common_name() {
        let with = |names: &[&str], common_name: Option<&str>| Certificate {
            subject: "CN=x".into(),
            issuer: "CN=ca".into(),
            names: names.iter().map(|&name| name.to_owned()).collect(),
            addresses: Vec::new(),
            not_before: Date(0),
            not_after: Date(0),
            is_ca: false,
            uses: Vec::new(),
            key: String::new(),
            common_name: common_name.map(str::to_owned),
        };
        for (names, common_name, host) in [
            (&["Rack1-A", "b"][..], Some("c"), Some("rack1-a")),
            (&[], Some("Rack1-C"), Some("rack1-c")),
            // A certificate for many hosts identifies none of them.
            (&["*.rack1"], Some("c"), None),
            (&[], Some("a b"), None),
            (&[], Some("network"), Some("network")),
            (&[], Some(""), None),
            (&[], None, None),
        ] {
            let found = with(names, common_name).host();
            assert_eq!(found.as_deref(), host, "{names:?}, {common_name:?}");
        }
    }
}
