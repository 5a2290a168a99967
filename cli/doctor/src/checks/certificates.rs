//! Certificates for connections between hosts: usable now and for a while, by this host, and by
//! nobody else.

use std::net::IpAddr;

use farside_error_chain::Chain;
use farside_pki::{CA_CERT, CA_CRL, Date, Fault, PkiError, Side};

use crate::{
    Facts, Finding,
    facts::{Certificates, FileMode, User, Users},
    finding::{quoted, quoted_path},
};

const CHECK: &str = "certificates";

/// What expires sooner is reported, seconds.
const SOON: i64 = 30 * DAY;
const DAY: i64 = 24 * 3600;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let of = |certificates| of_side(facts, certificates);
    facts.certificates.iter().flat_map(of).collect()
}

fn of_side(facts: &Facts, certificates: &Certificates) -> Vec<Finding> {
    let why = match certificates.vms.as_slice() {
        [] => "hosts that borrow here refuse the lender's connections".to_owned(),
        vms => format!("VM {} borrows with these", vms.join(", ")),
    };
    let file = certificates.own_file();
    let mut findings = modes(facts, certificates);
    match &certificates.loaded {
        // The mode is reported already.
        Err(PkiError::Readable { .. }) => {}
        Err(error) => findings.push(
            Finding::problem(CHECK, Chain(error).to_string(), &why)
                .fix(remedy(certificates, error)),
        ),
        Ok(()) => {
            findings.extend(certificates.own.iter().filter_map(|own| {
                let when = soon(own.not_after, certificates.now)?;
                let what = format!("{} ({}) expires on {when}", file.display(), own.subject);
                Some(Finding::note(CHECK, what, &why).fix(reissue(certificates)))
            }));
            findings.extend(cas(certificates, &why));
            findings.extend(name(certificates));
        }
    }
    findings.extend(lists(certificates));
    if let (true, Some(own)) = (findings.is_empty(), &certificates.own) {
        let what = format!(
            "{} is valid until {}, for {}",
            file.display(),
            own.not_after,
            own.all_names()
        );
        findings.push(Finding::ok(CHECK, what));
    }
    findings
}

/// The date, with the time that is left, if it is soon or past.
fn soon(until: Date, now: Date) -> Option<String> {
    let left = until.0.saturating_sub(now.0);
    (left < SOON).then(|| match left {
        ..0 => format!("{until}, which is past"),
        _ => format!("{until}, in {} days", left / DAY),
    })
}

fn remedy(certificates: &Certificates, error: &PkiError) -> String {
    match error {
        PkiError::Own { path, fault, .. } if path.ends_with(CA_CERT) => match fault {
            Fault::NotYet(_) => "timedatectl   # the clock".to_owned(),
            _ => "farside pki init --force   # on the CA's host; then issue all hosts' certificates again, and copy them".to_owned(),
        },
        PkiError::Own {
            fault: Fault::NotYet(_),
            ..
        } => "timedatectl   # the clock".to_owned(),
        PkiError::Invalid { path, .. } if path.ends_with(CA_CRL) => renew_list(certificates),
        _ => reissue(certificates),
    }
}

/// The command that renews the certificates of this host.
fn reissue(certificates: &Certificates) -> String {
    let own = certificates.own.as_ref();
    let named = own.and_then(|own| own.host());
    let host = named.as_ref().or(certificates.hosts.first());
    let host = host.map_or("HOST", String::as_str);
    let issued = own.map_or(&[][..], |own| &own.addresses);
    let listens = certificates
        .hosts
        .iter()
        .filter_map(|host| host.parse().ok());
    let mut addresses: Vec<IpAddr> = issued.iter().copied().chain(listens).collect();
    addresses.retain(|address| !address.is_unspecified());
    addresses.sort();
    addresses.dedup();
    let addresses: String = addresses
        .iter()
        .map(|address| format!(" --address {address}"))
        .collect();
    format!(
        "farside pki issue {}{addresses} --force   # on the CA's host; then copy the files to {} here",
        quoted(host),
        certificates.directory.display()
    )
}

fn renew_list(certificates: &Certificates) -> String {
    format!(
        "farside pki revoke   # on the CA's host; then copy {CA_CRL} to {} here",
        certificates.directory.display()
    )
}

fn cas(certificates: &Certificates, why: &str) -> Vec<Finding> {
    let file = certificates.directory.join(CA_CERT);
    let expire = certificates.cas.iter().filter_map(|ca| {
        let when = soon(ca.not_after, certificates.now)?;
        let what = format!("the CA {} in {} expires on {when}", ca.subject, file.display());
        let fix = "farside pki init --force   # on the CA's host; then issue all hosts' certificates again, and copy them";
        Some(Finding::note(CHECK, what, why).fix(fix))
    });
    expire.collect()
}

