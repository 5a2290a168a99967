//! The backend of a VM that libvirt starts and stops. libvirt waits for the hook that calls this,
//! so nothing here may call libvirt or take the VM's lock, whose holder may call libvirt.

use std::{
    ffi::OsString, fs::Permissions, io::Write, os::unix::fs::PermissionsExt, path::PathBuf,
    time::Duration,
};

use farside_daemon::{VmName, files, paths};
use farside_error_chain::Chain;
use farside_qemu_configs::{ANCHOR_FILE, DomainVm, anchor_image};
use farside_vm_config::places;

use crate::{Backend, Error};

/// Starts the backend of a domain that is about to start, and waits until it serves all of the
/// domain's devices. It is configured by the VM configuration if there is one, else by the domain.
/// A running backend is reused.
///
/// After an error, a backend that this started is stopped.
pub fn start_domain_backend(domain: &DomainVm, limit: Duration) -> Result<(), Error> {
    let vm = &domain.name;
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

/// Stops the backend of a domain that has stopped, if one runs. On return its devices are back at
/// their lenders.
pub fn end_domain_backend(vm: &VmName) -> Result<(), Error> {
    // Before the backend, which removes the directory if it is empty.
    weigh_anchor(vm)?;
    Backend::end(vm, false)
}

/// A domain may have devices that are not in the configuration, and a running backend may not serve
/// all of them.
fn serve_all(mut backend: Backend, domain: &DomainVm) -> Result<(), Error> {
    for device in &domain.devices {
        backend.attach(&device.id)?;
    }
    Ok(())
}

fn anchor(vm: &VmName) -> PathBuf {
    paths::vm_dir(vm).join(ANCHOR_FILE)
}

/// Creates the image that blocks save and migration at the path in the domain. It contains nothing
/// secret, so it is world-readable.
fn drop_anchor(vm: &VmName) -> Result<(), Error> {
    let path = anchor(vm);
    // libvirt runs the hook as root, and the directory may be the backend's user's.
    files::create(&path)
        .and_then(|mut file| {
            file.write_all(&anchor_image())?;
            // Whatever the umask is.
            file.set_permissions(Permissions::from_mode(0o644))
        })
        .map_err(Error::system(format!("cannot write {}", path.display())))
}

fn weigh_anchor(vm: &VmName) -> Result<(), Error> {
    files::remove(&anchor(vm)).map_err(Error::system(format!("VM {vm}")))
}

/// The arguments of `farside serve` for a domain without a VM configuration.
fn arguments(domain: &DomainVm) -> Vec<OsString> {
    let mut args: Vec<String> = vec![
        "--memory".into(),
        domain.memory.to_string(),
        "--machine".into(),
        domain.machine.name().into(),
    ];
    for device in &domain.devices {
        args.extend(["--device".into(), device.id.to_string()]);
    }
    for lender in &domain.lenders {
        args.extend(["--lender".into(), lender.clone()]);
    }
    args.into_iter().map(OsString::from).collect()
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
