//! The calls that announcing and looking up need.

use std::{
    io::{BufRead, BufReader, Read},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    Etcd, EtcdError, KeyValue,
    messages::{
        LeaseAnswer, Number, RangeAnswer, Streamed, TxnAnswer, TxnResponse, WatchAnswer, base64,
    },
    parse, silent,
};

/// Longest message of a watch, bytes: etcd sends what has changed, so a longer one is a change, too.
const MAX_EVENT: u64 = 1 << 20;

/// All keys that begin with a prefix.
pub(crate) struct Range {
    /// The revision of the store.
    pub(crate) revision: i64,
    pub(crate) kvs: Vec<KeyValue>,
    /// There are more.
    pub(crate) more: bool,
}

impl Etcd {
    /// The keys that begin with `prefix`, which ends with `/`; at most `most` of them.
    pub(crate) fn range(
        &self,
        prefix: &str,
        most: usize,
        deadline: Instant,
    ) -> Result<Range, EtcdError> {
        let body = json!({
            "key": base64(prefix),
            "range_end": base64(end_of(prefix)),
            "limit": most.to_string(),
        });
        let answer: RangeAnswer = self.call("/v3/kv/range", &body, deadline)?;
        Ok(Range {
            revision: answer.header.revision.0,
            kvs: answer.kvs,
            more: answer.more,
        })
    }

    /// Writes a key unless it exists: then its present value, or none if it has just gone.
    pub(crate) fn create(
        &self,
        key: &str,
        value: &[u8],
        lease: i64,
        deadline: Instant,
    ) -> Result<Result<(), Option<KeyValue>>, EtcdError> {
        let body = json!({
            "compare": [{
                "key": base64(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0",
            }],
            "success": [put(key, value, lease)],
            "failure": [{ "request_range": { "key": base64(key) } }],
        });
        let answer = self.transact(&body, deadline)?;
        let mut responses = answer.responses.into_iter();
        Ok(match (answer.succeeded, responses.next()) {
            (true, _) => Ok(()),
            (false, Some(TxnResponse { response_range })) => {
                Err(response_range.and_then(|range| range.kvs.into_iter().next()))
            }
            (false, None) => Err(None),
        })
    }

    /// Writes a key if its value is still of that revision. Returns whether it was.
    pub(crate) fn replace(
        &self,
        key: &str,
        revision: i64,
        value: &[u8],
        lease: i64,
        deadline: Instant,
    ) -> Result<bool, EtcdError> {
        let body = json!({
            "compare": [{
                "key": base64(key), "target": "MOD", "result": "EQUAL",
                "mod_revision": revision.to_string(),
            }],
            "success": [put(key, value, lease)],
        });
        Ok(self.transact(&body, deadline)?.succeeded)
    }

    /// Whether all `keys` belong to `lease`. At most 100 of them, below etcd's limit of operations in a
    /// transaction.
    pub(crate) fn all_belong_to(
        &self,
        keys: &[String],
        lease: i64,
        deadline: Instant,
    ) -> Result<bool, EtcdError> {
        let compare: Vec<_> = keys.iter().map(|key| of_lease(key, lease)).collect();
        let body = json!({ "compare": compare });
        Ok(self.transact(&body, deadline)?.succeeded)
    }

    /// Deletes a key if it belongs to `lease`.
    pub(crate) fn delete(&self, key: &str, lease: i64, deadline: Instant) -> Result<(), EtcdError> {
        let body = json!({
            "compare": [of_lease(key, lease)],
            "success": [{ "request_delete_range": { "key": base64(key) } }],
        });
        self.transact(&body, deadline).map(drop)
    }

    fn transact(&self, body: &Value, deadline: Instant) -> Result<TxnAnswer, EtcdError> {
        self.call("/v3/kv/txn", body, deadline)
    }

    /// A new lease.
    pub(crate) fn grant(&self, ttl: Duration, deadline: Instant) -> Result<i64, EtcdError> {
        let body = json!({ "TTL": ttl.as_secs().to_string() });
        let answer: LeaseAnswer = self.call("/v3/lease/grant", &body, deadline)?;
        Ok(answer.id.0)
    }

    /// Extends a lease. Returns whether there is one.
    pub(crate) fn keep_alive(&self, lease: i64, deadline: Instant) -> Result<bool, EtcdError> {
        let body = json!({ "ID": lease.to_string() });
        let answer: Streamed<LeaseAnswer> = self.call("/v3/lease/keepalive", &body, deadline)?;
        Ok(answer.result.ttl > Number(0))
    }

    /// Ends a lease, and deletes its keys.
    pub(crate) fn revoke(&self, lease: i64, deadline: Instant) -> Result<(), EtcdError> {
        let body = json!({ "ID": lease.to_string() });
        self.call::<Value>("/v3/lease/revoke", &body, deadline)
            .map(drop)
    }

    /// Waits until a key that begins with `prefix` changes after `revision`, or for `patience`: that one
    /// may have changed.
    pub(crate) fn wait_change(
        &self,
        prefix: &str,
        revision: i64,
        patience: Duration,
    ) -> Result<(), EtcdError> {
        const PATH: &str = "/v3/watch";
        let create = json!({ "create_request": {
            "key": base64(prefix),
            "range_end": base64(end_of(prefix)),
            "start_revision": (revision + 1).to_string(),
        } });
        let deadline = Instant::now() + patience;
        self.ask_for(PATH, &create, deadline, patience, |endpoint, response| {
            let mut lines = BufReader::new(response.into_body().into_reader());
            loop {
                let mut line = Vec::new();
                let read = lines.by_ref().take(MAX_EVENT).read_until(b'\n', &mut line);
                match read {
                    // Time is up: half-open connections end like this, too.
                    Err(_) if Instant::now() + Duration::from_millis(500) >= deadline => {
                        return Ok(());
                    }
                    Err(error) => return Err(silent(endpoint, error.to_string())),
                    Ok(0) => return Err(silent(endpoint, "the watch has ended".to_owned())),
                    Ok(_) if line.len() as u64 >= MAX_EVENT => return Ok(()),
                    Ok(_) => {}
                }
                let answer: Streamed<WatchAnswer> = parse(endpoint, PATH, &line)?;
                // It is canceled if the revision was compacted.
                if answer.result.canceled || !answer.result.events.is_empty() {
                    return Ok(());
                }
            }
        })
    }
}

fn put(key: &str, value: &[u8], lease: i64) -> Value {
    json!({ "request_put": {
        "key": base64(key), "value": base64(value), "lease": lease.to_string(),
    } })
}

fn of_lease(key: &str, lease: i64) -> Value {
    json!({
        "key": base64(key), "target": "LEASE", "result": "EQUAL", "lease": lease.to_string(),
    })
}

/// The first key after those that begin with `prefix`, which ends with `/`.
fn end_of(prefix: &str) -> String {
    format!("{}0", prefix.trim_end_matches('/'))
}
