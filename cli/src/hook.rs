//! `farside hook`: run by libvirt as `/etc/libvirt/hooks/qemu`.
//!
//! libvirt waits for it, and at some operations parses its output as a new domain: so it prints
//! nothing, never calls libvirt, and fails only for a domain that borrows devices.

use std::{
    io::{Read, stdin},
    time::Duration,
};

use anyhow::{Context, bail};
use clap::Args as ClapArgs;
use farside_qemu_configs::{DomainVm, NAMESPACE, read_domain};
use farside_vm_control::{end_domain_backend, start_domain_backend};

/// Time limit for the start of a backend: it queries each lender, with a deadline
/// of a few seconds each.
const START: Duration = Duration::from_secs(60);

/// Longest domain that is read, bytes: far more than any has.
const MAX_DOMAIN: u64 = 10 << 20;

/// libvirt's hook, called before a domain starts and after it has ended
///
/// The domain's XML comes on standard input. Starts and stops the backend of a domain that
/// borrows devices; ignores other domains.
#[derive(Debug, ClapArgs)]
pub(crate) struct Hook {
    /// Name of the domain.
    domain: String,
    /// libvirt's operation, such as `prepare` or `release`.
    operation: String,
    /// libvirt's sub-operation: `begin`, `end` or `-`.
    sub_operation: String,
    /// More, or `-`.
    #[arg(allow_hyphen_values = true, num_args = 0..)]
    extra: Vec<String>,
}

pub(crate) fn run(args: &Hook) -> anyhow::Result<()> {
    let domain = &args.domain;
    match (args.operation.as_str(), args.sub_operation.as_str()) {
        ("prepare", "begin") => match ours(domain)? {
            Some(vm) => start_domain_backend(&vm, START)
                .with_context(|| format!("farside cannot serve the devices of domain {domain}")),
            None => Ok(()),
        },
        ("release", "end") => match is_ours(&read()?) {
            true => end_domain_backend(&domain.parse()?)
                .with_context(|| format!("farside cannot end the backend of domain {domain}")),
            false => Ok(()),
        },
        ("restore", "begin") => match is_ours(&read()?) {
            true => bail!(
                "domain {domain} borrows devices, and a saved state has none of what they were doing: \
                 its guest cannot go on. Start it anew: `virsh start --force-boot {domain}`"
            ),
            false => Ok(()),
        },
        ("migrate", "begin") => match is_ours(&read()?) {
            true => bail!(
                "domain {domain} borrows devices, which do not come along: move it with \
                 `farside migrate`"
            ),
            false => Ok(()),
        },
        _ => Ok(()),
    }
}

/// The domain on standard input, if it borrows devices.
fn ours(name: &str) -> anyhow::Result<Option<DomainVm>> {
    let text = read()?;
    if !is_ours(&text) {
        return Ok(None);
    }
    let text =
        str::from_utf8(&text).with_context(|| format!("the XML of domain {name} is not UTF-8"))?;
    let vm = read_domain(text).with_context(|| {
        format!("farside cannot read the XML of domain {name}: see `virsh dumpxml {name}`")
    })?;
    match vm {
        Some(vm) if vm.name != *name => bail!(
            "libvirt calls the domain {name}, and its XML calls it {}",
            vm.name
        ),
        vm => Ok(vm),
    }
}

fn read() -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    stdin()
        .take(MAX_DOMAIN)
        .read_to_end(&mut text)
        .context("cannot read the domain's XML")?;
    Ok(text)
}

/// Whether an XML names our metadata anywhere: that can be seen in what does not
/// parse too, and is quick for all other domains.
fn is_ours(text: &[u8]) -> bool {
    let name = NAMESPACE.as_bytes();
    text.windows(name.len()).any(|window| window == name)
}
