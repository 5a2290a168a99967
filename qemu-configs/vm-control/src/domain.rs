//! The backend of a VM that libvirt starts and ends. libvirt's hook calls this
//! while libvirt waits: nothing here may ask libvirt, nor wait for a command that
//! may ask it, and so take the VM's lock.

use std::{
    ffi::OsString,
    fs::{self, File, Permissions},
    io::{ErrorKind, Write},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    time::Duration,
};

use farside_daemon::{check_name_of, paths};
use farside_error_chain::Chain;
use farside_qemu_configs::{ANCHOR_FILE, DomainVm, anchor_image};
use farside_vm_config::places;

use crate::{Backend, Error};

/// Starts the backend of a domain that is about to be started, and waits until it
/// serves all of the domain's devices. It is made from the VM configuration where
/// there is one, else from what the domain itself says. One that runs already is
/// taken.
///
/// After an error no backend of ours is left.
pub fn start_domain_backend(domain: &DomainVm, limit: Duration) -> Result<(), Error> {
    let vm = &domain.name;
    check(vm)?;
    let (backend, ours) = match Backend::find(vm)? {
        Some(backend) => (backend, false),
        None if places::description(vm).exists() => (Backend::start(vm, limit)?, true),
        None => (Backend::spawn(vm, &arguments(domain), limit)?, true),
    };
    let served = serve_all(backend, domain).and_then(|()| drop_anchor(vm));
    if served.is_err()
        && ours
        && let Err(error) = end_domain_backend(vm)
    {
        log::error!("{error}", error = Chain(&error));
    }
    served
}

/// Ends the backend of a domain that has ended. When this returns, its devices
/// are back at their lenders. That there is none is no error.
pub fn end_domain_backend(vm: &str) -> Result<(), Error> {
    check(vm)?;
    // Before the backend, which takes the directory away when it is empty.
    weigh_anchor(vm)?;
    Backend::end(vm, false)
}

/// A domain may have devices that the description has not, and a backend that ran
/// before may have lost some.
fn serve_all(mut backend: Backend, domain: &DomainVm) -> Result<(), Error> {
    for device in &domain.devices {
        backend.attach(&device.id)?;
    }
    Ok(())
}

fn anchor(vm: &str) -> PathBuf {
    paths::vm_dir(vm).join(ANCHOR_FILE)
}

/// Puts the image that keeps the domain from being saved or moved where its QEMU
/// looks for it. There is nothing in it that anyone may not read.
fn drop_anchor(vm: &str) -> Result<(), Error> {
    let path = anchor(vm);
    File::create(&path)
        .and_then(|mut file| {
            file.write_all(&anchor_image())?;
            file.set_permissions(Permissions::from_mode(0o644))
        })
        .map_err(Error::system(format!("cannot write {}", path.display())))
}

fn weigh_anchor(vm: &str) -> Result<(), Error> {
    let path = anchor(vm);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            let what = format!("cannot remove {}", path.display());
            Err(Error::system(what)(error))
        }
        _ => Ok(()),
    }
}

/// What `farside serve` is told of a domain without a description.
fn arguments(domain: &DomainVm) -> Vec<OsString> {
    let mut args: Vec<String> = vec![
        "--memory".into(),
        domain.memory.to_string(),
        "--machine".into(),
        domain.machine.name().into(),
    ];
    for device in &domain.devices {
        args.extend(["--device".into(), device.id.clone()]);
    }
    for lender in &domain.lenders {
        args.extend(["--lender".into(), lender.clone()]);
    }
    args.into_iter().map(OsString::from).collect()
}

fn check(vm: &str) -> Result<(), Error> {
    Ok(check_name_of("VM name", vm)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_is_told_what_the_domain_says() {
        let xml = "<domain type='kvm'><name>web1</name><metadata>\
             <f:vm xmlns:f='urn:farside:libvirt:1'><f:device id='disk0' port='0'/>\
             <f:lender address='tcp:10.0.0.2:7410'/></f:vm></metadata>\
             <memory unit='GiB'>4</memory><os><type>hvm</type></os></domain>";
        let domain = farside_qemu_configs::read_domain(xml).unwrap().unwrap();
        assert_eq!(
            arguments(&domain),
            [
                "--memory",
                "4294967296",
                "--machine",
                "pc",
                "--device",
                "disk0",
                "--lender",
                "tcp:10.0.0.2:7410"
            ]
        );
    }
}