/// Whether others can find this host under a name in its certificate.
fn name(certificates: &Certificates) -> Option<Finding> {
    let own = certificates.own.as_ref()?;
    let has = |host: &String| match host.parse::<IpAddr>() {
        // Every address of this host.
        Ok(address) if address.is_unspecified() => false,
        Ok(address) => own.addresses.contains(&address),
        Err(_) => {
            let short = host.split('.').next().unwrap_or(host);
            let is = |name: &String| {
                [host, short]
                    .iter()
                    .any(|host| name.eq_ignore_ascii_case(host))
            };
            own.names.iter().chain(&own.host()).any(is)
        }
    };
    if certificates.hosts.is_empty() || certificates.hosts.iter().any(has) {
        return None;
    }
    let what = format!(
        "{} is for {}, none of which is this host ({})",
        certificates.own_file().display(),
        own.all_names(),
        certificates.hosts.join(", ")
    );
    let why = match certificates.side {
        Side::Server => "a borrower refuses the lender if it connects to another name or address",
        Side::Client => "lenders take this host for the one that the certificate names",
    };
    Some(Finding::note(CHECK, what, why).fix(reissue(certificates)))
}

fn lists(certificates: &Certificates) -> Vec<Finding> {
    let file = certificates.directory.join(CA_CRL);
    let file = file.display();
    let lists = &certificates.lists;
    let mut findings: Vec<_> = lists
        .iter()
        .filter_map(|list| {
            let when = soon(list.next_update?, certificates.now)?;
            let what = format!(
                "the revocation list of {} in {file} expires on {when}",
                list.issuer
            );
            let why = "it is still used, but certificates that were revoked since are accepted";
            Some(Finding::note(CHECK, what, why).fix(renew_list(certificates)))
        })
        .collect();
    let without = |subject: &str| !lists.iter().any(|list| list.issuer == subject);
    if !lists.is_empty() {
        let cas = certificates.cas.iter().filter(|ca| without(&ca.subject));
        findings.extend(cas.map(|ca| {
            let what = format!("{file} has no revocation list of the CA {}", ca.subject);
            let why = "where there are lists, certificates of a CA without one are refused";
            Finding::problem(CHECK, what, why).fix(renew_list(certificates))
        }));
    }
    findings
}

/// Files that others can write, and a key that others can read, or its user cannot.
fn modes(facts: &Facts, certificates: &Certificates) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in &certificates.files {
        if file.mode & 0o002 != 0 && file.mode & 0o1000 == 0 {
            let what = format!("every user may write to {}", file.path.display());
            let why = "another user could replace the certificates, and accept any host";
            findings.push(
                Finding::problem(CHECK, what, why)
                    .fix(format!("chmod o-w {}", quoted_path(&file.path))),
            );
        }
    }
    let path = certificates.key_file();
    let Some(key) = certificates.files.iter().find(|file| file.path == path) else {
        return findings;
    };
    let shown = path.display();
    if key.mode & 0o004 != 0 {
        let what = format!(
            "every user can read the private key {shown} (mode {:04o})",
            key.mode
        );
        let why = "other users of this host can act as this host: the key is refused";
        findings.push(
            Finding::problem(CHECK, what, why)
                .fix(format!("chmod o= {}", quoted_path(&path)))
                .fix(reissue(certificates)),
        );
    } else if let Some(user) = unit_user(facts, certificates)
        && !can_read(&facts.users, user, key)
    {
        let what = format!("user {} cannot read the private key {shown}", user.name);
        let why = "the units run as that user";
        let quoted_key = quoted_path(&path);
        findings.push(Finding::problem(CHECK, what, why).fix(format!(
            "chgrp {} {quoted_key} && chmod g+r {quoted_key}",
            user.gid
        )));
    }
    findings
}

/// The user of the unit that reads the key, unless root.
fn unit_user<'a>(facts: &'a Facts, certificates: &Certificates) -> Option<&'a User> {
    let unit = match certificates.side {
        Side::Server => facts.systemd.lender.as_ref(),
        Side::Client => facts.systemd.backend.as_ref(),
    };
    let unit = unit.filter(|_| facts.by_units())?;
    facts.users.user(&unit.user).filter(|user| user.uid != 0)
}

fn can_read(users: &Users, user: &User, file: &FileMode) -> bool {
    match file.uid == user.uid {
        true => file.mode & 0o400 != 0,
        false => file.mode & 0o040 != 0 && users.has_gid(user, file.gid),
    }
}

#[cfg(test)]
mod tests;
