//! The JSON of etcd's gateway: 64-bit integers are strings, bytes are base64, and zeroes are left out.

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Deserializer, de};

/// A key and its value.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct KeyValue {
    #[serde(default)]
    pub(crate) key: Bytes,
    #[serde(default)]
    pub(crate) value: Bytes,
    /// The revision at which the value was written last.
    #[serde(default)]
    pub(crate) mod_revision: Number,
    /// The lease that it belongs to; 0 for none.
    #[serde(default)]
    pub(crate) lease: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct Header {
    #[serde(default)]
    pub(super) revision: Number,
}

#[derive(Debug, Deserialize)]
pub(super) struct RangeAnswer {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
    #[serde(default)]
    pub(super) more: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct TxnAnswer {
    #[serde(default)]
    pub(super) succeeded: bool,
    #[serde(default)]
    pub(super) responses: Vec<TxnResponse>,
}

#[derive(Debug, Deserialize)]
pub(super) struct TxnResponse {
    #[serde(default)]
    pub(super) response_range: Option<TxnRange>,
}

#[derive(Debug, Deserialize)]
pub(super) struct TxnRange {
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Debug, Deserialize)]
pub(super) struct LeaseAnswer {
    #[serde(default, rename = "ID")]
    pub(super) id: Number,
    /// Seconds left; 0 if there is no such lease.
    #[serde(default, rename = "TTL")]
    pub(super) ttl: Number,
}

/// A message of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: T,
}

#[derive(Debug, Deserialize)]
pub(super) struct WatchAnswer {
    #[serde(default)]
    pub(super) canceled: bool,
    #[serde(default)]
    pub(super) events: Vec<de::IgnoredAny>,
}

/// The body of an answer with an error's status.
#[derive(Debug, Deserialize)]
pub(super) struct Refusal {
    #[serde(default)]
    error: String,
    #[serde(default)]
    message: String,
}

impl Refusal {
    pub(super) fn text(&self) -> &str {
        match self.message.is_empty() {
            true => &self.error,
            false => &self.message,
        }
    }
}

/// An integer, as a string or as a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd)]
pub(crate) struct Number(pub(crate) i64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Text(String),
            Number(i64),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(number) => Ok(Self(number)),
            Either::Text(text) => text.parse().map(Self).map_err(de::Error::custom),
        }
    }
}

/// Bytes, in base64.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        let bytes = BASE64_STANDARD.decode(text.as_bytes());
        bytes.map(Self).map_err(de::Error::custom)
    }
}

/// Bytes in a request.
pub(super) fn base64(bytes: impl AsRef<[u8]>) -> String {
    BASE64_STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_etcd_are_read() {
        let range: RangeAnswer = serde_json::from_str(
            r#"{"header":{"cluster_id":"1","revision":"7"},"kvs":[{"key":"YQ==","create_revision":"5","mod_revision":"6","version":"1","value":"Yg==","lease":"99"}],"count":"1"}"#,
        )
        .unwrap();
        assert_eq!(range.header.revision, Number(7));
        let [kv] = &range.kvs[..] else { panic!() };
        assert_eq!((&kv.key.0[..], &kv.value.0[..]), (&b"a"[..], &b"b"[..]));
        assert_eq!((kv.mod_revision, kv.lease), (Number(6), Number(99)));
        let ended: Streamed<LeaseAnswer> =
            serde_json::from_str(r#"{"result":{"header":{},"ID":"5"}}"#).unwrap();
        assert_eq!((ended.result.id, ended.result.ttl), (Number(5), Number(0)));
        let refusal: Refusal =
            serde_json::from_str(r#"{"error":"lease not found","code":5}"#).unwrap();
        assert_eq!(refusal.text(), "lease not found");
    }

    #[test]
    fn bad_base64_and_numbers_are_refused() {
        for bad in [
            r#"{"key":"%"}"#,
            r#"{"key":5}"#,
            r#"{"lease":"x"}"#,
            r#"{"lease":"99999999999999999999"}"#,
        ] {
            serde_json::from_str::<KeyValue>(bad).unwrap_err();
        }
    }
}
