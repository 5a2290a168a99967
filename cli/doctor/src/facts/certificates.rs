//! The certificates of this host's lender and backends.

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use farside_daemon::paths;
use farside_lender::config::Config as LenderConfig;
use farside_lender_protocol::Address;
use farside_pki::{
    CA_CERT, CA_CRL, Certificate, Credentials, Date, PkiError, RevocationList, Side,
};

use super::VmFacts;
use crate::Host;

/// A file, or the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileMode {
    pub(crate) path: PathBuf,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// The certificates in a directory, of one side.
#[derive(Debug)]
pub(crate) struct Certificates {
    pub(crate) directory: PathBuf,
    pub(crate) side: Side,
    /// The VMs whose backends present them; empty for the lender.
    pub(crate) vms: Vec<String>,
    /// The names and addresses of this host, by which others could connect to its lender.
    pub(crate) hosts: Vec<String>,
    pub(crate) now: Date,
    /// Whether they can be used now.
    pub(crate) loaded: Result<(), PkiError>,
    pub(crate) own: Option<Certificate>,
    pub(crate) cas: Vec<Certificate>,
    pub(crate) lists: Vec<RevocationList>,
    pub(crate) files: Vec<FileMode>,
}

impl Certificates {
    /// The path of the own certificate, or of its key.
    pub(crate) fn own_file(&self) -> PathBuf {
        self.directory.join(self.side.files().certificate)
    }

    pub(crate) fn key_file(&self) -> PathBuf {
        self.directory.join(self.side.files().key)
    }
}

pub(crate) fn look(
    host: &Host,
    vms: &[VmFacts],
    lender: Option<&Result<LenderConfig, String>>,
) -> Vec<Certificates> {
    let name = host.text("etc/hostname").unwrap_or_default();
    let mut hosts: Vec<String> = Some(name.trim())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .into_iter()
        .collect();
    let mut found: Vec<Certificates> = Vec::new();
    for vm in vms {
        let Ok(config) = &vm.config else { continue };
        let mut lenders = config.lenders().into_iter();
        if !lenders.any(|address| matches!(address, Address::Tls { .. })) {
            continue;
        }
        let directory = config.pki();
        match found.iter_mut().find(|known| known.directory == directory) {
            Some(known) => known.vms.push(vm.name.clone()),
            None => {
                let vms = vec![vm.name.clone()];
                found.push(of(&directory, Side::Client, vms, hosts.clone()));
            }
        }
    }
    if let Some(Ok(config)) = lender {
        let listens = config.listen.iter().filter_map(|address| match address {
            Address::Tls { host, .. } => Some(host.clone()),
            _ => None,
        });
        let known = hosts.len();
        hosts.extend(listens);
        if config.tls.is_some() || hosts.len() > known {
            let named = config.tls.as_ref().and_then(|tls| tls.directory.clone());
            let directory = named.unwrap_or_else(paths::pki_dir);
            found.insert(0, of(&directory, Side::Server, Vec::new(), hosts));
        }
    }
    found
}

fn of(directory: &Path, side: Side, vms: Vec<String>, hosts: Vec<String>) -> Certificates {
    let pair = side.files();
    let of_file = |name: &str| Certificate::of_file(&directory.join(name)).unwrap_or_default();
    let named = [CA_CERT, CA_CRL, pair.certificate, pair.key].map(|name| directory.join(name));
    let files = std::iter::once(directory.to_owned()).chain(named);
    let files = files.filter_map(|path| {
        let meta = path.metadata().ok()?;
        let (mode, uid, gid) = (meta.mode() & 0o7777, meta.uid(), meta.gid());
        Some(FileMode {
            path,
            mode,
            uid,
            gid,
        })
    });
    Certificates {
        side,
        vms,
        hosts,
        now: Date::now(),
        loaded: Credentials::load(directory, side).map(drop),
        own: of_file(pair.certificate).into_iter().next(),
        cas: of_file(CA_CERT),
        lists: RevocationList::of_file(&directory.join(CA_CRL)).unwrap_or_default(),
        files: files.collect(),
        directory: directory.to_owned(),
    }
}
