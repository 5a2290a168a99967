//! TLS 1.3 over a TCP connection.
//!
//! The socket is read one record at a time, and a record holds bytes of one message only: whatever is
//! decrypted is handed on at once, so poll(2) reports every pending message as it does without TLS. A
//! peer that puts more into a record is disconnected.

use std::{
    io::{self, IoSlice, Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use farside_medium::{Cipher, Direction, Secrets};
use farside_pki::{Fault, Presented, is_farside};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg},
};
use rustls::{AlertDescription, Connection, ConnectionTrafficSecrets, Error, ExtractedSecrets};

/// Type, version, length (RFC 8446, 5.1).
const HEADER: usize = 5;

/// Most bytes after the header (RFC 8446, 5.2).
const MAX_BODY: usize = (1 << 14) + 256;

/// The first byte of a record: change_cipher_spec, alert, handshake, application_data.
const TYPES: std::ops::RangeInclusive<u8> = 20..=23;

/// An alert (fatal, unexpected_message) that is sent to a peer without TLS.
const NOT_TLS: [u8; 7] = [21, 3, 3, 0, 2, 2, 10];

/// Why a session ended, or was not established.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TlsError {
    /// The peer's certificate is not accepted.
    #[error("the certificate of the peer ({subject}) {fault}")]
    Certificate {
        /// Its subject.
        subject: String,
        /// What is wrong with it.
        fault: Fault,
    },
    /// The peer's certificate identifies no host.
    #[error(
        "the certificate of the peer ({subject}) names no host: issue one with a DNS name in subjectAltName"
    )]
    Nameless {
        /// Its subject.
        subject: String,
    },
    /// The peer has presented no certificate.
    #[error("the peer has presented no certificate, which every host needs (`farside pki issue`)")]
    NoCertificate,
    /// The peer has ended the session by an alert.
    #[error("the peer refuses the connection: {}", reason(*.0))]
    Refused(AlertDescription),
    /// The first bytes of the peer are not those of TLS.
    #[error(
        "the peer does not use TLS, its first bytes are \"{}\": connect to this port as tls:HOST:PORT",
        .0.escape_ascii()
    )]
    NotTls([u8; HEADER]),
    /// The peer has closed the connection during the handshake.
    #[error(
        "the peer closed the connection during the TLS handshake: its log has the reason, or it listens without TLS there (tcp:HOST:PORT)"
    )]
    NoHandshake,
    /// The connection ended without the alert that ends a session.
    #[error(
        "the connection ended without close_notify: the peer was killed, or the network cut it"
    )]
    Cut,
    /// The peer is another kind of server, or client.
    #[error("the peer has not offered farside's protocol (ALPN)")]
    OtherProtocol,
    /// A record is too long, or has the bytes of two messages.
    #[error("TLS record {0}")]
    Record(&'static str),
    /// Another violation of the protocol.
    #[error("TLS failed")]
    Session(#[source] Error),
}

/// What an alert means to the operator.
fn reason(alert: AlertDescription) -> String {
    use AlertDescription as Alert;
    let reason = match alert {
        Alert::CertificateExpired => {
            "this host's certificate has expired, or is not valid yet, by the peer's clock"
        }
        Alert::UnknownCA | Alert::DecryptError => {
            "this host's certificate is not issued by a CA of the peer"
        }
        Alert::CertificateRequired => "this host has presented no certificate",
        Alert::CertificateRevoked => "this host's certificate is revoked",
        Alert::BadCertificate | Alert::CertificateUnknown | Alert::UnsupportedCertificate => {
            "this host's certificate is not accepted"
        }
        Alert::ProtocolVersion => "it does not support TLS 1.3",
        Alert::NoApplicationProtocol => "it does not use farside's protocol",
        _ => return format!("TLS alert {alert:?}"),
    };
    format!("{reason} (its log has more)")
}

#[derive(Debug)]
pub(super) struct Session {
    connection: Connection,
    presented: Presented,
    socket: Arc<OwnedFd>,
    record: Box<[u8; HEADER + MAX_BODY]>,
    /// Bytes of the record that have been received.
    len: usize,
    /// A record was received.
    is_tls: bool,
    /// The host in the peer's certificate, after the handshake.
    host: Option<String>,
    /// Sending has failed.
    is_broken: bool,
}

fn direction((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Direction, TlsError> {
    use ConnectionTrafficSecrets as From;
    let (cipher, key, iv) = match secrets {
        From::Aes128Gcm { key, iv } => (Cipher::Aes128Gcm, key, iv),
        From::Aes256Gcm { key, iv } => (Cipher::Aes256Gcm, key, iv),
        From::Chacha20Poly1305 { key, iv } => (Cipher::Chacha20Poly1305, key, iv),
        _ => {
            let unknown = Error::General("secrets of an unknown cipher".to_owned());
            return Err(TlsError::Session(unknown));
        }
    };
    let iv = iv.as_ref().try_into();
    Ok(Direction {
        cipher,
        key: key.as_ref().to_vec(),
        iv: iv.map_err(|_| TlsError::Record("with an iv of another length"))?,
        sequence,
    })
}

/// What reading has found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// That many bytes.
    Data(usize),
    /// Nothing yet. The socket may have more, if it polls readable.
    Nothing,
    /// The peer has closed the session.
    Closed,
}

impl Session {
    pub(super) fn new(
        connection: impl Into<Connection>,
        presented: Presented,
        socket: Arc<OwnedFd>,
    ) -> Self {
        let mut connection = connection.into();
        // A message is accepted as a whole, and the next one only after it was sent.
        connection.set_buffer_limit(None);
        Self {
            connection,
            presented,
            socket,
            record: Box::new([0; HEADER + MAX_BODY]),
            len: 0,
            is_tls: false,
            host: None,
            is_broken: false,
        }
    }

    /// The host in the peer's certificate. None before the end of the handshake.
    pub(super) fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }

    pub(super) fn wants_write(&self) -> bool {
        self.connection.wants_write() && !self.is_broken
    }

    /// Sends until the socket is full.
    pub(super) fn flush(&mut self) -> Result<(), Errno> {
        while self.wants_write() {
            match self.connection.write_tls(&mut Socket(self.socket.as_fd())) {
                Ok(_) => {}
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::INTR) => {}
                    Some(Errno::AGAIN) => break,
                    errno => {
                        self.is_broken = true;
                        return Err(errno.unwrap_or(Errno::IO));
                    }
                },
            }
        }
        Ok(())
    }

    /// Encrypts one message. The caller has flushed the one before.
    pub(super) fn put(&mut self, message: &[u8]) -> Result<(), TlsError> {
        let written = self.connection.writer().write_all(message);
        written.map_err(|error| TlsError::Session(Error::General(error.to_string())))
    }

    /// The secrets of the session, for a process that moves data. What was received is used up, and what
    /// was sent is out.
    pub(super) fn into_secrets(self) -> Result<Secrets, TlsError> {
        let secrets = self.connection.dangerous_extract_secrets();
        let ExtractedSecrets { tx, rx } = secrets.map_err(TlsError::Session)?;
        Ok(Secrets {
            sending: direction(tx)?,
            receiving: direction(rx)?,
        })
    }

    /// Ends the session in this direction, if it was established.
    pub(super) fn end(&mut self) {
        if self.host.is_some() {
            self.close();
        }
    }

    /// Ends the session in this direction.
    pub(super) fn close(&mut self) {
        self.connection.send_close_notify();
        // A peer that does not receive it takes the connection for cut.
        let _ = self.flush();
    }

    /// Whether decrypted bytes are left.
    pub(super) fn has_data(&mut self) -> bool {
        let mut one = [0];
        matches!(self.connection.reader().read(&mut one), Ok(1))
    }

    /// Reads decrypted bytes into `into`, and for them at most `records` records, of which it counts
    /// down.
    pub(super) fn read(&mut self, into: &mut [u8], records: &mut u32) -> Result<Found, ReadError> {
        loop {
            match self.connection.reader().read(into) {
                Ok(0) => return Ok(Found::Closed),
                Ok(read) => return Ok(Found::Data(read)),
                // Its only other error is an end of the stream that it is not told of.
                Err(_) => {}
            }
            let Some(left) = records.checked_sub(1) else {
                return Ok(Found::Nothing);
            };
            if !self.read_record()? {
                return Ok(Found::Nothing);
            }
            *records = left;
            self.process()?;
        }
    }

    /// Continues the handshake. Returns whether it is complete.
    pub(super) fn shake(&mut self) -> Result<bool, ReadError> {
        self.flush()?;
        while self.host.is_none() {
            if !self.read_record()? {
                return Ok(false);
            }
            self.process()?;
        }
        Ok(true)
    }

    /// An alert of the peer that has arrived, after sending has failed.
    pub(super) fn alert(&mut self) -> Option<TlsError> {
        while let Ok(true) = self.read_record() {
            match self.process() {
                Err(ReadError::Tls(error @ TlsError::Refused(_))) => return Some(error),
                Err(_) => return None,
                Ok(()) if self.has_data() => return None,
                Ok(()) => {}
            }
        }
        None
    }

    /// Whether a record has arrived.
    fn read_record(&mut self) -> Result<bool, ReadError> {
        loop {
            let end = match self.len < HEADER {
                true => HEADER,
                false => HEADER + self.body()?,
            };
            if self.len == end && end > HEADER {
                self.is_tls = true;
                return Ok(true);
            }
            match recv(
                &*self.socket,
                &mut self.record[self.len..end],
                RecvFlags::empty(),
            ) {
                Ok((_, 0)) => return Err(self.cut(Errno::PIPE)),
                Ok((_, read)) => self.len += read,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(self.cut(errno)),
            }
        }
    }

    /// The length in the record's header, checked before anything is read into memory.
    fn body(&self) -> Result<usize, TlsError> {
        let [kind, major, minor, high, low, ..] = *self.record;
        if !self.is_tls && (!TYPES.contains(&kind) || major != 3) {
            // Tells a lender's client without TLS by its first bytes.
            let _ = send(&*self.socket, &NOT_TLS, SendFlags::NOSIGNAL);
            return Err(TlsError::NotTls([kind, major, minor, high, low]));
        }
        match usize::from(u16::from_be_bytes([high, low])) {
            0 => Err(TlsError::Record("without content")),
            len if len > MAX_BODY => Err(TlsError::Record("over the limit")),
            len => Ok(len),
        }
    }

    /// The peer has closed the socket, or the connection failed.
    fn cut(&self, errno: Errno) -> ReadError {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => match self.host {
                // An attacker can end a connection, but must not be able to end a session: with its
                // end a lender confirms that a device's DMA has stopped.
                Some(_) => ReadError::Tls(TlsError::Cut),
                None if !self.is_tls && self.len == 0 && !self.is_client() => ReadError::Silent,
                None => ReadError::Tls(TlsError::NoHandshake),
            },
            other => ReadError::System(other),
        }
    }

    fn is_client(&self) -> bool {
        matches!(self.connection, Connection::Client(_))
    }

    /// Decrypts the record.
    fn process(&mut self) -> Result<(), ReadError> {
        let mut bytes = &self.record[..self.len];
        while !bytes.is_empty() {
            let read = self.connection.read_tls(&mut bytes);
            if !read.is_ok_and(|read| read > 0) {
                return Err(TlsError::Record("after the end of the session").into());
            }
        }
        self.len = 0;
        let processed = self.connection.process_new_packets();
        // The handshake's next flight, or the alert that tells the peer of an error.
        let sent = self.flush();
        processed.map_err(|error| self.error(error))?;
        sent?;
        if self.host.is_none() && !self.connection.is_handshaking() {
            self.identify()?;
        }
        Ok(())
    }

    /// Checks the peer's name, after the handshake.
    fn identify(&mut self) -> Result<(), TlsError> {
        let checked = match self.presented.certificate() {
            _ if !is_farside(self.connection.alpn_protocol()) => Err(TlsError::OtherProtocol),
            None => Err(TlsError::NoCertificate),
            Some(certificate) => match (certificate.host(), self.is_client()) {
                (Some(host), _) => Ok(host),
                // The client has checked the lender's certificate against the name it connects to.
                (None, true) => Ok(certificate.subject),
                (None, false) => Err(TlsError::Nameless {
                    subject: certificate.subject,
                }),
            },
        };
        match checked {
            Ok(host) => {
                self.host = Some(host);
                Ok(())
            }
            Err(error) => {
                self.close();
                Err(error)
            }
        }
    }

    fn error(&self, error: Error) -> TlsError {
        let purpose = match self.is_client() {
            true => "server",
            false => "client",
        };
        match (error, self.presented.certificate()) {
            (Error::InvalidCertificate(error), Some(certificate)) => TlsError::Certificate {
                fault: Fault::new(error, &certificate, purpose),
                subject: certificate.subject,
            },
            (Error::NoCertificatesPresented, _) => TlsError::NoCertificate,
            (Error::AlertReceived(alert), _) => TlsError::Refused(alert),
            (Error::NoApplicationProtocol, _) => TlsError::OtherProtocol,
            (other, _) => TlsError::Session(other),
        }
    }
}

/// Why reading failed.
#[derive(Debug)]
pub(super) enum ReadError {
    Tls(TlsError),
    System(Errno),
    /// The peer has gone without a byte, as a port scanner does.
    Silent,
}

impl From<TlsError> for ReadError {
    fn from(error: TlsError) -> Self {
        Self::Tls(error)
    }
}

impl From<Errno> for ReadError {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

/// A socket, for rustls.
struct Socket<'a>(BorrowedFd<'a>);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, records: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut control = SendAncillaryBuffer::default();
        Ok(sendmsg(self.0, records, &mut control, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
