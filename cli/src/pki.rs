//! `farside pki`: certificates of hosts.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::Context;
use clap::{Args as ClapArgs, Subcommand};
use farside_daemon::paths;
use farside_pki::{
    CA_CERT, Certificate, Date, Side,
    issue::{self, Validity},
    revoke,
};

/// Make and show the certificates by which hosts know each other
///
/// One CA, and for each host a directory that `farside lend` and `farside serve` read there.
/// Another CA's certificates do as well: the file names are those of QEMU's tls-creds-x509.
#[derive(Debug, ClapArgs)]
pub(crate) struct Pki {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a CA: ca-cert.pem and ca-key.pem
    Init(Init),
    /// Issue the certificates of a host, or renew them (--force)
    Issue(Issue),
    Revoke(Revoke),
    /// Print certificates: names, dates, keys
    Show(Show),
}

#[derive(Debug, ClapArgs)]
struct Init {
    /// Directory of the CA [default: /etc/farside/pki].
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Name of the CA.
    #[arg(long, default_value = "farside CA")]
    name: String,
    /// Days until it expires.
    #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36500))]
    days: u32,
    /// Replace a CA that is there: the certificates it has issued are then refused.
    #[arg(long)]
    force: bool,
}

#[derive(Debug, ClapArgs)]
struct Issue {
    /// Name of the host, for `borrowers = ["host=HOST"]` and tls:HOST:PORT.
    host: String,
    /// IP address of the host, for tls:ADDRESS:PORT; may be given more than once.
    #[arg(long = "address", value_name = "IP")]
    addresses: Vec<IpAddr>,
    /// Days until the certificates expire.
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36500))]
    days: u32,
    /// Directory of the CA [default: /etc/farside/pki].
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Directory to write, to be copied to the host as its /etc/farside/pki [default:
    /// HOST in the CA's directory].
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Replace certificates that are there. Running lenders use the new ones at once.
    #[arg(long)]
    force: bool,
}

/// Revoke certificates: add them to the CA's revocation list, ca-crl.pem
///
/// Copy the list into each host's directory (/etc/farside/pki): running lenders use it for
/// the next connection. Connections that exist go on.
#[derive(Debug, ClapArgs)]
struct Revoke {
    /// Files of the certificates, such as rack1-a/client-cert.pem; without one, the list is
    /// renewed.
    #[arg(value_name = "CERTIFICATE")]
    certificates: Vec<PathBuf>,
    /// Days until hosts should have a newer list; an older one is still used.
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36500))]
    days: u32,
    /// Directory of the CA [default: /etc/farside/pki].
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
struct Show {
    /// File, or directory of a host or CA [default: /etc/farside/pki].
    path: Option<PathBuf>,
}

pub(crate) fn run(args: Pki) -> anyhow::Result<()> {
    match args.verb {
        Verb::Init(init) => {
            let directory = init.directory.unwrap_or_else(paths::pki_dir);
            let validity = Validity::days(init.days);
            report(&issue::init(&directory, &init.name, validity, init.force)?);
        }
        Verb::Issue(args) => {
            let directory = args.directory.unwrap_or_else(paths::pki_dir);
            let output = args.output.unwrap_or_else(|| directory.join(&args.host));
            let validity = Validity::days(args.days);
            let (host, addresses) = (&args.host, &args.addresses);
            let written = issue::issue(&directory, host, addresses, validity, &output, args.force)?;
            report(&written);
        }
        Verb::Revoke(args) => {
            let directory = args.directory.unwrap_or_else(paths::pki_dir);
            report(&revoke(&directory, &args.certificates, args.days)?);
        }
        Verb::Show(show) => {
            let path = show.path.unwrap_or_else(paths::pki_dir);
            for file in files(&path)? {
                for certificate in Certificate::of_file(&file)? {
                    print(&file, &certificate);
                }
            }
        }
    }
    Ok(())
}

fn report(written: &[PathBuf]) {
    for path in written {
        println!("{}", path.display());
    }
}

/// The certificates at `path`.
fn files(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let names = [Side::Server, Side::Client].map(|side| side.files().certificate);
    let names = [CA_CERT].into_iter().chain(names);
    let found: Vec<PathBuf> = names
        .map(|name| path.join(name))
        .filter(|file| file.exists())
        .collect();
    (!found.is_empty())
        .then_some(found)
        .with_context(|| format!("no certificates in {}", path.display()))
}

fn print(file: &Path, certificate: &Certificate) {
    let now = Date::now();
    let state = match certificate {
        _ if certificate.not_after < now => " (expired)",
        _ if certificate.not_before > now => " (not valid yet)",
        _ => "",
    };
    let uses = match (certificate.is_ca, certificate.uses.as_slice()) {
        (true, _) => "issuing certificates".to_owned(),
        (false, []) => "any use".to_owned(),
        (false, uses) => uses.join(", "),
    };
    println!(
        "{}\n  subject  {}\n  names    {}\n  issuer   {}\n  valid    {} to {}{state}\n  for      {uses}\n  key      SHA256:{}",
        file.display(),
        certificate.subject,
        certificate.all_names(),
        certificate.issuer,
        certificate.not_before,
        certificate.not_after,
        certificate.key,
    );
}
