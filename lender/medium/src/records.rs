//! TLS 1.3 records (RFC 8446, 5) with the keys of a session that another process has established.
//!
//! After the handshake a record is all that TLS is: a header, and one AEAD sealing. So processes that
//! move data need the session's traffic secrets, and neither certificates nor a TLS library.

use std::fmt;

use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce,
    UnboundKey,
};
use serde::{Deserialize, Serialize};

/// Type, version, length.
pub(crate) const RECORD_HEADER: usize = 5;
/// Most bytes of content.
pub(crate) const MAX_CONTENT: usize = 1 << 14;
/// Most bytes after the header.
pub(crate) const MAX_BODY: usize = MAX_CONTENT + 256;
/// The content's type, and the AEAD's tag.
pub(crate) const OVERHEAD: usize = 1 + 16;

/// application_data, the type of every encrypted record, and alert.
const DATA: u8 = 23;
const ALERT: u8 = 21;

/// Most records of a key: below the limit of AES-GCM (RFC 8446, 5.5), 2^24.5. Then the connection is
/// replaced.
const MAX_RECORDS: u64 = 1 << 24;

/// The AEAD of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cipher {
    /// TLS_AES_128_GCM_SHA256.
    Aes128Gcm,
    /// TLS_AES_256_GCM_SHA384.
    Aes256Gcm,
    /// TLS_CHACHA20_POLY1305_SHA256.
    Chacha20Poly1305,
}

impl Cipher {
    fn algorithm(self) -> &'static Algorithm {
        match self {
            Self::Aes128Gcm => &AES_128_GCM,
            Self::Aes256Gcm => &AES_256_GCM,
            Self::Chacha20Poly1305 => &CHACHA20_POLY1305,
        }
    }
}

/// The traffic secrets of one direction.
#[derive(Clone, Serialize, Deserialize)]
pub struct Direction {
    /// The AEAD.
    pub cipher: Cipher,
    /// Its key.
    pub key: Vec<u8>,
    /// The initialisation vector.
    pub iv: [u8; NONCE_LEN],
    /// The number of records before.
    pub sequence: u64,
}

/// The traffic secrets of a session.
#[derive(Clone, Serialize, Deserialize)]
pub struct Secrets {
    /// Of what this end sends.
    pub sending: Direction,
    /// Of what it receives.
    pub receiving: Direction,
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets")
    }
}

impl fmt::Debug for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Direction")
    }
}

/// Why records end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Not of this session, or changed on the way.
    #[error("a TLS record cannot be decrypted")]
    Forged,
    /// Too long, too short, or of another type.
    #[error("an invalid TLS record")]
    Invalid,
    /// The peer has ended the session by an alert.
    #[error("the peer has ended the TLS session")]
    Ended,
    /// The key may encrypt no more.
    #[error("the TLS session has sent {MAX_RECORDS} records, the maximum of a key")]
    UsedUp,
    /// The key is not of the cipher's length.
    #[error("an invalid key of a TLS session")]
    Key,
}

/// One direction of a session.
pub(crate) struct Records {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    sequence: u64,
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Records")
    }
}

impl Records {
    pub(crate) fn new(direction: &Direction) -> Result<Self, RecordError> {
        let key = UnboundKey::new(direction.cipher.algorithm(), &direction.key);
        Ok(Self {
            key: LessSafeKey::new(key.map_err(|_| RecordError::Key)?),
            iv: direction.iv,
            sequence: direction.sequence,
        })
    }

    /// The nonce of the next record (RFC 8446, 5.3).
    fn nonce(&mut self) -> Result<Nonce, RecordError> {
        if self.sequence >= MAX_RECORDS {
            return Err(RecordError::UsedUp);
        }
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        self.sequence += 1;
        Ok(Nonce::assume_unique_for_key(nonce))
    }

    /// Seals `buffer[start + RECORD_HEADER..]` as one record from `start` on.
    pub(crate) fn seal(&mut self, buffer: &mut Vec<u8>, start: usize) -> Result<(), RecordError> {
        let nonce = self.nonce()?;
        buffer.push(DATA);
        let body = buffer.len() - start - RECORD_HEADER + OVERHEAD - 1;
        let header = header(body);
        buffer[start..start + RECORD_HEADER].copy_from_slice(&header);
        let content = &mut buffer[start + RECORD_HEADER..];
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(header), content)
            .map_err(|_| RecordError::Invalid)?;
        buffer.extend_from_slice(tag.as_ref());
        Ok(())
    }

    /// Opens a record in place: its content is after the header. Returns its length.
    pub(crate) fn open(&mut self, record: &mut [u8]) -> Result<usize, RecordError> {
        let nonce = self.nonce()?;
        let (header, body) = record.split_at_mut(RECORD_HEADER);
        let aad = Aad::from(&*header);
        let opened = self.key.open_in_place(nonce, aad, body);
        let opened = opened.map_err(|_| RecordError::Forged)?;
        // Zeros may follow the type.
        let padded = opened.iter().rposition(|byte| *byte != 0);
        match padded.map(|at| (at, opened[at])) {
            // Without content it would cost time and carry nothing.
            Some((len @ 1.., DATA)) => Ok(len),
            Some((_, ALERT)) => Err(RecordError::Ended),
            _ => Err(RecordError::Invalid),
        }
    }
}

fn header(body: usize) -> [u8; RECORD_HEADER] {
    let [.., high, low] = body.to_be_bytes();
    [DATA, 3, 3, high, low]
}

/// The length of the record at the start of `bytes`, or `None` if its header is incomplete.
pub(crate) fn record_len(bytes: &[u8]) -> Result<Option<usize>, RecordError> {
    let Some((&[kind, major, _, high, low], _)) = bytes.split_first_chunk::<RECORD_HEADER>() else {
        return Ok(None);
    };
    let body = usize::from(u16::from_be_bytes([high, low]));
    if kind != DATA || major != 3 || !(OVERHEAD..=MAX_BODY).contains(&body) {
        return Err(RecordError::Invalid);
    }
    Ok(Some(RECORD_HEADER + body))
}
