//! Verification of a peer's certificate by rustls, which also keeps the certificate for messages:
//! rustls itself forgets one that it refuses.

use std::sync::{Arc, Mutex, PoisonError};

use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};

use crate::Certificate;

/// The certificate that the peer of one session has presented, whether or not it was accepted.
#[derive(Clone, Debug, Default)]
pub struct Presented(Arc<Mutex<Option<Certificate>>>);

impl Presented {
    /// The certificate, if it could be parsed.
    pub fn certificate(&self) -> Option<Certificate> {
        // The only update is an assignment.
        let certificate = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        certificate.clone()
    }

    fn keep(&self, der: &CertificateDer<'_>) {
        let certificate = Certificate::parse(der).ok();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = certificate;
    }
}

/// `V`, for one session.
#[derive(Debug)]
pub(crate) struct Keeping<V: ?Sized> {
    pub(crate) presented: Presented,
    pub(crate) verifier: Arc<V>,
}

impl ServerCertVerifier for Keeping<dyn ServerCertVerifier> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.presented.keep(end_entity);
        self.verifier
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

impl ClientCertVerifier for Keeping<dyn ClientCertVerifier> {
    fn offer_client_auth(&self) -> bool {
        self.verifier.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.verifier.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.presented.keep(end_entity);
        self.verifier
            .verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
