//! A client of etcd's JSON gateway (`/v3/...`): one request, one answer, with a deadline.

mod calls;
mod messages;

use std::{
    io::Read,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use farside_error_chain::Chain;
use farside_pki::{CA_CERT, PkiError, Side};
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::{
    Agent, Body,
    http::Response,
    tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem},
};

pub(crate) use messages::KeyValue;

use crate::{EtcdConfig, EtcdEndpoint, record::shown};

/// Time limit of one request to one member: then the next is asked.
const ATTEMPT: Duration = Duration::from_secs(2);

/// Longest answer, bytes.
const MAX_ANSWER: u64 = 8 << 20;

/// Longest answer that refuses a request, bytes.
const MAX_REFUSAL: u64 = 4096;

/// Longest file of certificates, bytes.
const MAX_FILE: u64 = 1 << 20;

/// An error of a call to etcd.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages name")]
pub enum EtcdError {
    /// The certificates cannot be used.
    #[error("cannot use {path} for the `https:` endpoints of etcd", path = path.display())]
    Certificates {
        path: PathBuf,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No member answers.
    #[error(
        "etcd does not answer at {asked} of {of} endpoints (the last one, {endpoint}: {why}); `endpoints` in host.toml lists them"
    )]
    Silent {
        asked: usize,
        of: usize,
        endpoint: EtcdEndpoint,
        why: String,
    },
    /// A member refuses the request.
    #[error("etcd at {endpoint} refuses {path} with status {status}: {message}")]
    Refused {
        endpoint: EtcdEndpoint,
        path: &'static str,
        status: u16,
        message: String,
    },
    /// The answer is not etcd's.
    #[error("{endpoint} does not answer {path} as etcd 3.4 or newer does: {why}")]
    Odd {
        endpoint: EtcdEndpoint,
        path: &'static str,
        why: String,
    },
}

/// A cluster.
#[derive(Debug)]
pub(crate) struct Etcd {
    endpoints: Vec<EtcdEndpoint>,
    agent: Agent,
    /// The index of the one that answered last.
    current: AtomicUsize,
}

impl Etcd {
    /// Reads the certificates of this host in `pki`, or in the directory that `config` names, if there are
    /// `https:` endpoints. Does not connect.
    pub(crate) fn new(config: &EtcdConfig, pki: &Path) -> Result<Self, EtcdError> {
        let directory = config.directory.as_deref().unwrap_or(pki);
        let uses_tls = config.endpoints.iter().any(EtcdEndpoint::is_tls);
        let tls = match uses_tls {
            true => tls(directory)?,
            false => TlsConfig::default(),
        };
        let agent = Agent::config_builder()
            .tls_config(tls)
            // The environment's is for other hosts.
            .proxy(None)
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent("farside")
            .build()
            .new_agent();
        Ok(Self {
            endpoints: config.endpoints.clone(),
            agent,
            current: AtomicUsize::new(0),
        })
    }

    /// Sends `body` to members in turn, first the one that answered last, until one answers.
    fn call<T: DeserializeOwned>(
        &self,
        path: &'static str,
        body: &Value,
        deadline: Instant,
    ) -> Result<T, EtcdError> {
        self.ask_for(path, body, deadline, ATTEMPT, |endpoint, mut response| {
            let bytes = read(&mut response, MAX_ANSWER);
            let bytes = bytes.map_err(|why| silent(endpoint, why))?;
            parse(endpoint, path, &bytes)
        })
    }

