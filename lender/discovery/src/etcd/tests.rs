//! A stand-in for a member of etcd, for what a real one does not do on demand. The real one is in the
//! end-to-end tests.

use std::{
    collections::BTreeMap,
    io::Write,
    net::{TcpListener, TcpStream},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU16},
    },
};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::json;

use super::*;

/// A key's value, the revision at which it was written, and its lease.
type Stored = (Vec<u8>, i64, i64);

#[derive(Default)]
pub(crate) struct Store {
    pub(crate) keys: BTreeMap<String, Stored>,
    pub(crate) leases: Vec<i64>,
    revision: i64,
}

impl Store {
    pub(crate) fn put(&mut self, key: &str, value: &[u8], lease: i64) {
        self.revision += 1;
        let stored = (value.to_vec(), self.revision, lease);
        self.keys.insert(key.to_owned(), stored);
    }

    /// As if its time was over.
    pub(crate) fn expire(&mut self) {
        self.leases.clear();
        self.keys.retain(|_, (_, _, lease)| *lease == 0);
    }

    fn kv(&self, key: &str) -> Vec<Value> {
        let found = self.keys.get(key).into_iter();
        found
            .map(|(value, revision, lease)| {
                json!({
                    "key": BASE64_STANDARD.encode(key), "value": BASE64_STANDARD.encode(value),
                    "mod_revision": revision.to_string(), "lease": lease.to_string(),
                })
            })
            .collect()
    }

    fn answer(&mut self, path: &str, body: &Value) -> Value {
        let text = |value: &Value| {
            let bytes = BASE64_STANDARD.decode(value.as_str().unwrap()).unwrap();
            String::from_utf8(bytes).unwrap()
        };
        let number = |value: &Value| value.as_str().unwrap().parse::<i64>().unwrap();
        match path {
            "/v3/lease/grant" => {
                self.revision += 1;
                self.leases.push(self.revision);
                json!({ "ID": self.revision.to_string(), "TTL": body["TTL"] })
            }
            "/v3/lease/keepalive" => match self.leases.contains(&number(&body["ID"])) {
                true => json!({ "result": { "ID": body["ID"], "TTL": "15" } }),
                false => json!({ "result": { "ID": body["ID"] } }),
            },
            "/v3/lease/revoke" => {
                let id = number(&body["ID"]);
                self.leases.retain(|lease| *lease != id);
                self.keys.retain(|_, (_, _, lease)| *lease != id);
                json!({})
            }
            "/v3/kv/range" => {
                let (from, to) = (text(&body["key"]), text(&body["range_end"]));
                let keys: Vec<_> = self.keys.range(from..to).map(|(key, _)| key).collect();
                let kvs: Vec<_> = keys.into_iter().flat_map(|key| self.kv(key)).collect();
                json!({ "header": { "revision": self.revision.to_string() }, "kvs": kvs })
            }
            "/v3/kv/txn" => {
                let none = Vec::new();
                let list = |name: &str| body[name].as_array().unwrap_or(&none);
                let holds = list("compare").iter().all(|compare| {
                    let stored = self.keys.get(&text(&compare["key"]));
                    match compare["target"].as_str().unwrap() {
                        "CREATE" => stored.is_none(),
                        "MOD" => stored.is_some_and(|at| at.1 == number(&compare["mod_revision"])),
                        _ => stored.is_some_and(|at| at.2 == number(&compare["lease"])),
                    }
                });
                let mut responses = Vec::new();
                for step in list(if holds { "success" } else { "failure" }) {
                    if let Some(put) = step.get("request_put") {
                        let value = text(&put["value"]).into_bytes();
                        self.put(&text(&put["key"]), &value, number(&put["lease"]));
                        responses.push(json!({ "response_put": {} }));
                    } else if let Some(range) = step.get("request_range") {
                        let kvs = self.kv(&text(&range["key"]));
                        responses.push(json!({ "response_range": { "kvs": kvs } }));
                    } else if let Some(delete) = step.get("request_delete_range") {
                        self.keys.remove(&text(&delete["key"]));
                        responses.push(json!({ "response_delete_range": {} }));
                    }
                }
                json!({ "succeeded": holds, "responses": responses })
            }
            other => panic!("{other}"),
        }
    }
}

/// A member that listens on this host.
pub(crate) struct Fake(Arc<Shared>);

struct Shared {
    port: u16,
    store: Mutex<Store>,
    /// It answers this instead.
    says: Mutex<Option<Vec<u8>>>,
    status: AtomicU16,
    is_silent: AtomicBool,
}

impl Fake {
    pub(crate) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let shared = Arc::new(Shared {
            port: listener.local_addr().unwrap().port(),
            store: Mutex::default(),
            says: Mutex::default(),
            status: AtomicU16::new(200),
            is_silent: AtomicBool::new(false),
        });
        let served = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let served = Arc::clone(&served);
                std::thread::spawn(move || served.serve(stream.unwrap()));
            }
        });
        Self(shared)
    }

    pub(crate) fn store(&self) -> std::sync::MutexGuard<'_, Store> {
        self.0.store.lock().unwrap()
    }

    /// From now on it closes connections, or does not.
    pub(crate) fn silence(&self, is_silent: bool) {
        self.0.is_silent.store(is_silent, Ordering::SeqCst);
    }

    pub(crate) fn say(&self, status: u16, answer: &[u8]) {
        self.0.status.store(status, Ordering::SeqCst);
        *self.0.says.lock().unwrap() = Some(answer.to_vec());
    }

    pub(crate) fn endpoint(&self) -> EtcdEndpoint {
        format!("http://127.0.0.1:{}", self.0.port).parse().unwrap()
    }

    pub(crate) fn config(&self) -> EtcdConfig {
        EtcdConfig {
            endpoints: vec![self.endpoint()],
            prefix: "/farside".into(),
            directory: None,
        }
    }

    fn etcd(&self) -> Etcd {
        Etcd::new(&self.config(), Path::new("/nonexistent")).unwrap()
    }
}

