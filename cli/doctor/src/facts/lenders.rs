//! The lenders of VMs, and their devices.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::mpsc::channel,
    thread,
    time::Instant,
};

use farside_daemon::paths;
use farside_error_chain::Chain;
use farside_lender::config::Config as LenderConfig;
use farside_lender_protocol::{Address, CallError, Client, DeviceEntry, ErrorKind};

use super::VmFacts;
use crate::Host;

/// The result of a query to a lender.
#[derive(Clone, Debug)]
pub(crate) struct LenderFacts {
    pub(crate) address: Address,
    /// The VMs that name it. Empty for this host's lender.
    pub(crate) vms: Vec<String>,
    /// Its name and its devices.
    pub(crate) answer: Result<(String, Vec<DeviceEntry>), Refusal>,
}

/// The error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Nobody listens there.
    Unreachable(String),
    /// It speaks another version of the protocol.
    Version(String),
    /// Something else listens there.
    NoLender(String),
    /// It is there, and did not answer, or refused.
    Other(String),
}

pub(crate) fn look(
    host: &Host,
    vms: &[VmFacts],
    ours: Option<&Result<LenderConfig, String>>,
) -> Vec<LenderFacts> {
    let mut wanted: BTreeMap<String, (Address, PathBuf, Vec<String>)> = BTreeMap::new();
    if let Some(Ok(lender)) = ours {
        let address = Address::from(lender.socket.clone());
        wanted.insert(address.to_string(), (address, paths::pki_dir(), Vec::new()));
    }
    for vm in vms {
        let Ok(config) = &vm.config else { continue };
        if config.devices.is_empty() && config.lenders.is_empty() {
            continue;
        }
        for address in config.lenders() {
            let entry = wanted.entry(address.to_string());
            let (_, _, vms) = entry.or_insert_with(|| (address, config.pki(), Vec::new()));
            vms.push(vm.name.clone());
        }
    }
    let deadline = Instant::now() + host.patience;
    let asked = wanted.into_values().map(|(address, pki, vms)| {
        // Looking up a name has no deadline: then the thread is left behind.
        let (send, receive) = channel();
        let to = address.clone();
        thread::spawn(move || send.send(ask(&to, &pki, deadline)));
        (address, vms, receive)
    });
    let asked: Vec<_> = asked.collect();
    let patience = host.patience;
    let answers = asked.into_iter().map(|(address, vms, receive)| {
        let left = deadline.saturating_duration_since(Instant::now());
        let late = || Refusal::Other(format!("no answer within {patience:?}"));
        let answer = receive.recv_timeout(left).unwrap_or_else(|_| Err(late()));
        LenderFacts {
            address,
            vms,
            answer,
        }
    });
    answers.collect()
}

fn ask(
    address: &Address,
    pki: &Path,
    deadline: Instant,
) -> Result<(String, Vec<DeviceEntry>), Refusal> {
    let mut client = Client::connect_by(address, None, pki, Some(deadline)).map_err(refusal)?;
    let devices = client.devices().map_err(refusal)?;
    Ok((client.lender().to_owned(), devices))
}

fn refusal(error: CallError) -> Refusal {
    match error {
        CallError::Unreachable { .. } => Refusal::Unreachable(Chain(&error).to_string()),
        CallError::Refused(error) if error.kind == ErrorKind::Version => {
            Refusal::Version(error.message)
        }
        CallError::NotALender { .. } => Refusal::NoLender(error.to_string()),
        other => Refusal::Other(Chain(&other).to_string()),
    }
}