    /// As [`Etcd::call`], with a time limit for each member; `take` reads the answer.
    fn ask_for<T>(
        &self,
        path: &'static str,
        body: &Value,
        deadline: Instant,
        each: Duration,
        take: impl Fn(&EtcdEndpoint, Response<Body>) -> Result<T, EtcdError>,
    ) -> Result<T, EtcdError> {
        let body = body.to_string();
        let of = self.endpoints.len();
        let first = self.current.load(Ordering::Relaxed);
        let mut last = None;
        for asked in 0..of {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let index = (first + asked) % of;
            let endpoint = &self.endpoints[index];
            let answer = self
                .attempt(endpoint, path, &body, left.min(each))
                .and_then(|response| take(endpoint, response));
            match answer {
                // It has no quorum, or has just started.
                Err(EtcdError::Refused {
                    status: 500..,
                    message,
                    ..
                }) => last = Some((asked + 1, endpoint, message)),
                Err(EtcdError::Silent { why, .. }) => last = Some((asked + 1, endpoint, why)),
                answer => {
                    self.current.store(index, Ordering::Relaxed);
                    return answer;
                }
            }
        }
        // The next call begins with another: this one may be slow for long.
        self.current.store((first + 1) % of, Ordering::Relaxed);
        let (asked, endpoint, why) = match last {
            Some((asked, endpoint, why)) => (asked, endpoint, why),
            None => (0, &self.endpoints[first % of], "no time is left".to_owned()),
        };
        Err(EtcdError::Silent {
            asked,
            of,
            endpoint: endpoint.clone(),
            why,
        })
    }

    fn attempt(
        &self,
        endpoint: &EtcdEndpoint,
        path: &'static str,
        body: &str,
        timeout: Duration,
    ) -> Result<Response<Body>, EtcdError> {
        let request = self.agent.post(format!("{endpoint}{path}"));
        let request = request.content_type("application/json");
        let config = request.config().timeout_global(Some(timeout));
        let sent = config.build().send(body);
        let mut response = sent.map_err(|error| silent(endpoint, error.to_string()))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let text = read(&mut response, MAX_REFUSAL).unwrap_or_default();
        Err(EtcdError::Refused {
            endpoint: endpoint.clone(),
            path,
            status: status.as_u16(),
            message: match serde_json::from_slice::<messages::Refusal>(&text) {
                Ok(refusal) => refusal.text().escape_debug().take(200).collect(),
                Err(_) => shown(&text),
            },
        })
    }
}

fn silent(endpoint: &EtcdEndpoint, why: String) -> EtcdError {
    EtcdError::Silent {
        asked: 1,
        of: 1,
        endpoint: endpoint.clone(),
        why,
    }
}

fn read(response: &mut Response<Body>, most: u64) -> Result<Vec<u8>, String> {
    let body = response.body_mut().with_config().limit(most);
    body.read_to_vec().map_err(|error| error.to_string())
}

fn parse<T: DeserializeOwned>(
    endpoint: &EtcdEndpoint,
    path: &'static str,
    bytes: &[u8],
) -> Result<T, EtcdError> {
    serde_json::from_slice(bytes).map_err(|error| EtcdError::Odd {
        endpoint: endpoint.clone(),
        path,
        why: format!("{error} in {}", shown(bytes)),
    })
}

/// TLS with this host's certificates: etcd is shown that of clients, if there is one.
fn tls(directory: &Path) -> Result<TlsConfig, EtcdError> {
    let cas: Vec<Certificate<'static>> = certificates(&directory.join(CA_CERT))?;
    let files = Side::Client.files();
    let own = directory.join(files.certificate);
    let client = match own.exists() {
        true => {
            let path = directory.join(files.key);
            let key = PrivateKey::from_pem(&read_file(&path)?).map_err(invalid(&path))?;
            Some(ClientCert::new_with_certs(&certificates(&own)?, key))
        }
        false => None,
    };
    Ok(TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&cas))
        .client_cert(client)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build())
}

fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, EtcdError> {
    let text = read_file(path)?;
    let mut all = Vec::new();
    for item in parse_pem(&text) {
        if let PemItem::Certificate(certificate) = item.map_err(invalid(path))? {
            all.push(certificate);
        }
    }
    match all.is_empty() {
        false => Ok(all),
        true => {
            let path = path.to_owned();
            Err(invalid(&path)(PkiError::Empty { path: path.clone() }))
        }
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, EtcdError> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(invalid(path))?;
    file.take(MAX_FILE)
        .read_to_end(&mut bytes)
        .map_err(invalid(path))?;
    Ok(bytes)
}

fn invalid<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    path: &Path,
) -> impl FnOnce(E) -> EtcdError + '_ {
    move |source| EtcdError::Certificates {
        path: path.to_owned(),
        source: source.into(),
    }
}

/// An error with its causes, for a log line.
pub(crate) fn chain(error: &EtcdError) -> String {
    Chain(error).to_string()
}

#[cfg(test)]
pub(crate) mod tests;