impl Shared {
    fn serve(&self, mut stream: TcpStream) {
        while let Some((path, body)) = request(&mut stream) {
            if self.is_silent.load(Ordering::SeqCst) {
                return;
            }
            let answer = match &*self.says.lock().unwrap() {
                Some(said) => said.clone(),
                None => {
                    let body = serde_json::from_slice(&body).unwrap();
                    let answer = self.store.lock().unwrap().answer(&path, &body);
                    answer.to_string().into_bytes()
                }
            };
            let status = self.status.load(Ordering::SeqCst);
            let head = format!(
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n",
                answer.len()
            );
            if stream
                .write_all(&[head.as_bytes(), &answer].concat())
                .is_err()
            {
                return;
            }
        }
    }
}

/// Path and body of the next request.
fn request(stream: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    let length = head.split("content-length: ").nth(1).unwrap();
    let length = length.lines().next().unwrap().parse().unwrap();
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some((head.split(' ').nth(1).unwrap().to_owned(), body))
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

#[test]
fn a_key_is_created_once() {
    let fake = Fake::new();
    let etcd = fake.etcd();
    let lease = etcd.grant(Duration::from_secs(15), soon()).unwrap();
    assert!(etcd.create("/a", b"1", lease, soon()).unwrap().is_ok());
    let present = etcd.create("/a", b"2", lease, soon()).unwrap().unwrap_err();
    let present = present.unwrap();
    assert_eq!((&present.value.0[..], present.lease.0), (&b"1"[..], lease));
    let revision = present.mod_revision.0;
    assert!(etcd.replace("/a", revision, b"3", lease, soon()).unwrap());
    assert!(!etcd.replace("/a", revision, b"4", lease, soon()).unwrap());
    assert_eq!(fake.store().keys["/a"].0, b"3");
    assert!(etcd.all_belong_to(&["/a".into()], lease, soon()).unwrap());
    assert!(
        !etcd
            .all_belong_to(&["/a".into(), "/b".into()], lease, soon())
            .unwrap()
    );
    etcd.delete("/a", lease + 1, soon()).unwrap();
    assert_eq!(fake.store().keys.len(), 1);
    assert!(etcd.keep_alive(lease, soon()).unwrap());
    etcd.revoke(lease, soon()).unwrap();
    assert!(fake.store().keys.is_empty());
    assert!(!etcd.keep_alive(lease, soon()).unwrap());
}

#[test]
fn the_next_member_is_asked_when_one_is_silent_or_without_quorum() {
    let (dead, split, good) = (Fake::new(), Fake::new(), Fake::new());
    dead.silence(true);
    split.say(503, br#"{"error":"etcdserver: no leader"}"#);
    good.store().put("/farside/devices/a", b"x", 0);
    let mut config = good.config();
    config.endpoints = [&dead, &split, &good].map(Fake::endpoint).to_vec();
    let etcd = Etcd::new(&config, Path::new("/nonexistent")).unwrap();
    let range = etcd.range("/farside/devices/", 10, soon()).unwrap();
    assert_eq!(range.kvs.len(), 1);
    // It is asked first from now on.
    assert_eq!(etcd.current.load(Ordering::Relaxed), 2);
    good.silence(true);
    let error = etcd.range("/farside/", 10, soon()).err().unwrap();
    let text = error.to_string();
    assert!(
        text.contains("does not answer at 3 of 3 endpoints"),
        "{text}"
    );
    assert!(text.contains("no leader"), "{text}");
}

#[test]
fn garbage_and_floods_are_errors_that_name_the_endpoint() {
    let fake = Fake::new();
    let etcd = fake.etcd();
    let endpoint = fake.endpoint().to_string();
    let flood = vec![b'['; MAX_ANSWER as usize + 1];
    for (status, answer, word) in [
        (200, &b"<html>"[..], "as etcd 3.4 or newer does"),
        (200, b"", "as etcd 3.4 or newer does"),
        (
            200,
            b"{\"header\":{},\"kvs\":[{\"key\":\"\x1b\"}]}",
            "as etcd",
        ),
        (200, &flood, "does not answer at 1 of 1"),
        (404, b"404 page not found\n", "status 404"),
        (401, b"{\"message\":\"a\\u001b[2Jb\"}", "a\\u{1b}[2Jb"),
        (503, b"\xff\xfe", "\\xff\\xfe"),
        (302, b"", "status 302"),
    ] {
        fake.say(status, answer);
        let error = etcd.range("/farside/", 10, soon()).err().unwrap();
        let text = error.to_string();
        assert!(text.contains(&endpoint) && text.contains(word), "{text}");
        assert!(text.len() < 600 && !text.contains('\x1b'), "{text}");
    }
}

#[test]
fn certificates_that_cannot_be_read_are_named() {
    let mut config = Fake::new().config();
    config.endpoints = vec!["https://127.0.0.1:1".parse().unwrap()];
    let error = Etcd::new(&config, Path::new("/nonexistent")).err().unwrap();
    let text = chain(&error);
    assert!(text.contains("/nonexistent/ca-cert.pem"), "{text}");
}
