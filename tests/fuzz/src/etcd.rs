//! What etcd answers, and the values and keys that other hosts have put there.
//!
//! Input: a byte that selects the kind, then the bytes.
//!
//! Invariants: no panic; a value that names a lender names it with TLS, and is written as it was read; a key
//! is that of its device.

use farside_lender_protocol::Address;
use serde::de::DeserializeOwned;

use crate::input::Input;
use messages::{KeyValue, LeaseAnswer, RangeAnswer, Refusal, Streamed, TxnAnswer, WatchAnswer};
use record::{Keys, Record};

#[path = "../../../lender/discovery/src/etcd/messages.rs"]
#[allow(dead_code, reason = "the client of etcd uses the rest")]
mod messages;
#[path = "../../../lender/discovery/src/record.rs"]
#[allow(dead_code, reason = "the announcer uses the rest")]
mod record;

/// Parses an answer, and the keys and values in it.
pub fn run(input: &[u8]) {
    let mut input = Input(input);
    match input.u8() % 7 {
        0 => read_value(input.0),
        1 => read_key(input.0),
        2 => {
            if let Some(answer) = parsed::<RangeAnswer>(input.0) {
                answer.kvs.iter().for_each(read);
            }
        }
        3 => {
            if let Some(answer) = parsed::<TxnAnswer>(input.0) {
                let ranges = answer.responses.iter();
                let ranges = ranges.filter_map(|response| response.response_range.as_ref());
                ranges.flat_map(|range| &range.kvs).for_each(read);
            }
        }
        4 => drop(parsed::<Streamed<LeaseAnswer>>(input.0)),
        5 => drop(parsed::<Streamed<WatchAnswer>>(input.0)),
        _ => drop(parsed::<Refusal>(input.0).map(|refusal| refusal.text().len())),
    }
}

fn parsed<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}

fn read(entry: &KeyValue) {
    read_key(&entry.key.0);
    read_value(&entry.value.0);
}

fn read_value(value: &[u8]) {
    let Some(record) = Record::parse(value) else {
        return;
    };
    assert!(matches!(record.address, Address::Tls { port, .. } if port != 0));
    assert_eq!(Record::parse(&record.to_value()), Some(record));
}

fn read_key(key: &[u8]) {
    let keys = Keys::new("farside");
    if let Some(device) = keys.device(key) {
        assert_eq!(keys.key(&device).as_bytes(), key);
    }
}
